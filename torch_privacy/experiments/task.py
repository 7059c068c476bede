# SPDX-License-Identifier: Apache-2.0
"""What an experiment module offers to the runner, written down once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

from torch_privacy import _validate as _check
from torch_privacy.runs import metrics as log

NOISE_RANGE = 1e-3, 100.0  # beyond, float32 noise or the accountant's lattice ends
LARGEST_SCALE = 1e30  # what float32 holds, with room for the noise
LARGEST_SEED = 2**63 - 1

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset


class Settings(Protocol):
    """The settings that every experiment has; a concrete one is a frozen dataclass and may add its own."""

    @property
    def noise_multiplier(self) -> float | None: ...  # None with a target_epsilon, and only then
    @property
    def target_epsilon(self) -> float | None: ...
    @property
    def delta(self) -> float: ...
    @property
    def expected_batch_size(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def clip_norm(self) -> float: ...
    @property
    def epochs(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def baseline(self) -> bool: ...


@dataclass(frozen=True)
class Score:
    """How well outputs fit targets: a number for each example, its mean over them, and a function of that."""

    measure: log.Measure
    of_each: Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> (n,)
    of_mean: Callable[[float], float] = float


def is_correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Where the largest output is the right one, as float32 of shape (n,)."""
    return (outputs.argmax(1) == targets).float()


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared differences of shape (n,)."""
    return (outputs - targets).square()


ACCURACY = Score(log.ACCURACY, is_correct)
RMSE = Score(log.Measure("RMSE", larger_is_better=False), squared_error, math.sqrt)


def _nothing(model: nn.Module) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Task:
    """A learning problem, ready to run: data, the network, how it is trained, and what its outputs are scored by."""

    train: Dataset[Any]  # map-style, of (input, target)
    test: Dataset[Any]
    new_model: Callable[[], nn.Module]  # equal weights at every call
    new_optimizer: Callable[[nn.Module], Optimizer]
    losses: Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> (n,), one loss per example
    score: Score = ACCURACY
    new_baseline_optimizer: Callable[[nn.Module], Optimizer] | None = None  # where clipping allows what others do not
    new_scheduler: Callable[[Optimizer, int], LRScheduler] | None = None  # of the number of steps; moves every step
    private: Callable[[nn.Module], Mapping[str, Any]] = _nothing  # further arguments of PrivateTraining, as clipping
    augment: Callable[[Tensor], Tensor] | None = None  # inputs in training, each changed at random by itself
    views: int = 1  # of each example at once, every one augmented anew; their mean gradient is the example's
    average: float | None = None  # decay of the weights' moving average, which is scored and released in their place
    released: Mapping[str, Any] = field(default_factory=dict)  # before the first step; a resumed run gets it back
    device: str = "cpu"
    not_covered: tuple[str, ...] = ()  # what was taken from the examples without noise
    data_files: Mapping[str, str] = field(default_factory=dict)  # public: name -> SHA-256 of every file read
    num_threads: int | None = None  # torch threads; small networks lose more by waiting for each other than they gain


class Trainable(Protocol):
    """A module of ``torch_privacy.experiments`` that ``train`` trains: settings, and the task that they make."""

    @property
    def Settings(self) -> Callable[..., Any]: ...
    @property
    def build_task(self) -> Callable[..., Task]: ...  # of the settings; of a resumed run's ``released``, if any


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A network whose first weights depend on the seed alone; the random state stays as it was."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().float()  # whatever torch's default is


def check_names(experiment: str, module: Trainable, chosen: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` that names the settings that an experiment does not have."""
    known = [setting.name for setting in fields(module.Settings)]  # pyright: ignore[reportArgumentType]
    if strangers := [name for name in chosen if name not in known]:
        raise ValueError(
            f"train: {experiment} has no setting {', '.join(map(repr, strangers))}; it has {', '.join(known)}."
        )


def check_numbers(settings: Settings) -> None:
    """Raise a ``ValueError`` that names the first setting that no data could be trained with."""
    noise = {"noise_multiplier": settings.noise_multiplier, "target_epsilon": settings.target_epsilon}
    _check.positive("train", **{name: value for name, value in noise.items() if value is not None})
    _check.positive("train", clip_norm=settings.clip_norm, learning_rate=settings.learning_rate, epochs=settings.epochs)
    _check.in_range("train", 0, LARGEST_SCALE, clip_norm=settings.clip_norm, learning_rate=settings.learning_rate)
    _check.in_range("train", 0, 1e6, epochs=settings.epochs)
    low, high = NOISE_RANGE
    if settings.noise_multiplier is not None and not low <= settings.noise_multiplier <= high:
        raise ValueError(
            f"train: noise_multiplier={settings.noise_multiplier!r} must lie in [{low:g}, {high:g}]. "
            "Useful values are about 0.5 to 10."
        )
    _check.whole("train", seed=settings.seed)
    if settings.seed > LARGEST_SEED:
        raise ValueError(f"train: seed={settings.seed!r} must be an integer of at most 2**63 - 1.")
    _check.whole("train", at_least=1, expected_batch_size=settings.expected_batch_size)


def check_settings(settings: Settings, num_examples: int) -> None:
    """Raise a ``ValueError`` that names the first setting that cannot be run on ``num_examples`` examples."""
    check_numbers(settings)
    mean = "It is the mean number of examples that a step draws from the training data."
    _check.in_range("train", 0, num_examples, expected_batch_size=settings.expected_batch_size, hint=mean)
    whole = f"From 1/n on (n = {num_examples} examples) it would allow publishing somebody's record; try 1e-5."
    _check.strictly_between("train", 0, 1 / num_examples, delta=settings.delta, hint=whole)


def number_of_steps(settings: Settings, num_examples: int) -> int:
    """Epochs turned into whole steps, ``epochs * n / expected_batch_size`` rounded to the nearest, at least 1."""
    return max(1, round(settings.epochs * num_examples / settings.expected_batch_size))
