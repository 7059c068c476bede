# SPDX-License-Identifier: Apache-2.0
"""The plan: which exact method answers for each op, and what is kept for the clipped sum, under a budget of memory.

Choices follow a model of costs, not a stopwatch: so one run repeats another bit for bit, on a busy machine as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .ops import Method, Op
from .ops._base import CHUNK_FLOATS
from .ops.dense import Rows

# A row entry that is kept is written once and read twice: as many operations as that takes.
KEPT_ENTRY = 60


@dataclass(frozen=True)
class Choice:
    """What is done with one op once its b is known: how its norms are found, and what stays for the clipped sum."""

    method: Method
    keeps: str  # "rows", or "x and b"
    cost: float  # operations for norms and sum
    held: int  # bytes held until the sum


def cheapest(op: Op) -> Method:
    """The method with the fewest operations for norms alone."""
    return min(op.methods(), key=lambda method: method.flops)


def choices(op: Op) -> list[Choice]:
    """Every way to get norms and clipped sum of an op, the fastest first."""
    methods = op.methods()
    makers = [method for method in methods if method.rows]
    sum_cost = min((method.flops for method in makers), default=0.0)
    least = min(methods, key=lambda method: method.flops)
    found = [Choice(least, "x and b", least.flops + sum_cost, held_bytes(op))]
    entries = op.num_examples * op.shape.numel()
    if makers and not isinstance(op, Rows):
        maker = min(makers, key=lambda method: method.flops)
        found.append(Choice(maker, "rows", maker.flops + KEPT_ENTRY * entries, entries * op.dtype.itemsize))
    return sorted(found, key=lambda choice: choice.cost)


def held_bytes(op: Op) -> int:
    """Bytes of the tensors that an op holds on to."""
    held = [getattr(op, field.name) for field in fields(op)]  # type: ignore[arg-type]
    return sum(tensor.numel() * tensor.itemsize for tensor in held if isinstance(tensor, Tensor))


def squared_norms(op: Op, method: Method | None = None) -> Tensor:
    """Squared norms (n,) of an op's rows by a method (the cheapest unless given), chunk by chunk."""
    method = method or cheapest(op)
    parts = [_norms_of(method, method.compute(part)) for part in _chunks(op, method)]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def rows_and_norms(op: Op, method: Method) -> tuple[Rows, Tensor]:
    """The rows of an op by a method that makes them, and their squared norms (n,)."""
    parts = [method.compute(part) for part in _chunks(op, method)]
    norms = [_norms_of(method, part) for part in parts]
    if len(parts) == 1:
        return Rows(parts[0]), norms[0]
    return Rows(torch.cat(parts)), torch.cat(norms)


def _norms_of(method: Method, answer: Tensor) -> Tensor:
    return Rows(answer).squared_norms() if method.rows else answer


def _chunks(op: Op, method: Method) -> list[Op]:
    n = op.num_examples
    size = chunk_size(n, method.floats)
    return [op] if size >= n else [op.select(slice(i, i + size)) for i in range(0, n, size)]


def chunk_size(num_examples: int, floats: float) -> int:
    """How many examples to take at a time so that temporaries of ``floats`` numbers for all stay within a chunk."""
    return max(1, num_examples // max(1, math.ceil(floats / CHUNK_FLOATS)))


class Budget:
    """Decides, op by op during the backward, what may be kept for the clipped sum.

    Args:
        limit: peak memory allowed: up to 100 in units of what non-private training needs (its activations and
            gradients), else in bytes.
        activations: bytes that autograd saved in the forward; they are freed as the backward goes on.
        on_the_way: bytes of all recorded ops' inputs and outputs, by which the progress of the backward is told.
        parameters: bytes of the parameters, and so of their gradients.
    """

    def __init__(self, limit: float, activations: int, on_the_way: int, parameters: int):
        self._limit = limit * (activations + parameters) if limit <= 100 else limit
        self._activations, self._on_the_way = activations, max(on_the_way, 1)
        self._passed = 0
        self._held = 0

    def passed(self, size: int) -> None:
        """The backward has gone past an op with so many bytes of inputs and outputs."""
        self._passed += size

    def choose(self, op: Op) -> Choice:
        """The fastest choice that fits, or the one that holds the least."""
        left = self._activations * max(0.0, 1 - self._passed / self._on_the_way)
        found = choices(op)
        fitting = [choice for choice in found if self._held + left + choice.held <= self._limit]
        choice = fitting[0] if fitting else min(found, key=lambda choice: choice.held)
        self._held += choice.held
        return choice


def saved_bytes(nodes: Iterable[Node], parameters: Iterable[Tensor]) -> int:
    """Bytes of the distinct tensors that autograd saved in these nodes, other than the parameters."""
    own = {p.untyped_storage().data_ptr() for p in parameters}
    sizes: dict[int, int] = {}
    for node in nodes:
        for tensor in _saved_by(node):
            storage = tensor.untyped_storage().data_ptr()
            if storage not in own:
                sizes[storage] = max(sizes.get(storage, 0), tensor.numel() * tensor.itemsize)
    return sum(sizes.values())


def _saved_by(node: Node) -> list[Tensor]:
    saved = []
    for name in _saved_names(type(node)):
        try:
            value = getattr(node, name)
        except RuntimeError:  # freed, or never saved
            continue
        saved += [t for t in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(t, Tensor)]
    return saved


@cache
def _saved_names(kind: type) -> tuple[str, ...]:
    """Attributes by which a kind of node shows the tensors it saved."""
    found = (name for name in dir(kind) if name.startswith("_saved_") or name == "saved_tensors")
    return tuple(name for name in found if name.removeprefix("_saved_") not in _NUMBERS)


# What nodes save beside tensors; asking for one takes as long as asking for a tensor.
_NUMBERS = {"dim", "alpha", "beta", "self_sym_sizes", "mat1_sym_sizes", "mat2_sym_sizes", "dims", "keepdim"}
