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

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from ._check import whole

KEY_BYTES = 32
_CHUNK = 2**17  # pairs of normal numbers made at a time: the temporaries stay in the cache


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
        """``size`` normal numbers. Box-Muller: sqrt(-2 ln u) times (cos, sin) of 2π v, for uniform u in (0, 1] and v.

        u has 63 bits, so that its smallest value, which makes the largest normal number, is 2^-64.
        """
        pairs = (size + 1) // 2
        random = self._random_bytes(step, 12 * pairs)
        radius_bits = torch.frombuffer(random, dtype=torch.int64, count=pairs)
        angle_bits = torch.frombuffer(random, dtype=torch.int32, count=pairs, offset=8 * pairs)
        normal = np.empty(2 * pairs, dtype=np.float32)
        cosines, sines = torch.from_numpy(normal[:pairs]), torch.from_numpy(normal[pairs:])
        for i in range(0, pairs, _CHUNK):
            part = slice(i, i + _CHUNK)
            u = radius_bits[part].bitwise_and(2**63 - 1).to(torch.float32).add_(0.5).mul_(2.0**-63)
            radius = u.log_().mul_(-2).sqrt_()
            angle = angle_bits[part].to(torch.float32).mul_(math.pi * 2.0**-31)
            torch.mul(radius, angle.cos(), out=cosines[part])
            torch.mul(radius, angle.sin_(), out=sines[part])
        return normal[:size]

    def _random_bytes(self, step: int, count: int) -> bytearray:
        """AES keystream of the step: the counter's upper 64 bits are the step, the lower ones count the blocks."""
        out = bytearray(count)
        encryptor = Cipher(algorithms.AES(self.key), modes.CTR((step << 64).to_bytes(16, "big"))).encryptor()
        encryptor.update_into(memoryview(bytes(count)), out)
        return out


def key_from_test_seed(seed: int, purpose: str) -> bytes:
    """A key that anyone can compute: for tests only, never for a private run."""
    return hashlib.sha256(f"torch_privacy test seed {seed} for {purpose}".encode()).digest()
