# SPDX-License-Identifier: Apache-2.0
"""Provides the methods that the papers on DP-SGD-JL compare, each as a training step on the same problem."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import torch_privacy as tp
from torch_privacy.experiments.task import trainable
from torch_privacy_papers.bu2021.measure import Step, memory_bytes

CHUNK_BYTES = 2**28  # of rows that vmap holds at once


@dataclass(frozen=True)
class TimedProblem:
    """A network, data in tensors, and the settings that all methods share."""

    new_model: Callable[[], nn.Module]
    new_optimizer: Callable[[nn.Module], Optimizer]
    data: TensorDataset
    batch_size: int
    clip_norm: float
    noise_multiplier: float

    def batch(self) -> tuple[Tensor, Tensor]:
        """Returns a random batch."""
        chosen = torch.randint(len(self.data), (self.batch_size,))
        inputs, targets = self.data.tensors
        return inputs[chosen], targets[chosen]


Maker = Callable[[TimedProblem], Step]


def non_private(problem: TimedProblem) -> Step:
    """Returns a step with the mean gradient, without privacy."""
    model = problem.new_model()
    optimizer = problem.new_optimizer(model)

    def step() -> None:
        x, y = problem.batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def vanilla(problem: TimedProblem, only: int | None = None) -> Step:
    """Returns a step with one backward pass for each example, or for the first ``only``; then clipping and noise."""
    model = problem.new_model()
    optimizer, parameters = problem.new_optimizer(model), trainable(model)

    def step() -> None:
        x, y = problem.batch()
        losses = F.cross_entropy(model(x), y, reduction="none")
        total = [torch.zeros_like(p) for p in parameters]
        for loss in losses[:only]:
            row = torch.autograd.grad(loss, parameters, retain_graph=True)
            c = clip_factors(torch.stack([part.square().sum() for part in row]).sum().sqrt(), problem.clip_norm)
            for part, sum_ in zip(row, total, strict=True):
                sum_.add_(c * part)
        update(problem, optimizer, parameters, total)

    return step


def multiple(problem: TimedProblem, *, at_once: bool = False) -> Step:
    """Returns a step with all rows by ``torch.func.vmap``, in chunks or at once; then clipping and noise."""
    model = problem.new_model()
    optimizer, parameters = problem.new_optimizer(model), trainable(model)
    size = problem.batch_size if at_once else max(1, CHUNK_BYTES // sum(p.nbytes for p in parameters))

    def step() -> None:
        total = [torch.zeros_like(p) for p in parameters]
        for x, y in zip(*(part.split(size) for part in problem.batch()), strict=True):
            rows = rows_by_vmap(model, x, y)
            norms = torch.stack([part.flatten(1).square().sum(1) for part in rows.values()]).sum(0).sqrt()
            c = clip_factors(norms, problem.clip_norm)
            for name, sum_ in zip(list(rows), total, strict=True):
                sum_.add_(torch.tensordot(c, rows.pop(name), 1))
        update(problem, optimizer, parameters, total)

    return step


def rows_by_vmap(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Returns the per-example gradients by ``torch.func``, name -> (n, *shape).

    Raises:
        Refused: vmap cannot follow the model, or memory does not suffice.
    """

    def loss(trained: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, trained, (x[None],)), y[None])

    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    try:
        with without_warnings():  # by torch, about layers without a batching rule
            return vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")(trained, x, y)
    except RuntimeError as error:
        raise tp.Refused(f"vmap: {str(error).splitlines()[0]}") from error


def outer_product(problem: TimedProblem) -> Step:
    """Returns a step of Opacus, which computes rows in hooks and replaces ``nn.LSTM`` by its own layer.

    Raises:
        ModuleNotFoundError: If Opacus is not installed.
        MemoryError: If a batch's rows, all held at once, take more than half of this machine's memory.
    """
    plain = problem.new_model()
    rows = problem.batch_size * sum(p.nbytes for p in trainable(plain))
    if rows > memory_bytes() // 2:  # the system would kill this process
        raise MemoryError(f"{rows / 2**30:.0f} GiB of rows")
    engine, validators = import_module("opacus"), import_module("opacus.validators")
    model = validators.ModuleValidator.fix(plain)
    with without_warnings():  # that its noise is not secure
        private, optimizer, _ = engine.PrivacyEngine().make_private(
            module=model,
            optimizer=problem.new_optimizer(model),
            data_loader=DataLoader(problem.data, batch_size=problem.batch_size),
            noise_multiplier=problem.noise_multiplier,
            max_grad_norm=problem.clip_norm,
            poisson_sampling=False,
        )

    def step() -> None:
        x, y = problem.batch()
        optimizer.zero_grad()
        with without_warnings():  # by torch, about its hooks
            F.cross_entropy(private(x), y).backward()
        optimizer.step()

    return step


@contextmanager
def without_warnings() -> Iterator[None]:
    """Hides the warnings of the block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def ours(projections: int, problem: TimedProblem, method: str | None = None) -> Step:
    """Returns a step of `PrivateTraining` with exact norms, or with ``projections`` > 0 random directions."""
    model = problem.new_model()
    clipping = tp.Flat(problem.clip_norm)
    if projections:
        clipping = tp.Sketched(projections, clip_norm=problem.clip_norm, method=method, not_for_release=True)
    training = tp.PrivateTraining(
        model,
        problem.new_optimizer(model),
        problem.data,
        expected_batch_size=problem.batch_size,
        num_steps=10**6,
        clipping=clipping,
        noise_multiplier=problem.noise_multiplier,
    )
    batches = iter(training)

    def step() -> None:
        """Makes one step, rehearsals included."""
        made = training.step_count
        while training.step_count == made:
            x, y = next(batches)
            training.step(F.cross_entropy(model(x), y, reduction="none"))

    return step


def clip_factors(norms: Tensor, clip_norm: float) -> Tensor:
    """Returns ``min(1, clip_norm / norm)``."""
    return (clip_norm / norms).clamp(max=1)


def update(problem: TimedProblem, optimizer: Optimizer, parameters: list[nn.Parameter], total: list[Tensor]) -> None:
    """Adds noise by torch's generator and updates; only for measurements, the model must not be released."""
    stddev = problem.noise_multiplier * problem.clip_norm
    for p, sum_ in zip(parameters, total, strict=True):
        p.grad = (sum_ + stddev * torch.randn_like(sum_)) / problem.batch_size
    optimizer.step()


def vanilla_seconds(few: Mapping[int, float], batch_size: int) -> float:
    """Returns the seconds for a whole batch, by linear extrapolation from two numbers of backward passes."""
    (less, first), (more, second) = sorted(few.items())
    return first + (batch_size - less) * max(second - first, 0) / (more - less)
