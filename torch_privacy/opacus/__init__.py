# SPDX-License-Identifier: Apache-2.0
"""Runs training loops written for Opacus: ``from torch_privacy.opacus import PrivacyEngine``, and the loop stays."""

from typing import Any

from .accountant import Accountant as Accountant
from .checkpoints import from_opacus as from_opacus
from .engine import PrivacyEngine as PrivacyEngine
from .optimizers import DPOptimizer as DPOptimizer
from .run import PrivateLoader as PrivateLoader
from .utils.batch_memory_manager import BatchMemoryManager as BatchMemoryManager
from .validators import ModuleValidator as ModuleValidator


def __getattr__(name: str) -> Any:
    if name == "GradSampleModule":
        raise ImportError(
            "torch_privacy.opacus has no GradSampleModule: leave it out, as every model has its gradients without one."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
