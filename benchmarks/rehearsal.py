# SPDX-License-Identifier: Apache-2.0
"""What rehearsals take of a run of 1,000 steps, and what Python takes of a step.

    python benchmarks/rehearsal.py                       # adult, mnist_cnn, gpt, bilstm_imdb
    python benchmarks/rehearsal.py adult mlp --steps 300
    python benchmarks/rehearsal.py --python adult mlp    # milliseconds of a whole step instead

A training with everything runs for some steps. Steps are of four kinds: not rehearsed, rehearsed at one turn (one in
64), at a power of two, and in full (steps 0 to 2, in which layouts are measured, too). Printed are the medians of
processor time of each kind, and the share that rehearsals would take of 1,000 steps: for every rehearsed step what it
took beyond the turn of the batch itself. Processor time in one thread hardly feels other programs on the machine.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path

import torch
from models import MODELS, Problem, load, per_example
from torch.utils.data import TensorDataset

import torch_privacy as tp

NETWORKS = ["adult", "mnist_cnn", "gpt", "bilstm_imdb"]
STEPS = 1000  # of the run that the share is for
FULL, POWER, CHANCE = "in full", "power of two", "by chance"


def training_of(problem: Problem, steps: int, seed: int) -> tp.PrivateTraining:
    """Everything included; the batches have the problem's size on average."""
    model, x, y = problem
    data = TensorDataset(torch.cat([x] * 4), torch.cat([y] * 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return tp.PrivateTraining(
        model,
        optimizer,
        data,
        expected_batch_size=len(x),
        num_steps=steps,
        clipping=tp.Flat(1.0),
        noise_multiplier=1.0,
        delta=1e-9,
        test_seed=seed,
    )


def kind_of(step: int, turns: int) -> str:
    return FULL if step <= 2 else CHANCE if turns == 1 else POWER


def run(name: str, steps: int, seed: int) -> tuple[dict[str, list[float]], list[float], int]:
    """Seconds of the rehearsals by kind, of the batches' own turns, and the number of rehearsed steps."""
    training = training_of(load(name), steps, seed)
    extra: dict[str, list[float]] = defaultdict(list)
    own: list[float] = []
    spent, turns, start = 0.0, 0, time.process_time()
    for x, y in training:
        step = training.step_count
        made = training.step(per_example(training.model(x), y))
        now = time.process_time()
        if made:
            own.append(now - start)
            if turns:
                extra[kind_of(step, turns)].append(spent)
            spent, turns = 0.0, 0
        else:
            spent, turns = spent + now - start, turns + 1
        start = now
    return extra, own, sum(map(len, extra.values()))


def share(extra: dict[str, list[float]], own: list[float]) -> float:
    """Of 1,000 steps: three in full, those at powers of two from 4 to 512, and one in 64 of the others."""
    powers = sum(1 for k in range(2, 20) if 2**k < STEPS)
    usual = statistics.median(extra.get(CHANCE) or [statistics.median(extra[POWER]) / 1.5])
    rehearsals = sum(extra[FULL]) + powers * statistics.median(extra[POWER]) + (STEPS - 3 - powers) / 64 * usual
    return rehearsals / (rehearsals + STEPS * statistics.median(own))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS, choices=[*MODELS, []], metavar="NETWORK")
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--python", action="store_true", help="milliseconds of a step, as minimum and median")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    head = "network        step, ms   in full  power of two  by chance   share of 1,000 steps"
    print("network        minimum   median, ms of a step" if arguments.python else head)
    for name in arguments.networks or NETWORKS:
        extra, own, _ = run(name, arguments.steps, arguments.seed)
        milliseconds = 1000 * statistics.median(own)
        if arguments.python:
            print(f"{name:<14} {1000 * min(own):7.2f}  {milliseconds:7.2f}", flush=True)
            continue
        kinds = [
            f"{1000 * statistics.median(extra[kind]):9.2f}" if extra[kind] else "        -"
            for kind in (FULL, POWER, CHANCE)
        ]
        print(
            f"{name:<14} {milliseconds:8.2f} {kinds[0]} {kinds[1]:>13} {kinds[2]:>10} {share(extra, own):12.1%}",
            flush=True,
        )
        if arguments.json:
            row = {"network": name, "own": own, "extra": extra, "share": share(extra, own)}
            with arguments.json.open("a") as file:
                print(json.dumps(row), file=file)


if __name__ == "__main__":
    main()
