# SPDX-License-Identifier: Apache-2.0
"""Provides noise of any symmetric law that has a density, from the inverse of its tail.

A number needs two words of the keystream: 111 bits for its tail, one for its sign, and 16 for a **jitter** of whole
units of the grid. The tail, a float64, has a relative error of at most 2^-52, and none below 2^-59, so that large
numbers are drawn as finely as small ones. The rounding of ``magnitude`` still shifts the border between two points of
the grid, by about 1e-16 / 2^-32 of their distance. The jitter spreads each number over 2^16 points, where these errors
are smaller by that factor. It is independent of everything, so that the noise with jitter reveals no more than the
noise without it; it is 2^-18 standard deviations large. So an error of 1e-12 standard deviations in ``magnitude``
changes the probability of a point of the grid by about 1e-7, which `mechanisms.base.noise_factors` covers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from ...support.validate import Refused
from .chunks import Chunk, Part, add_on_device, chunks_of, copy, grid_unit
from .gaussian import Noise
from .processor import Keystream

SMALLEST_TAIL = 2.0**-112
CHUNK = 65_024  # numbers computed at a time
_JITTER_BITS, _REST = 16, 17  # of the second word: sign, jitter, and what is left for the tail

Magnitude = Callable[[np.ndarray], np.ndarray]


class TailNoise(Noise):
    """Noise of a symmetric law: a function of key, step and place, as `Noise`.

    Args:
        key: 32 secret bytes.
        magnitude: the inverse of the tail: what the magnitude of a number exceeds with this probability, in (0, 1].
        stddev: the standard deviation of the law, by which the numbers are divided.

    Guarantees:
        - Numbers of different places are independent; whoever holds a slice makes that of the slice.
        - The mass beyond ``magnitude(2^-112)``, 2e-34, is never drawn.
        - It is made on the CPU, for tensors on any device.

    Source: L. Devroye (1986), "Non-uniform random variate generation", II.2, for the inversion.
    """

    def __init__(self, key: bytes | None, magnitude: Magnitude, stddev: float):
        super().__init__(key)
        self._numbers = TailNumbers(self.key, magnitude, stddev)

    def _by_generator(self, parts: Iterable[Part]) -> list[tuple[TailNumbers, list[Part]]]:  # pyright: ignore
        return [(self._numbers, [part for part in parts if part[2]])]


class TailNumbers:
    """Numbers of a law, divided by its standard deviation: a function of key, step and place."""

    name = "AES-256-CTR, inverse of the tail"

    def __init__(self, key: bytes, magnitude: Magnitude, stddev: float):
        self._keystream = Keystream(hashlib.blake2b(b"tail", key=key, digest_size=32).digest())  # not that of `Noise`
        self._magnitude, self._stddev = magnitude, stddev

    def add(self, step: int, parts: Sequence[Part]) -> None:
        """Adds the numbers at the places of the parts, times their scales, on the grid."""
        for chunk in chunks_of(parts, CHUNK):
            unit = grid_unit(chunk.scale)
            numbers, jitter = self._draw(step, chunk)
            noise = np.rint(numbers * (chunk.scale / unit)) + jitter
            values = torch.cat([piece.cpu() for piece in chunk.pieces])
            copy(add_on_device(values, torch.from_numpy(noise), unit), chunk.pieces)

    def fill(self, step: int, parts: Sequence[Part]) -> None:
        """Overwrites the parts with the numbers at their places."""
        for chunk in chunks_of(parts, CHUNK):
            copy(torch.from_numpy(self._draw(step, chunk)[0]), chunk.pieces)

    def _draw(self, step: int, chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of a chunk, and their jitter in units of the grid: both (n,) float64."""
        memory = bytearray(16 * chunk.size + 32)
        words = self._keystream.words(step, 2 * chunk.first, 2 * chunk.size, memory).view(np.uint64).reshape(-1, 2)
        first, second = words.T
        tail = first * 2.0**-64 + ((second >> np.uint64(_REST)) + 0.5) * 2.0**-111
        numbers = np.asarray(self._magnitude(tail), float) / self._stddev
        if numbers.shape != tail.shape or not np.isfinite(numbers).all():
            raise Refused("PrivateTraining: the noise's magnitude(tail) must return a finite number for each tail.")
        jitter = (second >> np.uint64(1)) & np.uint64(2**_JITTER_BITS - 1)
        negative = (second & np.uint64(1)).astype(bool)
        return np.where(negative, -numbers, numbers), jitter.astype(float) - 2.0 ** (_JITTER_BITS - 1)
