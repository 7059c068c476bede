# SPDX-License-Identifier: Apache-2.0
"""Compares optimizers made for noise on the tasks of accuracy.py, at equal epsilon and equal tuning effort.

    python benchmarks/optimizers.py run --log optimizers.jsonl    # goes on where it was stopped
    python benchmarks/optimizers.py show --log optimizers.jsonl   # prints the table and the price of the tuning

Every method sees the same mechanism: 4,000 examples, 250 Poisson batches of ``tp.plan``, rows clipped to norm 1, the
same noise. Only what is clipped and what is done with the sum differ. Each has five learning rates with seed 0, of
which held-out data choose one; four more seeds train with it. Each run is scored with its last weights and their moving
average (that of ``MovingAverage``).

* SGD, momentum 0.9, Adam: as in torch.
* Adam, noise subtracted: the known variance of the noise is taken from the second moment, of which at least a tenth of
  that variance is left. Tang, Shpilevskiy & Lécuyer (2024), "DP-AdamBC", arXiv:2312.14334.
* scaled by public moments: rows are multiplied by 1 / (sqrt(E g²) + ε) before they are clipped, and the sum once more
  after; ε is the root mean square. The moments are those of 200 held-out examples, taken as public, renewed every 25
  steps.
* scaled by past releases: the same by the noisy gradients of the last 25 steps, less the variance of their noise.
  Ganesh, McMahan & Thakurta (2025), arXiv:2507.01129; Li et al. (2023), "DP²", arXiv:2212.00309.
* two-point: rows are gradients at two points, c g(w + d) + (1 - c) g(w), d the last step, c = (1 - k) / k, k = 0.3;
  what is released is averaged. Zhang et al. (2025), "DiSK", arXiv:2410.03883. One clipped row of an example, one price.

The loop is this script's own, on torch's generator: several trainings run side by side as one. It is for comparisons on
data that need no protection; train with ``PrivateTraining``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accuracy import DECAY, DELTA, FEATURES, NUM_EXAMPLES, STEPS, Log, Row, accuracy, error, load, new_model
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from torch_privacy import privacy

N, SEEDS, EVERY, NUM_PUBLIC, LEAST, KAPPA = 4_000, 5, 25, 200, 0.1, 0.3
EPSILON = {"census": 0.5, "digits": 1.0, "reviews": 2.0}
SGD = {"census": 0.5, "digits": 1.0, "reviews": 4.0}  # the middle of five rates, for steps of one gradient
METHODS = {  # the same in units of it, or for Adam the rate itself
    "SGD": 1.0, "momentum 0.9": 0.125, "two-point": 1.0, "scaled by public moments": 1.0,
    "scaled by past releases": 1.0, "Adam": None, "Adam, noise subtracted": None,
}  # fmt: skip
ADAM = {"census": 0.02, "digits": 0.01, "reviews": 0.02}
PREFIXES = "", "averaged_"


class Rows:
    """Per-example gradients of several networks, by their weights."""

    def __init__(self, model: torch.nn.Module):
        self.shapes = {name: p.shape for name, p in model.named_parameters()}

        def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

        self.rows = vmap(vmap(grad(loss), (None, 0, 0)))

    def __call__(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Returns (k, n, p) for weights (k, p), inputs (k, n, ...) and targets (k, n)."""
        parts = w.split([shape.numel() for shape in self.shapes.values()], 1)
        named = zip(parts, self.shapes.items(), strict=True)
        weights = {name: part.view(len(w), *shape) for part, (name, shape) in named}
        return torch.cat([rows.flatten(2) for rows in self.rows(weights, x, y).values()], 2)


class Draws:
    """Random numbers of several trainings, each with its own seed."""

    def __init__(self, seeds: list[int]):
        self.generators = [torch.Generator().manual_seed(1000 + seed) for seed in seeds]

    def batches(self, probability: float) -> tuple[Tensor, Tensor]:
        """Returns indices (k, m) of Poisson batches, and which of them count."""
        drawn = [(torch.rand(N, generator=one) < probability).nonzero()[:, 0] for one in self.generators]
        index = torch.nn.utils.rnn.pad_sequence(drawn, batch_first=True, padding_value=-1)
        return index.clamp(min=0), index >= 0

    def noise(self, size: int) -> Tensor:
        return torch.stack([torch.randn(size, generator=one) for one in self.generators])


def scale_of(second_moment: Tensor) -> Tensor:
    """Returns 1 / (sqrt(v) + ε) with a mean square of 1, where ε is the root mean square of all; v is (k, p)."""
    scale = 1 / (second_moment.sqrt() + second_moment.mean(1, keepdim=True).sqrt())
    return scale / scale.square().mean(1, keepdim=True).sqrt()


def trained(task: str, method: str, rates: list[float], seeds: list[int]) -> list[dict[str, Any]]:
    """Trains once for each pair of rate and seed; returns accuracies of the last weights and of their average."""
    parts = load(task, FEATURES[task])
    x, y = (part[:N] for part in parts["train"])
    public = [part[:NUM_PUBLIC].expand(len(seeds), *part[:NUM_PUBLIC].shape) for part in parts["held_out"]]
    held_out = [part[NUM_PUBLIC:] for part in parts["held_out"]]
    planned = privacy.plan(N, EPSILON[task], DELTA, num_steps=(STEPS,)).chosen
    size, stddev = planned.expected_batch_size, planned.noise_multiplier / planned.expected_batch_size
    models = []
    for seed in seeds:
        torch.manual_seed(seed)
        models.append(new_model(task, FEATURES[task]))
    w = torch.stack([parameters_to_vector(model.parameters()).detach() for model in models])
    rows_at, draws, rate = Rows(models[0]), Draws(seeds), torch.tensor(rates)[:, None]
    mean, first, second = w.clone(), torch.zeros_like(w), torch.zeros_like(w)
    scale, past, before = torch.ones_like(w), torch.zeros_like(w), torch.zeros_like(w)
    for step in range(STEPS):
        if method == "scaled by public moments" and step % EVERY == 0:
            scale = scale_of(rows_at(w, *public).square().mean(1))
        index, counts = draws.batches(size / N)
        rows = rows_at(w, x[index], y[index])
        if method == "two-point":
            c = (1 - KAPPA) / KAPPA
            rows = c * rows_at(w + before, x[index], y[index]) + (1 - c) * rows
        rows *= scale[:, None]
        factors = counts / rows.norm(dim=2).clamp(min=1)
        released = torch.einsum("kn,knp->kp", factors, rows) / size + stddev * draws.noise(w.shape[1])
        first, second, update = update_of(method, released, first, second, stddev, step + 1)
        if method == "scaled by past releases":
            past += (released.square() - stddev**2) / scale.square()
            if step % EVERY == EVERY - 1:
                scale = scale_of((past / EVERY).maximum(LEAST * (stddev / scale).square()))
                past = torch.zeros_like(w)
        before = -rate * (scale * update)
        w = w + before
        decay = min(DECAY, (1 + step) / (10 + step))
        mean = decay * mean + (1 - decay) * w
    found: list[dict[str, Any]] = [{} for _ in seeds]
    for prefix, weights in zip(PREFIXES, (w, mean), strict=True):
        for one, model, vector in zip(found, models, weights, strict=True):
            vector_to_parameters(vector, model.parameters())
            one[prefix + "held_out"] = accuracy(model, *held_out)
            one[prefix + "test"] = accuracy(model, *parts["test"])
    return found


def update_of(
    method: str, released: Tensor, first: Tensor, second: Tensor, stddev: float, t: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns first and second moments, and the update, of a mean gradient with noise."""
    if method == "momentum 0.9":
        first = 0.9 * first + released
        return first, second, first
    if method == "two-point":
        first = (1 - KAPPA) * first + KAPPA * released
        return first, second, first
    if not method.startswith("Adam"):
        return first, second, released
    first, second = 0.9 * first + 0.1 * released, 0.999 * second + 0.001 * released.square()
    moment = second / (1 - 0.999**t)
    if method == "Adam, noise subtracted":
        moment = (moment - stddev**2).clamp(min=LEAST * stddev**2)
    return first, second, first / (1 - 0.9**t) / (moment.sqrt() + 1e-8)


def rates_of(task: str, method: str) -> list[float]:
    factor = METHODS[method]
    middle = ADAM[task] if factor is None else factor * SGD[task]
    return [middle * 2.0**power for power in range(-2, 3)]


def run(log: Log, tasks: list[str]) -> None:
    for task in tasks:
        for method in METHODS:
            tries = make(log, task, method, [(rate, 0) for rate in rates_of(task, method)])
            best = {max(tries, key=lambda one: one[prefix + "held_out"])["setting"]["rate"] for prefix in PREFIXES}
            for rate in sorted(best):
                make(log, task, method, [(rate, seed) for seed in range(1, SEEDS)])


def make(log: Log, task: str, method: str, pairs: list[tuple[float, int]]) -> list[Row]:
    """Returns the rows of pairs of rate and seed; those that the file lacks are trained side by side."""
    rows = [{"task": task, "method": method, "rate": rate, "seed": seed} for rate, seed in pairs]
    lacking = [row for row in rows if log.find(row) is None]
    if lacking:
        found = trained(task, method, [row["rate"] for row in lacking], [row["seed"] for row in lacking])
        for row, scores in zip(lacking, found, strict=True):
            log.get(row, lambda _, scores=scores: scores)
    return [log.get(row) for row in rows]


def scores(log: Log, task: str, method: str, prefix: str) -> tuple[float, np.ndarray]:
    """Returns the rate chosen, and the test accuracies with it by seed; none if there are no rows."""
    of_method = [one for one in log.rows if (one["setting"]["task"], one["setting"]["method"]) == (task, method)]
    first = [one for one in of_method if one["setting"]["seed"] == 0]
    if not first:
        return math.nan, np.array([])
    rate = max(first, key=lambda one: one[prefix + "held_out"])["setting"]["rate"]
    chosen = sorted(
        (one["setting"]["seed"], one[prefix + "test"]) for one in of_method if one["setting"]["rate"] == rate
    )
    return rate, np.array([test for _, test in chosen])


def show(log: Log, tasks: list[str]) -> None:
    """Prints accuracies of SGD, and gains over it; seeds are paired, as they share weights, batches and noise."""
    for prefix, title in zip(PREFIXES, ("last weights", "averaged weights"), strict=True):
        print(f"| {title} | {' | '.join(f'{task}, ε = {EPSILON[task]:g}' for task in tasks)} |")
        print("|---" * (len(tasks) + 1) + "|")
        for method in METHODS:
            cells = []
            for task in tasks:
                rate, test = scores(log, task, method, prefix)
                base = scores(log, task, "SGD", prefix)[1]
                if method == "SGD":
                    cells.append(f"{test.mean():.2f} ± {error(test):.2f} %, rate {rate:g}")
                elif len(test) == len(base):
                    gain = test - base
                    cells.append(f"{gain.mean():+.2f} ± {error(gain):.2f}, rate {rate:g}")
                else:
                    cells.append("")
            print(f"| {method} | {' | '.join(cells)} |")
        print()
    price(tasks)


def price(tasks: list[str]) -> None:
    """Prints what the five tries would cost on the private data: of a search with five runs on average."""
    for task in tasks:
        planned = privacy.plan(N, EPSILON[task], DELTA, num_steps=(STEPS,)).chosen
        event = privacy.SubsampledGaussian(planned.noise_multiplier, planned.expected_batch_size / N)
        count = privacy.Gaussian(10.0)  # noise of 10 examples on the number of right answers
        search = privacy.Repeated(((event, STEPS), (count, 1)), 5.0, "logarithmic")
        one, all_runs = (privacy.compose([priced]).epsilon_high(DELTA) for priced in ((event, STEPS), (search, 1)))
        print(f"{task}: epsilon {one:.3f} of one run, {all_runs:.3f} of a private search with five runs on average")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "show"])
    parser.add_argument("--log", type=Path, default=Path("optimizers.jsonl"))
    parser.add_argument("--tasks", nargs="+", choices=NUM_EXAMPLES, default=list(NUM_EXAMPLES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    actions: dict[str, Callable[[Log, list[str]], None]] = {"run": run, "show": show}
    actions[given.what](Log(given.log), given.tasks)


if __name__ == "__main__":
    main()
