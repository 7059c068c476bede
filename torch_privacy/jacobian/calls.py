# SPDX-License-Identifier: Apache-2.0
"""What the tape notes of one op call, and what of that lies behind the losses of one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ..ops import Use
from .graph import Graph

# The op of what a composition of our own noted.
SCAN = "scan"
# Two further backwards through this part of the graph are cheaper than one through all of it.
NEAR = 0.3
# What the op of a cut begins with, see ``Call.cut``.
CUT = "into "


@dataclass(slots=True)
class Output:
    """Where an op's output y hangs in the graph: at ``edge``, y's own or that of the base that y is a part of."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    part: tuple[Tensor, tuple[int, ...], int] | None  # base (without its entries), y's strides in it, y's offset

    @property
    def size(self) -> int:
        """Bytes of y."""
        return self.shape.numel() * self.dtype.itemsize

    def gradient(self, g: Tensor | None, like: Tensor) -> Tensor:
        """Gradient in y, from that at the edge; zeros where the losses do not depend on it."""
        if g is None:
            return like.new_zeros(self.shape, dtype=self.dtype)
        if self.part is None:
            return g if g.shape == self.shape else g.reshape(self.shape)
        base, stride, offset = self.part
        laid_out = torch.empty_strided(base.shape, base.stride(), dtype=g.dtype, device=g.device).copy_(g)
        return laid_out.as_strided(self.shape, stride, offset)


@dataclass(slots=True)
class Call:
    """One op call that met parameters."""

    op: str
    output: Output
    inputs: tuple[Node, ...]  # where the graph goes on behind the call, other than to the noted parameters
    uses: tuple[Use, ...]
    versions: list[tuple[Tensor, int]]
    place: int = 0  # in the code

    @staticmethod
    def cut(func: Callable, output: Output, place: int) -> Call:
        """Not a call, but a tensor whose entries are moved by ``func`` as the data say: its gradient is looked at."""
        return Call(CUT + getattr(func, "__name__", ""), output, (), (), [], place)

    @property
    def is_cut(self) -> bool:
        """Whether it is no call."""
        return self.op.startswith(CUT)

    @property
    def is_scan(self) -> bool:
        """Whether a composition of our own noted it, whose inputs are nobody's in particular."""
        return self.op == SCAN

    def forget(self) -> None:
        """Let go of the inputs: the ops made of the call have what they need."""
        self.uses, self.versions = (), []

    @property
    def edge(self) -> GradientEdge:
        return self.output.edge

    @property
    def shape(self) -> torch.Size:
        return self.output.shape

    @property
    def size(self) -> int:
        """Bytes of inputs that are kept for the backward, and of the output."""
        saved = sum(t.numel() * t.itemsize for use in self.uses for t in use.saved())
        return saved + self.output.size


@dataclass(slots=True)
class Reached:
    """What the losses of one batch were computed from: the calls between them and the parameters, and the way there.

    ``cuts`` are the tensors on the way whose entries may have been moved as the data say.
    """

    losses: Tensor
    graph: Graph
    calls: list[Call]
    cuts: list[Call]
    path: int

    @property
    def places(self) -> list[Call]:
        """Calls and cuts."""
        return [*self.calls, *self.cuts]

    def dtypes(self) -> set[torch.dtype]:
        """The floating-point types on the way, casts between the calls included."""
        dtypes = {self.losses.dtype, *(call.output.dtype for call in self.calls)}
        for node in self.graph.nodes():
            if node.name() == "ToCopyBackward0":
                dtypes |= {metadata.dtype for metadata in node._input_metadata}
        return dtypes

    def precision(self) -> float:
        """Relative rounding of the coarsest floating-point type on the way."""
        return max(torch.finfo(dtype).eps for dtype in self.dtypes())

    def deepest(self, places: Sequence[Call]) -> list[bool]:
        """Which of these have no other below them in the graph."""
        nodes = [place.output.edge.node for place in places]
        above = self.graph.above(set(nodes))
        return [node not in above for node in nodes]

    def cuts_are_near(self) -> bool:
        """Whether the part of the graph above the cuts is small enough to be gone through twice."""
        above = self.graph.above({cut.output.edge.node for cut in self.cuts})
        return len(above) <= NEAR * len(self.graph.children)
