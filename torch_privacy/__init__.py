# SPDX-License-Identifier: Apache-2.0
"""Train neural networks with differential privacy: exact, at about the price of ordinary training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import privacy as privacy
    from ._check import Refused as Refused
    from ._tape import record as record
    from .clipping import Flat as Flat
    from .jacobian import Jacobian as Jacobian
    from .training import PrivateTraining as PrivateTraining
    from .training import Spent as Spent

__version__ = "0.1.0"

# The public names, imported when first asked for: `torch_privacy.privacy` and the command's help never wait for torch.
_HOME = {
    "Flat": "clipping",
    "Jacobian": "jacobian",
    "PrivateTraining": "training",
    "Refused": "_check",
    "Spent": "training",
    "record": "_tape",
}
__all__ = ["Flat", "Jacobian", "PrivateTraining", "Refused", "Spent", "privacy", "record"]


def __getattr__(name: str) -> Any:
    if name == "privacy":
        return import_module(".privacy", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
