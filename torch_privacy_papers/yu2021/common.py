# SPDX-License-Identifier: Apache-2.0
"""Compares GP, B-GEP and GEP (gradient embedding perturbation) at three epsilons.

GP is ordinary clipping and noise. Each row has the least noise that stays within its epsilon by exact accounting. The
published epsilons of B-GEP and GEP are by another accountant, which is no bound for GEP (see docs/gep.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, TensorDataset

import torch_privacy as tp
from torch_privacy.data import Data
from torch_privacy.experiments import task
from torch_privacy.experiments.study import Study
from torch_privacy.experiments.task import Task
from torch_privacy.mechanisms.gep.anchors import random_labels
from torch_privacy.runs.rows import (
    ACCURACY_COLUMN,
    BASELINE,
    BASELINE_COLUMN,
    EXACT,
    MOMENTS,
    PRIVACY_COLUMNS,
    SCORE,
    TableColumn,
    TrainingRow,
)
from torch_privacy.support import validate as _check

EPSILONS = 2.0, 5.0, 8.0
HELD_OUT = 10_000  # training examples on which settings are tuned
SIGNIFICANT = 2  # standard errors
NUM_TESTED = 10_000  # test images of MNIST and CIFAR-10
CHUNK = 250  # anchors that pass through a network at once
COLUMNS = {
    SCORE: ACCURACY_COLUMN,
    BASELINE: BASELINE_COLUMN,
    **{key: PRIVACY_COLUMNS[key] for key in (MOMENTS, EXACT)},
}
TUNING_COLUMNS = {SCORE: TableColumn("accuracy, held out", digits=1, percent=True), EXACT: PRIVACY_COLUMNS[EXACT]}
NOTES = (
    "GP: plain gradient perturbation. B-GEP: the noisy embedding alone. GEP: embedding and residual.",
    "The noise of every row is calibrated to its epsilon by exact accounting, that of GEP as one release of two parts. "
    "The paper's epsilons are by moments, and those of GEP by an accountant that is no bound.",
)
TUNING_NOTES = (
    f"Accuracy on the last {HELD_OUT:,} training images, on which nothing is trained here: as many epochs as in the "
    "experiment itself, so fewer steps. The test images play no part. Each method has the same number of settings, "
    "unless some are left out below. No epsilon covers the choice.",
)


@dataclass(frozen=True, kw_only=True)
class Settings(task.Settings):
    """The settings of a training by one of the methods; ``clip_norm`` bounds embeddings if there are directions."""

    baseline_learning_rate: float = 0.1  # at the start, without privacy, where gradients are not clipped
    momentum: float = 0.9
    residual_clip_norm: float = 0.2  # 0 leaves out residuals, as B-GEP does
    embedding_share: float | None = None  # of the budget; None for the least noise, 0.5 in the paper
    keeps_residual_noise: bool = False  # whether the residual's noise in the subspace stays, as in the paper
    num_basis: int = 0  # directions k; 0 for plain gradient perturbation
    num_anchors: int = 2000  # m, drawn anew for every step
    power_iterations: int = 1  # 0 for random directions
    optimizer: str = "SGD"  # or another key of `OPTIMIZERS`
    weight_decay: float = 0.0
    decay: str = "linear"  # of the learning rate, or another key of `DECAYS`
    held_out: int = 0  # the last training examples, which replace the test data while settings are tuned
    num_train: int | None = None  # train on the first examples only


DEFAULTS = Settings(
    target_epsilon=EPSILONS[-1],
    expected_batch_size=1000,
    learning_rate=0.1,  # at the start; it decays linearly to zero
    clip_norm=1.0,
    epochs=1.0,
)


@dataclass(frozen=True)
class Public:
    """The auxiliary data of the anchors: inputs, or a data set of inputs and labels, and their files."""

    examples: Tensor | Dataset[Any]
    files: Mapping[str, str]
    has_labels: bool = False  # whether anchors use the data's labels in place of random ones


@dataclass(frozen=True)
class MethodComparison:
    """Compares the methods on one network and data set, and holds the paper's numbers.

    Args:
        defaults: settings of every training.
        load: settings -> the data.
        load_public: settings -> the auxiliary data.
        new_model: returns the network.
        groups: prefixes of the parameters' names, one for each group of directions.
        methods: name -> its settings, which override those of the level.
        levels: epsilon -> settings at that epsilon.
        paper: (method, epsilon) -> the paper's accuracy.
        baseline: the paper's accuracy without privacy, if known.
        quick: settings of a quick look, which those of a method override.
        tried: method -> the settings that were tried for it, on held-out training examples.
        tuned: (method, epsilon) -> settings that differ there from those of the method.
        variants: name -> method -> settings that replace its own in one more row, at the first epsilon.
    """

    defaults: Settings
    load: Callable[[Any], Data]
    load_public: Callable[[Any], Public]
    new_model: Callable[[], nn.Module]
    groups: Sequence[str]
    methods: Mapping[str, Mapping[str, Any]]
    levels: Mapping[float, Mapping[str, Any]]
    paper: Mapping[tuple[str, float], float]
    baseline: float | None
    quick: Mapping[str, Any]
    tried: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    tuned: Mapping[tuple[str, float], Mapping[str, Any]] = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)

    def study(self, *notes: str) -> Study:
        """Returns the study of this comparison; ``notes`` are added to those of all."""
        return Study(
            COLUMNS,
            self.rows,
            (*NOTES, *notes),
            self.defaults,
            self.build_task,
            findings=findings,
            findings_need_all=False,
        )

    def tuning(self, *epsilons: float) -> Study:
        """Returns the study that compares the tried settings, at some epsilons, on training examples held out."""
        rows = partial(self._tried_rows, epsilons)
        return Study(TUNING_COLUMNS, rows, TUNING_NOTES, self.defaults, self.build_task)

    def _tried_rows(self, epsilons: Sequence[float], quick: bool) -> Sequence[TrainingRow]:
        """Returns a row for every tried setting; a quick look has the first one of each method."""
        return [
            TrainingRow(
                f"{method}, epsilon {epsilon:g}, {', '.join(f'{name} {value:g}' for name, value in tried.items())}",
                {**self._settings_at(epsilon, method, quick), **tried, "held_out": HELD_OUT},
            )
            for epsilon in (epsilons[:1] if quick else epsilons)
            for method, several in self.tried.items()
            for tried in (several[:1] if quick else several)
        ]

    def build_task(self, settings: Settings) -> Task:
        """Returns the data's own split, the network, and the perturbation of its gradients."""
        _check.whole("train", num_basis=settings.num_basis, power_iterations=settings.power_iterations)
        _check.one_of("train", OPTIMIZERS, optimizer=settings.optimizer)
        _check.one_of("train", DECAYS, decay=settings.decay)
        _check.non_negative("train", weight_decay=settings.weight_decay)
        data, public = _split(self.load(settings), settings), self.load_public(settings)
        return task.classification(
            data,
            partial(task.seeded, self.new_model, settings.seed),
            settings,
            new_optimizer=partial(_optimizer, settings, settings.learning_rate),
            new_baseline_optimizer=partial(_optimizer, settings, settings.baseline_learning_rate),
            new_scheduler=DECAYS[settings.decay],
            private=partial(_arguments, settings, public, self.groups),
            device=task.gpu_if_any(),
            data_files={**data.files, **public.files},
        )

    def rows(self, quick: bool) -> Sequence[TrainingRow]:
        """Returns every method at every epsilon, of which the last trains the non-private baseline; then variants."""
        rows = [self._row(method, epsilon, quick) for epsilon in self.levels for method in self.methods]
        last = rows.pop()
        known = {} if self.baseline is None else {BASELINE: self.baseline}
        rows.append(TrainingRow(last.name, {**last.settings, "baseline": True}, {**last.paper, **known}))
        return rows if quick else [*rows, *self._variants()]

    def _variants(self) -> Iterator[TrainingRow]:
        epsilon = next(iter(self.levels))
        for what, methods in self.variants.items():
            for method, changed in methods.items():
                row = self._row(method, epsilon, quick=False)
                yield TrainingRow(f"{row.name}, {what}", {**row.settings, **changed}, row.paper)

    def _row(self, method: str, epsilon: float, quick: bool) -> TrainingRow:
        paper = {SCORE: self.paper[method, epsilon]} if (method, epsilon) in self.paper else {}
        return TrainingRow(f"{method}, epsilon {epsilon:g}", self._settings_at(epsilon, method, quick), paper)

    def _settings_at(self, epsilon: float, method: str, quick: bool) -> dict[str, Any]:
        level = {**self.levels[epsilon], **(self.quick if quick else {})}
        return {"target_epsilon": epsilon, **level, **self.methods[method], **self.tuned.get((method, epsilon), {})}


def findings(results: Mapping[str, Any]) -> Iterator[str]:
    """Yields the differences in accuracy of B-GEP and GEP from GP in rows of the same kind, with standard errors.

    With several seeds the error is that of the mean of paired differences. With one seed it is that of the test images:
    ``√((a (1 - a) + b (1 - b)) / 10,000)`` for accuracies a and b that are taken to be independent.
    """
    scores = {row["row"]: [run["numbers"][SCORE] for run in row["runs"]] for row in results["rows"]}
    gains = []  # of GEP, in standard errors
    for name, found in scores.items():
        method, _, rest = name.partition(", ")
        plain = scores.get(f"GP, {rest}")
        if method == "GP" or plain is None or None in (*found, *plain):
            continue
        difference, error = _difference(found, plain)
        source = f"paired over {len(found)} seeds" if len(found) > 1 else "one seed: that of the test images alone"
        yield f"{name}: {difference:+.1f} points from GP, standard error {error:.1f} ({source})."
        if method == "GEP":
            gains.append(difference / error if error else math.copysign(math.inf, difference))
    if gains and max(gains) <= SIGNIFICANT:
        yield f"GEP does not beat GP here: no gain exceeds {SIGNIFICANT} standard errors."


def _difference(found: Sequence[float], plain: Sequence[float]) -> tuple[float, float]:
    """Returns the mean difference of two rows' accuracies over the seeds and its standard error, in points."""
    differences = [100 * (a - b) for a, b in zip(found, plain, strict=True)]
    if len(differences) > 1:
        return mean(differences), stdev(differences) / math.sqrt(len(differences))
    return differences[0], 100 * math.sqrt(sum(a * (1 - a) for a in (*found, *plain)) / NUM_TESTED)


def _split(data: Data, settings: Settings) -> Data:
    """Returns the data with the training and test examples that the settings ask for."""
    _check.whole("train", held_out=settings.held_out)
    inputs, labels = data.train.tensors
    left = len(labels) - settings.held_out
    _check.in_range("train", 0, left, num_train=left if settings.num_train is None else settings.num_train)
    train = slice(left if settings.num_train is None else settings.num_train)
    test = TensorDataset(inputs[left:], labels[left:]) if settings.held_out else data.test
    return replace(data, train=TensorDataset(inputs[train], labels[train]), test=test)


def _optimizer(settings: Settings, learning_rate: float, model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS[settings.optimizer](task.trainable(model), learning_rate, settings)


OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter], float, Settings], torch.optim.Optimizer]] = {
    "SGD": lambda parameters, rate, settings: torch.optim.SGD(
        parameters, lr=rate, momentum=settings.momentum, weight_decay=settings.weight_decay
    ),
    "Adam": lambda parameters, rate, settings: torch.optim.Adam(
        parameters, lr=rate, weight_decay=settings.weight_decay
    ),
}


def _linear_decay(optimizer: torch.optim.Optimizer, num_steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 - step / num_steps)


def _tenth_from_half_time(optimizer: torch.optim.Optimizer, num_steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1.0 if 2 * step < num_steps else 0.1)


DECAYS: Mapping[str, Callable[[torch.optim.Optimizer, int], LambdaLR] | None] = {
    "linear": _linear_decay,
    "tenth from half time": _tenth_from_half_time,
    "none": None,
}


def _arguments(settings: Settings, public: Public, groups: Sequence[str], model: nn.Module) -> dict[str, Any]:
    """Returns the clipping of `PrivateTraining` by a subspace; nothing if there are no directions."""
    if not settings.num_basis:
        return {}
    subspace = tp.AnchorSubspace(
        public.examples,
        settings.num_basis,
        groups,
        settings.num_anchors,
        settings.power_iterations,
        labels=labels_of_the_data if public.has_labels else random_labels,
        chunk_size=CHUNK,
    )
    embedding = tp.Flat(settings.clip_norm)
    if not settings.residual_clip_norm:
        return {"clipping": tp.BGEP(subspace, embedding)}
    residual, share = tp.Flat(settings.residual_clip_norm), settings.embedding_share
    gep = tp.GEP(subspace, embedding, residual, share, settings.keeps_residual_noise)
    return {"clipping": gep}


def labels_of_the_data(batch: Any, outputs: Tensor, generator: torch.Generator) -> Tensor:
    """Returns the labels of the auxiliary examples."""
    return batch[1]
