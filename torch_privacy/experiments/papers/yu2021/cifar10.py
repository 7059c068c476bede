# SPDX-License-Identifier: Apache-2.0
"""Small photographs with gradient embedding perturbation: Yu, Zhang, Chen and Liu (2021), Table 1, CIFAR-10.

``torch-privacy reproduce gep-cifar10`` trains ResNet-20 with group normalization (268,346 parameters, five groups). The
anchors are photographs of CIFAR-100 with random labels. The paper reports 59.7, 70.1 and 74.9 % test accuracy with GEP
at epsilon 2, 5 and 8. The full run wants a GPU, which it takes if there is one.

Its settings are the paper's, but for the learning rate, which falls linearly and there once, at half time; the noise in
the subspace, which residuals do not need; and the split of the budget, which is that of the least noise.

Source: D. Yu, H. Zhang, W. Chen, T.-Y. Liu, "Do not let privacy overbill utility: gradient embedding perturbation for
private learning", ICLR 2021, arXiv:2102.12677.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch.utils.data import TensorDataset

from torch_privacy import _validate as _check
from torch_privacy.data import Data, load_cifar10, load_public_images
from torch_privacy.experiments.models.networks import ResNet20
from torch_privacy.experiments.papers.yu2021 import common as gep


@dataclass(frozen=True)
class Settings(gep.Settings):
    """The paper's settings."""

    clip_norm: float = 10.0
    residual_clip_norm: float = 2.0
    num_basis: int = 1000
    num_anchors: int = 2000
    num_test_examples: int = 10_000  # of the test images, from the first


def load(settings: Any) -> Data:
    """CIFAR-10."""
    _check.whole("train", at_least=1, num_test_examples=settings.num_test_examples)
    data = _load_once(settings.data)
    return replace(data, test=TensorDataset(*(part[: settings.num_test_examples] for part in data.test.tensors)))


_load_once = cache(load_cifar10)  # which takes ten seconds


def load_public(settings: gep.Settings) -> gep.Public:
    """Photographs of CIFAR-100."""
    found = load_public_images(settings.data)
    return gep.Public(found.images, found.files)


EXPERIMENT = gep.Experiment(
    load,
    load_public,
    ResNet20,
    groups=("stem", "stages.0", "stages.1", "stages.2", "head"),
    methods={"GP": {"num_basis": 0}, "B-GEP": {"residual_clip_norm": 0.0}, "GEP": {}},
    levels={2.0: {"epochs": 50}, 5.0: {"epochs": 100}, 8.0: {"epochs": 200}},
    paper={
        ("GP", 2.0): 0.436, ("GP", 5.0): 0.522, ("GP", 8.0): 0.564,
        ("B-GEP", 2.0): 0.503, ("B-GEP", 5.0): 0.595, ("B-GEP", 8.0): 0.630,
        ("GEP", 2.0): 0.597, ("GEP", 5.0): 0.701, ("GEP", 8.0): 0.749,
    },
    baseline=0.904,
    quick={"epochs": 0.005, "expected_batch_size": 50, "num_basis": 50, "num_anchors": 60, "num_test_examples": 1000},
)  # fmt: skip
COLUMNS, NOTES = gep.COLUMNS, gep.NOTES
build_task, rows = EXPERIMENT.build_task, EXPERIMENT.rows
