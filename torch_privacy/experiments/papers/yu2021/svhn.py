# SPDX-License-Identifier: Apache-2.0
"""House numbers with gradient embedding perturbation: Yu, Zhang, Chen and Liu (2021), Table 1, SVHN.

``torch-privacy reproduce gep-svhn`` trains the network of ``gep-cifar10`` with its settings on the digits of SVHN and
the 531,131 easier ones that come with them (7 GiB of memory), for a tenth of the epochs. The paper reports 92.3, 94.7
and 95.1 % test accuracy with GEP at epsilon 2, 5 and 8. The full run wants a GPU, which it takes if there is one.

SVHN, which is for non-commercial use, must be fetched by whoever runs this; nothing of it was at hand when this was
written. A quick look leaves the further images out.

Source: D. Yu, H. Zhang, W. Chen, T.-Y. Liu, "Do not let privacy overbill utility: gradient embedding perturbation for
private learning", ICLR 2021, arXiv:2102.12677.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch.utils.data import TensorDataset

from torch_privacy import _validate as _check
from torch_privacy.data import Data, load_svhn
from torch_privacy.experiments.papers.yu2021 import cifar10 as gep_cifar10


@dataclass(frozen=True)
class Settings(gep_cifar10.Settings):
    """The paper's settings."""

    delta: float = 1e-6
    num_test_examples: int = 26_032
    extra: bool = True  # whether the further images are trained on, too


def load(settings: Any) -> Data:
    """SVHN."""
    _check.whole("train", at_least=1, num_test_examples=settings.num_test_examples)
    data = _load_once(settings.data, extra=settings.extra)
    return replace(data, test=TensorDataset(*(part[: settings.num_test_examples] for part in data.test.tensors)))


_load_once = cache(load_svhn)


EXPERIMENT = replace(
    gep_cifar10.EXPERIMENT,
    load=load,
    levels={2.0: {"epochs": 5}, 5.0: {"epochs": 10}, 8.0: {"epochs": 20}},
    paper={
        ("GP", 2.0): 0.871, ("GP", 5.0): 0.913, ("GP", 8.0): 0.916,
        ("GEP", 2.0): 0.923, ("GEP", 5.0): 0.947, ("GEP", 8.0): 0.951,
    },
    baseline=None,
    quick={**gep_cifar10.EXPERIMENT.quick, "extra": False, "epochs": 0.0035},
)  # fmt: skip
COLUMNS, NOTES = gep_cifar10.COLUMNS, gep_cifar10.NOTES
build_task, rows = EXPERIMENT.build_task, EXPERIMENT.rows
