# SPDX-License-Identifier: Apache-2.0
"""``OPS``: torch function -> what it notes about its parameters. The only registry: an op is a file and a line here."""

from collections.abc import Callable, Iterator

from . import conv, elementwise, embedding, linear, norm
from ._base import Layout as Layout
from ._base import Method as Method
from ._base import Op as Op
from ._base import Use as Use

OPS: dict[Callable, Callable[..., Iterator[Use]]] = {
    **linear.RECORDERS,
    **conv.RECORDERS,
    **embedding.RECORDERS,
    **norm.RECORDERS,
    **elementwise.RECORDERS,
}
