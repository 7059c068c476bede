# SPDX-License-Identifier: Apache-2.0
"""Makes normal numbers on a GPU: ChaCha20 on 32-bit integers, and Box-Muller in float64.

Nothing is copied between host and device, and the host does not wait, but for the first words of a process. AES would
need tables or bits, ChaCha20 needs sums only; Box-Muller needs no choice that depends on a number, as the ziggurat
does.

ChaCha20 is one kernel where triton is installed, as it is with PyTorch for CUDA, and 500 tensor operations elsewhere.
Integers leave nothing to rounding: both give the same words, and a kernel that does not is not used.
"""

from __future__ import annotations

import hashlib
import math
import struct
import warnings
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from .chunks import Chunk, Part, chunks_of, copy
from .grid import add_on_device, grid_unit

CHUNK = 2**23  # numbers computed at a time: enough for a GPU, in about 260 MiB
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
        words = words_of(chunk.device)(self._key, step, first, count, chunk.device)
        return box_muller(words.view(-1))[skip : skip + chunk.size]


def state_of(key: bytes, step: int, first: int) -> tuple[int, ...]:
    """Returns the 16 words that block ``first`` begins with, as signed integers."""
    return struct.unpack("<16i", _CONSTANTS + key + struct.pack("<QQ", first, step))


def chacha20(key: bytes, step: int, first: int, count: int, device: torch.device) -> Tensor:
    """Returns ``count`` blocks of ChaCha20's words: (count, 16) int32 on the device.

    Block b of the step is that of RFC 8439 with the counter ``b mod 2^32``, and the nonce ``b // 2^32`` (4 bytes) and
    step (8 bytes), in little-endian order.
    """
    state = torch.empty(16, count, dtype=torch.int32, device=device)
    for row, word in zip(state, state_of(key, step, first), strict=True):
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


Words = Callable[[bytes, int, int, int, torch.device], Tensor]


@cache
def words_of(device: torch.device) -> Words:
    """Returns what computes the words of `chacha20` on a device: one kernel, or `chacha20` itself.

    The kernel is asked for the words of some blocks first, among them those where the counter overflows.
    """
    if device.type != "cuda":
        return chacha20
    try:
        from .chacha_kernel import write_words
    except ImportError:
        return chacha20

    def fused(key: bytes, step: int, first: int, count: int, device: torch.device) -> Tensor:
        words = torch.empty(16, count, dtype=torch.int32, device=device)
        write_words(words, state_of(key, step, first), first)
        return words.t().contiguous()

    asked = bytes(range(32)), 2**63 + 5, 2**32 - 100, 300, device
    try:
        if torch.equal(fused(*asked), chacha20(*asked)):
            return fused
        reason = "its words are not those of ChaCha20"
    except Exception as error:  # of triton, which needs a C compiler, and a folder for what it compiled
        reason = f"{type(error).__name__}: {error}"
    warnings.warn(
        f"PrivateTraining: the fused kernel of triton for the noise cannot be used, so that every {CHUNK:,} numbers "
        f"take 500 more launches. The noise is the same. The reason is: {reason:.500}",
        stacklevel=2,
    )
    return chacha20


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
