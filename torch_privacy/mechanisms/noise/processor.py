# SPDX-License-Identifier: Apache-2.0
"""Makes normal numbers on the CPU, from AES-256 and the ziggurat, and adds them to tensors there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .chunks import Chunk, Part, chunks_of, copy
from .grid import add_on_grid, grid_unit
from .keystream import Keystream
from .ziggurat import in_rectangles, in_the_rest

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
