# SPDX-License-Identifier: Apache-2.0
"""Makes normal numbers on the CPU, from AES-256 and the ziggurat, and adds them to tensors there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from .chunks import Chunk, Part, chunks_of, copy
from .grid import add_on_grid, grid_unit
from .keystream import Keystream
from .ziggurat import in_rectangles, in_the_rest

CHUNK = 130_048  # numbers computed at a time: fewer calls, and still in cache; a multiple of 1,024
_TOGETHER = 8  # chunks that draw their numbers outside of the rectangles together


class _Memory:
    """Memory for the numbers of some chunks, reused for all: fresh pages cost as much as the arithmetic."""

    def __init__(self) -> None:
        self.random = bytearray(8 * CHUNK + 32)
        self.parts, self.counts = np.empty(CHUNK, np.int64), np.empty(CHUNK)
        self.normal = np.empty(_TOGETHER * CHUNK)


class ProcessorNormals:
    """Standard normal numbers as a function of key, step and place, made on the CPU for tensors on any device."""

    name = "AES-256-CTR, ziggurat"

    def __init__(self, key: bytes):
        self._keystream = Keystream(key)
        self._free: list[_Memory] = []  # one for each thread at most

    def add(self, step: int, parts: Sequence[Part]) -> None:
        """Adds the numbers at the places of the parts, times their scales, on the grid."""
        self._run(partial(self._add, step), chunks_of(parts, CHUNK))

    def fill(self, step: int, parts: Sequence[Part]) -> None:
        """Overwrites the parts with the numbers at their places."""
        self._run(partial(self._fill, step), chunks_of(parts, CHUNK))

    def _run(self, work: Callable[[Sequence[Chunk], _Memory], None], chunks: list[Chunk]) -> None:
        """Does the work for all chunks, in one thread: a second one waits for Python's lock as long as it helps."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = _Memory()
        for start in range(0, len(chunks), _TOGETHER):
            work(chunks[start : start + _TOGETHER], memory)
        self._free.append(memory)

    def _add(self, step: int, chunks: Sequence[Chunk], memory: _Memory) -> None:
        units, scales = [], []
        for chunk in chunks:
            units.append(unit := grid_unit(chunk.scale))
            scales.append(chunk.scale / unit)
        for chunk, unit, noise in zip(chunks, units, self._draw(step, chunks, scales, memory), strict=True):
            values = [*map(_on_processor, chunk.pieces)]
            with np.errstate(over="ignore"):  # a number beyond the range of its type is infinite, as in torch
                add_on_grid([*map(Tensor.numpy, values)], noise, unit, memory.counts[: chunk.size])
            for piece, value in zip(chunk.pieces, values, strict=True):
                if value is not piece:
                    piece.copy_(value)

    def _fill(self, step: int, chunks: Sequence[Chunk], memory: _Memory) -> None:
        for chunk, numbers in zip(chunks, self._draw(step, chunks, [1.0] * len(chunks), memory), strict=True):
            copy(torch.from_numpy(numbers), chunk.pieces)

    def _draw(
        self, step: int, chunks: Sequence[Chunk], scales: Sequence[float], memory: _Memory
    ) -> Iterator[np.ndarray]:
        """Yields the numbers (n,) of each chunk, times its scale: float64, in this memory."""
        drawn, rest, start = [], [], 0
        for chunk, scale in zip(chunks, scales, strict=True):
            out = memory.normal[start : start + chunk.size]
            words = self._keystream.words(step, chunk.first, chunk.size, memory.random)
            rest.append(in_rectangles(words, scale, memory.parts[: chunk.size], out))
            drawn.append(out)
            start += chunk.size
        places = np.concatenate([chunk.first + indices for chunk, indices in zip(chunks, rest, strict=True)])
        numbers, start = self._in_the_rest(step, places), 0
        for out, indices, scale in zip(drawn, rest, scales, strict=True):
            if len(indices):
                out[indices] = numbers[start : start + len(indices)] * scale
                start += len(indices)
            yield out

    def _in_the_rest(self, step: int, places: np.ndarray) -> np.ndarray:
        """Returns the numbers at places that are in no rectangle: of each place's first attempt that is accepted."""
        numbers, missing, attempt = np.empty(len(places)), np.arange(len(places)), 0
        while len(missing):
            words = self._keystream.further_words(step, places[missing], attempt)
            numbers[missing], accepted = in_the_rest(words)
            missing = missing[~accepted]
            attempt += 1
        return numbers


def _on_processor(piece: Tensor) -> Tensor:
    """Returns the numbers on the CPU in a type that numpy has; the tensor itself where it can be."""
    piece = piece.cpu()
    return piece if piece.dtype in (torch.float32, torch.float64) else piece.float()
