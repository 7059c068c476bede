# SPDX-License-Identifier: Apache-2.0
"""Controls torch's modes around the user's code: autocast, torch.compile, hooks for saved tensors; walks its values."""

import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Method = TypeVar("Method", bound=Callable[..., Any])


def tensors_in(tree: Any) -> list[Tensor]:
    """Returns the tensors in nested tuples, lists, mappings and other containers that torch's pytree knows."""
    found: list[Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):  # of a kind that the pytree does not know, such as a tokenizer's output
            found += tensors_in([*leaf.values()])
    return found


def without_autocast(device: str) -> AbstractContextManager:
    """Returns a context that turns autocast off on devices of this type."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


class _Uncompiled:
    """Disables ``torch.compile`` inside. Torch has one stance for all threads: the last thread to leave restores it."""

    def __init__(self) -> None:
        self._inside, self._lock = 0, threading.Lock()
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            # Dynamo takes a second to import; before that, nothing is compiled.
            if self._stance is None and "torch._dynamo" in sys.modules:
                self._stance = torch.compiler.set_stance("force_eager")

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None


_UNCOMPILED = _Uncompiled()


def uncompiled() -> AbstractContextManager:
    """Returns a context in which compiled functions run uncompiled, so that their ops can be recorded."""
    return _UNCOMPILED


def exact(method: Method) -> Method:
    """Decorates a method of an object with a ``_device``, so that it runs without gradients and without autocast."""

    @wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), without_autocast(self._device.type):
            return method(self, *args, **kwargs)

    return guarded  # pyright: ignore[reportReturnType]


def saves_elsewhere() -> bool:
    """True if tensors that autograd saves now pass through hooks, as with checkpointing or offloading."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # type: ignore[attr-defined]
