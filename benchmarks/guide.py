# SPDX-License-Identifier: Apache-2.0
"""Measures the curves of docs/accuracy.md, and the picture of the first page: accuracy over epsilon, beside Opacus.

    python benchmarks/guide.py curves --log guide.jsonl   # ten minutes on one core; goes on where it was stopped
    python benchmarks/guide.py peers --log guide.jsonl    # an hour
    python benchmarks/guide.py draw --log guide.jsonl     # prints the numbers, and draws docs/img/guide.svg, first.svg

**Curves**: 5,000 digits of MNIST, a network of two convolutions, 250 steps, the batch of ``tp.plan``, gradients clipped
to norm 1, rate 2, epsilon 2 at delta 1e-5, averaged weights (``accuracy.py``, task ``digits``); one setting changes.

**Peers**: all 60,000 digits and the same network, loss, optimizer and clip norm at equal time. Each library gets
``SECONDS`` of processor time for the training, everything included: sampling, gradients, noise and accounting. Two
trials measure its time for a step; the number of steps that fits is what its own accountant calibrates the noise for.
Batch and rate are those with the best accuracy on held-out digits, chosen for each library and epsilon with seed 0.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import accuracy
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torch_privacy as tp
from torch_privacy.data import load_mnist

SECONDS, DELTA, CLIP_NORM, TRIAL = 25.0, 1e-5, 1.0, 12
EPSILONS = (1.0, 2.0, 4.0, 8.0)
BATCHES, RATES = (512, 2048), tuple(2.0**k for k in range(-2, 5))  # the same grid for each library
LIBRARIES = ("torch_privacy", "opacus")
HELD_OUT = 5_000
BASE = {
    "task": "digits", "features": "pixels", "epsilon": 2.0, **accuracy.BASE, "rate": 2.0,
}  # fmt: skip
CURVES: dict[str, list[dict[str, Any]]] = {
    "epsilon": [{"epsilon": epsilon} for epsilon in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)],
    "batch": [{"batch": 2.0**-k} for k in range(6, -1, -1)],
    "rate": [{"rate": 2.0**k} for k in range(-4, 5)],
    "rate, clip norm 0.1": [{"rate": 2.0**k, "clip": 0.1} for k in range(-4, 5)],
}
PICTURES = Path(__file__).parent.parent / "docs/img"
Row = dict[str, Any]


def curves(log: accuracy.Log, seeds: int) -> None:
    for rows in CURVES.values():
        for change in rows:
            for seed in range(seeds):
                log.get({**BASE, **change, "seed": seed})


@lru_cache(maxsize=1)
def digits() -> dict[str, tuple[Tensor, Tensor]]:
    split = load_mnist()
    (x, y), (test_x, test_y) = split.train.tensors, split.test.tensors
    held_out = x[-HELD_OUT:], y[-HELD_OUT:]
    return {"train": (x[:-HELD_OUT], y[:-HELD_OUT]), "held_out": held_out, "test": (test_x, test_y)}


def of_ours(row: Row, steps: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    training = tp.PrivateTraining(
        model, optimizer, TensorDataset(*digits()["train"]), expected_batch_size=row["batch"], num_steps=steps,
        clipping=tp.Flat(CLIP_NORM), target_epsilon=row["epsilon"], delta=DELTA,
    )  # fmt: skip
    for x, y in training:
        training.step(F.cross_entropy(model(x), y, reduction="none"))
    return training.spent().epsilon.high


def of_opacus(row: Row, steps: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    from opacus import PrivacyEngine

    data = TensorDataset(*digits()["train"])
    loader = DataLoader(data, batch_size=row["batch"])
    engine: Any = PrivacyEngine()  # its type wants whole epochs, and its accountant takes any
    private, private_optimizer, batches = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, target_epsilon=row["epsilon"], target_delta=DELTA,
        epochs=steps / len(loader), max_grad_norm=CLIP_NORM,
    )  # fmt: skip
    made = 0
    while made < steps:
        for x, y in batches:
            private_optimizer.zero_grad()
            F.cross_entropy(private(x), y).backward()
            private_optimizer.step()
            made += 1
            if made == steps:
                break
    return engine.get_epsilon(DELTA)


def timed(row: Row, steps: int) -> tuple[float, float, torch.nn.Module]:
    """Returns seconds of the processor, the epsilon that the library states, and the trained model."""
    torch.manual_seed(row["seed"])
    model = accuracy.cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=row["rate"])
    start = time.process_time()
    stated = (of_ours if row["library"] == "torch_privacy" else of_opacus)(row, steps, model, optimizer)
    return time.process_time() - start, stated, model


@lru_cache(maxsize=len(LIBRARIES) * len(BATCHES))
def pace(library: str, batch: int) -> tuple[float, float]:
    """Returns the seconds of a step, and of all else in a training."""
    row = {"library": library, "batch": batch, "epsilon": 2.0, "rate": 1.0, "seed": 0}
    timed(row, 1)  # what a process does once
    few, many = (timed(row, count * TRIAL)[0] for count in (1, 4))
    each = (many - few) / (3 * TRIAL)
    return each, max(0.0, few - each * TRIAL)


def trained(row: Row) -> dict[str, Any]:
    """Trains for `SECONDS`."""
    each, fixed = pace(row["library"], row["batch"])
    steps = max(1, int((SECONDS - fixed) / each))
    seconds, stated, model = timed(row, steps)
    scores = {name: accuracy.accuracy(model, *digits()[name]) for name in ("held_out", "test")}
    return {"steps": steps, "seconds": seconds, "stated": stated, **scores}


def peers(log: accuracy.Log, seeds: int) -> None:
    warnings.simplefilter("ignore")
    for epsilon in EPSILONS:
        for seed in range(seeds):
            for library in LIBRARIES:
                for batch, rate in [best_of(log, library, epsilon)] if seed else choices():
                    row = {"library": library, "epsilon": epsilon, "batch": batch, "rate": rate, "seed": seed}
                    log.get(row, trained)


def choices() -> list[tuple[int, float]]:
    return [(batch, rate) for batch in BATCHES for rate in RATES]


def best_of(log: accuracy.Log, library: str, epsilon: float) -> tuple[int, float]:
    """Returns batch and rate with the best accuracy of seed 0 on held-out digits."""
    both = {"library": library, "epsilon": epsilon, "seed": 0}
    found = [one for one in log.rows if both.items() <= one["setting"].items()]
    best = max(found, key=lambda one: one["held_out"])["setting"]
    return best["batch"], best["rate"]


def of_curve(log: accuracy.Log, name: str) -> Iterator[tuple[Row, float, float]]:
    """Yields setting, mean and standard error of the test accuracies."""
    for change in CURVES[name]:
        row = {**BASE, **change}
        found = [
            one["averaged_test"]
            for one in log.rows
            if {key: value for key, value in one["setting"].items() if key != "seed"} == row
        ]
        if found:
            yield row, float(np.mean(found)), accuracy.error(np.array(found))


def of_library(log: accuracy.Log, library: str) -> Iterator[tuple[float, np.ndarray, list[Row]]]:
    """Yields epsilon, the test accuracies of its seeds, and the lines of the log."""
    for epsilon in EPSILONS:
        if any(one["setting"].get("library") == library and one["setting"]["epsilon"] == epsilon for one in log.rows):
            batch, rate = best_of(log, library, epsilon)
            row = {"library": library, "epsilon": epsilon, "batch": batch, "rate": rate}
            found = [one for one in log.rows if row.items() <= one["setting"].items()]
            yield epsilon, np.array([one["test"] for one in found]), found


def draw(log: accuracy.Log, seeds: int) -> None:
    draw_curves(log)
    draw_peers(log)


def draw_curves(log: accuracy.Log) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    from torch_privacy.runs.report import figures, style

    batch = tp.plan(5_000, 2.0, DELTA, num_steps=(accuracy.STEPS,)).chosen.expected_batch_size
    axis = {"epsilon": ("epsilon", 1.0), "batch": ("expected batch size", batch), "rate": ("learning rate", 1.0)}
    with matplotlib.rc_context(style.FILE_STYLE):
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        panels = figure.subplots(1, 3, sharey=True)
        for name in CURVES:
            key = name.partition(",")[0]
            axes, (label, factor) = panels[list(axis).index(key)], axis[key]
            points = [(row[key] * factor, mean, error) for row, mean, error in of_curve(log, name)]
            print(name, *(f"{x:g}: {mean:.1f} ± {error:.1f}" for x, mean, error in points), sep="\n  ")
            if points:
                x, mean, error = zip(*points, strict=True)
                clip = "clip norm 0.1, rate times 10" if "clip" in name else "clip norm 1"
                axes.errorbar(x, mean, yerr=error, marker="o", markersize=4, linewidth=1.4, label=clip)
            axes.set_xscale("log", base=2)
            ticks = [x for x, *_ in points][::2]
            axes.set_xticks(ticks, [f"{x:.2g}" if x < 10 else f"{x:.0f}" for x in ticks])
            axes.set_xlabel(label, fontsize=11)
        panels[0].set_ylabel("test accuracy, %", fontsize=11)
        panels[2].legend(fontsize=9, frameon=False)
        figures.save(figure, PICTURES / "guide.svg")


def draw_peers(log: accuracy.Log) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    from torch_privacy.runs.report import figures, style

    with matplotlib.rc_context(style.FILE_STYLE):
        figure = Figure(figsize=(6.4, 3.4), layout="constrained")
        axes = figure.subplots()
        for library in LIBRARIES:
            points = list(of_library(log, library))
            for epsilon, test, found in points:
                steps = sorted(one["steps"] for one in found)
                setting = found[0]["setting"]
                ends = " (at an end of the grid)" if setting["rate"] in (min(RATES), max(RATES)) else ""
                print(
                    f"{library}, epsilon {epsilon:g}: {test.mean():.2f} ± {accuracy.error(test):.2f} %, batch "
                    f"{setting['batch']}, rate {setting['rate']:g}{ends}, {steps[len(steps) // 2]} steps, "
                    f"{np.median([one['seconds'] for one in found]):.0f} s, stated {found[0]['stated']:.3f}"
                )
            if points:
                errors = [0.0 if math.isnan(accuracy.error(test)) else accuracy.error(test) for _, test, _ in points]
                axes.errorbar(
                    [epsilon for epsilon, *_ in points], [test.mean() for _, test, _ in points], yerr=errors,
                    marker="o", markersize=5, linewidth=1.6, label={"opacus": "Opacus 1.6"}.get(library, library),
                )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
        axes.set_xlabel("epsilon", fontsize=11)
        axes.set_ylabel("test accuracy, %", fontsize=11)
        axes.legend(fontsize=10, frameon=False, loc="upper left")
        figures.save(figure, PICTURES / "first.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["curves", "peers", "draw"])
    parser.add_argument("--log", type=Path, default=Path("guide.jsonl"))
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    {"curves": curves, "peers": peers, "draw": draw}[given.what](accuracy.Log(given.log), given.seeds)


if __name__ == "__main__":
    main()
