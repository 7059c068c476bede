# SPDX-License-Identifier: Apache-2.0
"""Chooses an exact method for each op, and decides what to keep for the clipped sum under a memory budget.

Choices follow a model of costs, not a stopwatch, so that one run repeats another bit for bit, on a busy machine too.
``benchmarks/roofline.py --methods`` measures what a stopwatch would save: about a hundredth of an ordinary step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from torch import Tensor

from ...ops import Method, Op
from ...ops._base import CHUNK_FLOATS

# From this size on malloc asks the system for fresh pages every time (glibc: above 32 MiB), and keeping rows costs
# FRESH times as much.
FRESH, FRESH_BYTES = 5, 2**25


@dataclass(frozen=True)
class Choice:
    """The method for the norms of one op whose b is known, and what is kept of it for the clipped sum."""

    method: Method
    keeps: str  # "rows", "x and b", or "nothing": a second, native backward then gives the sum
    cost: float  # operations for norms and sum
    held: int  # bytes held until the sum
    temporary: int = 0  # bytes of temporaries while the norms are computed


def choices(op: Op) -> list[Choice]:
    """Returns every choice for norms and clipped sum of an op, the fastest first."""
    methods = op.methods()
    held = held_bytes(op)
    if len(methods) == 1:
        return [Choice(methods[0], "x and b", methods[0].flops, held, _temporary_bytes(op, methods[0].floats))]
    makers = [method for method in methods if method.rows]
    least = min(methods, key=lambda method: method.flops)
    found = [Choice(least, "x and b", least.flops + op.sum_flops, held, _temporary_bytes(op, least.floats))]
    if makers:
        maker = min(makers, key=lambda method: method.flops)
        entries = op.num_examples * op.shape.numel()
        size = entries * op.dtype.itemsize
        price = op.kept_entry * (1 if size <= FRESH_BYTES else FRESH)
        temporary = _temporary_bytes(op, maker.floats - entries)
        found.append(Choice(maker, "rows", maker.flops + price * entries, size, temporary))
    return sorted(found, key=lambda choice: choice.cost)


def _temporary_bytes(op: Op, floats: float) -> int:
    """Returns the bytes of temporaries with ``floats`` numbers, which are made in chunks."""
    return int(min(max(floats, 0), CHUNK_FLOATS)) * op.dtype.itemsize


def least_bytes(op: Op) -> int:
    """Returns the bytes that must be held of an op until the clipped sum."""
    return min(choice.held for choice in choices(op))


def held_bytes(value: Any) -> int:
    """Returns the bytes of the tensors that an op holds, those of ops inside of it included."""
    if isinstance(value, Tensor):
        return value.numel() * value.itemsize
    if isinstance(value, Op):
        return sum([held_bytes(getattr(value, name)) for name in _fields_of(type(value))])
    if isinstance(value, (tuple, list)):
        return sum(map(held_bytes, value))
    return 0


@cache
def _fields_of(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


class Budget:
    """Decides, op by op during the backward, what may be kept for the clipped sum.

    Args:
        limit: peak memory allowed: up to 100 in units of what non-private training needs (its activations, which are
            freed while its gradients are computed), else in bytes.
        activations: bytes that autograd keeps for the backward; they are freed as it proceeds.
        least: bytes that have to be held for the clipped sum, whatever is chosen.
        call_bytes: bytes of all recorded ops' inputs and outputs; they measure the progress of the backward.
        parameters: bytes of the parameters, and so of their gradients.
    """

    may_drop = False  # True if nothing need be kept, because the graph stays for a second backward

    def __init__(self, limit: float, activations: float, least: float, call_bytes: int, parameters: int):
        self._limit = limit * max(activations, parameters) if limit <= 100 else limit
        self._least = least
        self._activations, self.call_bytes = activations, max(call_bytes, 1)
        self._passed, self._held, self._least_to_come = 0, 0, least

    @property
    def wants_second_backward(self) -> bool:
        """True if one backward exceeds the limit, and two, which need the activations to their end, need less."""
        return self._least > max(self._limit, self._activations)

    def passed(self, size: int) -> None:
        """Notes that the backward has passed an op with ``size`` bytes of inputs and outputs."""
        self._passed += size

    def choose(self, op: Op) -> Choice:
        """Returns the fastest choice that fits, counting what must still be held; else the one that holds least."""
        found = choices(op)
        least = min(found, key=lambda choice: choice.held)
        left = self._activations * max(0.0, 1 - self._passed / self.call_bytes)
        self._least_to_come -= least.held
        room = self._limit - self._held - max(left, self._least_to_come)
        if self.may_drop:
            room = self._limit - self._held - self._activations
            least = replace(least, keeps="nothing", held=0)
        choice = next((choice for choice in found if choice.held + choice.temporary <= room), least)
        self._held += choice.held
        return choice

    def hold(self, size: int) -> None:
        """Adds ``size`` bytes that must be held, without a choice."""
        self._held += size
        self._least_to_come -= size

    def release(self, size: int) -> None:
        """Subtracts ``size`` bytes that are no longer held."""
        self._held -= size


def distinct_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of tensors, counting memory that they share once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        start = tensor.data_ptr()
        sizes[start] = max(sizes.get(start, 0), tensor.numel() * tensor.itemsize)
    return sum(sizes.values())
