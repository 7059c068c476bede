# SPDX-License-Identifier: Apache-2.0
"""Measures a private step inside of Lightning's Trainer, and with callbacks, over that of the loop by hand.

    OMP_NUM_THREADS=1 python benchmarks/trainers.py [--rounds 5] [--steps 30] [--width 1024]

All make the same steps of a network with four layers: the loop by hand, the loop with a log of every 10th step, with
TensorBoard every 10th step, and ``PrivateFit`` without and with ``self.log`` in each step. They take turns. Prints the
minimum and the median of a step's time, rehearsed steps included, and both over those of the loop: processor time of
one thread, which other programs hardly change.
"""

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_privacy as tp
from torch_privacy.lightning import PrivateFit

GOAL = 1.05


class Clock(tp.Callback):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def after_step(self, training: tp.PrivateTraining, step: tp.StepLog) -> None:
        self.times.append(time.process_time())

    def steps(self) -> list[float]:
        """Returns the seconds of each step but the first."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


class Module(lightning.LightningModule):
    """A classifier with four layers."""

    def __init__(self, width: int, logs: bool = False):
        super().__init__()
        self.logs = logs
        torch.manual_seed(0)
        layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)]
        self.layers = nn.Sequential(*layers, nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        if self.logs:
            self.log("train_loss", losses.mean())
        return losses

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def settings(*callbacks: tp.Callback) -> dict:
    """Returns the keywords of the training, the same for all."""
    return {
        "expected_batch_size": 256,
        "clipping": tp.Flat(1.0),
        "noise_multiplier": 1.0,
        "delta": 1e-5,
        "test_seed": 1,
        "callbacks": callbacks,
    }


def by_hand(module: Module, data: torch.utils.data.Dataset, num_steps: int, *callbacks: tp.Callback) -> None:
    """Trains by the plain loop."""
    optimizer = module.configure_optimizers()
    training = tp.PrivateTraining(module, optimizer, data, num_steps=num_steps, **settings(*callbacks))
    for x, y in training:
        training.step(F.cross_entropy(module(x), y, reduction="none"))


def by_trainer(module: Module, data: torch.utils.data.Dataset, num_steps: int, *callbacks: tp.Callback) -> None:
    """Trains by Lightning's Trainer."""
    trainer = lightning.Trainer(
        max_steps=num_steps,
        max_epochs=-1,
        accelerator="cpu",
        callbacks=[PrivateFit(**settings(*callbacks))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)


def main() -> None:
    parser = argparse.ArgumentParser(description="A private step in Lightning, and with callbacks, over the loop's.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=1024)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logger = logging.getLogger("steps")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(logging.NullHandler())
    data = torch.utils.data.TensorDataset(torch.randn(10_000, 64), torch.randint(10, (10_000,)))
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, tuple[Callable[..., None], Callable[[], list[tp.Callback]]]] = {
            "loop by hand": (by_hand, list),
            "loop, log of every 10th": (by_hand, lambda: [tp.LoggingCallback(every=10, logger=logger)]),
            "loop, TensorBoard every 10th": (by_hand, lambda: [tp.TensorBoardCallback(folder, every=10)]),
            "Lightning": (by_trainer, list),
            "Lightning, self.log": (by_trainer, list),
        }
        for _ in range(chosen.rounds):
            for name, (train, callbacks) in ways.items():
                clock = Clock()
                train(Module(chosen.width, logs="self.log" in name), data, chosen.steps, *callbacks(), clock)
                times.setdefault(name, []).extend(clock.steps())
    least, middle = min(times["loop by hand"]), statistics.median(times["loop by hand"])
    print(f"| way | minimum, ms | over the loop's | median, ms | over the loop's | goal: {GOAL} |")
    print("|---|---|---|---|---|---|")
    for name, seconds in times.items():
        ratios = min(seconds) / least, statistics.median(seconds) / middle
        verdict = "reached" if max(ratios) <= GOAL else "missed" if min(ratios) > GOAL else "missed by one of both"
        print(
            f"| {name} | {1e3 * min(seconds):.2f} | {ratios[0]:.3f} | {1e3 * statistics.median(seconds):.2f} | "
            f"{ratios[1]:.3f} | {verdict} |"
        )


if __name__ == "__main__":
    main()
