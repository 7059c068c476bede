# SPDX-License-Identifier: Apache-2.0
"""Chooses an exact method for each op, and decides what to keep for the clipped sum under a memory budget.

Choices follow a model of costs, not a stopwatch, so that one run repeats another bit for bit, on a busy machine too.
``benchmarks/roofline.py --methods`` measures what a stopwatch would save: about a hundredth of an ordinary step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from operator import attrgetter
from typing import TypeVar

import torch
from torch import Tensor

from ...ops import AnyLayout, Layout, Method, Op, Use
from ...ops._base import CHUNK_FLOATS
from ...support.validate import Refused
from ..layouts.known import Footprint, Layouts
from ..layouts.predict import Expected
from ..recording.calls import Call
from ..recording.graph import saved_bytes
from ..recording.paths import RecordedGraph

# From this size on malloc asks the system for fresh pages every time (glibc: above 32 MiB), and keeping rows costs
# FRESH times as much.
FRESH, FRESH_BYTES = 5, 2**25
# Gradients of at least this many bytes are measured at once, because each portion needs several backwards.
PORTION_BYTES = 2**24
# Any budget allows this many bytes, unless it is below what non-private training needs.
MIN_BUDGET = 2**26
# Up to this many bytes, graph and calls may be in memory together while predicted layouts are confirmed.
MAX_UNCONFIRMED_BYTES = 2**28


@dataclass(frozen=True)
class Choice:
    """The method for the norms of one op with known b, and what is kept of it for the clipped sum."""

    method: Method
    keeps: str  # "rows", "x and b", or "nothing": a second, native backward then gives the sum
    cost: float  # operations for norms and sum
    held: int  # bytes held until the sum
    temporary: int = 0  # bytes of temporaries while the norms are computed


def choices(op: Op) -> list[Choice]:
    """Returns every choice for norms and clipped sum of an op, the fastest first."""
    methods = op.methods()
    held = held_bytes(op)
    if len(methods) == 1 and not methods[0].rows:
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


def held_bytes(op: Op) -> int:
    """Returns the bytes of the tensors that an op holds, those of ops inside of it included."""
    size, values = 0, [*map(partial(getattr, op), _fields_of(type(op)))]
    while values:
        value = values.pop()
        if isinstance(value, Tensor):
            size += value.numel() * value.itemsize  # nbytes is refused for sparse ones
        elif isinstance(value, Op):
            size += held_bytes(value)
        elif isinstance(value, (tuple, list)):
            values += value
    return size


@cache
def _fields_of(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def make_op(use: Use, b: Tensor, layout: AnyLayout, names: tuple[str, ...]) -> Op:
    """Returns the Jacobian block of one use; a refusal names the parameters behind its weight."""
    try:
        return use.op(b, layout)
    except Refused as error:
        raise Refused(f"{error} Used with parameter {', '.join(map(repr, names))}.") from None


class MemoryBudget:
    """Decides, op by op during the backward, what may be kept for the clipped sum.

    Args:
        limit: peak memory allowed: up to 100 in units of what non-private training needs (its activations, which are
            freed while its gradients are computed), else in bytes.
        activations: bytes that autograd keeps for the backward; they are freed as it proceeds.
        least: bytes that have to be held for the clipped sum, whatever is chosen.
        call_bytes: bytes of all recorded ops' inputs and outputs; they measure the progress of the backward.
        parameters: bytes of the parameters, and so of their gradients.
        part: bytes of the activations that are made again for a part under activation checkpointing, then freed.

    Attributes:
        passed: bytes of inputs and outputs of the ops that the backward has passed.
    """

    may_drop = False  # True if nothing need be kept, because the graph stays for a second backward

    def __init__(
        self, limit: float, activations: float, least: float, call_bytes: int, parameters: int, part: float = 0.0
    ):
        self._limit = limit * max(activations, parameters) if limit <= 100 else limit
        self._least = least
        self._activations, self._part, self._call_bytes = activations, part, max(call_bytes, 1)
        self.passed, self._held, self._least_to_come = 0, 0, least

    @property
    def wants_second_backward(self) -> bool:
        """True if one backward exceeds the limit, and two, which need the activations to their end, need less."""
        return self._least > max(self._limit, self._activations)

    def fresh(self, *, may_drop: bool = False) -> MemoryBudget:
        """Returns the same budget for another backward."""
        other = copy(self)
        other.passed, other._held, other._least_to_come, other.may_drop = 0, 0, self._least, may_drop
        return other

    def choose(self, op: Op, *, may_drop: bool = True) -> Choice:
        """Returns the fastest choice that fits, counting what must still be held; else the one that holds least.

        Without ``may_drop`` something is kept, even if this budget allows to keep nothing.
        """
        found = choices(op)
        least = min(found, key=lambda choice: choice.held)
        left = self._part + (self._activations - self._part) * max(0.0, 1 - self.passed / self._call_bytes)
        self._least_to_come -= least.held
        room = self._limit - self._held - max(left, self._least_to_come)
        if self.may_drop:
            room = -1 if self._part else self._limit - self._held - self._activations
            if may_drop:
                least = replace(least, keeps="nothing", held=0)
        choice = next((choice for choice in found if choice.held + choice.temporary <= room), least)
        self._held += choice.held
        return choice

    def hold(self, size: int) -> int:
        """Adds ``size`` bytes that must be held, without a choice; returns them."""
        self._held += size
        self._least_to_come -= size
        return size

    def release(self, size: int) -> None:
        """Subtracts ``size`` bytes that are no longer held."""
        self._held -= size


_nbytes = attrgetter("nbytes")


def distinct_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of tensors, counting memory that they share once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        start = tensor.data_ptr()
        sizes[start] = max(sizes.get(start, 0), tensor.numel() * tensor.itemsize)
    return sum(sizes.values())


class Memory:
    """The memory that one batch takes.

    Args:
        layouts: remembers the footprint of each path.
        reached: the batch.
    """

    def __init__(self, layouts: Layouts, reached: RecordedGraph):
        self._layouts, self._reached = layouts, reached

    @property
    def known(self) -> Footprint | None:
        """Returns what earlier batches on this path needed; None on a new path."""
        return self._layouts.footprint(self._reached.path, self._reached.num_losses)

    def note(self, least: float) -> None:
        """Remembers that the batch needs its activations, and at least these bytes until the clipped sum."""
        footprint = Footprint(self.activations, least, self.part)
        self._layouts.note_footprint(self._reached.path, self._reached.num_losses, footprint)

    @cached_property
    def activations(self) -> int:
        """Returns the bytes that autograd keeps for the backward."""
        reached = self._reached
        if reached.recorder.log.saved_elsewhere:  # by checkpointing or offloading: these can be read only once
            return self.part + distinct_bytes([t for call in reached.calls for use in call.uses for t in use.saved()])
        lasting = [*reached.parts.values(), *reached.recorder.tensors.constants()]
        return saved_bytes(reached.graph, reached.num_losses, lasting)

    @cached_property
    def part(self) -> int:
        """Returns the bytes of the largest part that is made again in the backward, then freed."""
        parts = Counter[int]()
        for call in self._reached.calls:
            if call.is_packed:
                parts[call.part] += call.size
        return max(parts.values(), default=0)

    def may_keep_graph(self) -> bool:
        """True if the graph is small enough to stay while the rows are computed."""
        known = self.known
        activations = known.activations if known is not None else self.activations
        return activations + self._reached.size < MAX_UNCONFIRMED_BYTES

    def budget(self, limit: float) -> MemoryBudget:
        """Returns the budget of a backward: up to 100 in units of what non-private training needs, else in bytes."""
        known = self.known or Footprint(self.activations, 0, self.part)
        parameters = sum(map(_nbytes, self._reached.parts.values()))
        if 1 <= limit <= 100 and known.part:  # who computes activations twice wants to save any memory
            limit *= max(known.activations, parameters + known.part)
        elif 1 <= limit <= 100:
            limit = max(limit * max(known.activations, parameters), MIN_BUDGET)
        return MemoryBudget(limit, known.activations, known.least, self._reached.size, parameters, known.part)

    def least_bytes(self, place: Call, b: Tensor, layout: Expected | AnyLayout) -> float:
        """Returns the bytes that must be held of a call until the clipped sum, if its gradient has this layout."""
        if place.is_cut:
            return 0.0
        if not isinstance(layout, Layout):
            return place.size  # any order of the examples needs the same
        with torch.no_grad():
            if not place.is_packed:
                ops = [make_op(use, b, layout, self._reached.names_of(use.weight)) for use in place.uses]
                return sum([least_bytes(op) for op in ops])
            b = b.to("meta")  # the methods have the same prices without entries
            try:
                return sum([least_bytes(use.op(b, layout)) for use in place.uses])
            except (RuntimeError, NotImplementedError, Refused):  # a rule that looks at entries
                return place.size

    def portions(self) -> list[list[int]]:
        """Returns the numbers of calls and cuts in portions with gradients that need little memory."""
        sizes = {number: place.output.size for number, place in enumerate(self._reached.places)}
        portions = in_portions(sizes, max(PORTION_BYTES, self.activations / 8))
        return self._reached.ranks.peers.gather(portions)[0]


Name = TypeVar("Name")


def in_portions(sizes: Mapping[Name, float], most: float) -> list[list[Name]]:
    """Returns the names in order, divided where more than ``most`` would be together."""
    portions: list[list[Name]] = []
    total = math.inf
    for name, size in sizes.items():
        if total + size > most:
            portions.append([])
            total = 0
        portions[-1].append(name)
        total += size
    return portions
