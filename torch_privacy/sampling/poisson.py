# SPDX-License-Identifier: Apache-2.0
"""Provides samplers, which choose the examples of each step; only distributions that the accountant can price."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field

import numpy as np

from ..support.validate import in_range, plain_numbers, whole

KEY_BYTES = 32


@plain_numbers
@dataclass(frozen=True)
class Poisson:
    """Every example joins every step independently with probability ``sampling_probability``.

    A step's batch is a function of the secret key and the step's number, so that a resumed run sees the same batches.
    The batch size is drawn first (binomial), then that many distinct examples: the same distribution as one coin per
    example, at a cost that grows with the batch instead of the dataset.

    Args:
        num_examples: size n of the dataset.
        sampling_probability: q in (0, 1]; q·n is the expected batch size.
        key: 32 secret bytes; by default from the operating system. Privacy amplification requires its secrecy.

    Guarantees:
        - Inclusions are independent between examples and between steps; each has probability q (to 2^-53).
        - One (key, step) gives the same batch on every call.

    Example:
        >>> len(Poisson(num_examples=10, sampling_probability=1.0).indices(step=0))
        10
    """

    num_examples: int
    sampling_probability: float
    key: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES), repr=False)

    name = "Poisson"  # the name used by the accountant's events

    def __post_init__(self) -> None:
        whole("Poisson", num_examples=self.num_examples, at_least=1)
        hint = "For a mean batch of 256 out of 60000 pass 256 / 60000."
        in_range("Poisson", 0, 1, sampling_probability=self.sampling_probability, hint=hint)

    def indices(self, step: int) -> np.ndarray:
        """Returns the sorted indices of the examples that join the step, (batch_size,) int64, possibly none."""
        whole("Poisson.indices", step=step)
        generator = self._generator(step)
        batch_size = generator.binomial(self.num_examples, self.sampling_probability)
        chosen = generator.choice(self.num_examples, batch_size, replace=False, shuffle=False)
        return np.sort(chosen)

    def groups(self, step: int, size: int, count: int) -> np.ndarray:
        """Returns one of ``count`` groups for every example of the step's batch: (size,) int64, uniform, iid."""
        whole("Poisson.groups", step=step, size=size)
        return self._generator(step, b"groups").integers(count, size=size)

    def seeds(self, step: int, size: int) -> np.ndarray:
        """Returns a random number for every member of the step's batch: (size,) uint64."""
        whole("Poisson.seeds", step=step, size=size)
        return self._generator(step, b"seeds").integers(2**64, size=size, dtype=np.uint64)

    def _generator(self, step: int, purpose: bytes = b"") -> np.random.Generator:
        digest = hashlib.sha256(self.key + step.to_bytes(8, "big") + purpose).digest()
        return np.random.Generator(np.random.PCG64DXSM(int.from_bytes(digest, "big")))
