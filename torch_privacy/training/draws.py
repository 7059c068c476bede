# SPDX-License-Identifier: Apache-2.0
"""Draws the batches of a training, and cuts each into the shares of ranks and microbatches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil

import numpy as np

from ..sampling.canaries import WithCanaries
from ..sampling.owners import OwnerSampler
from .placement import Placement
from .settings import TrainingSettings


@dataclass(frozen=True)
class Share:
    """The examples of one (micro)batch that one rank computes with.

    Attributes:
        indices: of the examples in the data set.
        positions: (count,) where they are in the batch of all ranks.
        units: (count,) the row that each example belongs to; None if each has a row of its own.
        counts: False for a stand-in, which takes part in the loop of a rank that has no example, and in no sum.
    """

    indices: np.ndarray
    positions: np.ndarray
    units: np.ndarray | None = None
    counts: bool = True

    def units_of(self, keep: np.ndarray | None) -> np.ndarray | None:
        """Returns the rows of the kept examples, numbered without gaps; of all examples as they are."""
        return self.units if keep is None or self.units is None else numbered(self.units[keep])


def numbered(units: np.ndarray) -> np.ndarray:
    """Returns the same units, numbered from 0 without gaps."""
    return np.unique(units, return_inverse=True)[1]


class Draws:
    """Draws from one secret key the batch of every step, and the seeds of all random numbers that are no noise.

    Args:
        settings: settings of the training.
        key: the secret key, equal on all ranks.
        canaries: data set of an audit; leaves its absent canaries out of every batch.
        placement: which part of a batch is this rank's.

    Attributes:
        sampler: draws examples, or owners.
        indices: step -> those of its examples, canaries that are gradients included.
        records: step -> the same without these.
        placement: as given.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        key: bytes,
        *,
        canaries: WithCanaries | None = None,
        placement: Placement | None = None,
    ):
        units = settings.sampling.sampler(settings.num_units, settings.sampling_probability, key)
        self.sampler = units if settings.owners is None else OwnerSampler(settings.owners, units)
        size, owners = settings.performance.microbatch_size, settings.owners
        of_unit = 1 if owners is None else owners.per_owner
        self._units_at_once = None if size is None else max(1, size // of_unit)  # in a microbatch
        self._canaries, self.placement = canaries, placement
        self.indices = lru_cache(maxsize=64)(self._present)  # used by loader, loop and fingerprint
        self.records = self.indices if canaries is None else self._records

    def _present(self, step: int) -> np.ndarray:
        indices = self.sampler.indices(step)
        return indices if self._canaries is None else self._canaries.present(indices)

    def secret(self, purpose: bytes, *numbers: int) -> bytes:
        """Returns 32 bytes that are a function of the secret key and of these numbers; the same on all ranks."""
        return hashlib.blake2b(purpose + repr(numbers).encode(), key=self.sampler.key, digest_size=32).digest()

    def own_secret(self, purpose: bytes, *numbers: int) -> bytes:
        """Returns bytes that differ between parts of the batch, so that no two examples share random numbers."""
        part = () if self.placement is None or self.placement.num_parts == 1 else (self.placement.part,)
        return self.secret(purpose, *numbers, *part)

    def _records(self, step: int) -> np.ndarray:
        assert self._canaries is not None
        indices = self.indices(step)
        return indices[self._canaries.has_record(indices)]

    @property
    def by_owner(self) -> bool:
        """True if owners are drawn, not examples."""
        return isinstance(self.sampler, OwnerSampler)

    def owners(self, step: int) -> np.ndarray | None:
        """Returns (batch_size,) a number for the owner of each of a step's `records`, ascending; None if none."""
        if not isinstance(self.sampler, OwnerSampler):
            return None
        units = self.sampler.units(step)
        if self._canaries is None:
            return units
        drawn = self.sampler.indices(step)
        present = np.isin(drawn, self.records(step))
        return units[present]

    def parts(self, step: int, units: np.ndarray | None = None, num_rows: int | None = None) -> Sequence[Share]:
        """Returns this rank's share of each microbatch of a step; none if the batch is empty.

        The batch is cut by position, not by data, into one part for each rank; sizes differ by one at most, of examples
        or of owners. Every rank has as many microbatches as any other, if need be with a stand-in. Examples that share
        a row, as ``units`` and ``num_rows`` say, stay together, and so do those of one owner.
        """
        indices, placement = self.records(step), self.placement
        if not len(indices):
            return []
        number, part = (1, 0) if placement is None else (placement.num_parts, placement.part)
        owners = self.owners(step)
        if owners is None and units is not None and num_rows is not None:
            shares = [np.flatnonzero(np.isin(units, np.array_split(np.arange(num_rows), number)[part]))]
        else:
            units, places = owners, np.arange(len(indices)) if owners is None else numbered(owners)
            cuts = _cuts(places, number, part, self._units_at_once)
            shares = [np.arange(start, end) for start, end in pairwise(cuts)]
        return [self._share(indices, own, units, numbers_anew=owners is not None) for own in shares]

    def _share(self, indices: np.ndarray, own: np.ndarray, units: np.ndarray | None, *, numbers_anew: bool) -> Share:
        if not len(own):
            return Share(indices[:1], own, counts=False)
        of_own = None if units is None else units[own]
        return Share(indices[own], own, numbered(of_own) if of_own is not None and numbers_anew else of_own)

    def gradient_canaries(self, step: int) -> np.ndarray:
        """Returns the canaries of a step that are gradients, not records, counted from 0."""
        if self._canaries is None:
            return np.zeros(0, int)
        indices = self.indices(step)
        return indices[~self._canaries.has_record(indices)] - self._canaries.num_examples


def _cuts(places: np.ndarray, number: int, part: int, at_once: int | None) -> np.ndarray:
    """Returns where each microbatch of one of ``number`` ranks begins and ends, for ascending places of examples.

    Examples of one place stay together. Ranks get equally many places, but for one, and a microbatch ``at_once`` of
    them: so no number of examples at one place decides which others share a microbatch, and its random numbers.
    """
    count = int(places[-1]) + 1
    least, over = divmod(count, number)
    first, last = part * least + min(part, over), (part + 1) * least + min(part + 1, over)
    most = least + (over > 0)
    at_once = at_once or most
    ends = np.minimum(first + at_once * np.arange(ceil(most / at_once) + 1), last)
    return np.searchsorted(places, ends)
