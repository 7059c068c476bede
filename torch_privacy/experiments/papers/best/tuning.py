# SPDX-License-Identifier: Apache-2.0
"""Chooses settings for ``best-cifar10`` on public photographs, which costs no privacy.

``torch-privacy reproduce best-cifar10-tuning`` trains the dense layer on patches to tell photographs that stand upright
from those that stand upside down, with the number of steps and, in the mean gradient, the noise of a row of
``best-cifar10``. It learns from 1,500 photographs of CIFAR-100 in both positions, and is scored on the other 500. No
image of CIFAR-10 plays a part.

The task is another one than that of ``best-cifar10``, with two classes and fewer images. It shows which settings bear
the noise, not what accuracy to expect.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from torch_privacy.data import Data, load_public_images
from torch_privacy.experiments.papers.best import cifar10
from torch_privacy.experiments.papers.best.common import EPSILONS, Recipe, Recipes, linear, whitened_by
from torch_privacy.experiments.study import Study
from torch_privacy.privacy import calibrate
from torch_privacy.runs.rows import ACCURACY_COLUMN, SCORE, Training

GRIDS, SHRINKAGES, RATES = (2, 3), (0.1, 0.4, 1.6), (0.125, 0.25, 0.5)
NUM_IMAGES = 2_000  # every fourth is held out
NUM_EXAMPLES = 2 * NUM_IMAGES * 3 // 4  # to learn from
PATCHES = cifar10.RECIPES.recipes["patches, linear"]  # the recipe to tune
TARGET = replace(cifar10.RECIPES.defaults, **PATCHES.settings)


def load(folder: str | None) -> Data:
    """Returns the public photographs, of class 0 as they are and of class 1 upside down."""
    public = load_public_images(folder, num_images=NUM_IMAGES)
    held_out = torch.arange(NUM_IMAGES) % 4 == 0
    train, test = (_both_ways(public.images[part]) for part in (~held_out, held_out))
    return Data("upright or upside down", train, test, ("upright", "upside down"), public.licence, public.files)


def _both_ways(images: Tensor) -> TensorDataset:
    return TensorDataset(torch.cat([images, images.flip(2)]), torch.arange(2).repeat_interleave(len(images)))


def _recipe(cells: int, shrinkage: float) -> Recipe:
    inputs = partial(whitened_by, new_features=partial(cifar10.mirrored_patches, cells=cells), shrinkage=shrinkage)
    return Recipe(partial(linear, 2 * cifar10.FILTERS * cells**2, 2), {}, {}, inputs, load_public_images)


@cache
def num_steps() -> int:
    """Returns the number of steps of a row of ``best-cifar10``."""
    return round(TARGET.epochs * cifar10.NUM_EXAMPLES / TARGET.expected_batch_size)


@cache
def noise_multiplier(epsilon: float) -> float:
    """Returns that of batches of all images, with the noise in the mean gradient that CIFAR-10 needs at epsilon."""
    share = TARGET.expected_batch_size / cifar10.NUM_EXAMPLES
    needed = calibrate(epsilon, TARGET.delta, sampling_probability=share, num_steps=num_steps())
    return needed * NUM_EXAMPLES / TARGET.expected_batch_size


def rows(quick: bool) -> Sequence[Training]:
    """Returns all settings at epsilon 3, then rates at the other epsilons; a quick look has one row."""
    tried = [(3, cells, shrinkage, rate) for cells in GRIDS for shrinkage in SHRINKAGES for rate in RATES]
    others = (epsilon for epsilon in EPSILONS if epsilon != 3)
    tried += [(epsilon, cifar10.CELLS, cifar10.SHRINKAGE, rate) for epsilon in others for rate in RATES]
    found = [
        Training(
            f"epsilon {epsilon:g}, {_name(cells, shrinkage)}, rate {rate:g}",
            {
                "recipe": _name(cells, shrinkage),
                "noise_multiplier": noise_multiplier(epsilon),
                "learning_rate": rate,
            },
        )
        for epsilon, cells, shrinkage, rate in tried
    ]
    return [replace(found[0], settings={**found[0].settings, "epochs": 2})] if quick else found


def _name(cells: int, shrinkage: float) -> str:
    return f"{cells} x {cells} cells, shrinkage {shrinkage:g}"


CHOICES = {_name(cells, shrinkage): _recipe(cells, shrinkage) for cells in GRIDS for shrinkage in SHRINKAGES}
RECIPES = Recipes(TARGET, load, CHOICES, {})
TUNING = Study(
    {SCORE: replace(ACCURACY_COLUMN, heading="accuracy, public task")},
    rows,
    (
        "Whether public photographs of CIFAR-100 stand upright or upside down, learned from 1,500 and scored on 500 "
        "others, with the steps and the noise of a row of best-cifar10 at that epsilon. Nothing is private here, and "
        "no image of CIFAR-10 plays a part.",
    ),
    replace(
        TARGET,
        recipe=next(iter(CHOICES)),
        target_epsilon=None,
        noise_multiplier=1.0,
        expected_batch_size=NUM_EXAMPLES,
        epochs=num_steps(),
    ),
    RECIPES.build_task,
)
