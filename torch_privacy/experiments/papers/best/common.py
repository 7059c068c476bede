# SPDX-License-Identifier: Apache-2.0
"""What the experiments on the best private training of today share: recipes, each at four epsilons.

A recipe is what the network sees (images, or features of them that nobody has learnt), the network, random changes of
the inputs, and settings. All clip automatically (Bu et al. 2023): every gradient is brought to norm 1, so that the
learning rate is all there is to tune. Recipes may show an example in several views, and average the weights over steps
(De et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy import _validate as _check
from torch_privacy.data import Data
from torch_privacy.experiments.models.scattering import scattering
from torch_privacy.experiments.task import Task, seeded
from torch_privacy.runs.rows import ACCURACY_COLUMN, EXACT, PRIVACY_COLUMNS, SCORE, Training

EPSILONS = 1, 2, 3, 8
COLUMNS = {SCORE: ACCURACY_COLUMN, EXACT: PRIVACY_COLUMNS[EXACT]}
NOTES = (
    "Settings were chosen by trials on a part of the training data, which no epsilon covers; "
    "`torch-privacy search` would price them.",
)
CHANNELS = 81  # of scattering coefficients, per channel of the images
GROUPS = 27  # of channels, by which scattering coefficients are normalized
PART = 1000  # images at once


@dataclass(frozen=True)
class Settings:
    """What each of the experiments fills in."""

    noise_multiplier: float | None = None
    target_epsilon: float | None = 3.0  # None with a noise_multiplier, and only then
    delta: float = 1e-5
    expected_batch_size: int = 4096
    learning_rate: float = 1.0
    clip_norm: float = 1.0  # only in proportion to the learning rate
    epochs: float = 40
    recipe: str = "scattering, linear"
    views: int = 1
    average: float | None = 0.99  # decay of the weights' moving average
    microbatch_size: int = 2048  # images at once, each in all its views
    num_examples: int | None = None  # only the first so many for training, and for testing
    seed: int = 0  # public: the initial weights, the augmentation, the baseline's shuffling; never noise or batches
    baseline: bool = False
    data: str | None = None


@dataclass(frozen=True)
class Recipe:
    """One way to train. ``inputs`` maps images (n, c, h, w) to what the network sees, each by itself."""

    new_model: Callable[[], nn.Module]
    settings: Mapping[str, Any]
    quick: Mapping[str, Any]  # of a quick look
    inputs: Callable[[Tensor], Tensor] | None = None
    augment: Callable[[Tensor], Tensor] | None = None
    at: Mapping[float, Mapping[str, Any]] | None = None  # settings that are others at some epsilon


@dataclass(frozen=True)
class Experiment:
    """One of the experiments: data, recipes by name, the papers' accuracies by recipe and epsilon."""

    settings: Callable[..., Settings]
    load: Callable[[str | None], Data]
    recipes: Mapping[str, Recipe]
    paper: Mapping[tuple[str, float], float]

    def build_task(self, settings: Settings) -> Task:
        """The data's own split as the recipe sees it, and its network."""
        _check.one_of("train", self.recipes, recipe=settings.recipe)
        _check.whole("train", at_least=1, views=settings.views, microbatch_size=settings.microbatch_size)
        recipe = self.recipes[settings.recipe]
        data = as_seen(self.load, recipe.inputs, settings.data, settings.num_examples)
        clipping = tp.Automatic(clip_norm=settings.clip_norm)
        return Task(
            train=data.train,
            test=data.test,
            new_model=partial(seeded, recipe.new_model, settings.seed),
            new_optimizer=partial(_optimizer, settings.learning_rate),
            losses=partial(F.cross_entropy, reduction="none"),
            private=lambda model: {"clipping": clipping, "microbatch_size": settings.microbatch_size},
            augment=recipe.augment,
            views=settings.views,
            average=settings.average,
            device="cuda" if torch.cuda.is_available() else "cpu",
            not_covered=(*data.not_covered, "the choice of the settings"),
            data_files=data.files,
        )

    def rows(self, quick: bool, *, of: Sequence[str] = ()) -> Sequence[Training]:
        """All recipes, or those named, at every epsilon; a quick look has epsilon 3 only, and makes few steps."""
        return [
            Training(f"{name}, epsilon {epsilon:g}", self._settings(name, epsilon, quick), self._paper(name, epsilon))
            for name in of or self.recipes
            for epsilon in EPSILONS
            if not quick or epsilon == 3
        ]

    def _settings(self, name: str, epsilon: float, quick: bool) -> dict[str, Any]:
        recipe = self.recipes[name]
        chosen = {**recipe.settings, **(recipe.at or {}).get(epsilon, {}), **(recipe.quick if quick else {})}
        return {"recipe": name, "target_epsilon": float(epsilon), **chosen}

    def _paper(self, name: str, epsilon: float) -> dict[str, float]:
        return {SCORE: self.paper[name, epsilon]} if (name, epsilon) in self.paper else {}


def scattered(images: Tensor) -> Tensor:
    """Scattering coefficients, those of 27 groups of channels brought to mean 0 and variance 1 in each image."""
    n, c, h, w = images.shape
    seen = images.new_empty(n, CHANNELS * c, h // 4, w // 4)  # filled in parts: those of CIFAR-10 take 3.5 GiB
    for place, part in zip(seen.split(PART), images.split(PART), strict=True):
        place.copy_(F.group_norm(scattering(part), GROUPS))
    return seen


@lru_cache(maxsize=1)  # features take a minute or more, and all rows of a recipe share them
def as_seen(
    load: Callable[[str | None], Data],
    inputs: Callable[[Tensor], Tensor] | None,
    folder: str | None,
    num_examples: int | None,
) -> Data:
    """The data, or the first so many of both parts, with every image replaced by what the network sees."""
    data = load(folder)
    pairs = [[tensor[:num_examples] for tensor in part.tensors] for part in (data.train, data.test)]
    train, test = (TensorDataset(x if inputs is None else inputs(x), y) for x, y in pairs)
    return replace(data, train=train, test=test)


def linear(num_features: int, classes: int = 10) -> nn.Module:
    """One dense layer, all its weights 0 at first."""
    layer = nn.Linear(num_features, classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Flatten(), layer)


def _optimizer(learning_rate: float, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
