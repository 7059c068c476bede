# SPDX-License-Identifier: Apache-2.0
"""Makes the releases of a training: draws batches and noise from its secret keys, and records before use."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from math import ceil

import numpy as np
import torch
from cryptography.hazmat.primitives.poly1305 import Poly1305
from torch import Tensor

from .. import privacy
from ..mechanisms.noise import KEY_BYTES, BandedNoise, InverseBandedNoise, Noise, TailNoise, key_from_test_seed
from ..sampling.canaries import WithCanaries
from ..sampling.owners import OwnerSampler
from ..support.ranks import Ranks, RefusedTogether
from ..support.validate import Refused
from .machine import NotRepeated
from .placement import Placement, Ranked
from .schedule import Plan
from .settings import TrainingSettings

RECORDED, NOT_REPEATED = 0, 1
FEW, SMALL = 3, 2**20  # tensors, and numbers in all of them, from and up to which they are moved into one

# The releases of this process: noise key -> step -> fingerprint
_RELEASED: dict[bytes, dict[int, str]] = {}


Keys = tuple[bytes, bytes]  # of noise and sampler


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


def new_keys(test_seed: int | None, num_lost: int) -> Keys:
    """Returns new keys from the operating system, or those of a test seed."""
    if test_seed is None:
        return secrets.token_bytes(KEY_BYTES), secrets.token_bytes(KEY_BYTES)
    purposes = [f"{name} after {num_lost} lost steps" if num_lost else name for name in ("noise", "sampling")]
    return key_from_test_seed(test_seed, purposes[0]), key_from_test_seed(test_seed, purposes[1])


class Releases:
    """Draws batches and noise of every step from two secret keys, and records what is released.

    Args:
        settings: settings of the training; a ``test_seed`` fixes the keys.
        plan: the event of each step.
        ledger: records the releases.
        keys: keys of noise and sampler, equal on all ranks.
        since: the first step that these keys release.
        resumed: True if the keys are those of a state.
        num_lost: number of releases in the ledger that were not repeated after a crash, so that their steps are made
            again.
        canaries: data set of an audit; leaves its absent canaries out of every batch.
        ranks: the processes of the training.
        placement: which part of a batch is this rank's.
        made_here: True if the noise of sums on a GPU is made on the CPU; see `is_made_here`.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        plan: Plan,
        ledger: privacy.Ledger,
        keys: Keys,
        *,
        since: int = 0,
        resumed: bool = False,
        num_lost: int = 0,
        canaries: WithCanaries | None = None,
        ranks: Ranks | None = None,
        placement: Placement | None = None,
        made_here: bool = False,
    ):
        self._settings, self.ledger = settings, ledger
        self.num_lost, self.since, self._is_resumed = num_lost, since, resumed
        self.plan = plan.begun_anew(since, self.number(since))
        self._ranks, self._placement, self._made_here = ranks or Ranks(), placement, made_here
        self.noise = _noise(settings, keys[0], since)
        units = settings.sampling.sampler(settings.num_units, settings.sampling_probability, keys[1])
        self.sampler = units if settings.owners is None else OwnerSampler(settings.owners, units)
        self._canaries = canaries
        self.indices = lru_cache(maxsize=64)(self._present)  # used by loader, loop and fingerprint
        self._process = os.getpid()

    def _present(self, step: int) -> np.ndarray:
        indices = self.sampler.indices(step)
        return indices if self._canaries is None else self._canaries.present(indices)

    def secret(self, purpose: bytes, *numbers: int) -> bytes:
        """Returns 32 bytes that are a function of the secret key and of these numbers; the same on all ranks."""
        return hashlib.blake2b(purpose + repr(numbers).encode(), key=self.sampler.key, digest_size=32).digest()

    def own_secret(self, purpose: bytes, *numbers: int) -> bytes:
        """Returns bytes that differ between parts of the batch, so that no two examples share random numbers."""
        part = () if self._placement is None or self._placement.num_parts == 1 else (self._placement.part,)
        return self.secret(purpose, *numbers, *part)

    def records(self, step: int) -> np.ndarray:
        """Returns the indices of a step's examples, without canaries that are gradients."""
        indices = self.indices(step)
        return indices if self._canaries is None else indices[self._canaries.has_record(indices)]

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

        The batch is cut by position, not by data, into one part for each rank; sizes differ by one example at most.
        Every rank has as many microbatches as any other, if need be with a stand-in. Examples that share a row, as
        ``units`` and ``num_rows`` say, stay together, and so do those of one owner.
        """
        indices, placement = self.records(step), self._placement
        if not len(indices):
            return []
        number, part = (1, 0) if placement is None else (placement.num_parts, placement.part)
        owners = self.owners(step)
        if owners is not None:
            units = owners
            cuts = _cut_between(owners, number, self._settings.performance.microbatch_size)
            count = max(len(of_rank) for of_rank in cuts) - 1
            ends = [*cuts[part], *[cuts[part][-1]] * count][: count + 1]
            shares = [np.arange(start, end) for start, end in pairwise(ends)]
        elif units is None or num_rows is None:
            positions = np.array_split(np.arange(len(indices)), number)[part]
            size = self._settings.performance.microbatch_size or len(indices)
            count = ceil(ceil(len(indices) / number) / size)
            shares = [positions[k * size : (k + 1) * size] for k in range(count)]
        else:
            shares = [np.flatnonzero(np.isin(units, np.array_split(np.arange(num_rows), number)[part]))]
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

    def number(self, step: int) -> int:
        """Returns the number of a step's release in the ledger."""
        return len(self._settings.prior_releases) + self.num_lost + step

    def release(
        self,
        step: int,
        sums: dict[str, Tensor],
        stddevs: Mapping[str, float],
        places: Mapping[str, int] | None = None,
    ) -> None:
        """Adds the step's noise to the sums, in place or in one copy of all of them, and records the release.

        Each rank adds the noise of its slice, by its ``places``. Rank 0 records one fingerprint of all slices, and no
        rank returns before that.

        Raises:
            NotRepeated: the step was released before the training was resumed, and this release differs from it.
            Refused: the step was released before with the same noise, or another process may release it.
        """
        try:
            few, scales = _in_few(sums, stddevs) if places is None else (sums, stddevs)
            released = {name: total.cpu() for name, total in few.items()} if self._made_here else few
            self.noise.add_to(step, released, scales, places)
            fingerprint = self._fingerprint(step, released)
            for name, total in few.items():
                if released[name] is not total:
                    total.copy_(released[name], non_blocking=True)
        except Exception as error:
            self._ranks.tell(f"adds noise in step {step}", error)
            raise
        fingerprint = self._joined(step, fingerprint)
        if self._ranks.first_does(f"records step {step}", lambda: self._record(step, fingerprint)) == NOT_REPEATED:
            raise NotRepeated
        if not self._ranks.is_first:
            self.ledger.record(self.plan.at(step), self.number(step), fingerprint)
        _RELEASED.setdefault(self.noise.key, {})[step] = fingerprint

    def _record(self, step: int, fingerprint: str) -> int:
        self._check_noise(step, fingerprint)
        if self._is_resumed and step not in _RELEASED.get(self.noise.key, {}):
            if self.ledger.differs(self.plan.at(step), self.number(step), fingerprint):
                return NOT_REPEATED
        self.ledger.record(self.plan.at(step), self.number(step), fingerprint)
        return RECORDED

    def _joined(self, step: int, fingerprint: str) -> str:
        """Returns one fingerprint of all ranks' slices; refuses replicas of a slice that differ."""
        if self._ranks.size == 1:
            return fingerprint
        number = self._placement.slice_number if isinstance(self._placement, Ranked) else 0
        own = number.to_bytes(4, "big") + bytes.fromhex(fingerprint)
        found: dict[int, bytes] = {}
        for message in self._ranks.exchange(f"releases step {step}", payload=own):
            number, digest = int.from_bytes(message[:4], "big"), message[4:]
            if found.setdefault(number, digest) != digest:
                raise RefusedTogether(
                    f"PrivateTraining: two ranks with the same slice of the sums of step {step} have other numbers in "
                    "it: with the same noise, their difference would have none. Nothing was released. Check that all "
                    "ranks have the same hardware and the same release of torch."
                )
        return hashlib.blake2b(b"".join(found[number] for number in sorted(found)), digest_size=8).hexdigest()

    def _fingerprint(self, step: int, release: Mapping[str, Tensor]) -> str:
        """Returns a keyed digest of step, batch and release, which identifies the release and does not reveal it.

        A replay after a crash has the same fingerprint. The same step after other weights, learning rates or losses has
        another one, and must not be released, because it would have the same noise. No bit is left out: elsewhere the
        last bits of single numbers may differ, and then the difference of two releases would have no noise. Poly1305
        takes 3 % of the time of drawing the noise; blake2b alone would take 40 %.
        """
        digest = hashlib.blake2b(self.sampler.key + step.to_bytes(8, "big"), key=self.noise.key, digest_size=8)
        digest.update(self.indices(step).tobytes())
        digest.update(self.tag(step, release.values(), b"fingerprint"))
        return digest.hexdigest()

    def tag(self, step: int, tensors: Iterable[Tensor], purpose: bytes = b"tag") -> bytes:
        """Returns 16 bytes that depend on every bit of the tensors, and reveal nothing without the key."""
        tag = Poly1305(self.secret(purpose, step))
        for part in _bytes_of(tensors):
            tag.update(part.data)
        return tag.finalize()

    def _check_noise(self, step: int, fingerprint: str) -> None:
        """Refuses noise that another release may have: of a copy of the training, or of a forked process."""
        if os.getpid() != self._process:
            raise Refused(
                "PrivateTraining: this process was forked from the one that began the training, which may release the "
                "same steps with the same noise. Make the training, or load its state, in the process that trains."
            )
        before = _RELEASED.get(self.noise.key, {}).get(step, fingerprint)
        if before != fingerprint and self._settings.test_seed is None:
            raise Refused(
                f"PrivateTraining: step {step} was released before with the same noise and other sums, by a copy of "
                "this training or from the same state: the difference of the two would have no noise. Go on with that "
                "training, or begin a new one, with the releases so far as prior_releases."
            )


def _noise(settings: TrainingSettings, key: bytes, since: int) -> Noise:
    """Returns the noise that a key makes from a step on."""
    correlation, own = settings.correlation, settings.own_noise
    if own is not None:
        return TailNoise(key, own.law.magnitude, own.stddev)
    if correlation is None:
        return Noise(key)
    made = InverseBandedNoise if correlation.inverse else BandedNoise
    return made(key, correlation.coefficients(settings.num_steps, settings.sampling_probability), since)


def _cut_between(owners: np.ndarray, number: int, microbatch_size: int | None) -> list[list[int]]:
    """Returns, for each of ``number`` ranks, the ends of its microbatches in a batch of owners in ascending order.

    Cuts are between owners only. Ranks get about as many examples each; a microbatch has at most ``microbatch_size``,
    unless one owner has more.
    """
    ends = np.append(np.flatnonzero(np.diff(owners)) + 1, len(owners))  # of each owner's examples
    size, cuts, start = microbatch_size or len(owners), [], 0
    for rank in range(1, number + 1):
        wanted = len(owners) * rank / number
        last = int(ends[min(np.searchsorted(ends, wanted), len(ends) - 1)]) if rank < number else len(owners)
        cuts.append([start])
        while start < last:
            fitting = int(np.searchsorted(ends, start + size, side="right")) - 1
            following = int(np.searchsorted(ends, start, side="right"))
            start = min(int(ends[max(fitting, following)]), last)
            cuts[-1].append(start)
    return cuts


def _in_few(sums: dict[str, Tensor], stddevs: Mapping[str, float]) -> tuple[Mapping[str, Tensor], Mapping[str, float]]:
    """Moves small sums into one tensor, of which they become views, because a call costs more than its arithmetic.

    Returns it, or one for each kind of neighbors, by the name of its first, with their standard deviations; the sums as
    they are if they are large or few.
    """
    if len(sums) < FEW or sum(map(Tensor.numel, sums.values())) > SMALL:
        return sums, stddevs
    few: dict[str, Tensor] = {}
    for _, group in groupby(sums, lambda name: (stddevs[name], sums[name].dtype, sums[name].device)):
        names = [*group]
        tensors = [sums[name] for name in names]
        few[names[0]] = whole = torch.cat([t.view(-1) for t in tensors])
        parts = zip(names, whole.split([*map(Tensor.numel, tensors)]), tensors, strict=True)
        sums.update({name: part.view(t.shape) for name, part, t in parts})
    return few, {name: stddevs[name] for name in few}


def _bytes_of(tensors: Iterable[Tensor]) -> Iterator[np.ndarray]:
    """Yields the bytes of each tensor, in order; those of one GPU come in one copy, for which it waits."""
    tensors = list(tensors)
    gathered: dict[torch.device, Iterator[Tensor]] = {}
    for device in {tensor.device for tensor in tensors if not tensor.is_cpu}:
        there = [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.device == device]
        gathered[device] = iter(torch.cat(there).cpu().split([len(part) for part in there]))
    for tensor in tensors:
        if tensor.is_cpu and tensor.dtype in (torch.float32, torch.float64):
            yield tensor.numpy().reshape(-1).view(np.uint8)  # views of numpy cost less than those of torch
        else:
            yield (tensor.view(-1).view(torch.uint8) if tensor.is_cpu else next(gathered[tensor.device])).numpy()
