# SPDX-License-Identifier: Apache-2.0
"""Makes normal numbers on a GPU: ChaCha20 in tensor operations on 32-bit integers, and Box-Muller in float64.

Nothing is copied between host and device, and the host never waits. AES would need tables or bits, ChaCha20 needs sums
only; Box-Muller needs no choice that depends on a number, as the ziggurat does.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from .chunks import Chunk, Part, chunks_of, copy
from .grid import add_on_device, grid_unit

CHUNK = 2**21  # numbers computed at a time: enough for a GPU, in about 150 MB
_CONSTANTS = b"expand 32-byte k"
_NUMBERS = 8  # normal numbers in a block of 16 words


class DeviceNormals:
    """Standard normal numbers as a function of key, step and place, made where they are needed."""

    name = "ChaCha20, Box-Muller"

    def __init__(self, key: bytes):
        self._key = hashlib.blake2b(b"ChaCha20", key=key, digest_size=32).digest()  # not that of AES

    def add(self, step: int, parts: Sequence[Part]) -> None:
        """Adds the numbers at the places of the parts, times their scales, on the grid."""
        for chunk in chunks_of(parts, CHUNK):
            unit = grid_unit(chunk.scale)
            values = chunk.pieces[0] if len(chunk.pieces) == 1 else torch.cat(chunk.pieces)
            noise = self._draw(step, chunk).mul_(chunk.scale / unit)
            copy(add_on_device(values, noise, unit), chunk.pieces)

    def fill(self, step: int, parts: Sequence[Part]) -> None:
        """Overwrites the parts with the numbers at their places."""
        for chunk in chunks_of(parts, CHUNK):
            copy(self._draw(step, chunk), chunk.pieces)

    def _draw(self, step: int, chunk: Chunk) -> Tensor:
        first, skip = divmod(chunk.first, _NUMBERS)
        count = (skip + chunk.size + _NUMBERS - 1) // _NUMBERS
        words = chacha20(self._key, step, first, count, chunk.device)
        return box_muller(words.view(-1))[skip : skip + chunk.size]


def chacha20(key: bytes, step: int, first: int, count: int, device: torch.device) -> Tensor:
    """Returns ``count`` blocks of ChaCha20's words: (count, 16) int32 on the device.

    Block b of the step is that of RFC 8439 with the counter ``b mod 2^32``, and the nonce ``b // 2^32`` (4 bytes) and
    step (8 bytes), in little-endian order.
    """
    state = torch.empty(16, count, dtype=torch.int32, device=device)
    words = struct.unpack("<16i", _CONSTANTS + key + struct.pack("<QQ", first, step))
    for row, word in zip(state, words, strict=True):
        row.fill_(word)
    numbers = torch.arange(first, first + count, dtype=torch.int64, device=device)
    state[12].copy_(numbers)
    state[13].copy_(numbers >> 32)
    a, b, c, d = (rows.clone() for rows in state.split(4))
    for _ in range(10):
        b, d = _four_quarter_rounds(a, b, c, d)
        b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)  # the diagonals become columns
        b, d = _four_quarter_rounds(a, b, c, d)
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    return torch.cat([a, b, c, d]).add_(state).t().contiguous()


def _four_quarter_rounds(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Updates a and c (4, n) in place, one quarter round a row, and returns b and d. Sums wrap at 32 bits."""
    for first, second in ((16, 12), (8, 7)):
        d = _rotated(d.bitwise_xor_(a.add_(b)), first)
        b = _rotated(b.bitwise_xor_(c.add_(d)), second)
    return b, d


def _rotated(x: Tensor, bits: int) -> Tensor:
    """Returns the words rotated to the left: the upper bits without their sign, plus the words times 2^bits."""
    return (x >> (32 - bits)).bitwise_and_(2**bits - 1).add_(x, alpha=2**bits)


def box_muller(words: Tensor) -> Tensor:
    """Returns a number for every two words (n,): ``sqrt(-2 ln u)`` times cos and sin of 2π v, for uniform u and v.

    u has 63 bits, so that its smallest value, which gives the largest normal number, is 2^-64; v has 64 bits.
    """
    pairs = words.view(torch.int64).view(-1, 2)
    radius = pairs[:, 0].bitwise_and(2**63 - 1).double().add_(0.5).mul_(2.0**-63).log_().mul_(-2).sqrt_()
    angle = pairs[:, 1].double().mul_(math.pi * 2.0**-63)
    return torch.stack([angle.cos(), angle.sin()], 1).mul_(radius[:, None]).view(-1)
