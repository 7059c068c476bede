# SPDX-License-Identifier: Apache-2.0
"""Compares GP, B-GEP and GEP (gradient embedding perturbation) at three epsilons.

GP is ordinary clipping and noise. Each row has the least noise that stays within its epsilon by exact accounting. The
published epsilons of B-GEP and GEP are by another accountant, which is no bound for GEP (see docs/gep.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

import torch_privacy as tp
from torch_privacy.data import Data
from torch_privacy.experiments import task
from torch_privacy.experiments.study import Study
from torch_privacy.experiments.task import Task
from torch_privacy.gep.anchors import random_labels
from torch_privacy.runs.rows import (
    ACCURACY_COLUMN,
    BASELINE,
    BASELINE_COLUMN,
    EXACT,
    MOMENTS,
    PRIVACY_COLUMNS,
    SCORE,
    Training,
)
from torch_privacy.support import validate as _check

EPSILONS = 2.0, 5.0, 8.0
CHUNK = 250  # anchors that pass through a network at once
COLUMNS = {
    SCORE: ACCURACY_COLUMN,
    BASELINE: BASELINE_COLUMN,
    **{key: PRIVACY_COLUMNS[key] for key in (MOMENTS, EXACT)},
}
NOTES = (
    "GP: plain gradient perturbation. B-GEP: the noisy embedding alone. GEP: embedding and residual.",
    "The noise of every row is calibrated to its epsilon by exact accounting, that of GEP as one release of two parts. "
    "The paper's epsilons are by moments, and those of GEP by an accountant that is no bound.",
)


@dataclass(frozen=True, kw_only=True)
class Settings(task.Settings):
    """The settings of a training by one of the methods; ``clip_norm`` bounds embeddings if there are directions."""

    baseline_learning_rate: float = 0.1  # at the start, without privacy, where gradients are not clipped
    momentum: float = 0.9
    residual_clip_norm: float = 0.2  # 0 leaves out residuals, as B-GEP does
    embedding_share: float | None = None  # of the budget; None for the least noise, 0.5 in the paper
    num_basis: int = 0  # directions k; 0 for plain gradient perturbation
    num_anchors: int = 2000  # m, drawn anew for every step
    power_iterations: int = 1  # 0 for random directions


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
class Comparison:
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

    def study(self, *notes: str) -> Study:
        """Returns the study of this comparison; ``notes`` are added to those of all."""
        return Study(COLUMNS, self.rows, (*NOTES, *notes), self.defaults, self.build_task)

    def build_task(self, settings: Settings) -> Task:
        """Returns the data's own split, the network, and the perturbation of its gradients."""
        _check.whole("train", num_basis=settings.num_basis, power_iterations=settings.power_iterations)
        data, public = self.load(settings), self.load_public(settings)
        return task.classification(
            data,
            partial(task.seeded, self.new_model, settings.seed),
            settings,
            new_optimizer=partial(task.sgd, settings.learning_rate, momentum=settings.momentum),
            new_baseline_optimizer=partial(task.sgd, settings.baseline_learning_rate, momentum=settings.momentum),
            new_scheduler=_linear_decay,
            private=partial(_arguments, settings, public, self.groups),
            device=task.gpu_if_any(),
            data_files={**data.files, **public.files},
        )

    def rows(self, quick: bool) -> Sequence[Training]:
        """Returns every method at every epsilon; the last row also trains the non-private baseline."""
        rows = [self._row(method, epsilon, quick) for epsilon in EPSILONS for method in self.methods]
        last = rows.pop()
        known = {} if self.baseline is None else {BASELINE: self.baseline}
        return [*rows, Training(last.name, {**last.settings, "baseline": True}, {**last.paper, **known})]

    def _row(self, method: str, epsilon: float, quick: bool) -> Training:
        chosen = {**self.levels[epsilon], **(self.quick if quick else {}), **self.methods[method]}
        paper = {SCORE: self.paper[method, epsilon]} if (method, epsilon) in self.paper else {}
        return Training(f"{method}, epsilon {epsilon:g}", {"target_epsilon": epsilon, **chosen}, paper)


def _linear_decay(optimizer: torch.optim.Optimizer, num_steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 - step / num_steps)


def _arguments(settings: Settings, public: Public, groups: Sequence[str], model: nn.Module) -> dict[str, Any]:
    """Returns the arguments of `PrivateTraining` for a perturbation; none if there are no directions."""
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
        return {"clipping": None, "perturbation": tp.BGEP(subspace, embedding)}
    gep = tp.GEP(subspace, embedding, tp.Flat(settings.residual_clip_norm), settings.embedding_share)
    return {"clipping": None, "perturbation": gep}


def labels_of_the_data(batch: Any, outputs: Tensor, generator: torch.Generator) -> Tensor:
    """Returns the labels of the auxiliary examples."""
    return batch[1]
