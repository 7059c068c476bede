# SPDX-License-Identifier: Apache-2.0
"""What gradient embedding perturbation hangs on: Yu, Zhang, Chen and Liu (2021), Figure 6, Tables 5 and 6, Figure 7.

``torch-privacy reproduce gep-ablations`` trains the network of ``gep-mnist`` with GEP at epsilon 8, for fewer steps,
with one thing changed at a time: where the auxiliary images come from and which labels they have, the number m of
anchors, the number k of directions, and random directions in place of the anchors' subspace. The paper's ablations are
on CIFAR-10: compare the differences, not the accuracies. It finds that random labels beat true ones (75.1 to 72.9 %),
that photographs of another source are nearly as good, and that the number of anchors matters little.

Digits as auxiliary images are the first 2,000 of the test set, which the accuracy is then not counted on.

Source: D. Yu et al. (2021), arXiv:2102.12677.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import TensorDataset

from torch_privacy import _validate as _check
from torch_privacy.data import Data, load_mnist
from torch_privacy.experiments.papers.yu2021 import common as gep
from torch_privacy.experiments.papers.yu2021 import mnist as gep_mnist
from torch_privacy.runs.rows import ACCURACY_COLUMN, EXACT, PRIVACY_COLUMNS, SCORE, Training

HELD_OUT = 2000
COLUMNS = {SCORE: ACCURACY_COLUMN, EXACT: PRIVACY_COLUMNS[EXACT]}
NOTES = (
    "The paper's accuracies are of CIFAR-10, with m = 2000 where nothing else is said. Ours: k = 100 and m = 400.",
    "Accuracy on the last 8,000 test images: the first 2,000 are auxiliary data of some rows.",
)


@dataclass(frozen=True)
class Settings(gep_mnist.Settings):
    """Those of ``gep-mnist``, but for its length; and the auxiliary images."""

    epochs: float = 8.0
    auxiliary: str = "photographs"  # or one of the others in `AUXILIARY`


def load(settings: Any) -> Data:
    """MNIST without the first images of its test set."""
    data = load_mnist(settings.data)
    return replace(data, test=TensorDataset(*(part[HELD_OUT:] for part in data.test.tensors)))


def _digits(settings: Any, *, has_labels: bool = False) -> gep.Public:
    data = load_mnist(settings.data)
    return gep.Public(TensorDataset(*(part[:HELD_OUT] for part in data.test.tensors)), data.files, has_labels)


def _noise(settings: Any) -> gep.Public:
    generator = torch.Generator().manual_seed(settings.seed)
    return gep.Public(torch.rand(HELD_OUT, 1, 28, 28, generator=generator), {})


AUXILIARY: Mapping[str, Callable[[Any], gep.Public]] = {
    "photographs": gep_mnist.load_public,
    "digits": _digits,
    "labeled digits": lambda settings: _digits(settings, has_labels=True),
    "noise": _noise,
}


def load_public(settings: Any) -> gep.Public:
    """The auxiliary images that the settings name."""
    _check.one_of("train", AUXILIARY, auxiliary=settings.auxiliary)
    return AUXILIARY[settings.auxiliary](settings)


build_task = replace(gep_mnist.EXPERIMENT, load=load, load_public=load_public).build_task


def rows(quick: bool) -> Sequence[Training]:
    """One thing changed at a time; a quick look has fewer steps and fewer rows."""
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
    }
    shorter = {"epochs": 0.5} if quick else {}
    return [
        Training(name, {**settings, **shorter}, {} if paper is None else {SCORE: paper})
        for name, (settings, paper) in changed.items()
        if not quick or "=" not in name
    ]
