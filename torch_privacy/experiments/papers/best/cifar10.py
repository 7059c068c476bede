# SPDX-License-Identifier: Apache-2.0
"""Small photographs as well as private training from scratch recognizes them today, at epsilon 1, 2, 3 and 8.

``torch-privacy reproduce best-cifar10`` trains two recipes: one dense layer, and a small network of convolutions, on
scattering coefficients. ``best-cifar10-wide`` trains a wide residual network (WRN-16-4) with standardized weights,
group normalization and 16 views of every image, which wants a GPU. The literature has 69.3 % with convolutions on
scattering coefficients at epsilon 3, and 81.4 % with WRN-40-4 at epsilon 8.

Source: F. Tramèr, D. Boneh (2021), arXiv:2011.11660, table 1; S. De, L. Berrada, J. Hayes, S. Smith, B. Balle (2022),
arXiv:2204.13650.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from torch_privacy.data import load_cifar10
from torch_privacy.experiments.models.augmentation import cropped, flipped
from torch_privacy.experiments.models.wide_resnet import WideResNet
from torch_privacy.experiments.papers.best import common as best
from torch_privacy.experiments.papers.best.common import Recipe, linear, scattered

CHANNELS, SIDE = 3 * 81, 8  # of scattering coefficients
FEW = {"num_examples": 5_000, "expected_batch_size": 1024, "learning_rate": 0.5, "average": 0.9}
SLOWER: dict[float, dict[str, float]] = {epsilon: {"learning_rate": 1.0} for epsilon in (1, 2)}  # more noise there
SMALL = {"num_examples": 200, "expected_batch_size": 16, "epochs": 0.25, "views": 2, "average": 0.9}


def scattering_cnn(width: int = 64, classes: int = 10) -> nn.Module:
    """Two convolutions with tanh and a dense layer on scattering coefficients, as in Tramèr and Boneh."""
    layers = [nn.Conv2d(CHANNELS, width, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(width, width, 3, padding=1), nn.Tanh()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * (SIDE // 2) ** 2, classes))


def shifted_or_mirrored(images: Tensor) -> Tensor:
    """Shifts by up to four pixels, and mirror images."""
    return flipped(cropped(images, 32, padding=4))


@dataclass(frozen=True)
class Settings(best.Settings):
    """Those of the dense layer on scattering coefficients."""

    expected_batch_size: int = 8192
    epochs: float = 30
    learning_rate: float = 2.0
    average: float | None = 0.95


EXPERIMENT = best.Experiment(
    Settings,
    load_cifar10,
    {
        "scattering, linear": Recipe(
            partial(linear, CHANNELS * SIDE**2), {}, {**FEW, "epochs": 5}, inputs=scattered, at=SLOWER
        ),
        "scattering, convolutions": Recipe(
            scattering_cnn,
            {"expected_batch_size": 4096, "epochs": 20, "learning_rate": 3.0},
            {**FEW, "epochs": 2},
            inputs=scattered,
            at=SLOWER,
        ),
        "WRN-16-4": Recipe(
            WideResNet,
            {
                "expected_batch_size": 4096,
                "epochs": 150,
                "learning_rate": 1.0,
                "views": 16,
                "average": 0.9999,
                "microbatch_size": 64,
            },
            SMALL,
            augment=shifted_or_mirrored,
        ),
    },
    paper={("scattering, convolutions", 3): 0.693, ("WRN-16-4", 8): 0.814},
)
COLUMNS, NOTES = best.COLUMNS, best.NOTES
SCATTERING = [name for name in EXPERIMENT.recipes if name.startswith("scattering")]
build_task, rows = EXPERIMENT.build_task, partial(EXPERIMENT.rows, of=SCATTERING)
