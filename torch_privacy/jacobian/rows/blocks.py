# SPDX-License-Identifier: Apache-2.0
"""Blocks of the Jacobian: all uses of one weight, and what is kept of them until the clipped sum."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from ...ops import Op
from ...ops._base import chunk_size, in_sum_dtype, outer
from ...ops.dense import Rows, sum_rows
from ...ops.fallback import dense, for_each_cotangent
from ...ops.linear import Linear
from ...support.validate import Refused
from ..parallel.shards import WayBack
from .norms import first_squared_norms, projections, rows_and_norms, settled
from .plan import Choice, MemoryBudget, choices, held_bytes, least_bytes

SMALL = 2**16  # rows with at most this many numbers are joined and answer together: each call has its price

CONTIGUOUS = torch.contiguous_format

OuterProduct = tuple[Tensor, Tensor]  # the factors of a direction in the space of a weight: shape[:1] and shape[1:]
Direction = Callable[[torch.Size, torch.device], OuterProduct]  # (shape, device) -> one in a weight of that shape


Plan = tuple[str, Choice, dict[str, float]]  # the op's kind, what is chosen for it, and the prices of all methods


class NothingKept(Exception):
    """Raised by questions about rows of which only norms and one weighted sum remain."""


class NativeSum(Protocol):
    """Gives the weighted sum of blocks of which nothing was kept, by one ordinary backward for all of them."""

    @property
    def projects(self) -> bool:
        """True if rows are projected before they are left out."""
        ...

    def directions(self, name: str, weight: Tensor) -> Mapping[Hashable, OuterProduct]:
        """Returns the directions for this, each with a key; that of the one that confirms the sum is None."""
        ...

    def expect(self, name: str) -> None:
        """Adds a parameter, before the first sum."""

    def __call__(self, c: Tensor, name: str) -> Tensor:
        """Returns Jᵀ c in one of the parameters."""
        ...

    def confirm(self, name: str, total: Tensor, product: Tensor, scale: Tensor) -> None:
        """Receives a sum, its product with the direction of key None as the rows have it, and the rows' lengths."""


@dataclass(eq=False)
class Block:
    """All uses of one tensor ``weight``: a parameter (``direct``) or a function of parameters.

    ``rearranged`` means that the weight is one parameter with its entries in another order. The fields below ``ops``
    say what is kept of the block; only its own methods set them.
    """

    weight: Tensor
    names: tuple[str, ...]
    direct: bool
    rearranged: bool
    rounds: bool  # the way back to the parameters rounds to half precision
    way_back: WayBack | None = None  # if parameters or weight are distributed over several ranks
    ops: list[Op] = field(default_factory=list)  # more than one: uses without a common form
    norms: Tensor | None = None  # squared norms (n,) of the rows, if they are known already
    native: NativeSum | None = None  # gives the sum if no op was kept
    products: dict[Hashable, Tensor] = field(default_factory=dict)  # (n,) with the directions of ``native``
    summed_once: bool = False  # the ops are freed by the first sum that covers all of the block's parameters
    plan_of_op: Plan | None = None  # of the op that its rows replaced
    keeps: object = None  # something that must exist as long as the block
    joint: bool = False  # it is known to stand alone, and to answer jointly

    @property
    def kind(self) -> str:
        """Returns the kinds of its ops, as text."""
        return " + ".join(type(op).__name__.lower() for op in self.ops)

    @property
    def dropped(self) -> bool:
        """True if no op was kept."""
        return self.native is not None

    @property
    def stands_alone(self) -> bool:
        """True if the rows in the weight have the norms of the rows in the parameter behind it.

        False where the way back rounds: norms must be those of the rows that are summed.
        """
        return self.rearranged and not self.rounds and len(self.ops) <= 1

    @property
    def answers_jointly(self) -> bool:
        """True if it is cheaper to answer for it together with other blocks: few rows, or outer products."""
        if len(self.ops) != 1 or not self.direct or self.rounds:
            return False
        op: Any = self.ops[0]  # compared by type, because isinstance is slow for abstract classes
        kind = type(op)
        return (kind is Rows and op.values.numel() <= SMALL) or (kind is Linear and op.is_short_outer_product)

    @property
    def least_bytes(self) -> int:
        """Returns the bytes that must be held of it until the clipped sum."""
        if self.stands_alone and not self.answers_jointly:
            return least_bytes(self.ops[0])
        return sum(map(held_bytes, self.ops))

    def plan(self) -> Plan:
        """Returns the plan of a block that stands alone, if memory does not matter."""
        if self.plan_of_op is not None:
            return self.plan_of_op
        prices = {method.name: method.flops for method in self.ops[0].methods()}
        return self.kind, choices(self.ops[0])[0], prices

    # What is kept, while the backward runs

    def merge(self) -> None:
        """Merges uses that have a common form, with their cross terms: halves first, so that copies stay few."""
        ops = self.ops
        while len(ops) > 2:
            pairs = [_merged(ops[k : k + 2]) for k in range(0, len(ops), 2)]
            fewer = [op for pair in pairs for op in pair]
            if len(fewer) == len(ops):
                break
            ops = fewer
        done: list[Op] = []
        for op in ops:
            for k, known in enumerate(done):
                both = known.merge(op) or op.merge(known)
                if both is not None:
                    done[k] = both
                    break
            else:
                done.append(op)
        self.ops = done

    def reduce(self, budget: MemoryBudget, native: NativeSum) -> int:
        """Computes the norms of a block that stands alone; returns the bytes that it keeps, as the budget allows."""
        (op,) = self.ops
        if self.answers_jointly and (type(op) is Rows or not budget.may_drop):
            self.joint = True
            return budget.hold(held_bytes(op))  # norms are computed for many such blocks together
        # Products are with directions in the weight, so that it must be the parameter itself.
        choice = budget.choose(op, may_drop=self.direct or not native.projects)
        if choice.keeps == "rows":
            rows, self.norms = rows_and_norms(op, choice.method)
            self.ops = [rows]
        else:
            self.norms = first_squared_norms(op, choice.method)
        if choice.keeps == "nothing":
            self._drop(native)
        return choice.held

    def drop(self, native: NativeSum) -> None:
        """Keeps nothing but the norms, because other ranks of the tensor-parallel mesh keep no more."""
        if not self.dropped:
            self.norms = self.first_squared_norms()
            self._drop(native)

    def _drop(self, native: NativeSum) -> None:
        if native.projects and not self.direct:
            raise NothingKept
        for key, (left, right) in native.directions(self.names[0], self.weight).items():
            parts = [op.project_outer(left.to(op.dtype), right.to(op.dtype)) for op in self.ops]
            self.products[key] = sum(parts[1:], parts[0])
        self.ops, self.native = [], native
        native.expect(self.names[0])

    def keep_smaller_rows(self) -> None:
        """Keeps the rows of a block that stands alone, and their norms, if that is fast and takes no more memory."""
        if not self.answers_jointly:
            (op,) = self.ops
            choice = choices(op)[0]
            if choice.keeps == "rows" and choice.held <= held_bytes(op):
                self.plan_of_op = self.plan()
                rows, self.norms = rows_and_norms(op, choice.method)
                self.ops = [rows]

    def select(self, index: Tensor | slice) -> Block:
        """Returns the same block for some of the examples only."""
        if self.dropped:
            raise NothingKept
        if isinstance(index, Tensor) and index.device != self.weight.device:
            index = index.to(self.ops[0].device)
        norms = None if self.norms is None else self.norms[index]
        return replace(self, ops=[op.select(index) for op in self.ops], norms=norms)

    # Answers

    def first_squared_norms(self) -> Tensor:
        """Returns the squared norms (n,) of a block that stands alone; NaN where they must be settled."""
        return first_squared_norms(self.ops[0]) if self.norms is None else self.norms

    def settle(self) -> None:
        """Computes the norms of a block that stands alone again where they are NaN, from the rows."""
        if self.dropped:
            raise NothingKept
        self.norms = settled(self.ops[0], self.first_squared_norms())

    def rows(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns name -> (n, *shape), the rows in the parameters behind the weight."""
        if self.dropped:
            raise NothingKept
        rows = sum_rows(self.ops).values
        return {self.names[0]: rows} if self.direct else pulled_back(self, rows, parameters, batched=True)

    def weighted_sum(self, c: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns name -> (*shape,), Jᵀ c in the parameters behind the weight."""
        if self.native is not None:
            total = self.native(c, self.names[0])
            if None in self.products:
                assert self.norms is not None
                product, c = self.products[None], c.to(self.norms.device)
                self.native.confirm(self.names[0], total, c.to(product) @ product, c.to(self.norms) @ self.norms.sqrt())
            return {self.names[0]: total}
        if self.rounds:
            return self._sum_of_rows(c, parameters)
        first, *others = (op.weighted_sum(c.to(op.device, op.dtype)) for op in self.ops)
        total = sum(others, first)
        return {self.names[0]: total} if self.direct else pulled_back(self, total, parameters, batched=False)

    def last_weighted_sum(
        self, c: Tensor, parameters: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Returns `weighted_sum`, and frees a block that is summed once if all of its parameters are wanted."""
        total = self.weighted_sum(c, parameters)
        if self.summed_once and all([name in wanted for name in self.names]):
            self.ops = []
        return total

    def project(self, v: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """Returns J v (n, k), with the directions pushed forward from the parameters to the weight."""
        if self.dropped:
            raise NothingKept
        if self.rounds:  # the rounded rows, because their lengths and projections are compared
            return self._project_rows(v, parameters)
        try:
            pushed = v[self.names[0]] if self.direct else pushed_forward(self, v, parameters)
        except RuntimeError:  # the way back to the parameters has no second derivative, as through a sparse tensor
            return self._project_rows(v, parameters)
        first, *others = (projections(op, pushed.to(op.device, op.dtype)) for op in self.ops)
        return sum(others, first)

    def _project_rows(self, v: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        parts = self._rows_in_parts(self.ops[0].num_examples, parameters)
        found = ([Rows(r).project(v[name].to(r)) for name, r in rows.items()] for _, rows in parts)
        return torch.cat([torch.stack(of_names).sum(0) for of_names in found])

    def project_on(self, direction: Direction, parameters: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """Yields products (n,), which add up to those of the rows with one direction in each parameter.

        A direction in the weight would not do: its shape may differ from run to run, and with a part for each example,
        as a token has that is expanded to all, the product would depend on where in the batch an example is.
        """
        if self.dropped:
            yield self._product(direction)
        elif self.direct or self.way_back is not None:  # no direction can be pushed to a part on this rank
            left, right = direction(self.weight.shape, self.weight.device)
            for op in self.ops:
                yield op.project_outer(left.to(op.dtype), right.to(op.dtype))
        else:
            places = {name: (parameters[name].shape, parameters[name].device) for name in self.names}
            v = {name: outer(*direction(*place), place[0]).unsqueeze(0) for name, place in places.items()}
            yield self.project(v, parameters)[:, 0]

    def products_of_sum(
        self, c: Tensor, directions: Mapping[str, OuterProduct], parameters: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Returns name -> the product of Jᵀ c in this parameter with its direction."""
        if self.dropped:
            product = self._product(id(directions[self.names[0]][0]))
            return {self.names[0]: c.to(product) @ product}
        if self.direct and not self.rounds:
            left, right = directions[self.names[0]]
            products = [op.project_outer(left.to(op.dtype), right.to(op.dtype)) for op in self.ops]
            first, *others = [c.to(part) @ part for part in products]
            return {self.names[0]: sum(others, first)}
        found = self.weighted_sum(c, parameters)
        return {name: outer_product(directions[name], total) for name, total in found.items()}

    def _product(self, key: Hashable) -> Tensor:
        if key not in self.products:
            raise NothingKept
        return self.products[key]

    def _sum_of_rows(self, c: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the weighted sum of the same rounded rows that the norms were computed from."""
        total: dict[str, Tensor] = {}
        for part, rows in self._rows_in_parts(len(c), parameters):
            for name, of_name in rows.items():
                add = Rows(of_name).weighted_sum(c[part].to(of_name))
                total[name] = total[name] + add if name in total else add
        return total

    def _rows_in_parts(self, n: int, parameters: Mapping[str, Tensor]) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Yields the rows in the type for sums, a chunk of examples at a time."""
        size = chunk_size(n, n * sum(parameters[name].numel() for name in self.names))
        for i in range(0, max(n, 1), size):
            part = slice(i, i + size)
            yield part, {name: in_sum_dtype(rows) for name, rows in self.select(part).rows(parameters).items()}


def outer_product(direction: OuterProduct, gradient: Tensor) -> Tensor:
    """Returns the product of a gradient with a direction."""
    left, right = direction
    flat = in_sum_dtype(gradient).reshape(len(left), right.numel())
    return left.to(flat.dtype) @ (flat @ right.flatten().to(flat.dtype))


def disjoint(blocks: list[Block]) -> bool:
    """True if all weights are pieces of one parameter's memory that do not overlap, like the chunks of a matrix."""
    spans = []
    for block in blocks:
        w = block.weight
        dense = sorted((stride, size) for stride, size in zip(w.stride(), w.shape, strict=True) if size > 1)
        expected = 1
        for stride, size in dense:
            if stride != expected:
                return False
            expected *= size
        if not (block.rearranged and w._is_view()) and not block.direct:
            return False
        spans.append((w.untyped_storage().data_ptr(), w.storage_offset(), w.storage_offset() + w.numel()))
    spans.sort()
    return all(a[0] == b[0] and a[2] <= b[1] for a, b in pairwise(spans))


def _merged(ops: list[Op]) -> list[Op]:
    both = ops[0].merge(ops[1]) if len(ops) == 2 else None
    return ops if both is None else [both]


def pulled_back(block: Block, rows: Tensor, parameters: Mapping[str, Tensor], *, batched: bool) -> dict[str, Tensor]:
    """Returns rows in the parameters behind a weight, by one (batched) backward from it to these alone."""
    names, weight = block.names, block.weight
    if block.way_back is not None:
        pulled = (block.way_back.pull_rows if batched else block.way_back.pull)(rows.to(weight.dtype))
        return dict(zip(names, pulled, strict=True))
    leaves = [parameters[name] for name in names]
    if batched and not len(rows):  # torch cannot batch an empty tensor
        return {name: rows.new_zeros(0, *leaf.shape) for name, leaf in zip(names, leaves, strict=True)}

    def backward(g: Tensor, *, batched: bool) -> Sequence[Tensor | None]:
        return torch.autograd.grad(weight, leaves, g, retain_graph=True, is_grads_batched=batched, allow_unused=True)

    with torch.enable_grad():
        rows = rows.to(weight.dtype)
        pulled = for_each_cotangent(backward, rows) if batched else backward(rows, batched=False)
    # Autograd may give one tensor to several leaves, or one that repeats an entry; callers add in place.
    copies = (
        rows.new_zeros(*rows.shape[:batched], *leaf.shape) if g is None else dense(g).clone(memory_format=CONTIGUOUS)
        for g, leaf in zip(pulled, leaves, strict=True)
    )
    return dict(zip(names, copies, strict=True))


def pushed_forward(block: Block, v: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
    """Returns the derivatives (k, *weight.shape) of a weight along v, by differentiating a backward."""
    if block.way_back is not None:
        raise Refused(
            f"Jacobian.project: the weight of parameter {', '.join(map(repr, block.names))} is computed from "
            "tensor-parallel parameters, along which no direction can be pushed. Use the parameter itself."
        )
    leaves = [parameters[name] for name in block.names]
    with torch.enable_grad():
        u = torch.zeros_like(block.weight, requires_grad=True)
        pulled = torch.autograd.grad(block.weight, leaves, u, create_graph=True)
        directions = zip(*(v[name].to(p.device) for name, p in zip(block.names, leaves, strict=True)), strict=True)
        pushed = [torch.autograd.grad(pulled, u, direction, retain_graph=True)[0] for direction in directions]
    return torch.stack(pushed)
