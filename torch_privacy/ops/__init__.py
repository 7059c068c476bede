# SPDX-License-Identifier: Apache-2.0
"""Provides ``OPS``, the only registry: torch function -> recorder of its parameters' uses, one file per op family."""

from collections.abc import Callable, Iterable

from . import attention, branches, conv, einsum, elementwise, embedding, norm, recurrent, routed
from ._base import AnyLayout as AnyLayout
from ._base import Layout as Layout
from ._base import Method as Method
from ._base import Op as Op
from ._base import Ragged as Ragged
from ._base import Use as Use

OPS: dict[Callable, Callable[..., Iterable[Use]]] = {
    **einsum.RECORDERS,
    **conv.RECORDERS,
    **embedding.RECORDERS,
    **routed.RECORDERS,
    **norm.RECORDERS,
    **elementwise.RECORDERS,
}

# Torch functions that are replaced by a composition of torch calls, so that the inner ops are recorded one by one.
COMPOSED: dict[Callable, Callable] = {**recurrent.COMPOSED, **attention.COMPOSED, **branches.COMPOSED}
