# SPDX-License-Identifier: Apache-2.0
"""Trains ResNet-20 with gradient embedding perturbation: Yu, Zhang, Chen and Liu (2021), Table 1, CIFAR-10 and SVHN.

``torch-privacy reproduce gep-cifar10`` trains ResNet-20 with group normalization (268,346 parameters, five groups). The
anchors are photographs of CIFAR-100 with random labels. The paper reports 59.7, 70.1 and 74.9 % test accuracy with GEP
at epsilon 2, 5 and 8. ``gep-svhn`` trains the same network on the digits of SVHN and the 531,131 easier ones that come
with them (7 GiB of memory), for a tenth of the epochs; there the paper reports 92.3, 94.7 and 95.1 %. The full runs
need a GPU, which they use if there is one.

The settings are the paper's, with its weight decay, its learning rate that falls to a tenth at half time, and equal
noise multipliers for embedding and residual. `DEVIATIONS` lists what differs; the tables print it.

SVHN is for non-commercial use and must be fetched by the user; it was not available when this was written. A quick look
leaves out the easier images.

Source: D. Yu, H. Zhang, W. Chen, T.-Y. Liu, "Do not let privacy overbill utility: gradient embedding perturbation for
private learning", ICLR 2021, arXiv:2102.12677.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch.utils.data import TensorDataset

from torch_privacy.data import Data, load_cifar10, load_public_images, load_svhn
from torch_privacy.support import validate as _check
from torch_privacy_papers.models.networks import ResNet20
from torch_privacy_papers.yu2021 import common
from torch_privacy_papers.yu2021.common import MethodComparison, Public


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    """The settings of a training of ResNet-20."""

    num_test_examples: int = 10_000  # of the test images, from the first


@dataclass(frozen=True, kw_only=True)
class SVHNSettings(Settings):
    """The settings of a training on SVHN."""

    extra: bool = True  # whether to train on the easier images as well


DEFAULTS = Settings(  # the paper's
    target_epsilon=8.0,
    expected_batch_size=1000,
    learning_rate=0.1,
    clip_norm=10.0,
    residual_clip_norm=2.0,
    num_basis=1000,
    num_anchors=2000,
    embedding_share=0.5,
    weight_decay=1e-4,
    decay="tenth from half time",
    epochs=1.0,
)
SVHN_DEFAULTS = SVHNSettings(**{**vars(DEFAULTS), "delta": 1e-6, "num_test_examples": 26_032})


def load_photographs(settings: Any) -> Data:
    """Returns CIFAR-10 with the first ``num_test_examples`` test images."""
    return _with_first_tests(_cifar10(settings.data), settings)


def load_house_numbers(settings: Any) -> Data:
    """Returns SVHN with the first ``num_test_examples`` test images."""
    return _with_first_tests(_svhn(settings.data, extra=settings.extra), settings)


_cifar10, _svhn = cache(load_cifar10), cache(load_svhn)  # reading CIFAR-10 takes ten seconds


def _with_first_tests(data: Data, settings: Any) -> Data:
    _check.whole("train", at_least=1, num_test_examples=settings.num_test_examples)
    return replace(data, test=TensorDataset(*(part[: settings.num_test_examples] for part in data.test.tensors)))


def load_public(settings: Any) -> Public:
    """Returns photographs of CIFAR-100."""
    found = load_public_images(settings.data)
    return Public(found.images, found.files)


FEW = {"num_basis": 500, "num_anchors": 500, "keeps_residual_noise": True}  # half the time, and less
ON_CIFAR10 = MethodComparison(
    DEFAULTS,
    load_photographs,
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
    variants={
        "k = m = 500": {"B-GEP": {**FEW, "residual_clip_norm": 0.0}, "GEP": FEW},
        "8 epochs": {
            "GP": {"epochs": 8},
            "B-GEP": {**FEW, "residual_clip_norm": 0.0, "epochs": 8},
            "GEP": {**FEW, "epochs": 8},
        },
    },
    quick={"epochs": 0.005, "expected_batch_size": 50, "num_basis": 50, "num_anchors": 60, "num_test_examples": 1000},
)  # fmt: skip
ON_SVHN = replace(
    ON_CIFAR10,
    defaults=SVHN_DEFAULTS,
    load=load_house_numbers,
    levels={2.0: {"epochs": 5}, 5.0: {"epochs": 10}, 8.0: {"epochs": 20}},
    variants={},
    paper={
        ("GP", 2.0): 0.871, ("GP", 5.0): 0.913, ("GP", 8.0): 0.916,
        ("B-GEP", 2.0): 0.885, ("B-GEP", 5.0): 0.918, ("B-GEP", 8.0): 0.923,
        ("GEP", 2.0): 0.923, ("GEP", 5.0): 0.947, ("GEP", 8.0): 0.951,
    },
    baseline=0.959,
    quick={**ON_CIFAR10.quick, "extra": False, "epochs": 0.0035},
)  # fmt: skip
DEVIATIONS = (
    "Where this deviates from the paper: the anchors are images of CIFAR-100, not of ImageNet; k is 1000 everywhere, "
    "not the best of 500, 1000, 1500 and 2000; the part of the residual's noise that lies in the subspace is removed; "
    "and the noise is calibrated by exact accounting, for GEP as one release. This takes less noise than the paper's, "
    "but more for GEP on SVHN.",
    "As in the paper: batches of 1000 on average, SGD with momentum 0.9, learning rate 0.1, a tenth of it from half "
    "time on, weight decay 1e-4, clip norm 10 for gradients or embeddings and 2 for residuals, equal noise multipliers "
    "for both. GP has the same settings, and none of its own.",
    "k = m = 500: fewer directions, of fewer anchors, so that it takes a third of the time; the residual's noise stays "
    "as a whole, as in the paper.",
    "8 epochs: all three methods for as long as two cores train in an evening, a sixth of the paper's epochs, with as "
    "much less noise as epsilon 2 then takes; B-GEP and GEP with k = m = 500.",
)
CIFAR10, SVHN = ON_CIFAR10.study(*DEVIATIONS), ON_SVHN.study(*DEVIATIONS)
