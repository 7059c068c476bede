# SPDX-License-Identifier: Apache-2.0
"""What a clipped sum by random projections costs: ratio of minima to a non-private gradient, one thread.

``python benchmarks/sketched.py mnist_cnn bilstm_imdb --projections 1 10``; the drawing of the directions is included.
"""

import argparse
import secrets
import time
from collections.abc import Callable
from itertools import count

import models
import torch

import torch_privacy as tp
from torch_privacy._directions import Directions
from torch_privacy._projected import Sketch, SketchedJacobian, Sketching


def seconds(step: Callable[[], None], repeats: int) -> float:
    """The smallest time of some repeats, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def clipped(jacobian: SketchedJacobian, group: str) -> dict[str, torch.Tensor]:
    return jacobian.weighted_sum(tp.Flat(1.0).factors(jacobian.squared_norms().sqrt()))


def non_private(problem: models.Problem) -> Callable[[], None]:
    """Forward and backward."""
    model, x, y = problem
    parameters = list(model.parameters())

    def step() -> None:
        torch.autograd.grad(models.per_example(model(x), y).sum(), parameters)

    return step


def sketched(problem: models.Problem, sketching: Sketching) -> Callable[[], None]:
    """The same with a clipped sum, fresh directions in every step; called twice, so that checks are behind it."""
    model, x, y = problem
    parameters, key, numbers = dict(model.named_parameters()), secrets.token_bytes(32), count()

    def step() -> None:
        sketch = Sketch(sketching, parameters, Directions(key, next(numbers), 0))
        args = sketch.probe((x,))
        sketch.begin(model, args, {})
        out = model(*args)
        sketch.end(out)
        sketch.clipped_sum(models.per_example(out, y), {"all": tuple(parameters)}, clipped)

    step()
    step()
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", choices=models.MODELS)
    parser.add_argument("--projections", nargs="+", type=int, default=[1, 10, 32])
    parser.add_argument("--repeats", type=int, default=3)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    for name in settings.models:
        problem = models.load(name)
        base = seconds(non_private(problem), settings.repeats)
        print(f"{name}: non-private {1000 * base:.1f} ms")
        for r in settings.projections:
            sketching = Sketching(tp.Sketched(r))
            ratio = seconds(sketched(problem, sketching), settings.repeats) / base
            print(f"  {r:4} projections: {ratio:6.2f} x  {sketching.way}")


if __name__ == "__main__":
    main()
