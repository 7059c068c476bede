# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise from a cryptographic generator: AES-256 in counter mode, turned into normal numbers by Box-Muller.

Why not torch.Generator: on a CPU it is seeded by 32 bits (``manual_seed(s)`` and ``manual_seed(s + 2**32)`` draw the
same), a user's script can fix its seed by accident, the Mersenne twister can be run backwards from what it has drawn,
and its normal numbers end at 5.8 standard deviations. AES has none of that, and is no slower (docs/benchmarks.md).
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping
from itertools import accumulate

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from ._check import whole

KEY_BYTES = 32
_CHUNK = 2**15  # normal numbers made at a time: the temporaries stay in the cache and off the operating system's pages


class Noise:
    """Gaussian noise, a function of a secret key and the number of the step; its normal numbers are float32.

    Args:
        key: 32 secret bytes; by default from the operating system's cryptographic generator. Who knows the key can
            take the noise off every release made with it, past and future.

    Guarantees:
        - Steps, and tensors within a step, share no random bits.
        - One (key, step, shapes) gives the same numbers, bit for bit, on every call and however the batch was split.
        - No seed set by a user's script has any part in it, and it leaves torch's random state alone.
        - Magnitudes are cut at sqrt(2 ln 2^64) = 9.4 standard deviations, beyond which a normal number lies with
          probability below 1e-20.

    Source: Box & Muller (1958); AES-256-CTR, NIST SP 800-38A.
    """

    def __init__(self, key: bytes | None = None):
        self.key = secrets.token_bytes(KEY_BYTES) if key is None else key
        if len(self.key) != KEY_BYTES:
            raise ValueError(f"Noise: key of {len(self.key)} bytes; must be {KEY_BYTES} bytes.")

    def add_to(self, step: int, sums: Mapping[str, Tensor], stddev: float | Mapping[str, float]) -> None:
        """Add ``stddev`` times the step's standard normal numbers to the tensors, in place.

        Args:
            step: number of the step, 0 or above; one number must never be used for two releases.
            sums: name -> contiguous tensor of any floating-point type.
            stddev: absolute standard deviation, in the units of the sums; one for all, or by name.
        """
        whole("Noise.add_to", step=step)
        scales = [np.float32(stddev[name] if isinstance(stddev, Mapping) else stddev) for name in sums]
        flat = [tensor.view(-1) for tensor in sums.values()]
        ends = list(accumulate(map(len, flat)))
        for start in range(0, ends[-1] if ends else 0, _CHUNK):
            noise = self._normal(step, start, min(_CHUNK, ends[-1] - start))
            for tensor, end, scale in zip(flat, ends, scales, strict=True):
                first = end - len(tensor)
                low, high = max(start, first), min(start + len(noise), end)
                if low < high:
                    piece = noise[low - start : high - start]
                    piece *= scale
                    _add(tensor[low - first : high - first], piece)

    def _normal(self, step: int, start: int, size: int) -> np.ndarray:
        """Numbers ``start`` (a multiple of the chunk) to ``start + size`` of the step."""
        pairs = (size + 1) // 2
        normal = np.empty(2 * pairs, dtype=np.float32)
        _box_muller(self._random_bytes(step, 6 * start, 12 * pairs), normal)
        return normal[:size]

    def _random_bytes(self, step: int, offset: int, count: int) -> bytes:
        """Part of the step's AES keystream: the counter is the step (upper 64 bits) and a number of 16-byte blocks."""
        counter = (step << 64) + offset // 16
        return Cipher(algorithms.AES(self.key), modes.CTR(counter.to_bytes(16, "big"))).encryptor().update(bytes(count))


def _add(tensor: Tensor, noise: np.ndarray) -> None:
    """In place. On a CPU by numpy: waking torch's threads for every chunk can cost more than the chunk."""
    if tensor.device.type == "cpu":
        array = tensor.numpy()
        array += noise
    else:
        tensor.add_(torch.from_numpy(noise).to(tensor.device))


def _box_muller(random: bytes, out: np.ndarray) -> None:
    """Fill ``out`` (2 k,) from 12 k random bytes: sqrt(-2 ln u) times (cos, sin) of 2π v, for uniform u and v.

    u has 63 bits, so that its smallest value, which makes the largest normal number, is 2^-64; v has 32.
    """
    pairs = len(out) // 2
    radius = (np.frombuffer(random, np.int64, pairs) & (2**63 - 1)).astype(np.float32)
    radius += np.float32(0.5)
    radius *= np.float32(2.0**-63)
    angle = np.frombuffer(random, np.int32, pairs, offset=8 * pairs).astype(np.float32)
    angle *= np.float32(math.pi * 2.0**-31)
    np.log(radius, out=radius)
    radius *= np.float32(-2)
    np.sqrt(radius, out=radius)
    np.multiply(radius, np.cos(angle), out=out[:pairs])
    np.multiply(radius, np.sin(angle, out=angle), out=out[pairs:])


def key_from_test_seed(seed: int, purpose: str) -> bytes:
    """A key that anyone can compute: for tests only, never for a private run."""
    return hashlib.sha256(f"torch_privacy test seed {seed} for {purpose}".encode()).digest()
