# SPDX-License-Identifier: Apache-2.0
"""Trains on MNIST with the best known private recipes, at epsilon 1, 2, 3 and 8.

``torch-privacy reproduce best-mnist`` trains one dense layer on scattering coefficients, and ``best-mnist-cnn`` two
convolutions with tanh and group normalization that see every digit in two shifted views. The literature reports 98.7 %
with scattering and 98.1 % with convolutions, both at epsilon 3.

Source: F. Tramèr, D. Boneh (2021), arXiv:2011.11660, table 1, and N. Papernot et al. (2021), arXiv:2007.14191, quoted
there.
"""

from functools import partial

from torch import nn

from torch_privacy.data import load_mnist
from torch_privacy.experiments.models.augmentation import cropped
from torch_privacy.experiments.papers.best.common import DEFAULTS, Recipe, Recipes, linear, scattered

SHIFT = 2  # pixels, at most
CONVOLUTIONS = {
    "expected_batch_size": 2048,
    "epochs": 10,
    "learning_rate": 2.0,
    "views": 2,
    "average": 0.98,
    "microbatch_size": 512,
}


def tanh_cnn(width: int = 16, classes: int = 10) -> nn.Module:
    """Returns two convolutions and two dense layers with tanh, as in Papernot et al., with group normalization."""
    convolutions = [nn.Conv2d(1, width, 8, 2, 3), nn.GroupNorm(4, width), nn.Tanh(), nn.MaxPool2d(2, 1)]
    convolutions += [nn.Conv2d(width, 2 * width, 4, 2), nn.GroupNorm(4, 2 * width), nn.Tanh(), nn.MaxPool2d(2, 1)]
    dense = [nn.Flatten(), nn.Linear(32 * width, 2 * width), nn.Tanh(), nn.Linear(2 * width, classes)]
    return nn.Sequential(*convolutions, *dense)


RECIPES = Recipes(
    DEFAULTS,
    load_mnist,
    {
        "scattering, linear": Recipe(
            partial(linear, 81 * 49),
            {},
            {"epochs": 4},
            inputs=scattered,
            at={1: {"learning_rate": 0.5}, 2: {"learning_rate": 0.5}},
        ),
        "convolutions": Recipe(
            tanh_cnn,
            CONVOLUTIONS,
            {"epochs": 1, "expected_batch_size": 512, "average": 0.9},
            at={1: {"learning_rate": 1.0}, 2: {"learning_rate": 1.0}},
            augment=partial(cropped, size=28, padding=SHIFT),
        ),
    },
    paper={("scattering, linear", 3): 0.987, ("convolutions", 3): 0.981},
)
SCATTERING, CONVOLUTIONS = RECIPES.study("scattering, linear"), RECIPES.study("convolutions")
