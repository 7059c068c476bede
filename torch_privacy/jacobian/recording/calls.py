# SPDX-License-Identifier: Apache-2.0
"""Recorded op calls: the parameters that they use, and the positions of their outputs in the graph; and the program.

The program is made of all calls of torch functions in a forward. It knows which of them may put examples into another
order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ...ops import OPS, Use
from ...ops.fallback import compared, replay, uses_of
from ...support.torch_modes import saves_elsewhere
from ...support.validate import Refused
from ..parallel.shards import Placed, is_distributed, on_this_rank
from .functions import Traits, may_reorder
from .packed import MadeAgain, Packed, PackedUse, packed_uses, version_of, without_entries
from .tensors import KnownTensors

# The op of calls that one of our own compositions recorded.
SCAN = "scan"
# Prefix of the op of a cut, see ``Call.cut``.
CUT = "into "


@dataclass(slots=True)
class Output:
    """The position of an op's output y in the graph: ``edge`` is y's, or that of the base that y is a part of."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    part: tuple[Tensor, tuple[int, ...], int] | None  # base (without its entries), y's strides in it, y's offset
    placed: Placed | None = None  # of a distributed y, with this rank's shape and gradient

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
    """One op call with parameters among its inputs."""

    op: str
    output: Output
    inputs: tuple[GradientEdge, ...]  # where the graph continues past the call, other than to the recorded parameters
    uses: tuple[Use, ...]
    versions: list[tuple[Tensor, int]]
    place: int = 0  # hash of the place in the code
    size: int = 0  # bytes of inputs that are kept for the backward, and of the output
    needs_graph: bool = False  # nothing was recorded: nodes of the graph compute the rows
    part: int = 0  # number of the part that is computed again before its backward; 0 for none

    @property
    def is_packed(self) -> bool:
        """True if some inputs are made again in the backward."""
        return self.part > 0 and any(isinstance(use, PackedUse) for use in self.uses)

    def unpacked(self) -> tuple[Use, ...]:
        """Returns the uses with their inputs; within the backward, before it passes the call's node."""
        if not self.part:
            return self.uses
        return tuple(use.unpacked() if isinstance(use, PackedUse) else use for use in self.uses)

    def forget(self) -> None:
        """Frees inputs that were made again."""
        for use in self.uses if self.part else ():
            if isinstance(use, PackedUse):
                use.forget()

    def free_inputs(self) -> None:
        """Frees what the call holds for its rows; the ops made from it hold what they need."""
        self.uses, self.versions = (), []

    @staticmethod
    def cut(func: Callable, output: Output, place: int) -> Call:
        """Returns a cut: a tensor that ``func`` reorders as the data say, so that its gradient is measured."""
        return Call(CUT + getattr(func, "__name__", ""), output, (), (), [], place, output.size)

    @property
    def is_cut(self) -> bool:
        """True if it is a cut, and no call."""
        return self.op.startswith(CUT)

    @property
    def edge(self) -> GradientEdge:
        return self.output.edge

    @property
    def shape(self) -> torch.Size:
        return self.output.shape


class CallLog:
    """The recorded calls of one forward, in order.

    Args:
        parameters, saved_at: as of `MadeAgain`.
    """

    def __init__(self, parameters: Collection[Tensor], saved_at: dict[tuple, int]):
        self._parameters, self._saved_at = parameters, saved_at
        self.calls: list[Call] = []
        self.unrecorded: list[Call] = []  # stand for nodes by which losses reached parameters without a recorded call
        self.saved_elsewhere = False  # saved-tensor hooks keep autograd's tensors outside of its nodes
        self._parts: dict[int, int] = {}  # of the hooks -> number
        # Base's id -> calls with outputs that are views of it, with their strides and offset.
        self.views: dict[int, list[tuple[weakref.ref[Tensor], Call, tuple[int, ...], int]]] = {}

    @cached_property
    def again(self) -> MadeAgain:
        """Returns what is known of parts that run again; few forwards have any."""
        return MadeAgain(self._parameters, self._saved_at)

    def add(
        self,
        op: str,
        y: Tensor,
        uses: tuple[Use, ...],
        inputs: tuple[GradientEdge, ...],
        place: int,
        saved: Sequence[tuple[Tensor, Packed]] = (),
    ) -> None:
        """Adds a call of an op with output y; ``saved`` are the tensors that autograd saved for it by hooks."""
        hooks = saves_elsewhere()
        output, versions, part = output_of(y), [], 0
        size = output.size
        for use in uses:
            versions.append((use.weight, use.weight._version))
        if hooks is not None:
            self.saved_elsewhere = True
            part = self._parts.setdefault(id(hooks[1]), len(self._parts) + 1)  # the graph holds it
            changeable = [t for use in uses for t in use.saved()]
            uses = packed_uses(uses, saved, self.again, hash((op, place)))
            held = {id(t) for use in uses for t in use.saved()}
            versions += [(t if id(t) in held else version_of(t), t._version) for t in changeable]
            size += sum(use.packed_bytes for use in uses if isinstance(use, PackedUse))
        for use in uses:
            for t in use.saved():
                if hooks is None:
                    versions.append((t, t._version))
                size += t.numel() * t.itemsize  # nbytes is refused for sparse ones
        call = Call(op, output, inputs, uses, versions, place, size, part=part)
        self.calls.append(call)
        if y._base is not None and output.part is None and output.placed is None and output.edge == edge_of(y):
            where = y.stride(), int(y.storage_offset())
            self.views.setdefault(y._base._cdata, []).append((weakref.ref(y._base), call, *where))

    def move_views_to_base(self, changed: Tensor) -> None:
        """Moves the edges of outputs that are views of a tensor to its base, before it is changed in place.

        The change gives the views a new history, so that their present edges leave the graph.
        """
        base = changed if changed._base is None else changed._base
        for alive, call, stride, offset in self.views.pop(base._cdata, []):
            if alive() is base and base.grad_fn is not None:
                call.output = replace(call.output, edge=edge_of(base), part=(without_entries(base), stride, offset))


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
        return Output(GradientEdge(y.grad_fn, y.output_nr), y.shape, y.dtype, None)  # pyright: ignore[reportArgumentType]
    if base.numel() == y.numel() and base.is_contiguous() and y.is_contiguous():
        return Output(edge_of(base), y.shape, y.dtype, None)
    if not base.grad_fn.name().endswith("CopySlices"):
        return plain_output(y)
    return Output(edge_of(base), y.shape, y.dtype, (without_entries(base), y.stride(), int(y.storage_offset())))


def plain_output(y: Tensor) -> Output:
    """Returns the present position of an ordinary y in the graph."""
    return Output(edge_of(y), y.shape, y.dtype, None)


def _distributed_output(y: Tensor, base: Tensor | None) -> Output:
    """Returns the position of a distributed y, with the shape of this rank's part."""
    with_edge = y
    if base is not None and base.grad_fn is not None and base.numel() == y.numel() and base.is_contiguous():
        with_edge = base
    return Output(edge_of(with_edge), on_this_rank(y).shape, y.dtype, None, Placed.gradient_of(with_edge))


def edges_of(data: Sequence[Tensor], weights: Sequence[Tensor], known: KnownTensors) -> list[GradientEdge]:
    """Returns where the graph continues past a call's data, which must be separable into examples."""
    edges: list[GradientEdge] = []
    for t in data:
        if t.is_nested:
            raise Refused(
                f"tape: parameter {', '.join(map(repr, known.all_names(weights)))} is used with a nested tensor, in "
                "which examples cannot be separated. Pad it to a fixed length and use a mask, or take one tensor for "
                "each example."
            )
        if t.grad_fn is not None:
            edges.append(GradientEdge(t.grad_fn, t.output_nr))
    return edges


def edge_of(y: Tensor) -> GradientEdge:
    """Returns the gradient edge of y."""
    assert y.grad_fn is not None
    return GradientEdge(y.grad_fn, y.output_nr)


@dataclass(slots=True)
class RunCall:
    """A call of an op on parameters and data that was run."""

    func: Callable
    args: tuple  # as they were before
    kwargs: dict[str, Any]
    weights: list[Tensor]  # that need a gradient
    data: list[Tensor]
    result: Any
    results: list[Tensor]  # the tensors in the result
    in_place: bool


def uses_by_rule(run: RunCall, known: KnownTensors) -> tuple[Use, ...] | None:
    """Returns one use of each weight, as the op's rule finds them; None if it does not find all."""
    uses_by_rule = OPS.get(run.func)
    if uses_by_rule is None:
        return None
    ids, found, uses = [*map(id, run.weights)], [], []
    try:
        for use in uses_by_rule(run.result, *run.args, **run.kwargs):
            if id(use.weight) in ids:
                found.append(id(use.weight))
                uses.append(use)
    except Refused as error:
        names = ", ".join(map(repr, known.all_names(run.weights)))
        raise Refused(f"{error} Used with parameter {names}.") from None
    return tuple(uses) if found == ids or sorted(found) == sorted(ids) else None


def uses_by_fallback(run: RunCall) -> list[tuple[Tensor, tuple[Use, ...]]]:
    """Returns uses by the op's own backward, if running the op again gives the same result."""
    weights = list({id(t): t for t in run.weights}.values())
    try:
        again = replay(run.func, run.args, run.kwargs, weights, run.in_place)
        replayed = compared(again, [*map(on_this_rank, run.results)], _written(run))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return []
    if replayed is None:
        return []
    return [
        (y, tuple(uses_of(replayed, weights, k)))
        for k, y in enumerate(run.results)
        if y.grad_fn is not None and replayed.outputs[k].grad_fn is not None
    ]


def _written(run: RunCall) -> Tensor | None:
    """Returns the mask of the entries that ``h[key] = value`` writes; None for other ops, which may write all."""
    if run.func is not Tensor.__setitem__:
        return None
    written = torch.zeros_like(on_this_rank(run.args[0]), dtype=torch.bool)
    written[run.args[1]] = True
    return written


_next_number = torch._C._autograd._get_sequence_nr  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(slots=True, eq=False)
class OpStep:
    """A call of a torch function with its arguments, except for the tensors' entries."""

    func: Callable
    traits: Traits
    numbers: tuple  # integers, names and flags
    made_of: list[OpStep]  # the steps that made its arguments, for tensors that no gradient goes back to
    reorders: bool = False  # the data may have determined where entries of the result come from
    node: int = -1  # sequence number of its result in the graph
    first: int = field(default_factory=_next_number)  # number of the next node
    last: int = 0  # the same once it was run

    def note_result(self, result: Tensor) -> None:
        """Notes which nodes of the graph, if any, the step made: of several results, only some may be used."""
        node = result.grad_fn
        if node is not None:
            self.node = node._sequence_nr()
        self.last = _next_number()


class Program:
    """The steps of one forward.

    Args:
        output: tensor -> its position in the graph.
    """

    def __init__(self, output: Callable[[Tensor], Output]):
        self._output = output
        self.used: list[OpStep] = []  # steps that a gradient goes back through
        self.made_by: dict[int, tuple[weakref.ref[Tensor], OpStep]] = {}  # of tensors that no gradient goes back to
        self.cuts: list[Call] = []  # tensors with entries that the data may have reordered
        self.moved = False  # the data reordered entries of some tensor, with or without a gradient
        self.moved_unseen = False  # the same, of tensors that are not known

    def makers(self, tensors: Iterable[Tensor]) -> list[OpStep]:
        """Returns the steps that made those of the tensors that no gradient goes back to."""
        made_by = self.made_by
        known = [(t, *made_by[id(t)]) for t in tensors if id(t) in made_by]
        return [step for t, alive, step in known if alive() is t]

    def add(self, step: OpStep, results: Sequence[Tensor]) -> None:
        """Adds a step if its result has a gradient; else it is added once the result is used."""
        for t in results:
            if t.requires_grad:
                step.note_result(t)
                self.used.append(step)
                return
        for t in results:
            self.made_by[id(t)] = weakref.ref(t), step
            if step.traits.in_place and t._base is not None:
                self.made_by[id(t._base)] = weakref.ref(t._base), step

    def steps(self) -> list[OpStep]:
        """Returns the steps that a gradient goes back through, and those that made the other tensors used there."""
        found: dict[OpStep, None] = {}
        for step in self.used:
            stack = [step]
            while stack:
                step = stack.pop()
                if step not in found:
                    found[step] = None
                    stack += step.made_of
        return [*found]

    def note_unseen(self) -> None:
        """Notes that the data may have reordered entries of unknown tensors."""
        self.moved = self.moved_unseen = True

    def check_order(
        self, step: OpStep, args: tuple, data: Sequence[Tensor], tensors: Iterable[Tensor], place: int
    ) -> None:
        """Adds cuts, before a step is run, if its data may determine where entries with a gradient go."""
        step.reorders = may_reorder(step.func, args, data) or any(map(_reorders, step.made_of))
        if not step.reorders:
            return
        self.moved = True
        differentiable = [t for t in tensors if t.grad_fn is not None]
        if not differentiable:
            return
        unmeasurable = [
            t for t in differentiable if not t.is_floating_point() or t.layout is not torch.strided or t.is_nested
        ]
        if unmeasurable or step.traits.in_place:
            self.moved_unseen = True
            return
        self.cuts += [Call.cut(step.func, output, place) for output in map(self._output, differentiable)]


_reorders = attrgetter("reorders")
