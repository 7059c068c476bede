# SPDX-License-Identifier: Apache-2.0
"""Measures the time of a step inside of an integration over that of the same loop by hand; the goal is 1.05.

    python benchmarks/integrations.py              # exits with 1 if an integration is above the goal
    python benchmarks/integrations.py --steps 60

Both trainings have the same model, data, optimizer, schedule and keys, so that they make the same steps. Steps take
turns, each timed alone, without rehearsals, by processor time of one thread, which other programs hardly disturb. The
ratio is that of the minima, of the medians, and the median ratio of steps with the same batch.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import torch_privacy as tp
from torch_privacy.huggingface import PrivateTrainer, per_example_loss

GOAL = 1.05


def model(width: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=64, n_embd=width, n_layer=2, n_head=4, **ends))


def arguments(folder: str, steps: int) -> TrainingArguments:
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "logging_steps": 10**6}
    return TrainingArguments(output_dir=folder, max_steps=steps, per_device_train_batch_size=8, **quiet)


def by_hand(args: TrainingArguments, data: tp.Examples, width: int, privacy: dict[str, Any]) -> Iterator[None]:
    """Yields after each step of the plain loop."""
    trained = model(width)
    helper = Trainer(trained, args, train_dataset=data.dataset)
    helper.create_optimizer_and_scheduler(args.max_steps)
    training = tp.PrivateTraining(
        trained,
        helper.optimizer,
        replace(data, collate_fn=helper.data_collator),
        num_steps=args.max_steps,
        performance=tp.Performance(microbatch_size=8),
        scheduler=helper.lr_scheduler,
        **privacy,
    )
    trained.train()
    for batch in training:
        if training.step(per_example_loss(trained, batch)):
            yield


class Turns(TrainerCallback):
    """Makes a step of the plain loop after each step of the Trainer, and times both."""

    def __init__(self, steps: Iterator[None]):
        self.steps, self.seconds = steps, {"trainer": [], "by hand": []}
        self.began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        ended = time.process_time()
        next(self.steps)
        self.seconds["trainer"].append(ended - self.began)
        self.began = time.process_time()
        self.seconds["by hand"].append(self.began - ended)


def seconds_of_trainer(steps: int, width: int) -> dict[str, list[float]]:
    """Returns the seconds of each step, without the first ones, which rehearse or allocate."""
    rows = torch.randint(1, 1000, (2000, 32), generator=torch.Generator().manual_seed(0))
    items = [{"input_ids": row, "labels": row} for row in rows]
    data = tp.Examples(items, assume_independent="a benchmark of ordinary steps")
    privacy = {"clipping": tp.Flat(1.0), "noise_multiplier": 1.0, "expected_batch_size": 16, "delta": 1e-5}
    privacy |= {"test_seed": 1}
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(folder, steps)
        turns = Turns(by_hand(args, data, width, privacy))
        PrivateTrainer(model(width), args, train_dataset=data, privacy=privacy, callbacks=[turns]).train()
    return {name: seconds[3:] for name, seconds in turns.seconds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="steps of each training")
    parser.add_argument("--width", type=int, default=128, help="width of the GPT-2 with two layers")
    given = parser.parse_args()
    torch.set_num_threads(1)
    seconds = seconds_of_trainer(given.steps, given.width)
    ratios = {}
    for name, of in (("minimum", min), ("median", statistics.median)):
        trainer, by_hand = of(seconds["trainer"]), of(seconds["by hand"])
        ratios[name] = trainer / by_hand
        print(f"{name}: Trainer {1e3 * trainer:.1f} ms, by hand {1e3 * by_hand:.1f} ms, ratio {ratios[name]:.3f}")
    pairs = zip(seconds["trainer"], seconds["by hand"], strict=True)  # of the same batch
    ratios["median of pairs"] = statistics.median(a / b for a, b in pairs)
    print(f"median of the ratios of equal steps: {ratios['median of pairs']:.3f}")
    print(f"goal: {GOAL}")
    return int(min(ratios.values()) > GOAL)


if __name__ == "__main__":
    sys.exit(main())
