# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise from a cryptographic generator: AES-256 in counter mode, turned into normal numbers by Box-Muller.

Why not torch.Generator: on a CPU it is seeded by 32 bits (``manual_seed(s)`` and ``manual_seed(s + 2**32)`` draw the
same), a user's script can fix its seed by accident, the Mersenne twister can be run backwards from what it has drawn,
and its normal numbers end at 5.8 standard deviations. AES has none of that, and is no slower (docs/benchmarks.md).

Why a grid: floating-point numbers lie the denser the smaller they are, and noise is no denser than its own. Where a sum
and its noise nearly cancel, or where the sum has more bits than the noise, the low bits of what is released are the
sum's alone, and tell who took part whatever the noise (Mironov 2012). So both are brought to multiples of one unit,
which the noise alone determines: then the release is a function of the sum with real normal numbers on it.
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

from ._check import whole

KEY_BYTES = 32
_CHUNK = 2**15  # normal numbers made at a time: the temporaries stay in the cache, and torch's threads asleep
_FINENESS = 32  # of the grid: its unit is 2^-32 standard deviations, rounded down to a power of two
LEAST_STDDEV = 2.0**-900  # far above where powers of two end


class Noise:
    """Gaussian noise, a function of a secret key and the number of the step, made in float64.

    Args:
        key: 32 secret bytes; by default from the operating system's cryptographic generator. Who knows the key can
            take the noise off every release made with it, past and future.

    Guarantees:
        - Steps, and tensors within a step, share no random bits.
        - One (key, step, shapes) gives the same numbers, bit for bit, on every call and however the batch was split.
        - No seed set by a user's script has any part in it, and it leaves torch's random state alone.
        - Magnitudes are cut at sqrt(2 ln 2^64) = 9.4 standard deviations, beyond which a normal number lies with
          probability below 1e-20.
        - Low bits give nothing away: see ``add_to``.

    Source: Box & Muller (1958); AES-256-CTR, NIST SP 800-38A; I. Mironov (2012), "On significance of the least
        significant bits for differential privacy".
    """

    def __init__(self, key: bytes | None = None):
        self.key = secrets.token_bytes(KEY_BYTES) if key is None else key
        if len(self.key) != KEY_BYTES:
            raise ValueError(f"Noise: key of {len(self.key)} bytes; must be {KEY_BYTES} bytes.")

    def add_to(self, step: int, sums: Mapping[str, Tensor], stddev: float | Mapping[str, float]) -> None:
        """Add ``stddev`` times the step's standard normal numbers z to the tensors s, in place.

        What comes out is ``u·(round(s/u) + round(stddev·z/u))``, exactly, and then rounded to the tensor's type; u is
        2^-32 standard deviations, rounded down to a power of two. That equals ``u·round(r/u)`` of a release
        ``r = u·round(s/u) + stddev·z`` in real numbers. Rounding s adds at most ``u √p`` to a change of p numbers: for
        a billion of them 1e-5 standard deviations.

        Args:
            step: number of the step, 0 or above; one number must never be used for two releases.
            sums: name -> contiguous tensor of any floating-point type.
            stddev: absolute standard deviation, in the units of the sums; one for all, or by name. 0 adds nothing.

        Raises:
            ValueError: a standard deviation that is negative, not finite, or below 2^-900; nothing was added.
        """
        whole("Noise.add_to", step=step)
        scales = [_checked(stddev[name] if isinstance(stddev, Mapping) else stddev) for name in sums]
        scaled = zip((tensor.view(-1) for tensor in sums.values()), scales, strict=True)
        for number, pieces in enumerate(_chunks(scaled)):
            noise, start = self._normal(step, number, sum([piece.numel() for piece, _ in pieces])), 0
            for (scale, _), alike in groupby(pieces, lambda pair: (pair[1], pair[0].device)):
                run = [piece for piece, _ in alike]
                end = start + sum([piece.numel() for piece in run])
                if scale:
                    _add(run, noise[start:end], scale)
                start = end

    def _normal(self, step: int, chunk: int, size: int) -> Tensor:
        """The first so many numbers of the step's chunk with this number."""
        pairs = (size + 1) // 2
        normal = torch.empty(2 * pairs, dtype=torch.float64, device="cpu")
        _box_muller(self._random_bytes(step, 8 * _CHUNK * chunk, 16 * pairs), normal)
        return normal[:size]

    def _random_bytes(self, step: int, offset: int, count: int) -> bytes:
        """Part of the step's AES keystream: the counter is the step (upper 64 bits) and a number of 16-byte blocks."""
        counter = (step << 64) + offset // 16
        return Cipher(algorithms.AES(self.key), modes.CTR(counter.to_bytes(16, "big"))).encryptor().update(bytes(count))


def grid_unit(stddev: float) -> float:
    """The unit of the grid of what is released with noise of this standard deviation: a power of two."""
    return math.ldexp(0.5, math.frexp(stddev)[1] - _FINENESS)


def _checked(stddev: float) -> float:
    if stddev != 0 and not LEAST_STDDEV <= stddev < math.inf:
        raise ValueError(f"Noise.add_to: stddev={stddev!r} must be 0, or a finite number of at least 2^-900.")
    return float(stddev)


def _chunks(scaled: Iterable[tuple[Tensor, float]]) -> Iterator[list[tuple[Tensor, float]]]:
    """Vectors and their scales in order, cut into pieces: lists with as many numbers together as a chunk holds."""
    pieces, room = [], _CHUNK
    for vector, scale in scaled:
        start, end = 0, vector.numel()
        while start < end:
            stop = min(start + room, end)
            pieces.append((vector if stop - start == end else vector[start:stop], scale))
            start, room = stop, room - (stop - start)
            if not room:
                yield pieces
                pieces, room = [], _CHUNK
    if pieces:
        yield pieces


def _add(pieces: list[Tensor], normal: Tensor, stddev: float) -> None:
    """In place. Products with powers of two, and sums of whole numbers below 2^53, are exact."""
    unit = grid_unit(stddev)
    noise = normal.mul_(stddev / unit).round_()
    device = pieces[0].device
    home = "cpu" if device.type == "mps" else device  # which has no float64
    counts = torch.cat(pieces).to(home, torch.float64).mul_(1 / unit).round_()
    counts.add_(noise.to(home)).mul_(unit)
    parts = counts.split([piece.numel() for piece in pieces])
    torch._foreach_copy_(pieces, list(parts))  # pyright: ignore[reportPrivateImportUsage]


def _box_muller(random: bytes, out: Tensor) -> None:
    """Fill ``out`` (2 k,) from 16 k random bytes: sqrt(-2 ln u) times (cos, sin) of 2π v, for uniform u and v.

    u has 63 bits, so that its smallest value, which makes the largest normal number, is 2^-64; v has 64.
    """
    pairs = len(out) // 2
    drawn = torch.frombuffer(bytearray(random), dtype=torch.int64)
    radius = drawn[:pairs].bitwise_and(2**63 - 1).double().add_(0.5).mul_(2.0**-63)
    radius.log_().mul_(-2).sqrt_()
    angle = drawn[pairs:].double().mul_(math.pi * 2.0**-63)
    torch.mul(radius, angle.cos(), out=out[:pairs])
    torch.mul(radius, angle.sin_(), out=out[pairs:])


def key_from_test_seed(seed: int, purpose: str) -> bytes:
    """A key that anyone can compute: for tests only, never for a private run."""
    return hashlib.sha256(f"torch_privacy test seed {seed} for {purpose}".encode()).digest()
