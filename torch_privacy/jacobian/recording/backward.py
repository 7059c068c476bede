# SPDX-License-Identifier: Apache-2.0
"""Runs a backward that stops at the outputs of calls, and passes each gradient on as soon as it is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

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
