# SPDX-License-Identifier: Apache-2.0
"""Provides the random 64-bit words of a step from AES-256, addressed by place.

The cipher encrypts 128-bit counters, each for one purpose only: the upper 64 bits are the step, the lower ones are

- ``place // 2``: one word for each of two places;
- ``2^63 + place·2^15 + 2·attempt + (0 or 1)``: four further words for an attempt at one place.

The first kind is AES in counter mode (NIST SP 800-38A).
"""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

KEY_BYTES, MAX_STEP = 32, 2**64 - 1
WORD = np.dtype("<i8")
_PLACE_BITS = np.uint64(15)
_ZEROS = memoryview(bytes(2**20))
_CTR, _ECB = modes.CTR(bytes(16)), modes.ECB()


class Keystream:
    """Writes the words of any step and place; all are independent and uniform for who does not know the key."""

    def __init__(self, key: bytes):
        self._aes = algorithms.AES(key)
        # Contexts that no thread uses now. To make one takes as long as the words of a small network.
        self._counter_mode: list[CipherContext] = []
        self._single_blocks: list[CipherContext] = []

    def words(self, step: int, first: int, count: int, memory: bytearray) -> np.ndarray:
        """Returns one word for each of ``count`` places from ``first`` on: (count,) int64, in this memory.

        The memory has room for ``8 count + 32`` bytes; ``count`` is at most 131,000.
        """
        skip = first % 2
        zeros = _ZEROS[: 8 * (count + skip)]
        assert len(zeros) == 8 * (count + skip)
        context = self._idle(self._counter_mode, _CTR)
        context.reset_nonce(((step << 64) + first // 2).to_bytes(16, "big"))
        context.update_into(zeros, memory)
        self._counter_mode.append(context)
        return np.frombuffer(memory, WORD, count, 8 * skip)

    def further_words(self, step: int, places: np.ndarray, attempt: int) -> np.ndarray:
        """Returns four further words for this attempt at each place (n,) int64: (n, 4) uint64."""
        counters = np.empty((len(places), 2, 2), ">u8")
        counters[:, :, 0] = step
        counters[:, :, 1] = (places.view(np.uint64)[:, None] << _PLACE_BITS) + self._halves(attempt)
        context = self._idle(self._single_blocks, _ECB)
        encrypted = context.update(counters.data.cast("B"))
        self._single_blocks.append(context)
        return np.frombuffer(encrypted, "<u8").reshape(-1, 4)

    def _idle(self, contexts: list[CipherContext], mode: modes.CTR | modes.ECB) -> CipherContext:
        try:
            return contexts.pop()
        except IndexError:
            return Cipher(self._aes, mode).encryptor()

    @staticmethod
    def _halves(attempt: int) -> np.ndarray:
        return np.array([2**63 + 2 * attempt, 2**63 + 2 * attempt + 1], np.uint64)
