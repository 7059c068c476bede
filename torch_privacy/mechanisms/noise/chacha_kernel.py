# SPDX-License-Identifier: Apache-2.0
"""Makes normal numbers in one kernel of triton, which PyTorch for GPUs brings with it: ChaCha20 and Box-Muller."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS = 128  # of ChaCha20, in one instance of the kernel

_ARGUMENTS = "key0 key1 key2 key3 nonce first count".split()


def write_normals(numbers: Tensor, state: tuple[int, ...], first: int) -> None:
    """Writes the normal numbers of blocks ``first``, ``first + 1``, ... to ``numbers`` (count, 8) float64.

    Args:
        numbers: on the card.
        state: the 16 words that a block begins with, as signed integers; those of its number are not read.
        first: number of the first block.
    """
    count = len(numbers)
    pairs = [state[k] & 0xFFFFFFFF | state[k + 1] << 32 for k in (4, 6, 8, 10, 14)]
    kernel: Any = _kernel
    with torch.cuda.device_of(numbers):  # triton launches on the current device
        kernel[triton.cdiv(count, BLOCKS),](numbers, *pairs, first, count, BLOCKS)


@triton.jit
def _lower(pair):
    return pair.to(tl.uint32)


@triton.jit
def _upper(pair):
    return (pair >> 32).to(tl.uint32)


@triton.jit
def _quarter(a, b, c, d):
    a += b
    d ^= a
    d = (d << 16) | (d >> 16)
    c += d
    b ^= c
    b = (b << 12) | (b >> 20)
    a += b
    d ^= a
    d = (d << 8) | (d >> 24)
    c += d
    b ^= c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit(do_not_specialize=_ARGUMENTS)  # else it would be compiled again for some keys, steps and places
def _kernel(out, key0, key1, key2, key3, nonce, first, count, SIZE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    number = place + first
    nothing = place * 0
    zero = nothing.to(tl.uint32)
    s4, s5, s6, s7 = _lower(nothing + key0), _upper(nothing + key0), _lower(nothing + key1), _upper(nothing + key1)
    s8, s9, s10, s11 = _lower(nothing + key2), _upper(nothing + key2), _lower(nothing + key3), _upper(nothing + key3)
    s12, s13, s14, s15 = _lower(number), _upper(number), _lower(nothing + nonce), _upper(nothing + nonce)
    x0, x1, x2, x3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    inside = place < count
    first_number = out + place * 8
    _store(first_number, inside, x0 + 0x61707865, x1 + 0x3320646E, x2 + 0x79622D32, x3 + 0x6B206574)
    _store(first_number + 2, inside, x4 + s4, x5 + s5, x6 + s6, x7 + s7)
    _store(first_number + 4, inside, x8 + s8, x9 + s9, x10 + s10, x11 + s11)
    _store(first_number + 6, inside, x12 + s12, x13 + s13, x14 + s14, x15 + s15)


@triton.jit
def _store(out, inside, a, b, c, d):  # the same steps as in box_muller
    u = ((a.to(tl.int64) | b.to(tl.int64) << 32) & 0x7FFFFFFFFFFFFFFF).to(tl.float64)
    v = (c.to(tl.int64) | d.to(tl.int64) << 32).to(tl.float64)
    radius = tl.sqrt(tl.log((u + 0.5) * 1.0842021724855044e-19) * -2)  # 2^-63
    angle = v * 3.4061215800865545e-19  # pi 2^-63
    tl.store(out, tl.cos(angle) * radius, mask=inside)
    tl.store(out + 1, tl.sin(angle) * radius, mask=inside)
