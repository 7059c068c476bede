# SPDX-License-Identifier: Apache-2.0
"""Makes normal numbers on a GPU: ChaCha20 on 32-bit integers, and Box-Muller in float64.

Nothing is copied between host and device, and the host does not wait, but for the first numbers of a process. AES would
need tables or bits, ChaCha20 needs sums only; Box-Muller needs no choice that depends on a number, as the ziggurat
does.

Both are one kernel where triton is installed, as it is with PyTorch for CUDA, and 500 tensor operations elsewhere. Both
give the same numbers up to rounding, and a kernel that does not is not used.
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

from .chunks import Chunk, Part, add_on_device, chunks_of, copy, grid_unit

CHUNK = 2**23  # numbers computed at a time: enough for a GPU, in about 260 MiB
_CONSTANTS = b"expand 32-byte k"
_NUMBERS = 8  # normal numbers in a block of 16 words
ROUNDING = 1e-13  # of a number, at most 9.4, in two implementations of log, cos and sin


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
        numbers = normals_of(chunk.device)(self._key, step, first, count, chunk.device)
        return numbers.view(-1)[skip : skip + chunk.size]


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


def normals(key: bytes, step: int, first: int, count: int, device: torch.device) -> Tensor:
    """Returns the normal numbers of ``count`` blocks of `chacha20`: (count, 8) float64 on the device."""
    return box_muller(chacha20(key, step, first, count, device).view(-1)).view(count, _NUMBERS)


Normals = Callable[[bytes, int, int, int, torch.device], Tensor]


@cache
def normals_of(device: torch.device) -> Normals:
    """Returns what computes `normals` on a device: one kernel, or `normals` itself.

    The kernel is asked for the numbers of some blocks first, among them those where the counter overflows.
    """
    if device.type != "cuda":
        return normals
    try:
        from .chacha_kernel import write_normals
    except ImportError:
        return normals

    def fused(key: bytes, step: int, first: int, count: int, device: torch.device) -> Tensor:
        numbers = torch.empty(count, _NUMBERS, dtype=torch.float64, device=device)
        write_normals(numbers, state_of(key, step, first), first)
        return numbers

    asked = bytes(range(32)), 2**63 + 5, 2**32 - 100, 300, device
    try:
        if (fused(*asked) - normals(*asked)).abs().max() < ROUNDING:
            return fused
        reason = "its numbers are not those of ChaCha20 and Box-Muller"
    except Exception as error:  # of triton, which needs a C compiler, and a folder for what it compiled
        reason = f"{type(error).__name__}: {error}"
    warnings.warn(
        f"PrivateTraining: the fused kernel of triton for the noise cannot be used, so that every {CHUNK:,} numbers "
        f"take 500 more launches. The numbers are the same, up to rounding. The reason is: {reason:.500}",
        stacklevel=2,
    )
    return normals


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
