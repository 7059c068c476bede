# SPDX-License-Identifier: Apache-2.0
"""Decides which tensors made without data count as constants, and which as inputs with a part for each example."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

# Factories with results that hold no data of the batch.
_CONSTANTS = {torch.arange, torch.linspace, torch.logspace, torch.eye, torch.tril_indices, torch.triu_indices}
# Factories with results that may stand for an input with a part for every example, such as a first hidden state.
_FILLED = {torch.zeros, torch.ones, torch.full, torch.empty, torch.rand, torch.randn}
_PLAIN = {Tensor, nn.Parameter, nn.Buffer}
FROM_PYTHON = {torch.tensor, torch.as_tensor}  # make tensors of numbers
_FILLED |= FROM_PYTHON
# Entries above which a filled tensor with a part for each example counts as an input: rows in it, as in a constant,
# would take n times its size.
LARGE = 2**20

_Kind = tuple[Callable, torch.Size]  # function that made it, and its shape


class FilledTensors:
    """Decides which tensors filled with numbers may stand for an input, such as a first hidden state (n, d).

    All others count as constants. Constants are exact in any case, but one with a part for each example takes n times
    its size.
    """

    def __init__(self) -> None:
        self._of_any_batch: set[_Kind] = set()  # seen in batches that do not fit into any of their dimensions
        self._seen: set[_Kind] = set()  # in the present batch, while its size is not known
        self._shape: tuple[int, ...] = ()  # of the batch's first input
        self._dims = {0}  # dimensions of first inputs that may hold the examples
        self._stamps: dict[int, tuple[Any, int, str]] = {}  # of constants that last, by id
        self._numbers = count()
        self._read: dict[int, tuple[Any, int, list[float]]] = {}  # small tensors on other devices

    def entries_of(self, tensor: Tensor, *, lasts: bool) -> list[float]:
        """Returns the entries of a small tensor; none on other devices, where reading waits, unless the tensor lasts.

        Those of one that lasts are read once for each version.
        """
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_complex() or tensor.is_meta:
            return []
        if tensor.device.type == "cpu":
            return tensor.detach().reshape(-1).tolist()
        if not lasts:
            return []
        alive, version, entries = self._read.get(id(tensor), (None, None, []))
        if alive is None or alive() is not tensor or version != tensor._version:
            entries = tensor.detach().reshape(-1).tolist()
            self._read[id(tensor)] = weakref.ref(tensor), tensor._version, entries
        return entries

    def stamp(self, tensor: Tensor) -> str:
        """Returns a name of the tensor as it is now: another one once it was written into, or is another tensor."""
        alive, version, stamp = self._stamps.get(id(tensor), (None, None, ""))
        if alive is None or alive() is not tensor or version != tensor._version:
            stamp = f"constant {next(self._numbers)}"
            self._stamps[id(tensor)] = weakref.ref(tensor), tensor._version, stamp
        return stamp

    def guess(self, shape: tuple[int, ...]) -> int | None:
        """Returns the size of a batch with a first input of this shape, as earlier batches suggest."""
        self._shape = shape
        return next((shape[dim] for dim in sorted(self._dims) if dim < len(shape)), None)

    def learn(self, num_examples: int) -> None:
        """Remembers the size of the present batch."""
        dims = {dim for dim, size in enumerate(self._shape) if size == num_examples}
        self._dims, self._shape = self._dims & dims or dims or self._dims, ()
        if self._seen:
            self._of_any_batch |= {kind for kind in self._seen if _holds_none(kind[1], num_examples)}
            self._seen.clear()

    def _is_of_any_batch(self, kind: _Kind, num_examples: int | None) -> bool:
        """True if it was seen in a batch with examples that it cannot hold, the present batch included."""
        if num_examples is None:
            self._seen.add(kind)
        elif _holds_none(kind[1], num_examples):
            self._of_any_batch.add(kind)
        return kind in self._of_any_batch

    def stands_for_input(self, func: Callable, out: Tensor, num_examples: int | None) -> bool:
        """True if it is large, has a dimension of n, and was never seen with another n."""
        if self._is_of_any_batch((func, out.shape), num_examples):
            return False
        return num_examples is None or (num_examples * out.numel() > LARGE and num_examples in out.shape)

    def may_be_filled_by_examples(self, func: Callable, out: Any, num_examples: int | None) -> bool:
        """True if it is made to be written into, and may have a part for each example: (n, 7, 4) of zeros."""
        if not isinstance(out, Tensor) or not out.is_floating_point() or num_examples not in out.shape:
            return False
        name = getattr(func, "__name__", "")
        is_new = func in _FILLED or name.startswith("new_") or name.endswith("_like")
        return is_new and (func, out.shape) not in self._of_any_batch

    def makes_constant(self, func: Callable, out: Any, num_examples: int | None) -> bool:
        """True if a factory's result holds no data of the batch; a list of integers counts as positions."""
        if func in _CONSTANTS:
            return True
        if func in FROM_PYTHON and not out.is_floating_point():
            return out.ndim < 2
        return func in _FILLED and not self.stands_for_input(func, out, num_examples)

    def is_cached(self, tensor: Tensor, num_examples: int | None) -> bool:
        """True for integers that no recorded function made, as those cached in a model, without a part per example."""
        return not tensor.is_floating_point() and self._is_of_any_batch((Tensor, tensor.shape), num_examples)

    def makes_new(self, func: Callable, out: Any, args: tuple, num_examples: int | None) -> bool:
        """True for an input that takes only type and device of its argument, as ``weight.new_zeros(n, d)``."""
        name = getattr(func, "__name__", "")
        if name.endswith("_like") and args and not args[0].requires_grad:
            return False  # of a constant's shape, which has no part for each example
        is_new = name.startswith("new_") or name.endswith("_like")
        return is_new and self.stands_for_input(func, out, num_examples)


def _holds_none(shape: torch.Size, num_examples: int) -> bool:
    """True if no dimension can hold ``num_examples`` examples."""
    return all(size % max(num_examples, 1) for size in shape)
