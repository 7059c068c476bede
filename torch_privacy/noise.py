# SPDX-License-Identifier: Apache-2.0
"""Provides Gaussian noise from a cryptographic generator: AES-256 in counter mode, and Box-Muller.

Why not torch.Generator: on a CPU its seed has 32 bits (``manual_seed(s)`` and ``manual_seed(s + 2**32)`` draw the
same numbers), a user's script can fix its seed by accident, the state of the Mersenne twister can be recovered from its
outputs, and its normal numbers end at 5.8 standard deviations. AES has none of these weaknesses (times:
docs/benchmarks.md).

Why a grid: floating-point numbers are denser near zero, and noise can only take floating-point values. If a sum and its
noise nearly cancel, or if the sum has more bits than the noise, the low bits of the release come from the sum alone and
can reveal who took part, regardless of the noise (Mironov 2012). So both are rounded to multiples of one unit, which
depends only on the noise: then the release is a function of the sum plus noise in real numbers.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from .support.validate import whole

KEY_BYTES = 32
_CHUNK = 2**17  # normal numbers computed at a time: enough for torch to use several threads
_GRID_BITS = 32  # the grid's unit is 2^-32 standard deviations, rounded down to a power of two
MIN_STDDEV = 2.0**-900  # far above the smallest power of two

_Pieces = list[tuple[Tensor, float]]  # parts of vectors, each with the factor of its numbers


class Noise:
    """Gaussian noise: a function of a secret key and the step's number, computed in float64.

    Args:
        key: 32 secret bytes; by default from the operating system's cryptographic generator. Anyone who knows the key
            can subtract the noise from every release made with it, past and future.

    Guarantees:
        - Steps, and tensors within a step, share no random bits.
        - One (key, step, shapes) gives the same numbers, bit for bit, on every call and for every split of the batch.
        - No seed set by a user's script affects it, and it does not change torch's random state.
        - Magnitudes end at sqrt(2 ln 2^64) = 9.4 standard deviations, which a normal number exceeds with probability
          below 1e-20.
        - Low bits reveal nothing: see ``add_to``.

    Source: Box & Muller (1958); AES-256-CTR, NIST SP 800-38A; I. Mironov (2012), "On significance of the least
        significant bits for differential privacy".
    """

    def __init__(self, key: bytes | None = None):
        self.key = secrets.token_bytes(KEY_BYTES) if key is None else key
        if len(self.key) != KEY_BYTES:
            raise ValueError(f"Noise: key of {len(self.key)} bytes; must be {KEY_BYTES} bytes.")

    def add_to(self, step: int, sums: Mapping[str, Tensor], stddev: float | Mapping[str, float]) -> None:
        """Adds ``stddev`` times the step's standard normal numbers z to the tensors s, in place.

        The result is exactly ``u·(round(s/u) + round(stddev·z/u))``, and is then rounded to the tensor's dtype; u is
        2^-32 standard deviations, rounded down to a power of two. That equals ``u·round(r/u)`` of a release
        ``r = u·round(s/u) + stddev·z`` in real numbers. Rounding s adds at most ``u √p`` to a change of p numbers: for
        a billion of them 1e-5 standard deviations.

        Args:
            step: number of the step, 0 or above; one number must never be used for two releases.
            sums: name -> contiguous tensor of any floating-point dtype.
            stddev: absolute standard deviation, in the units of the sums; one for all, or by name. 0 adds nothing.

        Raises:
            ValueError: a standard deviation that is negative, not finite, or below 2^-900; nothing was added.
        """
        whole("Noise.add_to", step=step)
        scales = [_checked(stddev[name] if isinstance(stddev, Mapping) else stddev) for name in sums]
        memory = ChunkMemory(sums.values())
        for noise, pieces in self._drawn(step, zip(sums.values(), scales, strict=True), memory):
            start = 0
            for (scale, _), alike in groupby(pieces, lambda pair: (pair[1], pair[0].device)):
                run = [piece for piece, _ in alike]
                end = start + sum([piece.numel() for piece in run])
                if scale:
                    _add(run, noise[start:end], scale, memory)
                start = end

    def fill(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Overwrites the tensors with the step's standard normal numbers, rounded to their dtype.

        This is for random directions and the like; use ``add_to``, which rounds to the grid, to protect data.

        Args:
            step: number of the step, 0 or above; one number must never be used twice.
            tensors: name -> contiguous tensor of any floating-point dtype.
        """
        whole("Noise.fill", step=step)
        for numbers, pieces in self._drawn(step, ((t, 1.0) for t in tensors.values()), ChunkMemory(tensors.values())):
            _copy(numbers, [piece for piece, _ in pieces])

    def _drawn(
        self, step: int, scaled: Iterable[tuple[Tensor, float]], memory: ChunkMemory
    ) -> Iterator[tuple[Tensor, _Pieces]]:
        """Yields standard normal numbers with the pieces of tensors that they belong to, chunk by chunk."""
        for number, pieces in enumerate(_chunks(scaled)):
            yield self._normal(step, number, sum([piece.numel() for piece, _ in pieces]), memory), pieces

    def _normal(self, step: int, chunk: int, size: int, memory: ChunkMemory) -> Tensor:
        """Returns the first ``size`` numbers of the step's chunk with this index."""
        pairs = (size + 1) // 2
        self.write_keystream(memory.random, step, 8 * _CHUNK * chunk, 16 * pairs)
        return box_muller(memory, pairs)[:size]

    def write_keystream(self, out: bytearray, step: int, offset: int, count: int) -> None:
        """Writes part of the step's AES keystream; the counter is the step (upper 64 bits) and the 16-byte block."""
        counter = (step << 64) + offset // 16
        stream = Cipher(algorithms.AES(self.key), modes.CTR(counter.to_bytes(16, "big"))).encryptor()
        stream.update_into(bytes(count), out)


class ChunkMemory:
    """Memory for the numbers of one chunk, reused for all chunks: fresh pages cost as much as the arithmetic."""

    def __init__(self, tensors: Iterable[Tensor]):
        pairs = (min(_CHUNK, sum([tensor.numel() for tensor in tensors])) + 1) // 2
        self.random = bytearray(16 * max(pairs, 1))
        self.words = torch.frombuffer(self.random, dtype=torch.int64)
        self.whole = torch.empty(pairs, dtype=torch.int64, device="cpu")
        self.normal, self.counts = (torch.empty(2 * pairs, dtype=torch.float64, device="cpu") for _ in range(2))
        self.cosines = torch.empty(pairs, dtype=torch.float64, device="cpu")


def grid_unit(stddev: float) -> float:
    """Returns the unit of the grid of a release with noise of this standard deviation: a power of two."""
    return math.ldexp(0.5, math.frexp(stddev)[1] - _GRID_BITS)


def _checked(stddev: float) -> float:
    if stddev != 0 and not MIN_STDDEV <= stddev < math.inf:
        raise ValueError(f"Noise.add_to: stddev={stddev!r} must be 0, or a finite number of at least 2^-900.")
    return float(stddev)


def _chunks(scaled: Iterable[tuple[Tensor, float]]) -> Iterator[_Pieces]:
    """Splits tensors with their scales, in order, into pieces; yields lists of pieces of one chunk each."""
    pieces, left = [], _CHUNK
    for tensor, scale in scaled:
        vector = tensor.view(-1)
        start, end = 0, vector.numel()
        while start < end:
            stop = min(start + left, end)
            pieces.append((vector if stop - start == end else vector[start:stop], scale))
            start, left = stop, left - (stop - start)
            if not left:
                yield pieces
                pieces, left = [], _CHUNK
    if pieces:
        yield pieces


def _add(pieces: list[Tensor], normal: Tensor, stddev: float, memory: ChunkMemory) -> None:
    """Adds noise in place. Products with powers of two, and sums of integers below 2^53, are exact."""
    unit = grid_unit(stddev)
    noise = normal.mul_(stddev / unit).round_()
    device = pieces[0].device
    if device.type == "cuda":
        counts = torch.cat(pieces).double()
        noise = noise.to(device)
    else:  # also for devices without float64
        counts = memory.counts[: len(noise)]
        counts.copy_(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
    _copy(counts.mul_(1 / unit).round_().add_(noise).mul_(unit), pieces)


def _copy(numbers: Tensor, pieces: list[Tensor]) -> None:
    """Copies consecutive numbers to the pieces."""
    parts = numbers.split([piece.numel() for piece in pieces])
    torch._foreach_copy_(pieces, list(parts))  # pyright: ignore[reportPrivateImportUsage]


def box_muller(memory: ChunkMemory, pairs: int) -> Tensor:
    """Returns 2 k numbers from 16 k random bytes: sqrt(-2 ln u) times (cos, sin) of 2π v, for uniform u and v.

    u has 63 bits, so that its smallest value, which gives the largest normal number, is 2^-64; v has 64 bits.
    """
    radius, angle = memory.normal[:pairs], memory.normal[pairs : 2 * pairs]
    radius.copy_(torch.bitwise_and(memory.words[:pairs], 2**63 - 1, out=memory.whole[:pairs]))
    radius.add_(0.5).mul_(2.0**-63).log_().mul_(-2).sqrt_()
    angle.copy_(memory.words[pairs : 2 * pairs]).mul_(math.pi * 2.0**-63)
    cosines = torch.cos(angle, out=memory.cosines[:pairs])
    angle.sin_().mul_(radius)
    radius.mul_(cosines)
    return memory.normal[: 2 * pairs]


def key_from_test_seed(seed: int, purpose: str) -> bytes:
    """Returns a key that anyone can compute: for tests only, never for a private run."""
    return hashlib.sha256(f"torch_privacy test seed {seed} for {purpose}".encode()).digest()
