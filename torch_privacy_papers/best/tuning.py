# SPDX-License-Identifier: Apache-2.0
"""Chooses settings for ``best-cifar10`` on public photographs, which costs no privacy.

``torch-privacy reproduce best-cifar10-tuning`` trains the dense layers to tell photographs that stand upright from
those that stand upside down, with the number of steps and, in the mean gradient, the noise of a row of
``best-cifar10``. It learns from 1,500 photographs of CIFAR-100 in both positions, and is scored on the other 500. No
image of CIFAR-10 plays a part. Grid, decorrelation and rate of the patches are tried together; then filters, mirror
images, batches and epochs, one at a time, each at several rates.

The task is another one than that of ``best-cifar10``, with two classes and fewer images. It shows which settings bear
the noise, not what accuracy to expect.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from torch_privacy.data import Data, load_public_images
from torch_privacy.experiments.study import Study
from torch_privacy.privacy import calibrate
from torch_privacy.runs.rows import ACCURACY_COLUMN, SCORE, TrainingRow
from torch_privacy_papers.best import cifar10
from torch_privacy_papers.best.common import EPSILONS, Recipe, Recipes, Settings, linear, whitened_by

NUM_IMAGES = 2_000  # every fourth is held out
NUM_EXAMPLES = 2 * NUM_IMAGES * 3 // 4  # to learn from
OTHERS = tuple(epsilon for epsilon in EPSILONS if epsilon != 3)
TARGETS = {
    name: replace(cifar10.RECIPES.defaults, **cifar10.RECIPES.recipes[f"{name}, linear"].settings)
    for name in ("patches", "scattering")
}


@dataclass(frozen=True)
class TuningChoice:
    """Features, and the steps of a training on them; the defaults are those of ``best-cifar10``."""

    cells: int = cifar10.CELLS
    shrinkage: float = cifar10.SHRINKAGE
    filters: int = cifar10.FILTERS  # 0 for scattering coefficients
    mirrored: bool = True
    batch_size: int = TARGETS["patches"].expected_batch_size
    epochs: float = TARGETS["patches"].epochs

    @property
    def features(self) -> str:
        """The name of the features."""
        if not self.filters:
            return f"scattering, shrinkage {self.shrinkage:g}"
        name = f"{self.cells} x {self.cells} cells, shrinkage {self.shrinkage:g}"
        name += "" if self.filters == cifar10.FILTERS else f", {self.filters:,} filters"
        return name + ("" if self.mirrored else ", not mirrored")

    @property
    def num_steps(self) -> int:
        """The number of steps."""
        return round(self.epochs * cifar10.NUM_EXAMPLES / self.batch_size)

    def noise_multiplier(self, epsilon: float) -> float:
        """Returns that of batches of all images, with the noise in the mean gradient that CIFAR-10 needs at epsilon."""
        share = self.batch_size / cifar10.NUM_EXAMPLES
        needed = calibrate(epsilon, Settings.delta, sampling_probability=share, num_steps=self.num_steps)
        return needed * NUM_EXAMPLES / self.batch_size

    def recipe(self) -> Recipe:
        """Returns the dense layer on these features."""
        num_features, new_features = cifar10.CHANNELS * cifar10.SIDE**2, cifar10.new_scattering
        if self.filters:
            num_features = 2 * self.filters * self.cells**2
            new_features = partial(cifar10.new_patches, cells=self.cells, filters=self.filters, mirrored=self.mirrored)
        inputs = partial(whitened_by, new_features=new_features, shrinkage=self.shrinkage)
        return Recipe(partial(linear, num_features, 2), {}, {}, inputs, load_public_images)


PATCHES = TuningChoice()
SCATTERING = TuningChoice(
    filters=0,
    shrinkage=cifar10.SCATTERING_SHRINKAGE,
    batch_size=TARGETS["scattering"].expected_batch_size,
    epochs=TARGETS["scattering"].epochs,
)
RATES, SCATTERING_RATES = (0.125, 0.25, 0.5), (0.25, 0.5, 1.0)
GRID = [TuningChoice(cells=cells, shrinkage=shrinkage) for cells in (2, 3) for shrinkage in (0.1, 0.4, 1.6)]
CHANGED = [
    *(replace(PATCHES, filters=filters) for filters in (400, 1_600)),
    replace(PATCHES, mirrored=False),
    *(replace(PATCHES, batch_size=size, epochs=epochs) for size, epochs in ((4_096, 25), (8_192, 12), (8_192, 50))),
]
SCATTERINGS = [replace(SCATTERING, shrinkage=shrinkage) for shrinkage in (0.01, 0.03, 0.1, 0.3)]
TRIED = [
    *((3, choice, rate) for choice in GRID for rate in RATES),
    *((epsilon, PATCHES, rate) for epsilon in OTHERS for rate in RATES),
    *((3, choice, rate) for choice in CHANGED for rate in RATES),
    *((3, choice, rate) for choice in SCATTERINGS for rate in SCATTERING_RATES),
    *((epsilon, SCATTERING, rate) for epsilon in OTHERS for rate in SCATTERING_RATES),
]


def load(folder: str | None) -> Data:
    """Returns the public photographs, of class 0 as they are and of class 1 upside down."""
    public = load_public_images(folder, num_images=NUM_IMAGES)
    held_out = torch.arange(NUM_IMAGES) % 4 == 0
    train, test = (_both_ways(public.images[part]) for part in (~held_out, held_out))
    return Data("upright or upside down", train, test, ("upright", "upside down"), public.licence, public.files)


def _both_ways(images: Tensor) -> TensorDataset:
    return TensorDataset(torch.cat([images, images.flip(2)]), torch.arange(2).repeat_interleave(len(images)))


def rows(quick: bool) -> Sequence[TrainingRow]:
    """Returns a row for everything that was tried; a quick look has one row."""
    found = [_row(*tried) for tried in TRIED[: 1 if quick else None]]
    return [replace(row, settings={**row.settings, "epochs": 2}) for row in found] if quick else found


def _row(epsilon: float, choice: TuningChoice, rate: float) -> TrainingRow:
    usual = SCATTERING if not choice.filters else PATCHES
    steps = "" if choice.num_steps == usual.num_steps else f", batches of {choice.batch_size:,}, {choice.epochs} epochs"
    settings = {
        "recipe": choice.features,
        "noise_multiplier": _noise_multiplier(choice, epsilon),
        "learning_rate": rate,
        "epochs": float(choice.num_steps),  # each of one batch
    }
    return TrainingRow(f"epsilon {epsilon:g}, {choice.features}{steps}, rate {rate:g}", settings)


_noise_multiplier = cache(TuningChoice.noise_multiplier)


CHOICES = {choice.features: choice.recipe() for choice in (*GRID, *CHANGED, *SCATTERINGS)}
RECIPES = Recipes(cifar10.RECIPES.defaults, load, CHOICES, {})
TUNING = Study(
    {SCORE: replace(ACCURACY_COLUMN, heading="accuracy, public task")},
    rows,
    (
        "Whether public photographs of CIFAR-100 stand upright or upside down, learned from 1,500 and scored on 500 "
        "others, with the steps and the noise of a row of best-cifar10 at that epsilon. Nothing is private here, and "
        "no image of CIFAR-10 plays a part.",
        "Unless a row says otherwise: 800 filters, averaged over mirror images, batches of 8,192 for 25 epochs; for "
        "scattering coefficients batches of 4,096 for 15 epochs.",
    ),
    replace(
        cifar10.RECIPES.defaults,
        recipe=next(iter(CHOICES)),
        target_epsilon=None,
        noise_multiplier=1.0,
        expected_batch_size=NUM_EXAMPLES,
    ),
    RECIPES.build_task,
)
