# SPDX-License-Identifier: Apache-2.0
"""Recorded op calls, and those of them that the losses of one batch depend on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ...ops import Use
from ..parallel.shards import Placed, is_distributed, on_this_rank
from .graph import Graph

# The op of calls that one of our own compositions recorded.
SCAN = "scan"
# Two further backwards through this part of the graph are cheaper than one through all of it.
NEAR = 0.3
# Prefix of the op of a cut, see ``Call.cut``.
CUT = "into "


@dataclass(slots=True)
class Output:
    """The position of an op's output y in the graph: ``edge`` is y's, or that of the base that y is a part of."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    part: tuple[Tensor, tuple[int, ...], int] | None  # base (without its entries), y's strides in it, y's offset
    placed: Placed | None = None  # of a distributed y, whose shape and gradient are this rank's

    @property
    def size(self) -> int:
        """Returns the bytes of y."""
        return self.shape.numel() * self.dtype.itemsize

    def gradient(self, g: Tensor | None, like: Tensor) -> Tensor:
        """Returns the gradient in y, given that at the edge; zeros if the losses do not depend on y."""
        if g is None:
            return like.new_zeros(self.shape, dtype=self.dtype)
        if type(g) is not Tensor:
            g = on_this_rank(g) if self.placed is None else self.placed.local(g)
        if self.part is None:
            return g if g.shape == self.shape else g.reshape(self.shape)
        base, stride, offset = self.part
        whole = torch.empty_strided(base.shape, base.stride(), dtype=g.dtype, device=g.device).copy_(g)
        return whole.as_strided(self.shape, stride, offset)


@dataclass(slots=True)
class Call:
    """One op call whose inputs include parameters."""

    op: str
    output: Output
    inputs: tuple[GradientEdge, ...]  # where the graph continues past the call, other than to the recorded parameters
    uses: tuple[Use, ...]
    versions: list[tuple[Tensor, int]]
    place: int = 0  # hash of the place in the code
    size: int = 0  # bytes of inputs that are kept for the backward, and of the output
    needs_graph: bool = False  # nothing was recorded: nodes of the graph compute the rows

    @staticmethod
    def cut(func: Callable, output: Output, place: int) -> Call:
        """Returns a cut: a tensor whose entries ``func`` moves as the data say, so that its gradient is measured."""
        return Call(CUT + getattr(func, "__name__", ""), output, (), (), [], place, output.size)

    @property
    def is_cut(self) -> bool:
        """True if it is a cut, and no call."""
        return self.op.startswith(CUT)

    @property
    def is_scan(self) -> bool:
        """True if one of our own compositions recorded it; its inputs are then no single tensors of the user's."""
        return self.op == SCAN

    def forget(self) -> None:
        """Drops the inputs; the ops made from the call hold what they need."""
        self.uses, self.versions = (), []

    @property
    def edge(self) -> GradientEdge:
        return self.output.edge

    @property
    def shape(self) -> torch.Size:
        return self.output.shape


@dataclass(slots=True)
class Reached:
    """The calls between the losses of one batch and the parameters, with the graph and its path number.

    ``cuts`` are the tensors in between whose entries the data may have reordered.
    """

    losses: Tensor
    graph: Graph
    calls: list[Call]
    cuts: list[Call]
    path: int

    @property
    def needs_graph(self) -> bool:
        """True if some rows are computed by nodes of the graph, which must then outlive the backward."""
        return any([call.needs_graph for call in self.calls])

    @property
    def places(self) -> list[Call]:
        """Returns calls and cuts."""
        return [*self.calls, *self.cuts]

    def dtypes(self) -> set[torch.dtype]:
        """Returns the floating-point types between losses and parameters, including casts between calls."""
        dtypes = {self.losses.dtype, *(call.output.dtype for call in self.calls)}
        for node in self.graph.nodes():
            if node.name() == "ToCopyBackward0":
                dtypes |= {metadata.dtype for metadata in node._input_metadata}
        return dtypes

    def precision(self) -> float:
        """Returns the relative rounding of the coarsest floating-point type between losses and parameters."""
        return max(torch.finfo(dtype).eps for dtype in self.dtypes())

    def deepest(self, places: Sequence[Call]) -> list[bool]:
        """Returns, for each call or cut, whether no other one lies below it in the graph."""
        nodes = [place.output.edge.node for place in places]
        above = self.graph.above(set(nodes))
        return [node not in above for node in nodes]

    def cuts_are_near(self) -> bool:
        """True if the part of the graph above the cuts is small enough for two more backwards through it."""
        above = self.graph.above({cut.output.edge.node for cut in self.cuts})
        return len(above) <= NEAR * len(self.graph.children)


def output_of(y: Tensor) -> Output:
    """Returns the position of y in the graph, which stays valid after y is changed in place, as by ``relu_``.

    Some ops return a view of what they computed (linear of a rank-3 input, conv1d). Changing that view in place gives
    it a new history through its base; so the base's edge is taken if the two hold the same entries. An op that changes
    a part of a tensor in place gives the whole a new history: b is then that part of the whole's gradient.
    """
    base = y._base
    if type(y) is not Tensor and is_distributed(y):
        return _distributed_output(y, base)
    if base is None or base.grad_fn is None:
        return Output(edge_of(y), y.shape, y.dtype, None)
    if base.numel() == y.numel() and base.is_contiguous() and y.is_contiguous():
        return Output(edge_of(base), y.shape, y.dtype, None)
    if not base.grad_fn.name().endswith("CopySlices"):
        return Output(edge_of(y), y.shape, y.dtype, None)
    return Output(edge_of(base), y.shape, y.dtype, (without_entries(base), y.stride(), int(y.storage_offset())))


def _distributed_output(y: Tensor, base: Tensor | None) -> Output:
    """Returns the position of a distributed y, with the shape of this rank's part."""
    with_edge = y
    if base is not None and base.grad_fn is not None and base.numel() == y.numel() and base.is_contiguous():
        with_edge = base
    return Output(edge_of(with_edge), on_this_rank(y).shape, y.dtype, None, Placed.gradient_of(with_edge))


def without_entries(tensor: Tensor) -> Tensor:
    """Returns a tensor with the same shape, strides and type, and without memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def edge_of(y: Tensor) -> GradientEdge:
    """Returns the gradient edge of y."""
    assert y.grad_fn is not None
    return GradientEdge(y.grad_fn, y.output_nr)
