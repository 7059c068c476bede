# SPDX-License-Identifier: Apache-2.0
"""Random directions by which norms are estimated: fresh for every step and microbatch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from .._validate import whole
from ..noise import KEY_BYTES, Noise

GROUP_SIZE = 8  # directions that are taken together, unless the user says otherwise
GROUP_ENTRIES = 2**26  # of directions that are held at once, at most


class Directions:
    """Standard normal directions of the parameters, a function of a secret key, the step and the microbatch.

    Args:
        noise_key: key of the noise; the directions' own is derived from it, so that they share no random bits.
        step: number of the step.
        part: number of the microbatch in the step.
    """

    def __init__(self, noise_key: bytes, step: int, part: int):
        whole("Directions", step=step, part=part)
        label = b"directions" + step.to_bytes(8, "big") + part.to_bytes(8, "big")
        self._noise = Noise(hashlib.blake2b(label, key=noise_key, digest_size=KEY_BYTES).digest())

    def draw(self, numbers: Iterable[int], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Directions with these numbers, by name (g, *shape), drawn in float32; never in half precision."""
        numbers = list(numbers)
        drawn = {name: p.new_empty(len(numbers), *p.shape, dtype=torch.float32) for name, p in parameters.items()}
        for k, number in enumerate(numbers):
            self._noise.fill(number, {name: d[k] for name, d in drawn.items()})
        return {name: d.to(torch.promote_types(parameters[name].dtype, d.dtype)) for name, d in drawn.items()}

    def in_groups(
        self, count: int, group_size: int | None, parameters: Mapping[str, Tensor]
    ) -> Iterator[dict[str, Tensor]]:
        """The first ``count`` directions in even groups, as large as was asked for and memory allows at most."""
        entries = sum(p.numel() for p in parameters.values())
        size = max(1, min(group_size or GROUP_SIZE, GROUP_ENTRIES // max(entries, 1)))
        size = math.ceil(count / math.ceil(count / size))
        for start in range(0, count, size):
            yield self.draw(range(start, min(start + size, count)), parameters)

    def matrix(self, number: int, shape: tuple[int, int], like: Tensor) -> Tensor:
        """The block of directions with this number, of a shape, in the type and on the device of a tensor."""
        drawn = like.new_empty(shape, dtype=torch.float32)
        self._noise.fill(number, {"": drawn})
        return drawn.to(like.dtype)
