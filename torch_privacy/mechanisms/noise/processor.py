# SPDX-License-Identifier: Apache-2.0
"""Makes normal numbers on the CPU, from AES-256 and a ziggurat, and adds them to tensors there.

Words: the cipher encrypts 128-bit counters, each for one purpose only: the upper 64 bits are the step, the lower are

- ``place // 2``: one word for each of two places (AES in counter mode, NIST SP 800-38A);
- ``2^63 + place·2^15 + 2·attempt + (0 or 1)``: four further words for an attempt at one place.

Numbers: the area under ``f(x) = exp(-x²/2)``, x ≥ 0, is divided into 16384 equal parts. 16381 of them are rectangles
that lie wholly under the curve, stacked from the bottom: ``[0, xᵢ] × [f(xᵢ₋₁), f(xᵢ)]`` with ``x₁ > x₂ > ...`` and
f(x₀) = 0. A word chooses a part by its lowest 14 bits, and a number in the rectangle by all of its bits, with sign: one
product, and no test. The other 3 parts are what is left under the curve: a piece over each rectangle, and the tail
beyond x₁. There a point is drawn uniformly in boxes that cover the pieces (for the tail, under an exponential) until
one is under the curve, so that the law is exact.

Resolution: 50 bits of a word are left for the number. So the probability of a point of the grid (chunks.py) differs
from the normal law's by a relative error of 1.3e-7 (root mean square; 4e-8 below one standard deviation, 2e-6 between 3
and 4), as computed for samples of points. If the errors of different points are independent, this changes the privacy
loss of p numbers by about 1.8e-7 √p, added in squares: 2.4e-4 for 1.8 million numbers, as if the noise of a multiplier
of 1 were smaller by 3e-8, relative. `mechanism.noise_factors` prices it.

Source: C. D. McFarland (2016), "A modified ziggurat algorithm for generating exponentially and normally distributed
    pseudorandom numbers", arXiv:1403.6870, for the rectangles; G. Marsaglia (1964), "Generating a variable from the
    tail of the normal distribution". We draw what is left by rejection from boxes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from torch import Tensor

from .chunks import Chunk, Part, add_on_grid, chunks_of, copy, grid_unit

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


PARTS = 2**14


class Tables(NamedTuple):
    """The rectangles, and the boxes around what is left; the box with index 0 covers the tail."""

    widths: np.ndarray  # (PARTS,) of the rectangles; 0 for the parts that are none, which come first
    num_rest: int  # of the parts that are no rectangle
    areas: np.ndarray  # (boxes,) cumulated
    boxes: np.ndarray  # (boxes, 8): see in_the_rest


@cache
def tables() -> Tables:
    """Returns the tables, computed once.

    Over a rectangle the curve lies below its chord plus ``rise``, the largest of ``-f''(x) = (1 - x²) f(x)`` there (at
    the left edge), times width² / 8. So the box is a trapezoid; half of a parallelogram of the height ``full``.
    """
    right = np.array(edges())
    top = np.exp(-right * right / 2)  # upper edges of the rectangles
    left, peak = np.append(right[1:], 0.0), np.append(top[1:], 1.0)
    width, height, zero = right - left, peak - top, 0 * right
    rise = np.maximum(1 - left * left, 0) * peak * width * width / 8
    full = height + 2 * rise
    tail = [right[0], 0.0, 0.0, top[0], np.inf, 0.0, -1 / right[0], 0.0]
    boxes = np.vstack([tail, np.stack([left, width, top, full, height + rise, height, zero, zero + 1], axis=1)])
    areas = np.cumsum(np.append(top[0] / right[0], width * full / 2))
    num_rest = PARTS - len(right)
    return Tables(np.append(np.zeros(num_rest), right), num_rest, areas, boxes)


def edges() -> list[float]:
    """Returns the right edges x₁ > x₂ > ... of the rectangles: ``xᵢ (f(xᵢ) - f(xᵢ₋₁)) = √(π/2) / PARTS``."""
    area, found, x, bottom = math.sqrt(math.pi / 2) / PARTS, [], 8.0, 0.0
    while True:
        while True:  # from the right to the largest solution of f(x) = bottom + area / x
            top = bottom + area / x
            if top >= 1:
                return found
            left = math.sqrt(-2 * math.log(top))
            if left >= x:
                break
            x = left
        found.append(x)
        bottom = math.exp(-x * x / 2)


@lru_cache(16)
def _scaled_widths(scale: float) -> np.ndarray:
    return tables().widths * (scale * 2.0**-63)


def in_rectangles(words: np.ndarray, scale: float, parts: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Writes ``scale`` times the words' numbers to ``out``, and returns the indices of those that are in no rectangle.

    Args:
        words: (n,) int64.
        scale: any factor.
        parts: memory (n,) int64.
        out: (n,) float64; 0 where there is no rectangle.
    """
    np.bitwise_and(words, PARTS - 1, out=parts)
    np.take(_scaled_widths(scale), parts, out=out, mode="wrap")
    rest = (out == 0).nonzero()[0]  # faster than to compare the integers
    np.multiply(words, out, out=out)
    return rest


def in_the_rest(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns a number (n,) from each row of four random words (n, 4) uint64, and whether it is accepted.

    The words choose the box, the point in it, and the sign. A point of the parallelogram above the trapezoid's upper
    side is turned about the center of that side.
    """
    t = tables()
    box, along, up = words.T[:3] * 2.0**-64 + 2.0**-65  # above 0, at most 1
    left, width, bottom, full, upper, fall, decay, straight = t.boxes[np.searchsorted(t.areas, box * t.areas[-1])].T
    y = up * full
    is_above = y > upper - fall * along
    along = np.abs(is_above - along)
    y = np.abs(is_above * full - y)
    x = left + width * along + decay * np.log(along)
    y = bottom + y * np.maximum(along, straight)  # in the tail, full * along is the exponential at x
    return np.copysign(x, words[:, 3].view(np.int64)), y < np.exp(-0.5 * x * x)


CHUNK = 65_536  # numbers computed at a time: fewer calls of numpy, and three arrays that fit in most second caches


class _Memory:
    """Memory for the numbers of a chunk, reused for all: fresh pages cost as much as the arithmetic."""

    def __init__(self) -> None:
        self.random = bytearray(8 * CHUNK + 32)
        self.normal, self.values = np.empty(CHUNK), np.empty(CHUNK)
        self.parts = self.values.view(np.int64)  # needed before the values are


@dataclass(slots=True)
class _Left:
    """Numbers of a chunk that are drawn last, because they are few and take many calls."""

    chunk: Chunk
    indices: np.ndarray  # in the chunk
    values: np.ndarray | None  # of the tensors there, before; None if they are overwritten


class ProcessorNormals:
    """Standard normal numbers as a function of key, step and place, made on the CPU for tensors on any device."""

    name = "AES-256-CTR, ziggurat"

    def __init__(self, key: bytes):
        self._keystream = Keystream(key)
        self._free: list[_Memory] = []  # one for each thread at most

    def add(self, step: int, parts: Sequence[Part]) -> None:
        """Adds the numbers at the places of the parts, times their scales, on the grid."""
        left: list[_Left] = []
        memory = self._memory()
        with np.errstate(over="ignore"):  # a number beyond the range of its type is infinite, as in torch
            for chunk in chunks_of(parts, CHUNK):
                unit, values = grid_unit(chunk.scale), memory.values[: chunk.size]
                noise, indices = self._draw(step, chunk, chunk.scale / unit, memory)
                pieces = [*map(_on_processor, chunk.pieces)]
                arrays = [*map(Tensor.numpy, pieces)]
                np.concatenate(arrays, out=values, casting="same_kind")
                if len(indices):
                    left.append(_Left(chunk, indices, values[indices]))
                add_on_grid(values, noise, unit)
                start = 0
                for piece, there, array in zip(pieces, chunk.pieces, arrays, strict=True):
                    array[:] = values[start : start + len(array)]
                    start += len(array)
                    if piece is not there:
                        there.copy_(piece)
            self._put_left(step, left)
        self._free.append(memory)

    def fill(self, step: int, parts: Sequence[Part]) -> None:
        """Overwrites the parts with the numbers at their places."""
        left: list[_Left] = []
        memory = self._memory()
        for chunk in chunks_of(parts, CHUNK):
            numbers, indices = self._draw(step, chunk, 1.0, memory)
            copy(torch.from_numpy(numbers), chunk.pieces)
            if len(indices):
                left.append(_Left(chunk, indices, None))
        self._put_left(step, left)
        self._free.append(memory)

    def _memory(self) -> _Memory:
        try:
            return self._free.pop()
        except IndexError:
            return _Memory()

    def _draw(self, step: int, chunk: Chunk, scale: float, memory: _Memory) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers (n,) of a chunk, times a scale, and the indices of those that are 0 and drawn later."""
        noise = memory.normal[: chunk.size]
        words = self._keystream.words(step, chunk.first, chunk.size, memory.random)
        return noise, in_rectangles(words, scale, memory.parts[: chunk.size], noise)

    def _put_left(self, step: int, left: Sequence[_Left]) -> None:
        """Draws the numbers that are left, and writes them, or their sums with the values, into the tensors."""
        if not left:
            return
        counts = [len(one.indices) for one in left]
        numbers = self._in_the_rest(step, np.concatenate([one.chunk.first + one.indices for one in left]))
        before = [one.values for one in left if one.values is not None]
        if before:
            units, scales = [grid_unit(one.chunk.scale) for one in left], [one.chunk.scale for one in left]
            unit, scale = np.repeat(units, counts), np.repeat(scales, counts)
            values = np.concatenate(before)
            add_on_grid(values, numbers * (scale / unit), unit)
            numbers = values
        start = 0
        for one in left:
            start, end = start + len(one.indices), 0
            found = numbers[start - len(one.indices) : start]
            for piece in one.chunk.pieces:
                begin, end = end, end + len(piece)
                here = slice(None) if end - begin == one.chunk.size else (one.indices >= begin) & (one.indices < end)
                _write(piece, one.indices[here] - begin, found[here])

    def _in_the_rest(self, step: int, places: np.ndarray) -> np.ndarray:
        """Returns the numbers at places that are in no rectangle: of each place's first attempt that is accepted."""
        numbers, missing, attempt = np.empty(len(places)), np.arange(len(places)), 0
        while len(missing):
            words = self._keystream.further_words(step, places[missing], attempt)
            numbers[missing], accepted = in_the_rest(words)
            missing = missing[~accepted]
            attempt += 1
        return numbers


def _write(piece: Tensor, places: np.ndarray, numbers: np.ndarray) -> None:
    """Writes float64 numbers to some places of a piece, rounded to its dtype (by way of float32, as torch does)."""
    if piece.is_cpu and piece.dtype in _OF_NUMPY:
        piece.numpy()[places] = numbers
    elif len(places):
        piece.index_copy_(0, torch.from_numpy(places).to(piece.device), torch.from_numpy(numbers).to(piece))


_OF_NUMPY = (torch.float32, torch.float64)


def _on_processor(piece: Tensor) -> Tensor:
    """Returns the numbers on the CPU in a type that numpy has; the tensor itself where it can be."""
    piece = piece.cpu()
    return piece if piece.dtype in _OF_NUMPY else piece.float()
