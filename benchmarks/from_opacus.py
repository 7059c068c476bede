# SPDX-License-Identifier: Apache-2.0
"""Time per step of one training loop, three ways: PrivateTraining's own loop, the same loop as for Opacus, and Opacus.

``python benchmarks/from_opacus.py`` trains a small convolutional network and a two-layer network on random data, one
thread, and prints the median over repetitions of processor seconds per step, and their ratios. The ways take turns.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import opacus
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torch_privacy as tp
from torch_privacy.opacus import PrivacyEngine

STEPS, REPETITIONS, N, BATCH = 60, 9, 2000, 64
RARELY_REHEARSED = range(20, STEPS)  # steps that are timed: the first ones are rehearsed
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "two layers": (lambda: nn.Sequential(nn.Linear(100, 256), nn.ReLU(), nn.Linear(256, 10)), (100,)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.ReLU(),
            nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
        ),
        (1, 28, 28),
    ),
}  # fmt: skip


def native(model: nn.Module, optimizer: Any, loader: DataLoader) -> list[float]:
    """Returns the times at which steps ended, of PrivateTraining's own loop."""
    times = []
    training = tp.PrivateTraining(
        model,
        optimizer,
        tp.Examples(loader.dataset, assume_independent="a benchmark of steps without rehearsals"),
        expected_batch_size=N / len(loader),
        num_steps=STEPS,
        clipping=tp.Flat(1.0),
        noise_multiplier=1.0,
        test_seed=0,
    )
    for x, y in training:
        if training.step(F.cross_entropy(model(x), y, reduction="none")):
            times.append(time.process_time())
    return times


def kept(model: nn.Module, optimizer: Any, loader: Any, engine: Any = None, **options: Any) -> list[float]:
    """Returns the times at which steps ended, of a loop as for Opacus."""
    model, optimizer, loader = (engine or PrivacyEngine()).make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0, **options
    )
    times: list[float] = []
    while len(times) < STEPS:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            times.append(time.process_time())
    return times


def theirs(model: nn.Module, optimizer: Any, loader: Any) -> list[float]:
    """Returns the times at which steps ended, with Opacus."""
    return kept(model, optimizer, loader, opacus.PrivacyEngine())


def ours(model: nn.Module, optimizer: Any, loader: Any) -> list[float]:
    """Returns the times at which steps ended, with the same loop here."""
    assumption = "a benchmark of steps without rehearsals"
    return kept(model, optimizer, loader, test_seed=0, assume_independent=assumption)


def main() -> None:
    """Prints a table."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name, (make, shape) in MODELS.items():
        data = TensorDataset(torch.randn(N, *shape), torch.randint(10, (N,)))
        seconds: dict[str, list[float]] = {"native": [], "kept loop": [], "Opacus": []}
        for _ in range(REPETITIONS):
            for way, run in (("native", native), ("kept loop", ours), ("Opacus", theirs)):
                torch.manual_seed(0)
                model = make()
                times = run(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, BATCH))
                steps = [times[step] - times[step - 1] for step in RARELY_REHEARSED]
                seconds[way].append(statistics.median(steps))
        ratios = [a / b for a, b in zip(seconds["kept loop"], seconds["native"], strict=True)]
        print(
            f"{name}: "
            + ", ".join(f"{way} {1e3 * statistics.median(values):.2f} ms" for way, values in seconds.items())
            + f"; kept loop over native {statistics.median(ratios):.3f}"
        )


if __name__ == "__main__":
    main()
