# SPDX-License-Identifier: Apache-2.0
"""Runs a backward that stops at the outputs of calls, and passes each gradient on as soon as it is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ..parallel.shards import on_this_rank
from .calls import Call
from .paths import RecordedGraph


class GradientSink(Protocol):
    """Receives the gradients of a backward."""

    def take(self, number: int, g: Tensor | None) -> None:
        """Receives the gradient at the edge of a call (or cut); gradients are off, as they are in a backward."""


def backward_into(
    sink: GradientSink,
    reached: RecordedGraph,
    places: Sequence[Call],
    cotangent: Tensor,
    *,
    retain_graph: bool = False,
    at_once: bool = False,
    leaves: Sequence[Tensor] = (),
) -> None:
    """Runs one backward that stops at calls and cuts; each b goes to the sink as soon as it is known, then it is freed.

    It ends at the places with no other place below them, and at ``leaves``, the gradients of which hooks may read.
    With ``at_once`` every b is held until the end, which is faster for small ones; so is the b of calls that need the
    graph. The backward passes calls with inputs that must be made again, because this happens inside of it.
    """
    if not places and not leaves:
        return
    handles: list[Any] = []
    try:
        ends, beyond = [*range(len(places))], []
        packed = [place.is_packed for place in places] if reached.recorder.log.saved_elsewhere else []
        if not at_once or any(packed):
            deepest = reached.deepest(places)
            ends = [k for k in ends if deepest[k] or places[k].needs_graph]
            if any(packed):
                beyond = [edge for k in ends if packed[k] for edge in places[k].inputs]
                ends = [k for k in ends if not packed[k]]
            for number in sorted({*range(len(places))}.difference(ends)):
                edge = places[number].edge
                handles.append(edge.node.register_prehook(_hand_over(sink, number, edge.output_nr)))
        inputs = [*[places[number].output.edge for number in ends], *leaves, *beyond]
        with reached.running_again():
            gradients = torch.autograd.grad(
                reached.losses, inputs, cotangent, retain_graph=retain_graph, allow_unused=True
            )
    finally:
        for handle in handles:
            handle.remove()
        if reached.recorder.log.saved_elsewhere:
            for place in places:
                place.forget()
    of_places = [*gradients[: len(ends)]]
    del gradients  # each b is freed once the sink has done with it
    with torch.no_grad():
        for number in reversed(ends):
            sink.take(number, of_places.pop())


def _hand_over(sink: GradientSink, number: int, output: int) -> Callable[[tuple], None]:
    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        sink.take(number, gradients[output])

    return hook


def gradients_at(reached: RecordedGraph, places: Sequence[Call], cotangent: Tensor) -> list[Tensor]:
    """Returns the gradients in the outputs of calls and cuts, by one backward that ends at these. The graph stays."""
    if not places:
        return []
    edges = [place.edge for place in places]
    with reached.running_again():
        found = torch.autograd.grad(reached.losses, edges, cotangent, retain_graph=True, allow_unused=True)
    return [place.output.gradient(g, reached.losses) for place, g in zip(places, found, strict=True)]


class OpenNodes:
    """Notes which nodes of a graph pass on a gradient that is not zero.

    A closed node shows nothing of where the examples are behind it: the data may have closed a branch, by a mask or a
    maximum, that they open later. So may they open other copies of a tensor that an op repeats.

    Args:
        nodes: to watch from now on, until ``stop``.
    """

    def __init__(self, nodes: Iterable[Node]):
        self._nodes = [*nodes]
        self._flags: dict[int, list[Tensor]] = {}  # of the nodes met: whether gradients have entries that are not zero
        self._open: set[int] = set()
        self._partly: list[Tensor] = []  # whether some copies of a tensor, but not all, have a gradient
        self._handles = [node.register_prehook(self._noting(k, node)) for k, node in enumerate(self._nodes)]

    def stop(self) -> None:
        """Stops watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def closed(self) -> set[Node]:
        """Returns the nodes that a backward came to without any gradient."""
        read = iter(_read([flag for flags in self._flags.values() for flag in flags]))
        self._open |= {number for number, flags in self._flags.items() if any([next(read) for _ in flags])}
        return {self._nodes[number] for number in self._flags.keys() - self._open}

    def any_open(self) -> bool:
        """True if some node had a gradient."""
        return len(self.closed()) < len(self._flags)

    def copies_are_closed(self) -> bool:
        """True if only some copies of a repeated tensor had a gradient, as where a mask selects one of them."""
        return any(_read(self._partly))

    def _noting(self, number: int, node: Node) -> Callable[[tuple], None]:
        """Returns a hook. It holds no node: after an error it may stay, and would keep the graph."""
        all_flags, is_open, partly = self._flags, self._open, self._partly
        name = type(node).__name__
        copies = tuple(getattr(node, _REPEATING[name])) if name in _REPEATING else None

        def note(gradients: tuple[Tensor | None, ...]) -> None:
            flags = all_flags.setdefault(number, [])
            for g in [on_this_rank(g) for g in gradients if g is not None]:
                if g.layout is torch.strided and not g.is_nested:
                    flags.append(g.detach().any())
                    if copies is not None:
                        partly.append(_some_copies(g.detach() != 0, name, copies))
                else:
                    is_open.add(number)

        return note


def _read(flags: Sequence[Tensor]) -> list[bool]:
    """Returns the flags as Python has them; the host waits once for each device."""
    places: dict[torch.device, list[int]] = {}
    for place, flag in enumerate(flags):
        places.setdefault(flag.device, []).append(place)
    found = [False] * len(flags)
    for there in places.values():
        for place, value in zip(there, torch.stack([flags[place].bool() for place in there]).tolist(), strict=True):
            found[place] = value
    return found


_REPEATING = {"ExpandBackward0": "_saved_self_sym_sizes", "RepeatBackward0": "_saved_repeats"}


def _some_copies(has: Tensor, name: str, numbers: tuple[int, ...]) -> Tensor:
    """Returns whether some copies, but not all, of a row that a node repeats have a gradient; ``has`` of each entry."""
    numbers = (1,) * (has.ndim - len(numbers)) + numbers
    if name == "ExpandBackward0":
        dims = [dim for dim, (before, after) in enumerate(zip(numbers, has.shape, strict=True)) if before < after]
    else:
        pairs = [(copies, size // max(1, copies)) for copies, size in zip(numbers, has.shape, strict=True)]
        has, dims = has.reshape([*chain(*pairs)]), [2 * dim for dim, copies in enumerate(numbers) if copies > 1]
    rows = has if has.ndim - 1 in dims else has.any(-1, keepdim=True)
    return (rows.any(dims) & ~rows.all(dims)).any() if dims and has.numel() else has.new_zeros(())
