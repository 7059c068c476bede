# SPDX-License-Identifier: Apache-2.0
"""The Jacobian of the per-example losses, as an operator that answers three questions and never forms its rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from ...ops._base import chunk_size, in_sum_dtype
from ...ops.dense import Rows, squared_lengths
from ...ops.linear import Linear, OuterProducts
from ...support.torch_modes import exact
from ..parallel.ranks import NO_OTHERS, ModelRanks
from .blocks import Block, Direction, OuterProduct, disjoint
from .plan import choices


class JoinedBlocks:
    """Blocks that answer together, because for small ones every call of torch costs more than its arithmetic.

    Args:
        blocks: of one Jacobian; those that answer jointly are joined if there are several, all of one type
            and on one device.

    Attributes:
        blocks: those that are joined.
        ids: of these.
    """

    def __init__(self, blocks: Sequence[Block]):
        self._of_rows: list[Block] = []
        self._of_outer: list[Block] = []
        rows: list[Tensor] = []
        outer: list[Linear] = []
        kinds: set[tuple[torch.dtype, torch.device]] = set()
        for block in blocks:
            if block.joint or block.answers_jointly:
                op: Any = block.ops[0]
                if type(op) is Rows:
                    self._of_rows.append(block)
                    rows.append(op.values.unsqueeze(-1).flatten(1))  # also of a scalar
                    kinds.add((op.values.dtype, block.weight.device))
                else:
                    self._of_outer.append(block)
                    outer.append(op)
                    kinds.add((op.b.dtype, block.weight.device))
        if len(rows) + len(outer) < 2 or len(kinds) > 1:
            self._of_rows, self._of_outer, rows, outer = [], [], [], []
        self.blocks = [*self._of_rows, *self._of_outer]
        self.ids = {*map(id, self.blocks)}
        self._rows = torch.cat(rows, 1) if rows else None
        self._outer = OuterProducts(outer) if outer else None

    def squared_norms(self) -> Tensor:
        """Returns (n,), over all of the blocks."""
        parts = [] if self._rows is None else [squared_lengths(self._rows)]
        if self._outer is not None:
            parts.append(self._outer.squared_norms())
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def last_weighted_sum(self, c: Tensor) -> list[tuple[str, Tensor]]:
        """Returns the name of each block's parameter with Jᵀ c in it; frees the factors of blocks summed once."""
        found: list[tuple[str, Tensor]] = []
        if self._rows is not None:
            total, end = c.to(self._rows) @ self._rows, 0
            for block in self._of_rows:
                start, end = end, end + block.weight.numel()
                found.append((block.names[0], total[start:end].view(block.weight.shape)))
        if self._outer is not None:
            blocks, frees = self._of_outer, all(map(_summed_once, self._of_outer))
            op: Any = blocks[0].ops[0]
            c = c.to(blocks[0].weight.device, op.b.dtype)
            for block in blocks if frees else ():
                block.ops = []
            found += [(blocks[k].names[0], total) for k, total in self._outer.weighted_sums(c, frees=frees)]
        return found

    def project_on(self, direction: Direction) -> Iterator[Tensor]:
        """Yields the products (n,) of the rows with one direction in each weight."""
        if self._rows is not None:
            factors = [direction(block.weight.shape, self._rows.device) for block in self._of_rows]
            factors = [(left.to(self._rows.dtype), right.flatten().to(self._rows.dtype)) for left, right in factors]
            yield self._rows @ torch.cat([torch.outer(left, right).flatten() for left, right in factors])
        for block in self._of_outer:
            yield from block.project_on(direction, {})  # parameters themselves


_summed_once = attrgetter("summed_once")


class RowsOfBatch(Protocol):
    """The rows of one batch, with exact or estimated norms: three questions, as of a `Jacobian`."""

    @property
    def num_examples(self) -> int:
        """Returns the number of rows."""
        ...

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Returns name and shape of every parameter, in the model's order."""
        ...

    def squared_norms(self, *, final: bool = True) -> Tensor:
        """Returns the squared norms of the rows (n,); unless ``final``, NaN where that must wait for a GPU."""
        ...

    def project(self, v: Mapping[str, Tensor]) -> Tensor:
        """Returns J v (n, k) for k directions given as name -> (k, *shape)."""
        ...

    def weighted_sum(self, c: Tensor) -> dict[str, Tensor]:
        """Returns Jᵀ c for weights c (n,): name -> a tensor of the parameter's shape."""
        ...

    def select(self, index: Tensor | slice) -> RowsOfBatch:
        """Returns the rows of some of the examples only."""
        ...


class Jacobian:
    """The n x p matrix J whose row i is the gradient of example i's own loss, as a linear operator.

    It is asked three questions: ``squared_norms``, ``project`` and ``weighted_sum``. Every answer is exact up to
    rounding; half precision is summed in float32. Rows of tied and reused parameters cover all uses together. All
    answers are detached from the graph.

    Guarantees:
        - ``squared_norms()[i]`` is the squared norm of row i over all parameters together.
        - ``weighted_sum(c)`` is Σᵢ cᵢ row_i; with c all ones, the ordinary gradient of the summed losses.
        - ``project(v)[i, j]`` is the inner product of row i with direction j.

    Of a tensor-parallel model every rank has a part: norms and projections are those of the whole rows, by one
    all-reduce, and equal on all ranks; sums, rows and directions are those of the rank's own shards.
    """

    def __init__(
        self,
        num_examples: int,
        dtype: torch.dtype,
        parameters: Mapping[str, Tensor],
        blocks: list[Block],
        ranks: ModelRanks = NO_OTHERS,
    ):
        self._ranks, self.num_examples, self._dtype = ranks, num_examples, dtype
        self._all = self._parameters = parameters  # `_all` has those of other columns, behind the same weights, too
        self._blocks = blocks
        self._device = next(map(_device, parameters.values()), torch.device("cpu"))  # of one number for each example

    @property
    def depends_on_graph(self) -> bool:
        """True if some sums need another backward, because nothing was kept for them."""
        return any([block.dropped for block in self._blocks])

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Returns name and shape of every parameter, in the model's order."""
        return {name: p.shape for name, p in self._parameters.items()}

    # The three questions

    @exact
    def squared_norms(self, names: tuple[str, ...] | None = None, *, final: bool = True) -> Tensor:
        """Returns the squared norms of the rows (n,) over all parameters, or over those named.

        On a GPU some may have to be computed a second time, where a Gram matrix was inaccurate, and the host waits for
        that. Unless ``final`` these are NaN.
        """
        wanted = set(self._parameters if names is None else names)
        total = self._ranks.squared_norms(self._squared_norms_here, wanted)
        if final and total.device.type != "cpu" and total.isnan().any():
            for block in self._split(wanted)[0]:
                if not block.answers_jointly:
                    block.settle()
            total = self._ranks.squared_norms(self._squared_norms_here, wanted)
        return total

    @exact
    def check_equal(self) -> None:
        """Raises unless tensor-parallel ranks agree on the rows of the parameters that all of them have."""
        self._ranks.check_equal(self._squared_norms_here, set(self._parameters))

    def _squared_norms_here(self, wanted: set[str]) -> Tensor:
        """Returns the squared norms (n,) in this rank's parts of the wanted parameters."""
        separate, joint = self._split(wanted)
        joined = self._joined
        others = [block for block in separate if id(block) not in joined.ids]
        parts: list[Tensor] = []
        if joined.blocks and len(others) + len(joined.blocks) == len(separate):
            parts, separate = [joined.squared_norms()], others
        parts += [block.first_squared_norms() for block in separate]
        parts += [self._joint_squared_norms(joint, wanted)] if joint else []
        dtype = self._sum_dtype  # asks all parameters
        parts = [part.to(self._device, dtype) for part in parts]
        if len(parts) < 2:
            return parts[0] if parts else torch.zeros(self.num_examples, device=self._device, dtype=dtype)
        return torch.stack(parts).sum(0)

    @exact
    def project(self, v: Mapping[str, Tensor]) -> Tensor:
        """Returns J v (n, k) for k directions given as name -> (k, *shape); every parameter must be named."""
        missing = sorted(set(self._parameters) - set(v))
        if missing:
            raise ValueError(f"Jacobian.project: no direction for parameter {', '.join(map(repr, missing))}.")
        k = len(next(iter(v.values())))
        others = {name: self._all[name].new_zeros(k, *self._all[name].shape) for name in self._used() - set(v)}
        directions = {**v, **others}
        total = torch.zeros(self.num_examples, k, device=self._device, dtype=self._sum_dtype)
        return self._ranks.projections(self._blocks, directions, self._all, total)

    @exact
    def weighted_sum(self, c: Tensor) -> dict[str, Tensor]:
        """Returns Jᵀ c for weights c (n,): name -> a tensor of the parameter's shape."""
        total: dict[str, Tensor] = {}
        joined = self._joined
        for name, part in joined.last_weighted_sum(c):
            total[name] = total[name] + part if name in total else part
        for block in self._blocks:
            if id(block) not in joined.ids:
                for name, part in block.last_weighted_sum(c, self._all, self._parameters).items():
                    total[name] = total[name] + part if name in total else part
        for name in self._parameters.keys() - total.keys():  # no op used these
            total[name] = torch.zeros_like(self._all[name], memory_format=torch.contiguous_format)
        return dict(zip(self._parameters, map(total.__getitem__, self._parameters), strict=True))

    # Further questions, for the self-check, rehearsals and small models

    @torch.no_grad()
    def products_of_sum(self, c: Tensor, directions: Mapping[str, OuterProduct]) -> Iterator[tuple[str, Tensor]]:
        """Yields name and product with the parameter's direction, piece by piece; they add up to those of Jᵀ c."""
        for block in self._blocks:
            for name, part in block.products_of_sum(c, directions, self._all).items():
                if name in self._parameters:
                    yield name, part

    @torch.no_grad()
    def project_on(self, direction: Direction) -> Tensor:
        """Returns the product (n,) of each row with one direction.

        It is given in each parameter, and in a weight instead where ranks have parts of it.
        """
        total = torch.zeros(self.num_examples, dtype=self._sum_dtype, device=self._device)
        joined = self._joined
        others = [block for block in self._blocks if id(block) not in joined.ids]
        parts = (part for block in others for part in block.project_on(direction, self._all))
        for part in chain(parts, joined.project_on(direction)):
            total = total + part.to(total.device)
        return total

    def rounding(self, names: Iterable[str]) -> float:
        """Returns the coarsest relative rounding of lengths, products and sums in these columns."""
        names = set(names)
        dtypes = {self._sum_dtype, *(p.dtype for name, p in self._parameters.items() if name in names)}
        dtypes |= {op.dtype for block in self._blocks if not names.isdisjoint(block.names) for op in block.ops}
        return max(torch.finfo(torch.promote_types(dtype, torch.float32)).eps for dtype in dtypes)

    @exact
    def rows(self) -> dict[str, Tensor]:
        """Returns the rows themselves, name -> (n, *shape): n times the memory of the model."""
        unused = self._parameters.keys() - self._used()
        total = {name: self._all[name].new_zeros(self.num_examples, *self._all[name].shape) for name in unused}
        for block in self._blocks:
            for name, part in block.rows(self._all).items():
                total[name] = total[name] + part if name in total else part
        return {name: total[name] for name in self._parameters}

    # Parts of it

    def select(self, index: Tensor | slice) -> Jacobian:
        """Returns the rows of some of the examples only."""
        num_examples = len(torch.arange(self.num_examples, device=self._device)[index])
        return self._with(num_examples, self._parameters, [block.select(index) for block in self._blocks])

    def restricted(self, names: Iterable[str]) -> Jacobian:
        """Returns the columns of some of the parameters only."""
        names = set(names)
        if len(names) == len(self._all) == len(self._parameters):
            return self
        kept = {name: p for name, p in self._parameters.items() if name in names}
        blocks = [block for block in self._blocks if not names.isdisjoint(block.names)]
        return self._with(self.num_examples, kept, blocks)

    def _with(self, num_examples: int, parameters: Mapping[str, Tensor], blocks: list[Block]) -> Jacobian:
        other = Jacobian(num_examples, self._dtype, self._all, blocks, self._ranks)
        other._parameters = parameters
        return other

    def keep(self, what: object) -> None:
        """Keeps an object while there are blocks with weights that are computed from parameters."""
        for block in self._blocks:
            if not block.direct:
                block.keeps = what

    # The plan

    def plan(self) -> list[PlanRow]:
        """Returns how norms and sums are computed, block by block, if memory does not matter."""
        separate, joint = self._split(set(self._parameters))
        rows = []
        for block in separate:
            kind, best, prices = block.plan()
            rows.append(PlanRow(block.names, kind, best.method.name, best.keeps, best.cost, best.held, prices))
        for block in joint:
            bests = [choices(op)[0] for op in block.ops]
            cost, held = sum(best.cost for best in bests), sum(best.held for best in bests)
            rows.append(PlanRow(block.names, block.kind, "joint rows", "x and b", cost, held, {}))
        order = {name: number for number, name in enumerate(self._parameters)}
        return sorted(rows, key=lambda row: min(order[name] for name in row.names if name in order))

    def explain(self) -> str:
        """Returns the plan as a table: parameter, op, how norms and sum are made, operations, bytes, other methods."""
        head = ("parameter", "op", "norms by", "kept for the sum", "operations", "MiB", "prices of all methods")
        table = [head, *(row.cells() for row in self.plan())]
        widths = [max(len(line[k]) for line in table) for k in range(len(head) - 1)]
        return "\n".join(
            "  ".join(f"{cell:{width}}" for cell, width in zip(line, [*widths, 0], strict=True)).rstrip()
            for line in table
        )

    # How blocks are put together

    @cached_property
    def _joined(self) -> JoinedBlocks:
        return JoinedBlocks(self._blocks)

    @property
    def _sum_dtype(self) -> torch.dtype:
        """Returns the widest type of losses and parameters, at least float32, because lengths are sums over all."""
        widest = torch.promote_types(self._dtype, torch.float32)
        for p in self._all.values():
            if p.dtype is not widest:
                widest = torch.promote_types(widest, p.dtype)
        return widest

    def _used(self) -> set[str]:
        """Returns the parameters that some op used."""
        return {name for block in self._blocks for name in block.names}

    def _split(self, wanted: set[str]) -> tuple[list[Block], list[Block]]:
        """Returns the blocks with norms that add up, and those with rows that must be added or pulled back first."""
        sharing: dict[str, list[Block]] = {}
        for block in self._blocks:
            for name in block.names:
                sharing.setdefault(name, []).append(block)
        separate, joint = [], []
        for block in self._blocks:
            if wanted.isdisjoint(block.names):
                continue
            others = sharing[block.names[0]]
            alone = block.joint or (block.stands_alone and (len(others) == 1 or disjoint(others)))
            (separate if alone else joint).append(block)
        return separate, joint

    def _joint_squared_norms(self, blocks: list[Block], wanted: set[str]) -> Tensor:
        """Returns the squared norms (n,) in the wanted parameters, from rows that are added block by block."""
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
            squares = [Rows(rows[name]).squared_norms().to(self._device) for name in names & wanted]
            parts.append(torch.stack(squares).sum(0))
        return torch.cat(parts)


_device = attrgetter("device")


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
        """Returns the line as text."""
        prices = ", ".join(f"{name} {price:.2g}" for name, price in self.prices.items())
        names, size = ", ".join(self.names), f"{self.held_bytes / 2**20:.2f}"
        return names, self.op, self.norms_by, self.keeps, f"{self.operations:.2g}", size, prices
