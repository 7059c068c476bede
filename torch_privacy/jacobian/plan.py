# SPDX-License-Identifier: Apache-2.0
"""The plan: which exact method answers for each op, and what is kept for the clipped sum, under a budget of memory.

Choices follow a model of costs, not a stopwatch: so one run repeats another bit for bit, on a busy machine as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..ops import Method, Op
from ..ops._base import CHUNK_FLOATS
from ..ops.dense import Rows

# Where rows are so large that malloc asks the system for fresh pages every time (glibc: above 32 MiB), keeping them
# costs this many times as much.
FRESH, FRESH_BYTES = 5, 2**25
FEW, MANY = 32, 128  # examples in a product with directions that do not fit the cache: of large rows, of small ones


@dataclass(frozen=True)
class Choice:
    """What is done with one op once its b is known: how its norms are found, and what stays for the clipped sum."""

    method: Method
    keeps: str  # "rows", "x and b", or "nothing": a second, native backward then gives the sum
    cost: float  # operations for norms and sum
    held: int  # bytes held until the sum
    passing: int = 0  # bytes of temporaries while the norms are taken


def cheapest(op: Op) -> Method:
    """The method with the fewest operations for norms alone."""
    return min(op.methods(), key=lambda method: method.flops)


def choices(op: Op) -> list[Choice]:
    """Every way to get norms and clipped sum of an op, the fastest first."""
    methods = op.methods()
    held = held_bytes(op)
    if len(methods) == 1:
        return [Choice(methods[0], "x and b", methods[0].flops, held, _passing(op, methods[0].floats))]
    makers = [method for method in methods if method.rows]
    least = min(methods, key=lambda method: method.flops)
    found = [Choice(least, "x and b", least.flops + op.sum_flops, held, _passing(op, least.floats))]
    if makers:
        maker = min(makers, key=lambda method: method.flops)
        entries = op.num_examples * op.shape.numel()
        size = entries * op.dtype.itemsize
        price = op.kept_entry * (1 if size <= FRESH_BYTES else FRESH)
        passing = _passing(op, maker.floats - entries)
        found.append(Choice(maker, "rows", maker.flops + price * entries, size, passing))
    return sorted(found, key=lambda choice: choice.cost)


def _passing(op: Op, floats: float) -> int:
    """Bytes of temporaries of so many numbers, which are made in chunks."""
    return int(min(max(floats, 0), CHUNK_FLOATS)) * op.dtype.itemsize


def least_bytes(op: Op) -> int:
    """Bytes that must be held of an op until the clipped sum."""
    return min(choice.held for choice in choices(op))


def held_bytes(held: Any) -> int:
    """Bytes of the tensors that an op holds on to, those of ops inside of it included."""
    if isinstance(held, Tensor):
        return held.numel() * held.itemsize
    if isinstance(held, Op):
        return sum(held_bytes(getattr(held, field.name)) for field in fields(held))  # type: ignore[arg-type]
    if isinstance(held, (tuple, list)):
        return sum(map(held_bytes, held))
    return 0


def squared_norms(op: Op, method: Method | None = None) -> Tensor:
    """Squared norms (n,) of an op's rows by a method (the cheapest unless given), chunk by chunk."""
    method = method or cheapest(op)
    parts = [_norms_of(part, method, method.compute(part)) for part in _chunks(op, method)]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def rows_and_norms(op: Op, method: Method) -> tuple[Rows, Tensor]:
    """The rows of an op by a method that makes them, and their squared norms (n,)."""
    n = op.num_examples
    size = chunk_size(n, method.floats - n * op.shape.numel())  # the rows themselves are there for all, anyway
    if size >= n:
        rows = method.compute(op)
        return Rows(rows), _norms_from(op, rows)
    values = torch.empty(n, *op.shape, dtype=op.dtype, device=op.device)
    norms = []
    for i in range(0, n, size):
        part = method.compute(op.select(slice(i, i + size)))
        values[i : i + size] = part
        norms.append(_norms_from(op, part))
    return Rows(values), torch.cat(norms)


def projections(op: Op, v: Tensor) -> Tensor:
    """J v (n, k) for k directions (k, *shape): by the op's own way, some directions at a time, or from its rows.

    Where an example has several positions, one product with its row is cheaper than one with every position.
    """
    n, k, size = op.num_examples, len(v), op.shape.numel()
    if isinstance(op, Rows) or not n or k == 1:
        return op.project(v)
    if op.sum_flops < 2 * n * size:
        some = max(1, CHUNK_FLOATS // (n * op.shape[-1]))
        return torch.cat([op.project(part) for part in v.split(some)], 1)
    step = max(chunk_size(n, n * size), min(k, max(FEW, min(MANY, FRESH_BYTES // max(1, 4 * size)))))
    return torch.cat([Rows(op.select(slice(i, i + step)).rows()).project(v) for i in range(0, n, step)])


def _norms_of(op: Op, method: Method, answer: Tensor) -> Tensor:
    return _norms_from(op, answer) if method.rows else answer


def _norms_from(op: Op, rows: Tensor) -> Tensor:
    estimated = op.norms_from(rows)
    return Rows(rows).squared_norms() if estimated is None else estimated


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
        limit: peak memory allowed: up to 100 in units of what non-private training needs (its activations, which are
            freed while its gradients come), else in bytes.
        activations: bytes that autograd keeps for the backward; they are freed as it goes on.
        least: bytes that have to be held for the clipped sum, however it is done.
        on_the_way: bytes of all recorded ops' inputs and outputs, by which the progress of the backward is told.
        parameters: bytes of the parameters, and so of their gradients.
    """

    may_drop = False  # whether nothing may be kept: then the graph has to stay for a second backward

    def __init__(self, limit: float, activations: float, least: float, on_the_way: int, parameters: int):
        self._limit = limit * max(activations, parameters) if limit <= 100 else limit
        self._least = least
        self._activations, self._on_the_way = activations, max(on_the_way, 1)
        self._passed, self._held, self._least_to_come = 0, 0, least

    @property
    def wants_second_backward(self) -> bool:
        """Whether the limit is too small for one: it needs the activations to its end, which must be less."""
        return self._least > max(self._limit, self._activations)

    def passed(self, size: int) -> None:
        """The backward has gone past an op with so many bytes of inputs and outputs."""
        self._passed += size

    def choose(self, op: Op) -> Choice:
        """The fastest choice that fits, now and with what must be held to the end, or the one that holds the least."""
        found = choices(op)
        least = min(found, key=lambda choice: choice.held)
        left = self._activations * max(0.0, 1 - self._passed / self._on_the_way)
        self._least_to_come -= least.held
        room = self._limit - self._held - max(left, self._least_to_come)
        if self.may_drop:
            room = self._limit - self._held - self._activations
            least = replace(least, keeps="nothing", held=0)
        choice = next((choice for choice in found if choice.held + choice.passing <= room), least)
        self._held += choice.held
        return choice

    def hold(self, size: int) -> None:
        """So many bytes are held that nothing can be chosen about."""
        self._held += size
        self._least_to_come -= size

    def release(self, size: int) -> None:
        """So many bytes are not held any more."""
        self._held -= size


def distinct_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, those that share memory counted once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        start = tensor.data_ptr()
        sizes[start] = max(sizes.get(start, 0), tensor.numel() * tensor.itemsize)
    return sum(sizes.values())
