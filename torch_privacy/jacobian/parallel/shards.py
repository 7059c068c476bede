# SPDX-License-Identifier: Apache-2.0
"""Takes the calls of a tensor-parallel model apart, so that each rank applies the ops' rules to its own tensors.

A weight W is replicated over the mesh or sharded in one dimension. An op (x, W) -> y runs on every rank as y_r =
op(x_r, W_r) on local tensors. So the rows of W_r follow by the op's own rule from x_r and the gradient b_r in y_r:

* y is sharded: b_r is the shard of b.
* y is the sum of the ranks' y_r (``Partial``): b_r is the whole b.
* y is replicated: b_r is the whole b, and the rows of a replicated W are whole and equal on all ranks.

Then ‖g_i‖² = Σ over W replicated (once) + Σ over ranks Σ over W sharded. If W is replicated but y sharded, as by
``SequenceParallel``, each rank has a term of every row, and the norm of their sum is not known: refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from ...ops import AnyLayout, Op, Use
from ...ops.elementwise import EntrywiseUse
from ...ops.embedding import EmbeddingUse
from ...support.validate import Refused

_MODULE, _COLLECTIVES = "torch.distributed.tensor", "torch.distributed._functional_collectives"


def is_distributed(tensor: Any) -> bool:
    """True for a ``DTensor``; asks nothing of torch unless some library has imported them."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(tensor, module.DTensor)


def may_be_parallel(tensors: Sequence[Tensor]) -> bool:
    """True if some tensor is distributed, or if attention may be split over the positions of an example."""
    module = sys.modules.get(_MODULE)
    if module is None:
        return False
    return attention_is_split() or any([isinstance(tensor, module.DTensor) for tensor in tensors])


def is_internal(frame: FrameType | None) -> bool:
    """True for a call that ``torch.distributed`` makes itself, to move shards about."""
    while frame is not None and frame.f_globals.get("__name__") == "torch._ops":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("torch.distributed.")


def on_this_rank(tensor: Any) -> Tensor:
    """Returns this rank's part of a tensor, which is the tensor itself unless it is distributed; without a gradient."""
    if type(tensor) is Tensor:
        return tensor
    if is_distributed(tensor):
        with torch.no_grad():
            tensor = tensor.to_local()
    collectives = sys.modules.get(_COLLECTIVES)
    if collectives is not None and isinstance(tensor, collectives.AsyncCollectiveTensor):
        return collectives.wait_tensor(tensor.elem)
    return tensor


def whole_losses(losses: Any) -> Tensor:
    """Returns losses as an ordinary tensor, whole on every rank, with their graph."""
    if is_distributed(losses):
        losses = losses.full_tensor()
    collectives = sys.modules.get(_COLLECTIVES)
    if collectives is not None and isinstance(losses, collectives.AsyncCollectiveTensor):
        return losses.clone()  # any op waits for it
    return losses


@dataclass(frozen=True)
class Placed:
    """Where the entries of a gradient are wanted: whole on every rank, or sharded in one dimension."""

    mesh: Any
    placements: tuple[Any, ...]

    @staticmethod
    def gradient_of(y: Tensor) -> Placed:
        """Returns where the gradient in y belongs: where y is, and whole if y is a sum of the ranks' tensors."""
        whole = sys.modules[_MODULE].Replicate()
        y_: Any = y
        return Placed(y_.device_mesh, tuple(whole if place.is_partial() else place for place in y_.placements))

    def local(self, gradient: Tensor) -> Tensor:
        """Returns this rank's part of the gradient; a collective, if it arrives otherwise."""
        if is_distributed(gradient):
            moved: Any = gradient
            if tuple(moved.placements) != self.placements:
                with torch.no_grad():
                    moved = moved.redistribute(self.mesh, self.placements)
            gradient = moved
        return on_this_rank(gradient)


def local_gradient(gradient: Tensor | None, parameter: Tensor) -> Tensor | None:
    """Returns this rank's part of the gradient in a parameter."""
    if gradient is None or not is_distributed(parameter):
        return gradient if gradient is None else on_this_rank(gradient)
    return Placed.gradient_of(parameter).local(gradient)


@dataclass(frozen=True)
class WayBack:
    """The way from a distributed weight, which was computed from parameters, back to these.

    Args:
        weight: as the model used it.
        leaves: the parameters.
    """

    weight: Tensor
    leaves: tuple[Tensor, ...]

    def pull(self, gradients: Tensor) -> list[Tensor]:
        """Returns gradients in this rank's parts of the parameters, given one in this rank's part of the weight."""
        weight: Any = self.weight
        if is_distributed(weight):
            gradients = sys.modules[_MODULE].DTensor.from_local(
                gradients, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape,
                stride=weight.stride(),
            )  # fmt: skip
        with torch.enable_grad():
            found = torch.autograd.grad(self.weight, self.leaves, gradients, retain_graph=True)
        local = [local_gradient(g, leaf) for g, leaf in zip(found, self.leaves, strict=True)]
        return [g.clone(memory_format=torch.contiguous_format) for g in local if g is not None]

    def pull_rows(self, rows: Tensor) -> list[Tensor]:
        """Returns rows (n, *shape) in the parameters, one after the other, because each may need a collective."""
        found = [self.pull(row) for row in rows]
        return [torch.stack(of_leaf) for of_leaf in zip(*found, strict=True)]


class PartsOfCall:
    """One call of an op on distributed tensors, as this rank runs it on its own.

    Args:
        func: the op.
        names: of the parameters that are used, for messages.
        data: the tensors among the inputs that are not weights.
        y: the result, or the first of several.
    """

    def __init__(self, func: Callable, names: tuple[str, ...], data: Sequence[Tensor], y: Tensor):
        self._func, self._names, self._y = func, names, y
        self._data = [_placement(t) for t in data if is_distributed(t)]
        self._y_place = _placement(y) if is_distributed(y) else None

    def localized(self, tree: Any, pieces: Mapping[int, Tensor]) -> Any:
        """Returns arguments with this rank's tensors in place of distributed ones; ``pieces`` by the weight's id."""

        def local(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) in pieces:
                return pieces[id(value)]
            if is_distributed(value) and _placement(value).is_partial():
                with torch.no_grad():
                    value = Placed.gradient_of(value).local(value)
            return on_this_rank(value)

        return tree_map(local, tree)

    @property
    def is_replicated(self) -> bool:
        """True if data and result are whole on every rank."""
        return all(place is None or place.is_replicate() for place in (*self._data, self._y_place))

    def use(self, use: Use, weight: Tensor, args: tuple, kwargs: dict) -> Use:
        """Returns the use as this rank makes it, of its part of the weight.

        Args:
            use: found by the op's rule for local arguments.
            weight: distributed, or an ordinary tensor, which is the same on all ranks.
            args: the local arguments.
            kwargs: the local keyword arguments.

        Raises:
            Refused: the rows of this rank's part cannot be computed from its part of the data.
        """
        y = self._y_place
        if y is None:
            return use
        w = _placement(weight) if is_distributed(weight) else None
        if w is None or w.is_replicate():
            if y.is_shard():
                raise Refused(self._positions_sharded(y))
            if use.saved() and not all(place.is_replicate() or place.is_partial() for place in self._data):
                raise Refused(self._unknown(w, y))
            return use
        if not w.is_shard() or y.is_replicate() or _has_empty_shards(weight):
            raise Refused(self._unknown(w, y))
        if y.is_shard():
            if isinstance(use, EntrywiseUse) and y.dim - self._y.ndim != w.dim - weight.ndim:
                raise Refused(self._unknown(w, y))
        elif self._func is F.embedding and w.dim == 0:
            return ShardedLookUpUse.of(use, weight)
        if not self._runs_locally(args, kwargs):
            raise Refused(self._unknown(w, y))
        return use

    def _runs_locally(self, args: tuple, kwargs: dict) -> bool:
        """True if the op on local tensors has a result of the local result's shape."""

        def shape_of(value: Any) -> Any:
            return value.to("meta") if isinstance(value, Tensor) else value

        with torch.no_grad():
            try:
                out = self._func(*tree_map(shape_of, args), **tree_map(shape_of, kwargs))
            except (RuntimeError, NotImplementedError):
                return False
        return isinstance(out, Tensor) and out.shape == on_this_rank(self._y).shape

    def _positions_sharded(self, y: Any) -> str:
        return (
            f"tape: parameter {listed(self._names)} is replicated over the tensor-parallel mesh, but the output of "
            f"{self._op!r} is sharded in dimension {y.dim}, so that every rank has only some positions of an example, "
            "and a term of its gradient, from which the norm of the whole does not follow. Freeze this parameter "
            "(requires_grad_(False)), or leave its module out of the parallel plan (no SequenceParallel), so that it "
            "runs on whole activations."
        )

    def _unknown(self, w: Any, y: Any) -> str:
        placed = "an ordinary tensor" if w is None else str(w)
        return (
            f"tape: parameter {listed(self._names)} ({placed}) is used by {self._op!r} on data placed as "
            f"{[str(place) for place in self._data]} with an output placed as {y}; its rows are not known from the "
            "tensors of one rank. Use ColwiseParallel or RowwiseParallel for this module, in shards that are not "
            "empty, leave it out of the parallel plan, or freeze the parameter."
        )

    @property
    def _op(self) -> str:
        return getattr(self._func, "__name__", str(self._func))


@dataclass(frozen=True)
class ShardedLookUpUse(EmbeddingUse):
    """Records ``y = W[ids]`` where each rank has some vectors of the table, and gives zeros for others.

    ``elsewhere`` marks the ids of other ranks, and padding: their gradients are not this rank's.
    """

    elsewhere: Tensor | None = None
    of_table: int | None = None  # the row of padding in the whole table

    @property
    def padding(self) -> int | None:
        return self.of_table

    @staticmethod
    def of(use: Use, weight: Any) -> ShardedLookUpUse:
        """Returns the use for the ids that this rank has, of a table sharded in its first dimension."""
        assert isinstance(use, EmbeddingUse)
        start = _first_row(weight)
        padding, ids = use.padding_idx, use.ids - start
        elsewhere = (ids < 0) | (ids >= len(use.weight))
        if padding is not None:
            padding %= weight.shape[0]
            elsewhere |= use.ids == padding
        return ShardedLookUpUse(use.weight, torch.where(elsewhere, 0, ids), None, elsewhere, padding)

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        assert self.elsewhere is not None
        return super().op(
            b.masked_fill(self.elsewhere.view(*self.ids.shape, *(1,) * (b.ndim - self.ids.ndim)), 0), layout
        )


def _placement(tensor: Any) -> Any:
    """Returns the only placement of a distributed tensor."""
    if len(tensor.placements) != 1:
        raise Refused(
            f"tape: a tensor is distributed over a mesh of {len(tensor.placements)} dimensions in the model's forward. "
            'Give parallelize_module a mesh of one dimension, as mesh["tp"].'
        )
    return tensor.placements[0]


def _first_row(weight: Any) -> int:
    """Returns the number of the first row that this rank has of a tensor sharded in its first dimension."""
    size, ranks = weight.shape[0], weight.device_mesh.size()
    return min(size, -(-size // ranks) * weight.device_mesh.get_local_rank())


def _has_empty_shards(weight: Any) -> bool:
    """True if some rank has no part of a sharded tensor; the same on all ranks."""
    size, ranks = weight.shape[_placement(weight).dim], weight.device_mesh.size()
    return -(-size // ranks) * (ranks - 1) >= size


def splits_positions(func: Callable, tensors: Sequence[Any]) -> bool:
    """True if attention runs on tensors that are sharded by position, as context parallelism does."""
    if getattr(func, "__name__", "") not in ("scaled_dot_product_attention", "flex_attention"):
        return False
    places = [place for t in tensors if is_distributed(t) for place in t.placements]
    return any(place.is_shard() and place.dim == 2 for place in places)


def attention_is_split() -> bool:
    """True inside of torch's ``context_parallel``, which replaces the function of attention."""
    function = F.scaled_dot_product_attention
    return (getattr(function, "__module__", None) or "").startswith("torch.distributed.")


def refuse_split_positions(names: Sequence[str]) -> Refused:
    """Returns the refusal of context parallelism for trained parameters."""
    return Refused(
        f"tape: attention runs with context parallelism: every rank has only some positions of an example, and of the "
        f"rows of {listed(names)} only a term, from which the norm does not follow. Train without context_parallel; "
        "use tensor parallelism, activation checkpointing or shorter examples instead."
    )


def listed(names: Sequence[str]) -> str:
    """Returns names for a message."""
    return ", ".join(map(repr, names))
