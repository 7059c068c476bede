# SPDX-License-Identifier: Apache-2.0
"""What the experiments on gradient embedding perturbation share: GP, B-GEP and GEP at three epsilons.

GP is ordinary clipping and noise. Each row's noise is the least that stays within its epsilon by exact accounting: the
published epsilons of B-GEP and GEP rest on another accountant, which is no bound for GEP (see docs/gep.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

import torch_privacy as tp
from torch_privacy import _validate as _check
from torch_privacy.data import Data
from torch_privacy.experiments.task import Task, seeded
from torch_privacy.gep.settings import random_labels
from torch_privacy.runs.rows import ACCURACY_COLUMN, BASELINE, EXACT, MOMENTS, PRIVACY_COLUMNS, SCORE, Column, Training

EPSILONS = 2.0, 5.0, 8.0
CHUNK = 250  # anchors that go through a network at once
COLUMNS = {
    SCORE: ACCURACY_COLUMN,
    BASELINE: Column("not private", digits=1, percent=True),
    **{key: PRIVACY_COLUMNS[key] for key in (MOMENTS, EXACT)},
}
NOTES = (
    "GP: plain gradient perturbation. B-GEP: the noisy embedding alone. GEP: embedding and residual.",
    "The noise of every row is calibrated to its epsilon by exact accounting, that of GEP as one release of two parts. "
    "The paper's epsilons are by moments, and those of GEP by an accountant that is no bound.",
)


@dataclass(frozen=True)
class Settings:
    """What each of the experiments fills in."""

    noise_multiplier: float | None = None  # None with a target_epsilon, and only then
    target_epsilon: float | None = EPSILONS[-1]
    delta: float = 1e-5
    expected_batch_size: int = 1000
    learning_rate: float = 0.1  # at the start; it falls linearly to zero
    baseline_learning_rate: float = 0.1  # the same without privacy, where gradients are not clipped
    momentum: float = 0.9
    clip_norm: float = 1.0  # of gradients; of embeddings if there are directions
    residual_clip_norm: float = 0.2  # 0 leaves residuals out, as B-GEP does
    embedding_share: float | None = None  # of the budget; None for the least noise, 0.5 in the paper
    num_basis: int = 0  # directions k; 0 for plain gradient perturbation
    num_anchors: int = 2000  # m, drawn anew for every step
    power_iterations: int = 1  # 0 for random directions
    epochs: float = 1.0
    seed: int = 0  # public: the initial weights, the baseline's shuffling; never noise, batches or anchors
    baseline: bool = False
    data: str | None = None


@dataclass(frozen=True)
class Public:
    """The auxiliary data of the anchors: inputs, or a data set of inputs and labels, and the files that they are in."""

    examples: Tensor | Dataset[Any]
    files: Mapping[str, str]
    has_labels: bool = False  # which are taken then; else random ones


@dataclass(frozen=True)
class Experiment:
    """One of the experiments: what it trains, and the paper's numbers.

    Args:
        load: settings -> the data.
        load_public: settings -> the auxiliary data.
        new_model: the network.
        groups: prefixes of the parameters' names, one for each group of directions.
        methods: name -> its settings, which go before those of the level.
        levels: epsilon -> settings at that epsilon.
        paper: (method, epsilon) -> accuracy; ``baseline`` is that without privacy.
        quick: settings of a quick look; those of a method go before.
    """

    load: Callable[[Any], Data]
    load_public: Callable[[Any], Public]
    new_model: Callable[[], nn.Module]
    groups: Sequence[str]
    methods: Mapping[str, Mapping[str, Any]]
    levels: Mapping[float, Mapping[str, Any]]
    paper: Mapping[tuple[str, float], float]
    baseline: float | None
    quick: Mapping[str, Any]

    def build_task(self, settings: Settings) -> Task:
        """The data's own split, the network, and how its gradients are perturbed."""
        _check.whole("train", num_basis=settings.num_basis, power_iterations=settings.power_iterations)
        data, public = self.load(settings), self.load_public(settings)
        return Task(
            train=data.train,
            test=data.test,
            new_model=partial(seeded, self.new_model, settings.seed),
            new_optimizer=partial(_optimizer, settings.learning_rate, settings.momentum),
            new_baseline_optimizer=partial(_optimizer, settings.baseline_learning_rate, settings.momentum),
            new_scheduler=_falling,
            losses=partial(F.cross_entropy, reduction="none"),
            private=partial(_arguments, settings, public, self.groups),
            device="cuda" if torch.cuda.is_available() else "cpu",
            not_covered=data.not_covered,
            data_files={**data.files, **public.files},
        )

    def rows(self, quick: bool) -> Sequence[Training]:
        """Every method at every epsilon; with the last the network without privacy."""
        rows = [self._row(method, epsilon, quick) for epsilon in EPSILONS for method in self.methods]
        last = rows.pop()
        known = {} if self.baseline is None else {BASELINE: self.baseline}
        return [*rows, Training(last.name, {**last.settings, "baseline": True}, {**last.paper, **known})]

    def _row(self, method: str, epsilon: float, quick: bool) -> Training:
        chosen = {**self.levels[epsilon], **(self.quick if quick else {}), **self.methods[method]}
        paper = {SCORE: self.paper[method, epsilon]} if (method, epsilon) in self.paper else {}
        return Training(f"{method}, epsilon {epsilon:g}", {"target_epsilon": epsilon, **chosen}, paper)


def _optimizer(learning_rate: float, momentum: float, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=learning_rate, momentum=momentum)


def _falling(optimizer: torch.optim.Optimizer, num_steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 - step / num_steps)


def _arguments(settings: Settings, public: Public, groups: Sequence[str], model: nn.Module) -> dict[str, Any]:
    """Further arguments of `PrivateTraining`: the perturbation, if there are directions."""
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
    """The labels that the auxiliary examples come with."""
    return batch[1]
