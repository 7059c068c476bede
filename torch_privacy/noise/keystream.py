# SPDX-License-Identifier: Apache-2.0
"""Provides the random 64-bit words of a step from AES-256, addressed by place.

The cipher encrypts 128-bit counters, each for one purpose only: the upper 64 bits are the step, the lower ones are

- ``place // 2``: one word for each of two places;
- ``2^63 + place·2^15 + 2·attempt + (0 or 1)``: four further words for an attempt at one place.

The first kind is AES in counter mode (NIST SP 800-38A).
"""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

KEY_BYTES, MAX_STEP = 32, 2**64 - 1
WORD = np.dtype("<i8")
_PLACE_BITS = np.uint64(15)
_ZEROS = memoryview(bytes(2**20))


class Keystream:
    """Writes the words of any step and place; all are independent and uniform for who does not know the key."""

    def __init__(self, key: bytes):
        self._aes = algorithms.AES(key)

    def words(self, step: int, first: int, count: int, memory: bytearray) -> np.ndarray:
        """Returns one word for each of ``count`` places from ``first`` on: (count,) int64, in this memory.

        The memory has room for ``8 count + 32`` bytes; ``count`` is at most 131,000.
        """
        skip = first % 2
        counter = ((step << 64) + first // 2).to_bytes(16, "big")
        zeros = _ZEROS[: 8 * (count + skip)]
        assert len(zeros) == 8 * (count + skip)
        Cipher(self._aes, modes.CTR(counter)).encryptor().update_into(zeros, memory)
        return np.frombuffer(memory, WORD, count, 8 * skip)

    def further_words(self, step: int, places: np.ndarray, attempt: int) -> np.ndarray:
        """Returns four further words for this attempt at each place (n,) int64: (n, 4) uint64."""
        counters = np.empty((len(places), 2, 2), ">u8")
        counters[:, :, 0] = step
        counters[:, :, 1] = (places.view(np.uint64)[:, None] << _PLACE_BITS) + self._halves(attempt)
        encrypted = Cipher(self._aes, modes.ECB()).encryptor().update(counters.data.cast("B"))
        return np.frombuffer(encrypted, "<u8").reshape(-1, 4)

    @staticmethod
    def _halves(attempt: int) -> np.ndarray:
        return np.array([2**63 + 2 * attempt, 2**63 + 2 * attempt + 1], np.uint64)
