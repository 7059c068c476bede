# SPDX-License-Identifier: Apache-2.0
"""Provides the settings that all trainings share, and the task that the runner trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from torch_privacy.runs import metrics as log
from torch_privacy.support import validate as _check
from torch_privacy.support.steps import steps_of

NOISE_RANGE = 1e-3, 100.0  # beyond these, float32 noise or the accountant's lattice fails
LARGEST_SCALE = 1e30  # float32 holds it, with room for the noise
LARGEST_SEED = 2**63 - 1
PREPARATION = "torch_privacy.preparation"  # logger of what a task does for minutes before its first step

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset

    from torch_privacy.data import Data


class Option(NamedTuple):
    """Says how a setting is chosen on the command line."""

    help: str
    name: str = ""  # of the option, if it is not that of the setting
    shown: str = ""  # the default, in words
    kind: type | None = None  # of the option, if it is not that of the setting; a path is passed on in full
    metavar: str | None = None
    panel: str | None = None  # heading in the help


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that every training has; an experiment with settings of its own adds fields in a subclass.

    Run folders and checkpoints store them under these names, and messages name them.
    """

    noise_multiplier: Annotated[  # None exactly if target_epsilon is given
        float | None,
        Option("Noise's standard deviation over the clip norm; no unit, above 0.", shown="calibrated to --epsilon"),
    ] = None
    target_epsilon: Annotated[
        float | None,
        Option(
            "Epsilon that is never exceeded, no unit: calibrates the noise, in place of --noise-multiplier.",
            "--epsilon",
            "adult: 2",
        ),
    ] = None
    delta: Annotated[float, Option("Delta of (epsilon, delta), a probability below 1/n.", shown="adult: 1e-5")] = 1e-5
    expected_batch_size: Annotated[
        int, Option("Expected batch size, in examples; every step draws its own size.", "--batch-size", "adult: 256")
    ]
    learning_rate: Annotated[float, Option("Step length per unit of gradient, above 0.", shown="adult: 0.15")]
    clip_norm: Annotated[
        float, Option("Bound on the L2 norm of each example's gradient, in its unit.", shown="adult: 1")
    ]
    epochs: Annotated[
        float,
        Option("Passes over the data, on average; gives epochs x n / batch size steps, rounded up.", shown="adult: 12"),
    ]
    seed: Annotated[  # never of the noise or the batches; of augmentation and baseline, too
        int, Option("Public seed, an integer: data split and first weights; not noise, not batches.", shown="0")
    ] = 0
    baseline: Annotated[
        bool, Option("Also train without privacy, to compare.", "--baseline/--no-baseline", "baseline")
    ] = False
    data: Annotated[
        str | None, Option("Folder of data sets.", shown="$TORCH_PRIVACY_DATA", kind=Path, metavar="DIR")
    ] = None
    budget: Annotated[
        str | None,
        Option(
            "Budget of the data, from torch-privacy budget open: a run that does not fit is refused.",
            shown="none",
            kind=Path,
            metavar="FILE",
        ),
    ] = None


@dataclass(frozen=True)
class Score:
    """A test score: a number for each example, and a function of the mean of these numbers."""

    measure: log.Measure
    of_each: Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> (n,)
    of_mean: Callable[[float], float] = float


def is_correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns float32 of shape (n,): 1 where the largest output is that of the target class, else 0."""
    return (outputs.argmax(1) == targets).float()


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the squared differences, of shape (n,)."""
    return (outputs - targets).square()


ACCURACY = Score(log.ACCURACY, is_correct)
RMSE = Score(log.Measure("RMSE", larger_is_better=False), squared_error, math.sqrt)


def _nothing(model: nn.Module) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Task:
    """A learning problem that is ready to run: data, network, optimizer, loss and score."""

    train: Dataset[Any]  # map-style, of (input, target)
    test: Dataset[Any]
    new_model: Callable[[], nn.Module]  # equal weights at every call
    new_optimizer: Callable[[nn.Module], Optimizer]
    losses: Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> (n,), one loss per example
    score: Score = ACCURACY
    more_scores: Callable[[nn.Module], dict[str, Any]] | None = None  # of the finished model, for ``results.json``
    new_baseline_optimizer: Callable[[nn.Module], Optimizer] | None = None  # with a learning rate of its own
    baseline_held_out: float = 0.0  # part of the training data that picks the baseline's best epoch; 0 takes the last
    new_scheduler: Callable[[Optimizer, int], LRScheduler] | None = None  # (optimizer, number of steps)
    private: Callable[[nn.Module], Mapping[str, Any]] = _nothing  # more arguments of PrivateTraining, such as clipping
    augment: Callable[[Tensor], Tensor] | None = None  # of training inputs, each example independently
    views: int = 1  # augmentations of each example per step; the example's gradient is their mean
    owners: Mapping[str, Any] = field(default_factory=dict)  # arguments of `Examples`, where owners are protected
    average: float | None = None  # decay of the weights' moving average, which is scored and released instead of them
    released: Mapping[str, Any] = field(default_factory=dict)  # before the first step; a resumed run passes it back
    device: str = "cpu"
    not_covered: tuple[str, ...] = ()  # what was computed from private data without noise
    data_files: Mapping[str, str] = field(default_factory=dict)  # public: name -> SHA-256 of every file read
    num_threads: int | None = None  # torch threads; 1 is fastest for small networks
    num_units: int | None = None  # of protection in the training data, such as persons; None for that of examples
    unit: str | None = None  # of protection, for the privacy statement; None for that of PrivateTraining
    schema: str | None = None  # of a table, as TOML: kept in the run folder, to encode other tables in the same way
    rows: Sequence[Any] | None = None  # of the private table, for the keyed fingerprint in the privacy statement
    notes: tuple[str, ...] = ()  # sentences to say before the first step; they may tell what ``released`` holds
    declared: tuple[Mapping[str, str], ...] = ()  # of a table: columns with what was declared public, and its source
    exact: tuple[str, ...] = ()  # sentences with exact counts of private data: to show, and to write nowhere


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Returns a network with initial weights that depend on the seed alone; leaves the random state unchanged."""
    from ..support import random_state  # imports torch

    with random_state.seeded(seed):
        return make().float()  # also where torch's default dtype is another one


def classification(data: Data, new_model: Callable[[], nn.Module], settings: Settings, **more: Any) -> Task:
    """Returns the task of classifying a data set with cross-entropy and plain SGD; ``more`` replaces fields of it."""
    from torch.nn import functional as F

    fields_of_task: dict[str, Any] = {
        "train": data.train,
        "test": data.test,
        "new_model": new_model,
        "new_optimizer": partial(sgd, settings.learning_rate),
        "losses": partial(F.cross_entropy, reduction="none"),
        "not_covered": data.not_covered,
        "data_files": data.files,
    }
    return Task(**{**fields_of_task, **more})


def sgd(learning_rate: float, model: nn.Module, momentum: float = 0.0) -> Optimizer:
    """Returns SGD on the parameters that are not frozen."""
    from torch.optim import SGD

    return SGD(trainable(model), lr=learning_rate, momentum=momentum)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def gpu_if_any() -> str:
    """Returns ``"cuda"`` where torch finds a GPU, else ``"cpu"``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def num_units(task: Task) -> int:
    """Returns the number n of units of protection: of examples, or of their owners."""
    return len(task.train) if task.num_units is None else task.num_units  # pyright: ignore[reportArgumentType]


def check_names(experiment: str, settings: Settings, chosen: Mapping[str, Any]) -> None:
    """Raises a ``ValueError`` that lists the chosen names that are no settings of the experiment."""
    known = [setting.name for setting in fields(settings)]
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(
            f"train: {experiment} has no setting {', '.join(map(repr, unknown))}; it has {', '.join(known)}."
        )


def check_numbers(settings: Settings) -> None:
    """Raises a ``ValueError`` that names the first setting that is invalid for any data set."""
    if settings.noise_multiplier is not None:
        _check.positive("train", noise_multiplier=settings.noise_multiplier)
    if settings.target_epsilon is not None:
        _check.positive("train", target_epsilon=settings.target_epsilon)
    _check.positive("train", clip_norm=settings.clip_norm, learning_rate=settings.learning_rate, epochs=settings.epochs)
    _check.in_range("train", 0, LARGEST_SCALE, clip_norm=settings.clip_norm, learning_rate=settings.learning_rate)
    _check.in_range("train", 0, 1e6, epochs=settings.epochs)
    low, high = NOISE_RANGE
    if settings.noise_multiplier is not None and not low <= settings.noise_multiplier <= high:
        allowed = f"must lie in [{low:g}, {high:g}]. Useful values are about 0.5 to 10."
        raise _check.InvalidValue("train", "noise_multiplier", settings.noise_multiplier, allowed)
    _check.whole("train", seed=settings.seed)
    if settings.seed > LARGEST_SEED:
        raise _check.InvalidValue("train", "seed", settings.seed, "must be an integer of at most 2**63 - 1.")
    _check.whole("train", at_least=1, expected_batch_size=settings.expected_batch_size)


def check_settings(settings: Settings, num_examples: int) -> None:
    """Raises a ``ValueError`` that names the first setting that is invalid for ``num_examples`` examples."""
    check_numbers(settings)
    mean = "It is the mean number of examples that a step draws from the training data."
    _check.in_range("train", 0, num_examples, expected_batch_size=settings.expected_batch_size, hint=mean)
    whole = f"From 1/n on (n = {num_examples} examples) it would allow publishing a whole record; try 1e-5."
    _check.strictly_between("train", 0, 1 / num_examples, delta=settings.delta, hint=whole)


def number_of_steps(settings: Settings, num_examples: int) -> int:
    """Returns ``epochs * n / expected_batch_size``, rounded up, as in `PrivateTraining`."""
    return steps_of(settings.epochs, num_examples, settings.expected_batch_size)
