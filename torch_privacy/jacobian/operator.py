# SPDX-License-Identifier: Apache-2.0
"""The Jacobian of the per-example losses: the n x p matrix that every algorithm asks three questions and none forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain, pairwise

import torch
from torch import Tensor

from .._torch_modes import exact
from ..ops import Op
from ..ops._base import in_sum_dtype
from ..ops.dense import Rows, squared_lengths, sum_rows
from .plan import Budget, choices, chunk_size, held_bytes, least_bytes, projections, rows_and_norms, squared_norms

# Rows with at most this many numbers are put side by side, and answer together: each call has its price.
SMALL = 2**16


# (weights of the rows, names of parameters) -> the weighted sum in these, by a backward of its own
Native = Callable[[Tensor, Sequence[str]], dict[str, Tensor]]


class NothingKept(Exception):
    """A question was asked of rows of which nothing but norms and one weighted sum can be had."""


@dataclass(eq=False)
class Block:
    """All uses of one tensor ``weight``: a parameter (``direct``) or a function of parameters.

    ``rearranged`` says that weight is one parameter with its entries only moved about.
    """

    weight: Tensor
    names: tuple[str, ...]
    direct: bool
    rearranged: bool
    rounds: bool  # the way back to the parameters rounds to half precision
    ops: list[Op] = field(default_factory=list)  # more than one: uses that have no common form
    norms: Tensor | None = None  # squared norms (n,) of the rows, where they were taken already
    method: str = ""  # by which method
    dropped: bool = False  # no op was kept
    held: int = 0  # bytes that a budget counts for it
    estimated: bool = False  # norms are not those of the rows

    @property
    def kind(self) -> str:
        """What its ops are, in words."""
        return " + ".join(type(op).__name__.lower() for op in self.ops)

    @property
    def stands_alone(self) -> bool:
        """Whether the rows in the weight have the norms of the rows in the parameter behind it.

        Not where the way back rounds: norms must be those of what is summed.
        """
        return self.rearranged and not self.rounds and len(self.ops) <= 1

    @property
    def small_rows(self) -> Rows | None:
        """Its rows, if they are the parameter's own and few enough to be joined with others."""
        if len(self.ops) == 1 and self.direct and not self.rounds and not self.estimated:
            (op,) = self.ops
            if isinstance(op, Rows) and op.values.numel() <= SMALL:
                return op
        return None

    @property
    def least_bytes(self) -> int:
        """Bytes that must be held of it until the clipped sum."""
        if self.stands_alone and self.small_rows is None:
            return least_bytes(self.ops[0])
        return sum(map(held_bytes, self.ops))

    def merge(self) -> None:
        """Bring uses that have a common form into it, with their cross terms: halves first, so that copies stay few."""
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

    def reduce(self, budget: Budget) -> None:
        """Take the norms of a block that stands for itself, and keep no more than the budget allows."""
        if self.small_rows is not None:
            self.hold(budget)
            return  # norms are taken of many together
        (op,) = self.ops
        choice = budget.choose(op)
        self.method, self.held = choice.method.name, choice.held
        if choice.keeps == "rows":
            rows, self.norms = rows_and_norms(op, choice.method)
            self.ops = [rows]
        else:
            self.norms = squared_norms(op, choice.method)
        if choice.keeps == "nothing":
            self.ops, self.dropped = [], True

    def hold(self, budget: Budget) -> None:
        """Keep all of it: its rows must be joined with others'."""
        self.held = self.least_bytes
        budget.hold(self.held)

    def select(self, index: Tensor | slice) -> Block:
        """The same block for some of the examples only."""
        if self.dropped:
            raise NothingKept
        norms = None if self.norms is None else self.norms[index]
        return replace(self, ops=[op.select(index) for op in self.ops], norms=norms)

    def rows(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rows by name, (n, *shape): the rows in the parameters behind the weight."""
        if self.dropped:
            raise NothingKept
        rows = sum_rows(self.ops).values
        return {self.names[0]: rows} if self.direct else self._pull_back(rows, parameters, batched=True)

    def weighted_sum(self, c: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Jᵀ c by name, (*shape,), in the parameters behind the weight."""
        if self.rounds:
            return self._sum_of_rows(c, parameters)
        first, *others = (op.weighted_sum(c.to(op.dtype)) for op in self.ops)
        total = sum(others, first)
        return {self.names[0]: total} if self.direct else self._pull_back(total, parameters, batched=False)

    def _sum_of_rows(self, c: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of the very rows, rounded on their way back, whose norms were taken."""
        total: dict[str, Tensor] = {}
        for part, rows in self._rows_in_parts(len(c), parameters):
            for name, of_name in rows.items():
                add = Rows(of_name).weighted_sum(c[part].to(of_name.dtype))
                total[name] = total[name] + add if name in total else add
        return total

    def _rows_in_parts(self, n: int, parameters: Mapping[str, Tensor]) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """The rows, in the type for sums, a chunk of examples at a time."""
        size = chunk_size(n, n * sum(parameters[name].numel() for name in self.names))
        for i in range(0, max(n, 1), size):
            part = slice(i, i + size)
            yield part, {name: in_sum_dtype(rows) for name, rows in self.select(part).rows(parameters).items()}

    def project(self, v: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """(n, k): J v, with the directions pushed forward from the parameters to the weight."""
        if self.dropped:
            raise NothingKept
        if self.rounds:  # of the very rows, too: their lengths and projections are compared
            parts = self._rows_in_parts(self.ops[0].num_examples, parameters)
            found = ([Rows(r).project(v[name].to(r.dtype)) for name, r in rows.items()] for _, rows in parts)
            return torch.cat([torch.stack(of_names).sum(0) for of_names in found])
        pushed = v[self.names[0]] if self.direct else self._push_forward(v, parameters)
        first, *others = (projections(op, pushed.to(op.dtype)) for op in self.ops)
        return sum(others, first)

    def _pull_back(self, rows: Tensor, parameters: Mapping[str, Tensor], *, batched: bool) -> dict[str, Tensor]:
        """Through the chain of ops between parameters and weight, by one (batched) backward of that chain alone."""
        leaves = [parameters[name] for name in self.names]
        if batched and not len(rows):  # torch cannot batch nothing
            return {name: rows.new_zeros(0, *leaf.shape) for name, leaf in zip(self.names, leaves, strict=True)}
        with torch.enable_grad():
            pulled = torch.autograd.grad(
                self.weight, leaves, rows.to(self.weight.dtype), retain_graph=True, is_grads_batched=batched
            )
        # Autograd may give one tensor to several leaves, or one that repeats an entry; callers add in place.
        own = (g.clone(memory_format=torch.contiguous_format) for g in pulled)
        return dict(zip(self.names, own, strict=True))

    def _push_forward(self, v: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """(k, *weight.shape): derivatives of the weight along v, as the derivative of a backward in its cotangent."""
        leaves = [parameters[name] for name in self.names]
        with torch.enable_grad():
            u = torch.zeros_like(self.weight, requires_grad=True)
            pulled = torch.autograd.grad(self.weight, leaves, u, create_graph=True)
            directions = zip(*(v[name] for name in self.names), strict=True)
            pushed = [torch.autograd.grad(pulled, u, direction, retain_graph=True)[0] for direction in directions]
        return torch.stack(pushed)


@dataclass(frozen=True)
class PlanRow:
    """One line of the plan: how norms and clipped sum of one block are made, with their price."""

    names: tuple[str, ...]
    op: str
    norms_by: str
    keeps: str
    operations: float
    held_bytes: int
    prices: Mapping[str, float]  # method -> operations for the norms

    def cells(self) -> tuple[str, ...]:
        """The line as text."""
        prices = ", ".join(f"{name} {price:.2g}" for name, price in self.prices.items())
        names, size = ", ".join(self.names), f"{self.held_bytes / 2**20:.2f}"
        return names, self.op, self.norms_by, self.keeps, f"{self.operations:.2g}", size, prices


def _disjoint(blocks: list[Block]) -> bool:
    """Whether all weights are pieces of one parameter's memory that do not overlap, as the chunks of a matrix are."""
    if len(blocks) == 1:
        return True
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


class Jacobian:
    """The n x p matrix J whose row i is the gradient of example i's own loss, as a linear operator.

    Every answer is exact up to rounding; half precision is summed in float32. Rows of tied and re-used parameters
    are those of the whole use. All answers are detached from the graph.

    Guarantees:
        - ``squared_norms()[i]`` is the squared norm of row i over all parameters together.
        - ``weighted_sum(c)`` is Σᵢ cᵢ row_i; with c all ones, the ordinary gradient of the summed losses.
        - ``project(v)[i, j]`` is the inner product of row i with direction j.
    """

    def __init__(
        self,
        num_examples: int,
        dtype: torch.dtype,
        parameters: Mapping[str, Tensor],
        blocks: list[Block],
        *,
        used_up: bool = False,
        native: Native | None = None,
    ):
        self.num_examples = num_examples
        self._native = native  # for the blocks of which nothing was kept
        self._used_up = used_up  # by its first weighted sum, block by block, so that memory is freed on the way
        self._dtype = dtype
        self._all = parameters
        self._parameters = parameters
        self._blocks = blocks
        self._side_by_side: tuple[list[Block], Tensor] | None = None
        self._estimates: Tensor | None = None  # squared norms (n,) of whole rows that take the place of the exact ones

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Name and shape of every parameter, in the model's order."""
        return {name: p.shape for name, p in self._parameters.items()}

    @exact
    def squared_norms(self, names: tuple[str, ...] | None = None) -> Tensor:
        """Squared norms of the rows, (n,), over all parameters or over those named."""
        if self._estimates is not None:
            assert names is None
            return self._estimates
        wanted = set(self._parameters if names is None else names)
        total = torch.zeros(self.num_examples, device=self._device, dtype=self._sum_dtype)
        apart, joint = self._split(wanted)
        joined, values = self._joined()
        if joined and len(joined) == sum([block.small_rows is not None for block in apart]):
            total += squared_lengths(values)
            apart = [block for block in apart if block.small_rows is None]
        for block in apart:
            total += squared_norms(block.ops[0]) if block.norms is None else block.norms
        if joint:
            total += self._joint_squared_norms(joint, wanted)
        return total

    @exact
    def weighted_sum(self, c: Tensor) -> dict[str, Tensor]:
        """Jᵀ c for weights c (n,): name -> a tensor of the parameter's shape."""
        total = {name: torch.zeros_like(p, memory_format=torch.contiguous_format) for name, p in self._unmet().items()}
        joined, values = self._joined()
        sums = (c.to(values.dtype) @ values).split([block.weight.numel() for block in joined]) if joined else ()
        dropped = [block for block in self._blocks if block.dropped]
        parts = [{block.names[0]: part.view(block.weight.shape)} for block, part in zip(joined, sums, strict=True)]
        done = {id(block) for block in (*joined, *dropped)}
        others = (self._sum_of(block, c) for block in self._blocks if id(block) not in done)
        if dropped:
            assert self._native is not None
            parts.append(self._native(c, [block.names[0] for block in dropped]))
        for part in chain(parts, others):
            for name, tensor in part.items():
                total[name] = total[name] + tensor if name in total else tensor
        return {name: total[name] for name in self._parameters}

    @torch.no_grad()
    def parts_of_sum(self, c: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What adds up to ``weighted_sum(c)``, piece by piece: (name, a part of the sum in that parameter)."""
        for block in self._blocks:
            for name, part in block.weighted_sum(c, self._all).items():
                if name in self._parameters:
                    yield name, part

    @exact
    def project(self, v: Mapping[str, Tensor]) -> Tensor:
        """J v, (n, k), for k directions given as name -> (k, *shape); every parameter must be named."""
        missing = sorted(set(self._parameters) - set(v))
        if missing:
            raise ValueError(f"Jacobian.project: no direction for parameter {', '.join(map(repr, missing))}.")
        k = len(next(iter(v.values())))
        met = {name for block in self._blocks for name in block.names}
        others = {name: p.new_zeros(k, *p.shape) for name, p in self._all.items() if name in met - set(v)}
        directions = {**v, **others}
        total = torch.zeros(self.num_examples, k, device=self._device, dtype=self._sum_dtype)
        for block in self._blocks:
            total = total + block.project(directions, self._all)
        return total

    def rounding(self, names: Iterable[str]) -> float:
        """The coarsest relative rounding of lengths, products and sums in these columns."""
        names = set(names)
        dtypes = {self._sum_dtype, *(p.dtype for name, p in self._parameters.items() if name in names)}
        dtypes |= {op.dtype for block in self._blocks if not names.isdisjoint(block.names) for op in block.ops}
        return max(torch.finfo(torch.promote_types(dtype, torch.float32)).eps for dtype in dtypes)

    @exact
    def rows(self) -> dict[str, Tensor]:
        """The rows themselves, name -> (n, *shape): n times the memory of the model."""
        total = {name: p.new_zeros(self.num_examples, *p.shape) for name, p in self._unmet().items()}
        for block in self._blocks:
            for name, part in block.rows(self._all).items():
                total[name] = total[name] + part if name in total else part
        return {name: total[name] for name in self._parameters}

    def select(self, index: Tensor | slice) -> Jacobian:
        """The rows of some of the examples only."""
        num_examples = len(torch.arange(self.num_examples, device=self._device)[index])
        some = self._like(num_examples, self._parameters, [block.select(index) for block in self._blocks])
        return some.estimated(None if self._estimates is None else self._estimates[index])

    def estimated(self, squared_norms: Tensor | None) -> Jacobian:
        """The same rows, of which these estimates (n,) are said to be the squared norms; None changes nothing."""
        if squared_norms is None:
            return self
        other = self._like(self.num_examples, self._parameters, self._blocks)
        other._estimates = squared_norms
        return other

    @exact
    def squared_bounds(self, bounds: Callable[[Op], Tensor]) -> Tensor:
        """Bounds on the squared norms of the rows (n,), from ``bounds`` on those of ops where these stand alone."""
        apart, joint = self._split(set(self._parameters))
        squares = [bounds(block.ops[0]).square() for block in apart]
        if joint:
            squares.append(self._joint_squared_norms(joint, set(self._parameters)))
        return torch.stack(squares).sum(0)

    def restricted(self, names: Iterable[str]) -> Jacobian:
        """The columns of some of the parameters only."""
        names = set(names)
        if len(names) == len(self._all) == len(self._parameters):
            return self
        kept = {name: p for name, p in self._parameters.items() if name in names}
        blocks = [block for block in self._blocks if not names.isdisjoint(block.names)]
        return self._like(self.num_examples, kept, blocks)

    def _like(self, num_examples: int, parameters: Mapping[str, Tensor], blocks: list[Block]) -> Jacobian:
        other = Jacobian(num_examples, self._dtype, self._all, blocks, used_up=self._used_up, native=self._native)
        other._parameters = parameters
        return other

    def plan(self) -> list[PlanRow]:
        """How norms and sums are computed, block by block, if memory is no concern."""
        apart, joint = self._split(set(self._parameters))
        rows = []
        for block in apart:
            best = choices(block.ops[0])[0]
            prices = {method.name: method.flops for method in block.ops[0].methods()}
            rows.append(PlanRow(block.names, block.kind, best.method.name, best.keeps, best.cost, best.held, prices))
        for block in joint:
            bests = [choices(op)[0] for op in block.ops]
            cost, held = sum(best.cost for best in bests), sum(best.held for best in bests)
            rows.append(PlanRow(block.names, block.kind, "joint rows", "x and b", cost, held, {}))
        return rows

    def explain(self) -> str:
        """The plan as a table: per parameter its op, how norms and sum are made, operations, bytes, other methods."""
        head = ("parameter", "op", "norms by", "kept for the sum", "operations", "MiB", "prices of all methods")
        table = [head, *(row.cells() for row in self.plan())]
        widths = [max(len(line[k]) for line in table) for k in range(len(head) - 1)]
        return "\n".join(
            "  ".join(f"{cell:{width}}" for cell, width in zip(line, [*widths, 0], strict=True)).rstrip()
            for line in table
        )

    def _sum_of(self, block: Block, c: Tensor) -> dict[str, Tensor]:
        total = block.weighted_sum(c, self._all)
        if self._used_up and all([name in self._parameters for name in block.names]):  # no other group needs it
            block.ops = []
        return total

    def _joined(self) -> tuple[list[Block], Tensor]:
        """The blocks of small rows, and these side by side: (n, their entries)."""
        if self._side_by_side is None:
            small = [block for block in self._blocks if block.small_rows is not None]
            rows = [block.ops[0].rows().unsqueeze(-1) for block in small]  # also of a scalar
            same = {values.dtype for values in rows}
            if len(small) > 1 and len(same) == 1:
                self._side_by_side = small, torch.cat([values.flatten(1) for values in rows], 1)
            else:
                self._side_by_side = [], torch.empty(0)
        return self._side_by_side

    @property
    def _sum_dtype(self) -> torch.dtype:
        """The widest type of losses and parameters, and not half precision: lengths are sums over all of these."""
        least = torch.promote_types(self._dtype, torch.float32)
        return reduce(torch.promote_types, (p.dtype for p in self._all.values()), least)

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self._parameters.values()), torch.device("cpu"))

    def _unmet(self) -> dict[str, Tensor]:
        met = {name for block in self._blocks for name in block.names}
        return {name: p for name, p in self._parameters.items() if name not in met}

    def _split(self, wanted: set[str]) -> tuple[list[Block], list[Block]]:
        """Blocks whose norms stand for themselves, and blocks whose rows must be added or pulled back first."""
        sharing: dict[str, list[Block]] = {}
        for block in self._blocks:
            for name in block.names:
                sharing.setdefault(name, []).append(block)
        apart, joint = [], []
        for block in self._blocks:
            if wanted.isdisjoint(block.names):
                continue
            alone = block.stands_alone and _disjoint(sharing[block.names[0]])
            (apart if alone else joint).append(block)
        return apart, joint

    def _joint_squared_norms(self, blocks: list[Block], wanted: set[str]) -> Tensor:
        names = {name for block in blocks for name in block.names}
        floats = self.num_examples * sum(self._all[name].numel() for name in names)
        size = chunk_size(self.num_examples, floats)
        parts = []
        for i in range(0, max(self.num_examples, 1), size):
            rows: dict[str, Tensor] = {}
            for block in blocks:
                for name, part in block.select(slice(i, i + size)).rows(self._all).items():
                    part = in_sum_dtype(part)
                    rows[name] = rows[name] + part if name in rows else part
            parts.append(torch.stack([Rows(rows[name]).squared_norms() for name in names & wanted]).sum(0))
        return torch.cat(parts)
