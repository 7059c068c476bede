# SPDX-License-Identifier: Apache-2.0
"""Which whole numbers of a forward are the same whatever the batch holds, such as the numbers of positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_MADE = frozenset({torch.arange, torch.zeros, torch.ones})  # of sizes alone


class Constants:
    """The constants met so far: those given, those made of sizes alone, and what functions make of these.

    Whatever is not known to be one may depend on data. One that is written to is none from then on.
    """

    def __init__(self, given: Iterable[Tensor]):
        self._known: dict[int, tuple[Tensor, int]] = {}  # the tensor keeps its number from being given to another
        for tensor in given:
            self._note(tensor)

    def look(self, func: Callable, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        """A function of torch was called; only results of whole numbers are of interest."""
        if isinstance(out, Tensor) and not out.is_floating_point():
            met = _tensors(args, kwargs)
            if self.has(met) if met else func in _MADE:
                self._note(out)

    def has(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are constants, every one."""
        return bool(tensors) and all(self._known.get(id(t), (t, -1))[1] == t._version for t in tensors)

    def _note(self, tensor: Tensor) -> None:
        if not tensor.is_floating_point() and not tensor.is_inference():
            self._known[id(tensor)] = tensor, tensor._version


def _tensors(*trees: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor)]


def numbers_looked_up(args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """What a lookup is given beside its table."""
    return [t for t in _tensors(args, kwargs) if not t.is_floating_point()]
