# SPDX-License-Identifier: Apache-2.0
"""Provides the two private releases that a schema is learnt from, each made and priced by opendp.

A measurement's own privacy map, which covers the arithmetic of its noise, must not exceed the price that was planned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from .extra import needed

ROUNDING = 1 + 1e-9  # of a scale, so that a map that rounds upwards still meets its rho


@dataclass(frozen=True)
class CountNoise:
    """Noise on a vector of counts to which every row adds at most 1 in each of ``groups`` groups.

    ``stddev`` is that of the discrete Gaussian on each count; the sensitivity is ``rows √groups`` in the L2 norm.
    """

    rows: int
    groups: int
    rho: float

    def __post_init__(self) -> None:
        """Rounds rho down to nine digits, so that equal shares of a budget are equal releases, with one price."""
        object.__setattr__(self, "rho", float(f"{self.rho * (1 - 5e-9):.8e}"))

    @property
    def sensitivity(self) -> float:
        """Returns the L2 norm of the largest change between neighboring tables, rounded up."""
        return math.nextafter(self.rows * math.sqrt(self.groups), math.inf)

    @property
    def stddev(self) -> float:
        """Returns the standard deviation on each count."""
        return ROUNDING * self.sensitivity / math.sqrt(2 * self.rho)


def part_of_opendp(name: str) -> ModuleType:
    """Returns a module of opendp; its prelude is not imported, as that loads scikit-learn."""
    needed("opendp.mod").enable_features("contrib")
    return needed(f"opendp.{name}")


def noisy_counts(counts: NDArray[np.int64], noise: CountNoise) -> NDArray[np.int64]:
    """Releases a vector of counts with discrete Gaussian noise."""
    if not len(counts):
        return np.zeros(0, np.int64)
    domains = part_of_opendp("domains")
    space = domains.vector_domain(domains.atom_domain(T="i64")), part_of_opendp("metrics").l2_distance(T="f64")
    release = part_of_opendp("measurements").make_gaussian(*space, noise.stddev, MO="ZeroConcentratedDivergence")
    _check(release.map(noise.sensitivity), noise.rho)
    return np.array(release(counts.tolist()), np.int64)


def frequent(counts: Mapping[str, int], noise: CountNoise, delta: float) -> tuple[dict[str, int], int]:
    """Releases the keys with a noisy count of at least a threshold, with these counts, and the threshold.

    A key that a neighboring table lacks must pass the threshold by noise alone; the chance of that is at most
    ``delta`` for all keys together.
    """
    rows, groups = noise.rows, noise.groups
    if not groups:
        return {}, 0
    domains, metrics = part_of_opendp("domains"), part_of_opendp("metrics")
    make = part_of_opendp("measurements").make_gaussian_threshold
    domain = domains.map_domain(domains.atom_domain(T="u32"), domains.atom_domain(T="u32"))
    space = domain, metrics.l02inf_distance(metrics.absolute_distance(T="f64"))
    change = rows * groups, noise.sensitivity, float(rows)
    low, high = rows, rows + math.ceil(noise.stddev * (2 - ndtri(min(delta / change[0], 0.5))) + 2)
    while high - low > 1:
        middle = (low + high) // 2
        high, low = (middle, low) if make(*space, noise.stddev, middle).map(change)[1] <= delta else (high, middle)
    _check(make(*space, noise.stddev, high).map(change)[1], delta)
    # opendp's map takes the tail of the normal distribution, beyond which whole numbers reach by less than one
    # (Canonne, Kamath & Steinke 2020, Proposition 25): a threshold that is higher by one keeps the promise
    release = make(*space, noise.stddev, high + 1)
    _check(release.map(change)[0], noise.rho)
    keys = list(counts)  # opendp gets their places: it cuts a text at a zero character, so that two would be one
    released = release(dict(enumerate(counts.values())))
    return {keys[place]: count for place, count in released.items()}, high + 1


def _check(spent: float, planned: float) -> None:
    """Asserts that a measurement costs no more than was planned; nothing has been released yet."""
    if not spent <= planned:
        raise AssertionError(
            f"opendp prices a release at {spent!r}, above the {planned!r} planned. Please report this."
        )
