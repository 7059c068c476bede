# SPDX-License-Identifier: Apache-2.0
"""Trains on MNIST with banded noise of 1, 8 and 32 bands at equal epsilon, and prints the accuracies.

    python benchmarks/banded.py run --log banded.jsonl          # goes on where it was stopped
    python benchmarks/banded.py table --log banded.jsonl

A small CNN with tanh (26,010 parameters) or a linear model, SGD without momentum, 1,000 steps with batches of 500 of
50,000 images on average (q = 0.01), clip norm 1, delta 1e-5. For each row the learning rate is chosen by the other
10,000 training images, so that the test images decide nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy.data import mnist

RATES, BANDS, EPSILONS = (0.5, 1.0, 2.0), (1, 8, 32), (2.0, 8.0)
STEPS, BATCH, DELTA, TRAINED = 1000, 500, 1e-5, 50_000


def network(kind: str) -> nn.Module:
    if kind == "linear":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return float(torch.cat([model(part).argmax(1) for part in x.split(2000)]).eq(y).double().mean())


def trained(
    kind: str, seed: int, epsilon: float, bands: int, rate: float, data: tuple[torch.Tensor, ...]
) -> dict[str, float]:
    x, y, test_x, test_y = data
    torch.manual_seed(seed)
    model = network(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    training = tp.PrivateTraining(
        model, optimizer, TensorDataset(x[:TRAINED], y[:TRAINED]), expected_batch_size=BATCH, num_steps=STEPS,
        clipping=tp.Flat(1.0), target_epsilon=epsilon, delta=DELTA, correlation=tp.Banded(bands),
    )  # fmt: skip
    for inputs, labels in training:
        training.step(F.cross_entropy(model(inputs), labels, reduction="none"))
    spent = training.spent().epsilon.high
    assert spent <= epsilon
    held_out, test = accuracy(model, x[TRAINED:], y[TRAINED:]), accuracy(model, test_x, test_y)
    noise = training.settings.noise_multiplier
    return {"epsilon_high": spent, "noise": noise, "held_out": held_out, "test": test}  # type: ignore[dict-item]


def run(log: Path, kind: str, seeds: int, rates: list[float]) -> None:
    split = mnist.load_mnist()
    data = (*split.train.tensors, *split.test.tensors)
    known = [json.loads(line)["setting"] for line in log.read_text().splitlines()] if log.exists() else []
    for setting in itertools.product([kind], range(seeds), EPSILONS, BANDS, rates):
        if list(setting) not in known:
            row = {"setting": setting, **trained(*setting, data)}
            with log.open("a") as file:
                print(json.dumps(row), file=file)
            print(row, flush=True)


def table(log: Path) -> None:
    found: dict[tuple[str, float, int], dict[float, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in map(json.loads, log.read_text().splitlines()):
        kind, _, epsilon, bands, rate = row["setting"]
        found[kind, epsilon, bands][rate].append(row)
    print("| network | epsilon | bands | noise multiplier | learning rate | test accuracy, % | seeds |")
    print("|---|---|---|---|---|---|---|")
    for (kind, epsilon, bands), rates in sorted(found.items()):
        rate, rows = max(rates.items(), key=lambda each: np.mean([row["held_out"] for row in each[1]]))
        test = 100 * np.array([row["test"] for row in rows])
        error = test.std(ddof=1) / len(test) ** 0.5 if len(test) > 1 else float("nan")
        shown = f"{test.mean():.2f} ± {error:.2f} | {len(test)}"
        print(f"| {kind} | {epsilon:g} | {bands} | {rows[0]['noise']:.3f} | {rate:g} | {shown} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--log", type=Path, default=Path("banded.jsonl"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--network", choices=["cnn", "linear"], default="cnn")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.what == "run":
        run(arguments.log, arguments.network, arguments.seeds, arguments.rates)
    else:
        table(arguments.log)


if __name__ == "__main__":
    main()
