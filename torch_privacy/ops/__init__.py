# SPDX-License-Identifier: Apache-2.0
"""``OPS``: torch function -> what it notes about its parameters. The only registry: an op is a file and a line here."""

from collections.abc import Callable, Iterator

from . import attention, conv, einsum, elementwise, embedding, norm, recurrent, routed
from ._base import AnyLayout as AnyLayout
from ._base import Layout as Layout
from ._base import Method as Method
from ._base import Op as Op
from ._base import Ragged as Ragged
from ._base import Use as Use

OPS: dict[Callable, Callable[..., Iterator[Use]]] = {
    **einsum.RECORDERS,
    **conv.RECORDERS,
    **embedding.RECORDERS,
    **routed.RECORDERS,
    **norm.RECORDERS,
    **elementwise.RECORDERS,
}

# Torch functions that are better taken apart: our own composition of torch calls, whose inner ops are noted one by one.
COMPOSED: dict[Callable, Callable] = {**recurrent.COMPOSED, **attention.COMPOSED}
