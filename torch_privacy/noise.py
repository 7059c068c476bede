# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise from a cryptographic generator: AES-256 in counter mode, turned into normal numbers by Box-Muller.

Why not torch.Generator: on a CPU it is seeded by 32 bits (``manual_seed(s)`` and ``manual_seed(s + 2**32)`` draw the
same), a user's script can fix its seed by accident, the Mersenne twister can be run backwards from what it has drawn,
and its normal numbers end at 5.8 standard deviations. AES has none of that, and is faster (docs/benchmarks.md).
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from ._check import whole

KEY_BYTES = 32
_CHUNK = 2**16  # pairs of normal numbers made at a time: the temporaries stay in the cache


class Noise:
    """Standard normal float32 noise, a function of a secret key and the number of the step.

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

    def draw(self, step: int, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Standard normal float32 tensors of the shapes and on the devices of ``like``, for one step.

        Args:
            step: number of the step, 0 or above; one number must never be used for two releases.
            like: name -> tensor; only its shape and device count.
        """
        whole("Noise.draw", step=step)
        sizes = [tensor.numel() for tensor in like.values()]
        normal = torch.from_numpy(self._normal(step, sum(sizes)))
        parts = normal.split(sizes)
        return {
            name: part.view(tensor.shape).to(tensor.device)
            for (name, tensor), part in zip(like.items(), parts, strict=True)
        }

    def _normal(self, step: int, size: int) -> np.ndarray:
        """``size`` normal numbers, made in chunks by as many threads as torch uses; the numbers do not depend on it."""
        pairs = (size + 1) // 2
        normal = np.empty(2 * pairs, dtype=np.float32)
        starts = range(0, pairs, _CHUNK)

        def fill(start: int) -> None:
            count = min(_CHUNK, pairs - start)
            random = self._random_bytes(step, 12 * start, 12 * count)
            _box_muller(random, normal[2 * start : 2 * (start + count)])

        if len(starts) == 1:
            fill(0)
        else:
            with ThreadPoolExecutor(min(len(starts), torch.get_num_threads())) as pool:
                list(pool.map(fill, starts))
        return normal[:size]

    def _random_bytes(self, step: int, offset: int, count: int) -> bytes:
        """Part of the step's AES keystream: the counter is the step (upper 64 bits) and a number of 16-byte blocks."""
        counter = (step << 64) + offset // 16
        return Cipher(algorithms.AES(self.key), modes.CTR(counter.to_bytes(16, "big"))).encryptor().update(bytes(count))


def _box_muller(random: bytes, out: np.ndarray) -> None:
    """Fill ``out`` (2 k,) from 12 k random bytes: sqrt(-2 ln u) times (cos, sin) of 2π v, for uniform u and v.

    u has 63 bits, so that its smallest value, which makes the largest normal number, is 2^-64; v has 32.
    """
    pairs = len(out) // 2
    u = (np.frombuffer(random, np.int64, pairs) & (2**63 - 1)).astype(np.float32)
    u += np.float32(0.5)
    u *= np.float32(2.0**-63)
    radius = np.log(u, out=u)
    radius *= np.float32(-2)
    np.sqrt(radius, out=radius)
    angle = np.frombuffer(random, np.int32, pairs, offset=8 * pairs).astype(np.float32)
    angle *= np.float32(math.pi * 2.0**-31)
    cosine, sine = out[:pairs], out[pairs:]
    np.multiply(radius, np.cos(angle), out=cosine)
    np.multiply(radius, np.sin(angle, out=angle), out=sine)


def key_from_test_seed(seed: int, purpose: str) -> bytes:
    """A key that anyone can compute: for tests only, never for a private run."""
    return hashlib.sha256(f"torch_privacy test seed {seed} for {purpose}".encode()).digest()
