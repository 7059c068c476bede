# SPDX-License-Identifier: Apache-2.0
"""Provides samplers, which choose the examples of each step; only distributions that the accountant can price."""

from __future__ import annotations

import hashlib
import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..support.validate import in_range, plain_numbers, whole

KEY_BYTES = 32


@dataclass(frozen=True)
class Sampler(ABC):
    """Chooses the examples of each step: a function of the secret key and of the step's number.

    So a resumed run sees the same batches.

    Args:
        num_examples: size n of the dataset.
    """

    num_examples: int
    key: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES), repr=False, kw_only=True)

    def __post_init__(self) -> None:
        whole(type(self).__name__, num_examples=self.num_examples, at_least=1)

    @abstractmethod
    def indices(self, step: int) -> np.ndarray:
        """Returns the sorted indices of the examples that join the step, (batch_size,) int64, possibly none."""

    def groups(self, step: int, size: int, count: int) -> np.ndarray:
        """Returns one of ``count`` groups for every example of the step's batch: (size,) int64, uniform, iid."""
        whole("Sampler.groups", step=step, size=size)
        return self._generator(step, b"groups").integers(count, size=size)

    def seeds(self, step: int, size: int) -> np.ndarray:
        """Returns a random number for every member of the step's batch: (size,) uint64."""
        whole("Sampler.seeds", step=step, size=size)
        return self._generator(step, b"seeds").integers(2**64, size=size, dtype=np.uint64)

    def _generator(self, step: int, purpose: bytes = b"") -> np.random.Generator:
        digest = hashlib.sha256(self.key + step.to_bytes(8, "big") + purpose).digest()
        return np.random.Generator(np.random.PCG64DXSM(int.from_bytes(digest, "big")))


@plain_numbers
@dataclass(frozen=True)
class PoissonSampler(Sampler):
    """Every example joins every step independently with probability ``sampling_probability``.

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
        >>> len(PoissonSampler(num_examples=10, sampling_probability=1.0).indices(step=0))
        10
    """

    sampling_probability: float

    def __post_init__(self) -> None:
        super().__post_init__()
        hint = "For a mean batch of 256 out of 60000 pass 256 / 60000."
        in_range("PoissonSampler", 0, 1, sampling_probability=self.sampling_probability, hint=hint)

    def indices(self, step: int) -> np.ndarray:
        whole("PoissonSampler.indices", step=step)
        generator = self._generator(step)
        batch_size = generator.binomial(self.num_examples, self.sampling_probability)
        chosen = generator.choice(self.num_examples, batch_size, replace=False, shuffle=False)
        return np.sort(chosen)


@dataclass(frozen=True)
class VaryingSampler(Sampler):
    """A Poisson sample in every step, each step with a probability of its own.

    Args:
        num_examples: size n of the dataset.
        probabilities: that of each step.
        key: as for `PoissonSampler`.
    """

    probabilities: tuple[float, ...]

    def indices(self, step: int) -> np.ndarray:
        return PoissonSampler(self.num_examples, self.probabilities[step], key=self.key).indices(step)


@plain_numbers
@dataclass(frozen=True)
class TruncatedSampler(PoissonSampler):
    """A `PoissonSampler` that keeps at most ``most`` examples of each batch, chosen uniformly.

    Guarantees:
        - Which examples stay is a function of key and step, and every subset of that size is equally likely.
    """

    most: int

    def indices(self, step: int) -> np.ndarray:
        drawn = super().indices(step)
        if len(drawn) <= self.most:
            return drawn
        kept = self._generator(step, b"truncated").choice(len(drawn), self.most, replace=False, shuffle=False)
        return drawn[np.sort(kept)]


@plain_numbers
@dataclass(frozen=True)
class BinsSampler(Sampler):
    """Every example is in exactly one of the ``num_bins`` batches of each epoch, its bin.

    Args:
        num_examples: size n of the dataset.
        num_bins: t, the number of batches of an epoch; each has n/t examples on average.
        key: as for `PoissonSampler`.

    Guarantees:
        - Bins are uniform, and independent between examples and between epochs: batch sizes are Binomial(n, 1/t).
        - One (key, step) gives the same batch on every call.

    Example:
        >>> sampler = BinsSampler(num_examples=10, num_bins=3)
        >>> sorted(i for step in range(3) for i in sampler.indices(step).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    num_bins: int
    _of_epochs: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("BinsSampler", num_bins=self.num_bins, at_least=1)

    def indices(self, step: int) -> np.ndarray:
        whole("BinsSampler.indices", step=step)
        epoch, number = divmod(step, self.num_bins)
        if epoch not in self._of_epochs:
            bins = self._generator(epoch, b"bins").integers(self.num_bins, size=self.num_examples)
            ends = np.cumsum(np.bincount(bins, minlength=self.num_bins))
            self._of_epochs[epoch] = np.argsort(bins, kind="stable"), ends
            self._of_epochs.pop(epoch - 2, None)  # batches are fetched ahead, so that two epochs are in use
        order, ends = self._of_epochs[epoch]
        return order[ends[number - 1] if number else 0 : ends[number]]


@plain_numbers
@dataclass(frozen=True)
class CyclicSampler(PoissonSampler):
    """Every example has a class, and joins only the steps whose turn it is, each with probability q times the classes.

    Args:
        num_examples: size n of the dataset.
        sampling_probability: q, the mean batch size over n.
        num_classes: b; step t draws from class t mod b.
        in_order: True if class and batches are fixed by the place in the data set: q b is 1, and nothing is random.
        key: as for `PoissonSampler`.

    Guarantees:
        - An example's class is a function of the key and its index, uniform and independent of all others, and the same
          in the whole run, so that it is never in two steps less than b apart.
    """

    num_classes: int
    in_order: bool = False

    @cached_property
    def classes(self) -> np.ndarray:
        """The class of each example, (n,)."""
        if self.in_order:
            return np.arange(self.num_examples) % self.num_classes
        return self._generator(0, b"classes").integers(self.num_classes, size=self.num_examples)

    def indices(self, step: int) -> np.ndarray:
        whole("CyclicSampler.indices", step=step)
        members = np.flatnonzero(self.classes == step % self.num_classes)
        generator, q = self._generator(step), min(1.0, self.sampling_probability * self.num_classes)
        batch_size = generator.binomial(len(members), q)
        return members[np.sort(generator.choice(len(members), batch_size, replace=False, shuffle=False))]
