# SPDX-License-Identifier: Apache-2.0
"""The Jacobian of the per-example losses: the n x p matrix that every algorithm asks three questions and none forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ._plan import cheapest, chunk_size, squared_norms
from .ops import Op
from .ops.dense import Rows, sum_rows


@dataclass(eq=False)
class Block:
    """All uses of one tensor ``weight``: a parameter (``direct``) or a function of parameters.

    ``rearranged`` says that weight is one parameter with its entries only moved about.
    """

    weight: Tensor
    names: tuple[str, ...]
    direct: bool
    rearranged: bool
    ops: list[Op] = field(default_factory=list)  # more than one: uses that have no common form

    def add(self, op: Op) -> None:
        """Merge one more use, with its cross terms, into an op it has a common form with."""
        for i, known in enumerate(self.ops):
            merged = known.merge(op)
            if merged is not None:
                self.ops[i] = merged
                return
        self.ops.append(op)

    def select(self, index: Tensor | slice) -> Block:
        """The same block for some of the examples only."""
        return Block(self.weight, self.names, self.direct, self.rearranged, [op.select(index) for op in self.ops])

    def rows(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rows by name, (n, *shape): the rows in the parameters behind the weight."""
        rows = sum_rows(self.ops).values
        return {self.names[0]: rows} if self.direct else self._pull_back(rows, parameters, batched=True)

    def weighted_sum(self, c: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Jᵀ c by name, (*shape,), in the parameters behind the weight."""
        first, *others = (op.weighted_sum(c.to(op.dtype)) for op in self.ops)
        total = sum(others, first)
        return {self.names[0]: total} if self.direct else self._pull_back(total, parameters, batched=False)

    def project(self, v: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """(n, k): J v, with the directions pushed forward from the parameters to the weight."""
        pushed = v[self.names[0]] if self.direct else self._push_forward(v, parameters)
        first, *others = (op.project(pushed.to(op.dtype)) for op in self.ops)
        return sum(others, first)

    def _pull_back(self, rows: Tensor, parameters: Mapping[str, Tensor], *, batched: bool) -> dict[str, Tensor]:
        """Through the chain of ops between parameters and weight, by one (batched) backward of that chain alone."""
        leaves = [parameters[name] for name in self.names]
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


class Jacobian:
    """The n x p matrix J whose row i is the gradient of example i's own loss, as a linear operator.

    Every answer is exact up to rounding; half precision is summed in float32. Rows of tied and re-used parameters
    are those of the whole use. All answers are detached from the graph.

    Guarantees:
        - ``squared_norms()[i]`` is the squared norm of row i over all parameters together.
        - ``weighted_sum(c)`` is Σᵢ cᵢ row_i; with c all ones, the ordinary gradient of the summed losses.
        - ``project(v)[i, j]`` is the inner product of row i with direction j.
    """

    def __init__(self, num_examples: int, dtype: torch.dtype, parameters: Mapping[str, Tensor], blocks: list[Block]):
        self.num_examples = num_examples
        self._dtype = dtype
        self._parameters = parameters
        self._blocks = blocks

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Name and shape of every parameter, in the model's order."""
        return {name: p.shape for name, p in self._parameters.items()}

    @torch.no_grad()
    def squared_norms(self, names: tuple[str, ...] | None = None) -> Tensor:
        """Squared norms of the rows, (n,), over all parameters or over those named."""
        wanted = set(self._parameters if names is None else names)
        total = torch.zeros(self.num_examples, device=self._device, dtype=torch.promote_types(self._dtype, torch.float))
        apart, joint = self._split(wanted)
        for block in apart:
            total += squared_norms(block.ops[0])
        if joint:
            total += self._joint_squared_norms(joint, wanted)
        return total

    @torch.no_grad()
    def weighted_sum(self, c: Tensor) -> dict[str, Tensor]:
        """Jᵀ c for weights c (n,): name -> a tensor of the parameter's shape."""
        total = {name: torch.zeros_like(p, memory_format=torch.contiguous_format) for name, p in self._unmet().items()}
        for block in self._blocks:
            for name, part in block.weighted_sum(c, self._parameters).items():
                total[name] = total[name] + part if name in total else part
        return {name: total[name] for name in self._parameters}

    @torch.no_grad()
    def project(self, v: Mapping[str, Tensor]) -> Tensor:
        """J v, (n, k), for k directions given as name -> (k, *shape); every parameter must be named."""
        missing = sorted(set(self._parameters) - set(v))
        if missing:
            raise ValueError(f"Jacobian.project: no direction for parameter {', '.join(map(repr, missing))}.")
        k = len(next(iter(v.values())))
        total = torch.zeros(self.num_examples, k, device=self._device, dtype=self._dtype)
        for block in self._blocks:
            total = total + block.project(v, self._parameters)
        return total

    @torch.no_grad()
    def rows(self) -> dict[str, Tensor]:
        """The rows themselves, name -> (n, *shape): n times the memory of the model."""
        total = {name: p.new_zeros(self.num_examples, *p.shape) for name, p in self._unmet().items()}
        for block in self._blocks:
            for name, part in block.rows(self._parameters).items():
                total[name] = total[name] + part if name in total else part
        return {name: total[name] for name in self._parameters}

    def select(self, index: Tensor | slice) -> Jacobian:
        """The rows of some of the examples only."""
        num_examples = len(torch.arange(self.num_examples, device=self._device)[index])
        return Jacobian(num_examples, self._dtype, self._parameters, [block.select(index) for block in self._blocks])

    def explain(self) -> str:
        """The plan as a table: per parameter its op, the method chosen for its norms, and what each would cost."""
        apart, _ = self._split(set(self._parameters))
        lines = [f"{'parameter':40} {'op':12} {'norms by':16} operations"]
        for block in self._blocks:
            label = ", ".join(block.names)
            for op in block.ops:
                kind = type(op).__name__.lower()
                if block in apart:
                    prices = ", ".join(f"{method.name} {method.flops:.2g}" for method in op.methods())
                    lines.append(f"{label:40} {kind:12} {cheapest(op).name:16} {prices}")
                else:
                    lines.append(f"{label:40} {kind:12} {'joint rows':16} uses without a common form are added first")
        return "\n".join(lines)

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self._parameters.values()), torch.device("cpu"))

    def _unmet(self) -> dict[str, Tensor]:
        met = {name for block in self._blocks for name in block.names}
        return {name: p for name, p in self._parameters.items() if name not in met}

    def _split(self, wanted: set[str]) -> tuple[list[Block], list[Block]]:
        """Blocks whose norms stand for themselves, and blocks whose rows must be added or pulled back first."""
        uses: dict[str, int] = {}
        for block in self._blocks:
            for name in block.names:
                uses[name] = uses.get(name, 0) + 1
        apart, joint = [], []
        for block in self._blocks:
            if wanted.isdisjoint(block.names):
                continue
            alone = block.rearranged and len(block.ops) == 1 and uses[block.names[0]] == 1
            (apart if alone else joint).append(block)
        return apart, joint

    def _joint_squared_norms(self, blocks: list[Block], wanted: set[str]) -> Tensor:
        names = {name for block in blocks for name in block.names}
        floats = self.num_examples * sum(self._parameters[name].numel() for name in names)
        size = chunk_size(self.num_examples, floats)
        parts = []
        for i in range(0, self.num_examples, size):
            rows: dict[str, Tensor] = {}
            for block in blocks:
                for name, part in block.select(slice(i, i + size)).rows(self._parameters).items():
                    rows[name] = rows[name] + part if name in rows else part
            parts.append(torch.stack([Rows(rows[name]).squared_norms() for name in names & wanted]).sum(0))
        return torch.cat(parts)
