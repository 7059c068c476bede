# SPDX-License-Identifier: Apache-2.0
"""Condenses tensors on a GPU to few bytes, which the host reads in place of all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..mechanisms.noise.chunks import chunks_of
from ..mechanisms.noise.processor import WORD, Keystream

COLUMNS = 4096  # words of which 16 bytes are left
AT_ONCE = 2**23  # words; their products, 16 bytes each, exist at the same time
_WORDS = {1: torch.uint8, 2: torch.int16}  # bytes of a number -> words of its bits; of 32 bits for others


class Condenser:
    """Keeps two sums ``Σ k w mod 2^64`` of every 4096 words w of 32 bits, with secret words k of 64 bits.

    Tensors that differ in a bit have other sums, but for a probability of at most 2^-66: the difference of two words is
    an odd number times 2^t with t < 32, so that its product with a random k takes each of ``2^(64-t)`` values equally
    often (multilinear hashing: Dietzfelbinger, 1996; Lemire and Kaser, 2014). To copy the 500 MB that GPT-2 releases,
    and to compute a digest of them on the host, takes longer than a step of a GPU.

    Args:
        key: 32 secret bytes, equal on all ranks. Show no sums: only a keyed digest of them reveals nothing.
    """

    def __init__(self, key: bytes):
        memory = bytearray(2 * COLUMNS * WORD.itemsize + 32)
        words = Keystream(key).words(0, 0, 2 * COLUMNS, memory)
        self._keys = {torch.device("cpu"): torch.from_numpy(words.copy()).view(2, COLUMNS)}

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns bytes (uint8) that depend on every bit of these tensors of one device, on which they stay."""
        parts, place = [], 0
        for tensor in tensors:
            words = tensor.view(-1).view(_WORDS.get(tensor.itemsize, torch.int32)).int()
            parts.append((words, place, 1.0))
            place += words.numel()
        return torch.cat([part for chunk in chunks_of(parts, AT_ONCE) for part in self._sums(chunk.pieces)])

    def _sums(self, pieces: list[Tensor]) -> list[Tensor]:
        words = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        rows = words[: len(words) - len(words) % COLUMNS].view(-1, 1, COLUMNS)
        device = words.device
        if device not in self._keys:
            self._keys[device] = self._keys[torch.device("cpu")].to(device)
        sums = (rows * self._keys[device]).sum(-1)
        return [sums.view(-1).view(torch.uint8), words[rows.numel() :].contiguous().view(torch.uint8)]
