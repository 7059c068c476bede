# SPDX-License-Identifier: Apache-2.0
"""Divides tensors into chunks of consecutive places, and adds noise to them on a grid that the noise alone determines.

Why a grid: floating-point numbers are denser near zero, and noise can only take floating-point values. If a sum and its
noise nearly cancel, or if the sum has more bits than the noise, the low bits of the release come from the sum alone and
can reveal who took part, regardless of the noise (Mironov 2012). So both are rounded to multiples of one unit, which
depends only on the noise: then the release is a function of the sum plus noise in real numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ...support.validate import quoted, whole

MAX_PLACE = 2**47 - 1

Part = tuple[Tensor, int, float]  # a tensor, the place of its first number, and the factor of its noise


@dataclass(slots=True)
class Chunk:
    """Pieces of tensors at consecutive places, on one device and with noise of one scale."""

    first: int  # place
    scale: float
    device: torch.device
    size: int = 0
    pieces: list[Tensor] = field(default_factory=list)


def chunks_of(parts: Iterable[Part], largest: int) -> list[Chunk]:
    """Returns the chunks, of at most this number of entries."""
    chunks: list[Chunk] = []
    chunk = None
    for tensor, first, scale in parts:
        vector, device = tensor.view(-1), tensor.device
        start, end = 0, vector.numel()
        while start < end:
            place = first + start
            if (
                chunk is None
                or chunk.size == largest
                or place != chunk.first + chunk.size
                or scale != chunk.scale
                or device != chunk.device
            ):
                chunk = Chunk(place, scale, device)
                chunks.append(chunk)
            stop = min(end, start + largest - chunk.size)
            chunk.pieces.append(vector if stop - start == end else vector[start:stop])
            chunk.size += stop - start
            start = stop
    return chunks


def copy(numbers: Tensor, pieces: list[Tensor]) -> None:
    """Copies consecutive numbers to the pieces of a chunk."""
    parts = numbers.split([piece.numel() for piece in pieces])
    torch._foreach_copy_(pieces, list(parts))  # pyright: ignore[reportPrivateImportUsage]


def places_of(where: str, tensors: Mapping[str, Tensor], places: Mapping[str, int] | None) -> Mapping[str, int]:
    """Returns the place of each tensor's first number, by default one after the other; refuses places used twice."""
    if places is None:
        found, end = {}, 0
        for name, tensor in tensors.items():
            found[name] = end
            end += tensor.numel()
        return found
    missing = [name for name in tensors if name not in places]
    if missing:
        raise ValueError(f"{where}: places lacks {quoted(missing)}; must have a place for every tensor.")
    for name, tensor in tensors.items():
        whole(where, at_most=MAX_PLACE + 1 - tensor.numel(), **{f"places[{name!r}]": places[name]})
    ordered = sorted((places[name], tensor.numel(), name) for name, tensor in tensors.items() if tensor.numel())
    for (first, size, name), (other, _, other_name) in pairwise(ordered):
        if other < first + size:
            raise ValueError(
                f"{where}: places {first} to {first + size - 1} of {name!r} and {other} of {other_name!r} overlap: "
                "both would have the same noise. Give every number of a step a place of its own."
            )
    return places


_GRID_BITS = 32  # the grid's unit is 2^-32 standard deviations, rounded down to a power of two
MIN_STDDEV = 2.0**-900  # far above the smallest power of two


def grid_unit(stddev: float) -> float:
    """Returns the unit of the grid of a release with noise of this standard deviation: a power of two."""
    return math.ldexp(0.5, math.frexp(stddev)[1] - _GRID_BITS)


def add_on_grid(values: np.ndarray, noise: np.ndarray, unit: float | np.ndarray) -> None:
    """Replaces values v by ``u·(round(v/u) + round(noise))``.

    Products with powers of two, and sums of integers below 2^53, are exact.

    Args:
        values: (n,) float64.
        noise: (n,) float64 in units of the grid; is overwritten.
        unit: the grid's unit u, or that of each value.
    """
    np.rint(noise, out=noise)
    np.multiply(values, 1 / unit, out=values)
    np.rint(values, out=values)
    np.add(values, noise, out=values)
    np.multiply(values, unit, out=values)


def add_on_device(values: Tensor, noise: Tensor, unit: float) -> Tensor:
    """Returns the same for tensors (n,) on any device that has float64; overwrites the noise."""
    return noise.round_().add_(values.double().mul_(1 / unit).round_()).mul_(unit)
