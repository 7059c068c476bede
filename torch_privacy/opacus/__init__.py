# SPDX-License-Identifier: Apache-2.0
"""Runs training loops written for Opacus: ``from torch_privacy.opacus import PrivacyEngine``, and the loop stays."""

from .accountant import Accountant as Accountant
from .checkpoints import from_opacus as from_opacus
from .engine import PrivacyEngine as PrivacyEngine
from .optimizers import DPOptimizer as DPOptimizer
from .run import PrivateLoader as PrivateLoader
from .utils.batch_memory_manager import BatchMemoryManager as BatchMemoryManager
from .validators import ModuleValidator as ModuleValidator
