# SPDX-License-Identifier: Apache-2.0
"""Provides a grid that widens by octaves, and sums of two laws on it.

Its places are 0, 1, ..., BODY - 1, and then OCTAVE of equal distance from BODY 2^j to BODY 2^(j+1), for each j.
"""

import math
from collections.abc import Callable

import numpy as np

from ..bracket import Array

BODY = 2048  # places of equal distance
OCTAVE = 256  # places of each octave above the body


def means(moment: Array, mass: Array, otherwise: Array) -> Array:
    """Returns moment over mass, and the other value where there is no mass."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(mass > 0, moment / mass, otherwise)


def places_of(num_octaves: int) -> Array:
    """Returns the places of a grid, in steps from the base."""
    octave = BODY / OCTAVE * np.arange(OCTAVE, 2 * OCTAVE)
    return np.concatenate([np.arange(float(BODY)), *(octave * 2.0**j for j in range(num_octaves))])


def places_up_to(largest: float) -> Array:
    """Returns the places of the grid that reaches as far."""
    return places_of(max(0, math.ceil(math.log2(max(largest, 1.0) / (BODY - 1)) + 0.01)))


def num_octaves_of(mass: Array) -> int:
    """Returns the number of octaves of a law."""
    return (len(mass) - BODY) // OCTAVE


def sums(a: Array, b: Array, coarser: Callable[[Array, int], Array]) -> Array:
    """Returns the masses of the sums of two outcomes, in the order of `positions`.

    The outcomes of an octave are added to all smaller ones at once, which are brought to the octave's places.
    """
    found = [np.convolve(a[:BODY], b[:BODY])]
    low_a, low_b = (coarser(law[:BODY], BODY // OCTAVE) for law in (a, b))
    for j in range(max(num_octaves_of(a), num_octaves_of(b))):
        high_a, high_b = (_octave(law, j) for law in (a, b))
        found.append(np.convolve(high_a, low_b) + np.convolve(low_a, high_b))
        found.append(np.convolve(high_a, high_b))
        low_a, low_b = (
            coarser(np.concatenate([low[:-1], low[-1:] + high[:1], high[1:]]), 2)
            for low, high in ((low_a, high_a), (low_b, high_b))
        )
    return np.concatenate(found)


def _octave(mass: Array, j: int) -> Array:
    return mass[BODY + j * OCTAVE :][:OCTAVE] if j < num_octaves_of(mass) else np.zeros(OCTAVE)


def positions(num_octaves: int) -> Array:
    """Returns where the sums of `sums` are, in steps from the sum of both bases."""
    found = [np.arange(2.0 * BODY - 1)]
    for j in range(num_octaves):
        distance = 2.0**j * BODY / OCTAVE
        found += [distance * np.arange(OCTAVE, 3 * OCTAVE), distance * np.arange(2 * OCTAVE, 4 * OCTAVE - 1)]
    return np.concatenate(found)


def split(mass: Array, factor: int) -> Array:
    """Returns the masses at every ``factor``-th place, which others are split between, and at one more."""
    rows, share = mass.reshape(-1, factor), np.arange(factor) / factor
    return np.append(rows @ (1 - share), 0.0) + np.append(0.0, rows @ share)


def merge(mass: Array, factor: int) -> Array:
    """Returns the masses of groups of neighbors, and a zero."""
    return np.append(mass.reshape(-1, factor).sum(1), 0.0)
