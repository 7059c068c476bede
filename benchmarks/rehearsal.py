# SPDX-License-Identifier: Apache-2.0
"""Measures the share of rehearsals in a run of 1,000 steps, and the time of a whole step.

    python benchmarks/rehearsal.py                       # adult, mnist_cnn, gpt, bilstm_imdb
    python benchmarks/rehearsal.py adult mlp --steps 300
    python benchmarks/rehearsal.py --python adult mlp    # milliseconds of a whole step instead
    python benchmarks/rehearsal.py adult --items 1000000 # a data set of one's own, with code for each item

A complete training runs for some steps. Steps are of three kinds: not rehearsed, rehearsed (as often as the training
decides), and rehearsed in full (steps 0 to 2). Prints the processor time that rehearsals add to a step that
is not rehearsed, and their share of 1,000 steps. The time of the first three steps without rehearsals
(layouts are measured, rows are checked) is excluded: it is timed in another training, with ``assume_independent``.
Other programs on the machine hardly affect processor time in one thread.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from models import MODELS, Problem, load, per_example
from torch.utils.data import Dataset, TensorDataset

import torch_privacy as tp

NETWORKS = ["adult", "mnist_cnn", "gpt", "bilstm_imdb"]
STEPS = 1000  # of the run for which the share is computed
ROWS = 30_000  # of the data set, at least: rehearsals look at what it holds
FIRST = 3  # steps that are rehearsed in full


class Items(Dataset):
    """Makes any number of items from the rows of a batch, each by code of its own."""

    def __init__(self, problem: Problem, count: int):
        _, self.x, self.y = problem
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = index % len(self.x)
        return self.x[row], self.y[row]


def data_of(problem: Problem, items: int | None) -> Dataset:
    """Returns tensors with the rows of a batch again and again, or a data set with this many items."""
    if items is not None:
        return Items(problem, items)
    _, x, y = problem
    copies = -(-ROWS // len(x))
    return TensorDataset(torch.cat([x] * copies), torch.cat([y] * copies))


def training_of(
    problem: Problem, data: Dataset, steps: int, seed: int, reason: str | None = None
) -> tp.PrivateTraining:
    """Returns a complete training; batches have the problem's size on average."""
    model, x, _ = problem
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return tp.PrivateTraining(
        model,
        optimizer,
        tp.Examples(data, assume_independent=reason),
        expected_batch_size=len(x),
        num_steps=steps,
        clipping=tp.Flat(1.0),
        noise_multiplier=1.0,
        delta=1e-9,
        test_seed=seed,
    )


def run(
    name: str, items: int | None, steps: int, seed: int, reason: str | None = None
) -> tuple[float, list[float], list[float]]:
    """Returns the total seconds of the first steps, and the seconds of each later step, rehearsed or not."""
    problem = load(name)
    training = training_of(problem, data_of(problem, items), steps, seed, reason)
    first, rehearsed, others = 0.0, [], []
    turns, start = 0, time.process_time()
    for x, y in training:
        step = training.step_count
        if not training.step(per_example(training.model(x), y)):
            turns += 1
            continue
        now = time.process_time()
        if step < FIRST:
            first += now - start
        else:
            (rehearsed if turns else others).append(now - start)
        turns, start = 0, now
    return first, rehearsed, others


def share(name: str, full: float, usual: float, step: float, seed: int) -> float:
    """Returns the share of rehearsals in 1,000 steps: ``full`` seconds for the first, ``usual`` for each later one."""
    problem = load(name)
    rehearsals = training_of(problem, data_of(problem, None), STEPS, seed)._state.rehearsals
    later = sum(rehearsals.are_due(number, 0, 1)[0] for number in range(FIRST, STEPS))
    spent = full + later * usual
    return spent / (spent + STEPS * step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=[], choices=[*MODELS, []], metavar="NETWORK")
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--items", type=int, help="of a data set of one's own, in place of tensors")
    parser.add_argument("--python", action="store_true", help="milliseconds of a step, as minimum and median")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    head = "network        step, ms   first 3 in full     later   share of 1,000 steps"
    print("network        minimum   median, ms of a step" if arguments.python else head)
    for name in arguments.networks or NETWORKS:
        run(name, arguments.items, FIRST, arguments.seed)  # warms up
        first, rehearsed, others = run(name, arguments.items, arguments.steps, arguments.seed)
        step = statistics.median(others)
        if arguments.python:
            print(f"{name:<14} {1000 * min(others):7.2f}  {1000 * step:7.2f}", flush=True)
            continue
        without, _, _ = run(name, arguments.items, FIRST, arguments.seed, "a benchmark")
        full, usual = first - without, statistics.median(rehearsed) - step
        milliseconds = f"{1000 * step:8.2f} {1000 * full:17.2f} {1000 * usual:9.2f}"
        print(f"{name:<14} {milliseconds} {share(name, full, usual, step, arguments.seed):12.1%}", flush=True)
        if arguments.json:
            row = {"network": name, "first": full, "rehearsed": rehearsed, "others": others}
            with arguments.json.open("a") as file:
                print(json.dumps(row), file=file)


if __name__ == "__main__":
    main()
