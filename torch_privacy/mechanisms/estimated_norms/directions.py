# SPDX-License-Identifier: Apache-2.0
"""Provides the random directions for estimated norms, fresh for every step and microbatch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from ...support.validate import whole
from ..noise import KEY_BYTES, Noise

GROUP_SIZE = 8  # default number of directions that are projected at once
GROUP_ENTRIES = 2**26  # largest number of direction entries held at once


class Directions:
    """Standard normal directions in the space of the parameters: a function of a secret key, step and microbatch.

    Args:
        noise_key: key of the noise; the key of the directions is derived from it, so that they share no random bits.
        step: index of the step.
        part: index of the microbatch in the step.
    """

    def __init__(self, noise_key: bytes, step: int, part: int):
        whole("Directions", step=step, part=part)
        self.place = step, part
        label = b"directions" + step.to_bytes(8, "big") + part.to_bytes(8, "big")
        self._noise = Noise(hashlib.blake2b(label, key=noise_key, digest_size=KEY_BYTES).digest())

    def draw(self, numbers: Iterable[int], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the directions with these indices, name -> (g, *shape): drawn in float32, never in half precision."""
        numbers = list(numbers)
        drawn = {name: p.new_empty(len(numbers), *p.shape, dtype=torch.float32) for name, p in parameters.items()}
        for k, number in enumerate(numbers):
            self._noise.fill(number, {name: d[k] for name, d in drawn.items()})
        return {name: d.to(torch.promote_types(parameters[name].dtype, d.dtype)) for name, d in drawn.items()}

    def in_groups(
        self, count: int, group_size: int | None, parameters: Mapping[str, Tensor]
    ) -> Iterator[dict[str, Tensor]]:
        """Yields the first ``count`` directions in even groups, no larger than ``group_size`` and memory allow."""
        entries = sum(p.numel() for p in parameters.values())
        size = max(1, min(group_size or GROUP_SIZE, GROUP_ENTRIES // max(entries, 1)))
        size = math.ceil(count / math.ceil(count / size))
        for start in range(0, count, size):
            yield self.draw(range(start, min(start + size, count)), parameters)
