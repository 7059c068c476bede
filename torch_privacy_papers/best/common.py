# SPDX-License-Identifier: Apache-2.0
"""Provides what the experiments on today's best private training share: recipes, each trained at four epsilons.

A recipe consists of inputs (images, or features of them that were not learnt), a network, random augmentation, and
settings. All recipes use automatic clipping (Bu et al. 2023), which scales every gradient to norm 1, so that only the
learning rate needs tuning. A recipe may average the gradients of several views of an example, and average the weights
over the steps (De et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy.data import Data, PublicImages
from torch_privacy.experiments import task
from torch_privacy.experiments.study import Study
from torch_privacy.experiments.task import Task
from torch_privacy.runs.rows import ACCURACY_COLUMN, EXACT, PRIVACY_COLUMNS, SCORE, TrainingRow
from torch_privacy.support import validate as _check
from torch_privacy_papers.models.scattering import scattering

EPSILONS = 1, 2, 3, 8
COLUMNS = {SCORE: ACCURACY_COLUMN, EXACT: PRIVACY_COLUMNS[EXACT]}
NOTES = (
    "Settings were chosen by trials that train on a part of the training data and score on the rest (`held_out`), "
    "never on test data. No epsilon covers them; `torch-privacy search` would price them.",
)
CHANNELS = 81  # of scattering coefficients, per channel of the images
GROUPS = 27  # of channels, by which scattering coefficients are normalized
PART = 1000  # images at once
SHRINKAGE = 0.1  # of the covariance on noise toward a multiple of the identity


@dataclass(frozen=True, kw_only=True)
class Settings(task.Settings):
    """The settings of a training by one of the recipes."""

    recipe: str = "scattering, linear"
    views: int = 1
    average: float | None = 0.99  # decay of the weights' moving average
    microbatch_size: int = 2048  # images at once, each in all its views
    num_examples: int | None = None  # use only the first examples for training and for testing
    held_out: int = 0  # number of the last training examples to score on, in place of training: to choose settings


DEFAULTS = Settings(
    target_epsilon=3.0,
    expected_batch_size=4096,
    learning_rate=1.0,
    clip_norm=1.0,  # with automatic clipping only learning_rate * clip_norm matters
    epochs=40,
)


@dataclass(frozen=True)
class Recipe:
    """One way to train. ``inputs`` maps images (n, c, h, w) to the network's inputs, each image by itself.

    With ``public``, ``inputs`` maps images and public images, by which it is fitted.
    """

    new_model: Callable[[], nn.Module]
    settings: Mapping[str, Any]
    quick: Mapping[str, Any]  # settings of a quick look
    inputs: Callable[..., Tensor] | None = None
    public: Callable[[str | None], PublicImages] | None = None  # folder -> public images
    augment: Callable[[Tensor], Tensor] | None = None
    at: Mapping[float, Mapping[str, Any]] | None = None  # epsilon -> settings that differ there


@dataclass(frozen=True)
class Recipes:
    """The recipes for one data set, and the published accuracies by recipe and epsilon."""

    defaults: Settings
    load: Callable[[str | None], Data]
    recipes: Mapping[str, Recipe]
    paper: Mapping[tuple[str, float], float]
    own_data: Callable[[str | None], str | None] | None = None

    def study(self, *names: str, notes: Sequence[str] = NOTES, **more: Any) -> Study:
        """Returns the study of the named recipes; the first one's settings are the defaults."""
        defaults = replace(self.defaults, recipe=names[0], **self.recipes[names[0]].settings)
        rows = partial(self.rows, names)
        return Study(COLUMNS, rows, notes, defaults, self.build_task, own_data=self.own_data, **more)

    def build_task(self, settings: Settings) -> Task:
        """Returns the task of the recipe that the settings name, on the data's own split."""
        _check.one_of("train", self.recipes, recipe=settings.recipe)
        _check.whole("train", at_least=1, views=settings.views, microbatch_size=settings.microbatch_size)
        recipe = self.recipes[settings.recipe]
        _check.whole("train", held_out=settings.held_out)
        data = with_inputs(self.load, recipe.inputs, settings.data, settings.num_examples, recipe.public)
        if settings.held_out:
            data = with_held_out(data, settings.held_out)
        clipping = tp.Automatic(clip_norm=settings.clip_norm)
        performance = tp.Performance(microbatch_size=settings.microbatch_size)
        return task.classification(
            data,
            partial(task.seeded, recipe.new_model, settings.seed),
            settings,
            new_optimizer=partial(task.sgd, settings.learning_rate, momentum=0.9),
            private=lambda model: {"clipping": clipping, "performance": performance},
            augment=recipe.augment,
            views=settings.views,
            average=settings.average,
            device=task.gpu_if_any(),
            not_covered=(*data.not_covered, "the choice of the settings"),
        )

    def rows(self, names: Sequence[str], quick: bool) -> Sequence[TrainingRow]:
        """Returns the named recipes at every epsilon; a quick look has epsilon 3 only and fewer steps."""
        return [
            TrainingRow(
                f"{name}, epsilon {epsilon:g}",
                self._differing(names[0], name) | self._settings(name, epsilon, quick),
                self._paper(name, epsilon),
            )
            for name in names
            for epsilon in EPSILONS
            if not quick or epsilon == 3
        ]

    def _settings(self, name: str, epsilon: float, quick: bool) -> dict[str, Any]:
        recipe = self.recipes[name]
        chosen = {**(recipe.at or {}).get(epsilon, {}), **(recipe.quick if quick else {})}
        return {"recipe": name, "target_epsilon": float(epsilon), **chosen}

    def _differing(self, first: str, name: str) -> dict[str, Any]:
        """Returns the settings of a recipe that are not those of the study's first one, which are its defaults."""
        defaults, own = (asdict(replace(self.defaults, **self.recipes[one].settings)) for one in (first, name))
        return {key: value for key, value in own.items() if value != defaults[key]}

    def _paper(self, name: str, epsilon: float) -> dict[str, float]:
        return {SCORE: self.paper[name, epsilon]} if (name, epsilon) in self.paper else {}


def scattered(images: Tensor) -> Tensor:
    """Returns scattering coefficients, normalized to mean 0 and variance 1 within 27 groups of channels per image."""
    n, c, h, w = images.shape
    seen = images.new_empty(n, CHANNELS * c, h // 4, w // 4)  # filled in parts: CIFAR-10's take 3.5 GiB
    for place, part in zip(seen.split(PART), images.split(PART), strict=True):
        place.copy_(F.group_norm(scattering(part), GROUPS))
    return seen


def whitened(images: Tensor) -> Tensor:
    """Returns the coefficients of `scattered`, decorrelated as those of made-up images are, each image with norm √d.

    The channels of one place are multiplied by (S + 0.1 mean(eigenvalues) I)^(-1/2), where S is their covariance on
    images of noise with the spectrum 1/frequency of photographs. No data are used, so this costs no privacy. Without
    it most of a gradient lies in few directions that all digits share, and the noise hides the others.
    """
    seen = scattered(images)
    matrix = _of_noise()
    for part in seen.split(PART):
        colors = part.view(len(part), -1, CHANNELS, *part.shape[2:])
        part.copy_(_of_equal_norms(torch.einsum("ab,nibhw->niahw", matrix, colors)).view_as(part))
    return seen


@lru_cache(maxsize=1)
def _of_noise() -> Tensor:
    """Returns the matrix (81, 81) that decorrelates the channels of images of noise, mostly."""
    return _decorrelating(scattered(made_up_images(PART, 28)), SHRINKAGE)


def whitened_by(
    images: Tensor, public: Tensor, new_features: Callable[[Tensor], Callable[[Tensor], Tensor]], shrinkage: float
) -> Tensor:
    """Returns features of images, decorrelated as those of public images are, each image with norm √d.

    The channels x of one place become (S + shrinkage mean(eigenvalues) I)^(-1/2) (x - m), where m and S are their mean
    and covariance on the public images. Nothing is computed from the private ones together, so that this costs no
    privacy.

    Args:
        images: (n, c, h, w).
        public: images (m, c, h, w), taken to be of no one in the private data.
        new_features: public images -> a map of images to features (n, channels, height, width), each image by itself.
        shrinkage: share of the mean eigenvalue that is added to each.
    """
    features = new_features(public)
    known = torch.cat([features(part) for part in public.split(PART)])
    mean, matrix = known.mean((0, 2, 3)), _decorrelating(known, shrinkage)
    shift = matrix @ mean
    seen = images.new_empty(len(images), *known.shape[1:])
    for place, part in zip(seen.split(PART), images.split(PART), strict=True):
        place.copy_(_of_equal_norms(torch.einsum("ab,nbhw->nahw", matrix, features(part)) - shift[:, None, None]))
    return seen


def _of_equal_norms(x: Tensor) -> Tensor:
    """Returns each x[i] with norm √d, d its number of entries."""
    return F.normalize(x.flatten(1)).mul_(x[0].numel() ** 0.5).view_as(x)


def _decorrelating(seen: Tensor, shrinkage: float) -> Tensor:
    """Returns (S + shrinkage mean(eigenvalues) I)^(-1/2) for the covariance S of the channels of (n, c, h, w)."""
    values, vectors = torch.linalg.eigh(torch.cov(seen.transpose(0, 1).flatten(1).double(), correction=0))
    return ((vectors * (values + shrinkage * values.mean()) ** -0.5) @ vectors.T).float()


def made_up_images(number: int, side: int) -> Tensor:
    """Returns gray images (number, 1, side, side) of noise; amplitudes fall as 1/frequency; always the same."""
    drawn = torch.randn(number, 1, 2 * side, 2 * side, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    frequency = torch.fft.fftfreq(2 * side, dtype=torch.float32)
    amplitude = 1 / torch.hypot(frequency[:, None], frequency).clamp(min=1 / (2 * side))
    return torch.fft.ifft2(torch.fft.fft2(drawn) * amplitude).real[..., :side, :side].contiguous()


@lru_cache(maxsize=1)  # computing features takes a minute or more, and all rows of a recipe share them
def with_inputs(
    load: Callable[[str | None], Data],
    inputs: Callable[..., Tensor] | None,
    folder: str | None,
    num_examples: int | None,
    public: Callable[[str | None], PublicImages] | None = None,
) -> Data:
    """Returns the data, or the first ``num_examples`` of both parts, with every image mapped by ``inputs``."""
    data = load(folder)
    if public is not None and inputs is not None:
        found = public(folder)
        inputs, data = partial(inputs, public=found.images), replace(data, files={**data.files, **found.files})
    pairs = [[tensor[:num_examples] for tensor in part.tensors] for part in (data.train, data.test)]
    train, test = (TensorDataset(x if inputs is None else inputs(x), y) for x, y in pairs)
    return replace(data, train=train, test=test)


def with_held_out(data: Data, number: int) -> Data:
    """Returns the data with the last ``number`` training examples in place of the test examples.

    Raises:
        ValueError: If no training example would be left.
    """
    n = len(data.train)
    _check.in_range("train", 0, n - 1, held_out=number, hint=f"There are {n} training examples.")
    parts = [[tensor[part] for tensor in data.train.tensors] for part in (slice(n - number), slice(n - number, n))]
    train, test = (TensorDataset(*part) for part in parts)
    return replace(data, train=train, test=test)


def linear(num_features: int, classes: int = 10) -> nn.Module:
    """Returns one dense layer with initial weights 0."""
    layer = nn.Linear(num_features, classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Flatten(), layer)
