# SPDX-License-Identifier: Apache-2.0
"""Ablates gradient embedding perturbation: Yu, Zhang, Chen and Liu (2021), Figures 6 and 7, Tables 5 and 6.

``torch-privacy reproduce gep-ablations`` trains the network of ``gep-mnist`` with GEP at epsilon 8, for fewer steps,
with one change at a time: the source and the labels of the auxiliary images, the number m of anchors, the number k of
directions, the number t of power iterations, and random directions in place of the anchors' subspace; some of them with
B-GEP as well. The paper's ablations are on CIFAR-10: compare the differences, not the accuracies. It finds that random
labels beat true ones (75.1 to 72.9 %), that photographs of another source are nearly as good, that the number of
anchors matters little, and that more power iterations do not help.

Digits as auxiliary images are the first 2,000 of the test set; accuracy is measured on the others. There are only
2,000 images of CIFAR-100, so m = 4000 anchors are these and the first 2,000 training images of CIFAR-10: no private
data here, where digits are trained on.

Source: D. Yu et al. (2021), arXiv:2102.12677.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import TensorDataset

from torch_privacy.data import Data, load_cifar10, load_mnist
from torch_privacy.data.cifar import resized
from torch_privacy.experiments.study import Study
from torch_privacy.runs.rows import ACCURACY_COLUMN, EXACT, PRIVACY_COLUMNS, SCORE, TrainingRow
from torch_privacy.support import validate as _check
from torch_privacy_papers.yu2021 import common, mnist
from torch_privacy_papers.yu2021.common import Public

HELD_OUT = 2000
BIASED = {"residual_clip_norm": 0.0}  # B-GEP
COLUMNS = {SCORE: ACCURACY_COLUMN, EXACT: PRIVACY_COLUMNS[EXACT]}
NOTES = (
    "The paper's accuracies are on CIFAR-10, with m = 2000 unless stated otherwise. Ours: k = 100, m = 400, t = 1, "
    "a learning rate of 1 and 8 epochs. GEP of gep-mnist has 20 epochs and a residual's clip norm of 0.8, not 0.4.",
    "With one seed, two rows of GEP differ by 0.2 points (one standard error) by the choice of the test images alone, "
    "two of B-GEP by 0.4 to 0.6.",
    "Accuracy on the last 8,000 test images: the first 2,000 are auxiliary data of some rows.",
)


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    """The settings of a training of ``gep-mnist`` with other auxiliary images."""

    auxiliary: str = "photographs"  # or another key of `AUXILIARY`


DEFAULTS = Settings(**{**vars(mnist.DEFAULTS), "learning_rate": 1.0, "epochs": 8.0})


def load(settings: Any) -> Data:
    """Returns MNIST without the first images of its test set."""
    data = load_mnist(settings.data)
    return replace(data, test=TensorDataset(*(part[HELD_OUT:] for part in data.test.tensors)))


def _digits(settings: Any, *, has_labels: bool = False) -> Public:
    data = load_mnist(settings.data)
    return Public(TensorDataset(*(part[:HELD_OUT] for part in data.test.tensors)), data.files, has_labels)


def _noise(settings: Any) -> Public:
    generator = torch.Generator().manual_seed(settings.seed)
    return Public(torch.rand(HELD_OUT, 1, 28, 28, generator=generator), {})


def _other_photographs(settings: Any) -> Public:
    data = load_cifar10(settings.data)
    return Public(resized(data.train.tensors[0][:HELD_OUT], size=28, gray=True), data.files)


def _more_photographs(settings: Any) -> Public:
    two = mnist.load_public(settings), _other_photographs(settings)
    images = torch.cat([found.examples for found in two])  # pyright: ignore[reportArgumentType]
    return Public(images, {**two[0].files, **two[1].files})


AUXILIARY: Mapping[str, Callable[[Any], Public]] = {
    "photographs": mnist.load_public,
    "digits": _digits,
    "labeled digits": lambda settings: _digits(settings, has_labels=True),
    "noise": _noise,
    "other photographs": _other_photographs,
    "more photographs": _more_photographs,
}


def load_public(settings: Any) -> Public:
    """Returns the auxiliary images that the settings name."""
    _check.one_of("train", AUXILIARY, auxiliary=settings.auxiliary)
    return AUXILIARY[settings.auxiliary](settings)


COMPARISON = replace(mnist.COMPARISON, defaults=DEFAULTS, load=load, load_public=load_public)


def rows(quick: bool) -> Sequence[TrainingRow]:
    """Returns one change at a time; a quick look has fewer steps and fewer rows."""
    changed: dict[str, tuple[dict[str, Any], float | None]] = {
        "photographs, random labels": ({}, 0.747),
        "digits, random labels": ({"auxiliary": "digits"}, 0.751),
        "digits, true labels": ({"auxiliary": "labeled digits"}, 0.729),
        "noise for images": ({"auxiliary": "noise"}, None),
        "random directions": ({"power_iterations": 0}, None),
        "m = 125": ({"num_anchors": 125}, None),
        "m = 1000": ({"num_anchors": 1000}, 0.746),
        "m = 2000": ({"num_anchors": 2000}, 0.748),
        "k = 25": ({"num_basis": 25}, None),
        "k = 50": ({"num_basis": 50}, None),
        "k = 200": ({"num_basis": 200}, None),
        "photographs of CIFAR-10": ({"auxiliary": "other photographs"}, None),
        "m = 4000": ({"auxiliary": "more photographs", "num_anchors": 4000}, 0.752),
        "t = 2": ({"power_iterations": 2}, None),
        "t = 4": ({"power_iterations": 4}, None),
        "B-GEP": (BIASED, None),
        "B-GEP, digits, random labels": ({**BIASED, "auxiliary": "digits"}, None),
        "B-GEP, random directions": ({**BIASED, "power_iterations": 0}, None),
        "B-GEP, m = 1000": ({**BIASED, "num_anchors": 1000}, 0.622),
        "B-GEP, m = 2000": ({**BIASED, "num_anchors": 2000}, 0.626),
        "B-GEP, m = 4000": ({**BIASED, "auxiliary": "more photographs", "num_anchors": 4000}, 0.633),
        "B-GEP, k = 50": ({**BIASED, "num_basis": 50}, None),
        "B-GEP, k = 200": ({**BIASED, "num_basis": 200}, None),
        "B-GEP, t = 2": ({**BIASED, "power_iterations": 2}, None),
    }
    shorter = {"epochs": 0.5} if quick else {}
    return [
        TrainingRow(name, {**settings, **shorter}, {} if paper is None else {SCORE: paper})
        for name, (settings, paper) in changed.items()
        if not quick or "=" not in name
    ]


STUDY = Study(COLUMNS, rows, NOTES, DEFAULTS, COMPARISON.build_task)
