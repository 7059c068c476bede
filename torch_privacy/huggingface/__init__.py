# SPDX-License-Identifier: Apache-2.0
"""Trains models of transformers: ``PrivateTrainer``, a private ``Trainer``, and ``per_example_loss`` for own loops."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .losses import per_example_loss as per_example_loss

if TYPE_CHECKING:
    from .trainer import PrivateTrainer as PrivateTrainer

__all__ = ["PrivateTrainer", "per_example_loss"]


def __getattr__(name: str) -> Any:
    if name != "PrivateTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return import_module(".trainer", __name__).PrivateTrainer
    except ModuleNotFoundError as error:
        if error.name not in ("transformers", "accelerate"):
            raise
        raise ImportError(
            f"PrivateTrainer needs {error.name}. Install it with: pip install 'torch-privacy[huggingface]'"
        ) from error
