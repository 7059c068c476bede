# SPDX-License-Identifier: Apache-2.0
"""Measures a clipped sum by estimated norms: time and peak memory, as ratios to a non-private gradient.

    python benchmarks/sketched.py mnist_cnn cifar_cnn bilstm_imdb mlp --contenders exact jl:1 jl:10 jl:10:2
    python benchmarks/sketched.py gpt --positions 2048 --layers 2 --contenders exact gram

Contenders: ``exact`` is the tape; ``gram`` the tape with the norms of linear maps by Gram matrices only; ``jl:r``,
``jl:r:group_size`` and ``vjp:r`` (by double vjp) are described in docs/sketched.md, with fresh directions in every
step. All take turns in one process; times are the smaller of the ratios of medians and of minima, memory is the peak
of torch's allocations beyond the model. With one thread, processor time is measured, which other programs disturb less.
Goals stand beside the figures, and the script exits with 1 if one is missed.
"""

import argparse
import secrets
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import models
import step as steps
import torch
from memory import peak

import torch_privacy as tp
from torch_privacy.jacobian.layouts.known import Layouts
from torch_privacy.jacobian.tape import Tape
from torch_privacy.mechanisms.estimated_norms.directions import Directions
from torch_privacy.mechanisms.estimated_norms.projected import Projector
from torch_privacy.mechanisms.estimated_norms.settings import Projections
from torch_privacy.ops.linear import Linear
from torch_privacy.support.model_state import ModelTensors

Step = Callable[[], Any]
# (network, contender) -> largest ratios to the non-private step: of times, of memory
GOALS = {("bilstm_imdb", "jl:10"): (9.0, None), ("cifar_cnn", "jl:10"): (9.0, 1.3)}


def clipped(jacobian: Any, group: str) -> dict[str, torch.Tensor]:
    return jacobian.weighted_sum(tp.Flat(1.0).factors(jacobian.squared_norms().sqrt()))


def non_private(problem: models.Problem) -> Step:
    """Returns a step of forward and backward."""
    model, x, y = problem
    parameters = list(model.parameters())

    def step() -> None:
        torch.autograd.grad(models.per_example(model(x), y).sum(), parameters)

    return step


def private(problem: models.Problem, setting: Projections | None) -> Step:
    """Returns a step with a clipped sum; its first calls include checks and measurements."""
    model, x, y = problem
    trained, others = dict(model.named_parameters()), dict(model.named_buffers())
    layouts, key, numbers = Layouts(), secrets.token_bytes(32), count()
    tensors = ModelTensors(trained, others)
    estimator = None if setting is None else Projector(setting)

    def step() -> None:
        if estimator is None:
            recording = Tape(trained, others.values(), layouts, len(x))
        else:
            recording = estimator.recording(tensors, len(x), Directions(key, next(numbers), 0))
        recording.begin(model, (x,), {})
        out = model(x)
        recording.end(out)
        recording.clipped_sum(models.per_example(out, y), {"all": tuple(trained)}, clipped)

    return step


@contextmanager
def gram_alone() -> Iterator[None]:
    """Computes norms of linear maps with several positions by Gram matrices only."""
    methods = Linear.methods
    try:
        Linear.methods = lambda op: methods(op)[:1]  # type: ignore[method-assign]
        yield
    finally:
        Linear.methods = methods  # type: ignore[method-assign]


def by_gram(step: Step) -> Step:
    def with_gram() -> None:
        with gram_alone():
            step()

    return with_gram


def contender(name: str, problem: models.Problem) -> Step:
    kind, *numbers = name.split(":")
    if kind in ("exact", "gram"):
        step = private(problem, None)
        return step if kind == "exact" else by_gram(step)
    method = {"jl": None, "vjp": "double vjp"}[kind]
    return private(problem, Projections(*map(int, numbers), method=method))


def compare(label: str, problem: models.Problem, names: list[str], repeats: int) -> bool:
    """Prints one line for each contender; returns True if all goals were reached."""
    contenders = {"non-private": non_private(problem), **{name: contender(name, problem) for name in names}}
    for step in contenders.values():
        for _ in range(3):
            step()
    memory = {
        name: min(peak(step) for _ in range(2)) for name, step in contenders.items()
    }  # a call with a spot check takes more
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, step in contenders.items():
            start = clock()
            step()
            taken[name].append(clock() - start)
    base = taken["non-private"]
    print(f"{label}: non-private {1000 * min(base):.1f} ms, {memory['non-private']:.1f} MiB")
    reached = True
    for name in names:
        time_ratio = min(of(taken[name]) / of(base) for of in (statistics.median, min))
        memory_ratio = memory[name] / memory["non-private"]
        goals = GOALS.get((label, name), (None, None))
        figures = [
            f"{kind} {ratio:6.2f}{'' if goal is None else f' (goal {goal:g})'}"
            for kind, ratio, goal in zip(("time", "memory"), (time_ratio, memory_ratio), goals, strict=True)
        ]
        print(f"  {name:12} {'   '.join(figures)}", flush=True)
        pairs = zip((time_ratio, memory_ratio), goals, strict=True)
        reached &= all(goal is None or ratio <= goal for ratio, goal in pairs)
    return reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=models.MODELS)
    parser.add_argument("--contenders", nargs="+", default=["exact", "jl:1", "jl:10"])
    parser.add_argument("--positions", nargs="+", type=int, help="for gpt: one comparison per number")
    parser.add_argument("--width", type=int, default=512, help="for gpt with --positions")
    parser.add_argument("--batch", type=int, default=2, help="for gpt with --positions")
    parser.add_argument("--layers", type=int, default=4, help="for gpt with --positions")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    settings = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(settings.threads)
    reached = True
    for name in settings.models:
        if settings.positions is None:
            reached &= compare(name, models.load(name), settings.contenders, settings.repeats)
        for positions in settings.positions or ():
            torch.manual_seed(0)
            problem = models.gpt(settings.batch, positions, settings.width, settings.layers)
            label = f"gpt, {settings.batch} x {positions} positions, width {settings.width}, {settings.layers} layers"
            reached &= compare(label, problem, settings.contenders, settings.repeats)
    sys.exit(not reached)


if __name__ == "__main__":
    steps.keep_memory()
    main()
