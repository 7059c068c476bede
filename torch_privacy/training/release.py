# SPDX-License-Identifier: Apache-2.0
"""Makes the releases of a training: adds noise from its secret key, and records before use.

Of large tensors on a GPU the host reads a digest, in place of all their bytes.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.poly1305 import Poly1305
from torch import Tensor

from .. import privacy
from ..mechanisms.noise import KEY_BYTES, BandedNoise, InverseBandedNoise, Noise, TailNoise, key_from_test_seed
from ..mechanisms.noise.chunks import chunks_of
from ..mechanisms.noise.processor import WORD, Keystream
from ..sampling.canaries import WithCanaries
from ..support.ranks import Ranks, RefusedTogether
from ..support.validate import Refused
from .draws import Draws
from .machine import NotRepeated
from .placement import Placement, Ranked
from .sampling import StepPlan
from .settings import TrainingSettings

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


RECORDED, NOT_REPEATED = 0, 1
BEGUN = " new keys"  # after the fingerprint of their first release
FEW, SMALL = 3, 2**20  # tensors, and numbers in all of them, from and up to which they are moved into one
COPIED = 2**20  # bytes on a GPU up to which the host reads all of them

# The releases of this process: noise key -> step -> fingerprint
_RELEASED: dict[bytes, dict[int, str]] = {}


Keys = tuple[bytes, bytes]  # of noise and sampler


def is_known(noise_key: bytes) -> bool:
    """True if this process has made the key, or a release with it, so that it knows of those that it made."""
    return noise_key in _RELEASED


def new_keys(test_seed: int | None, num_lost: int) -> Keys:
    """Returns new keys from the operating system, or those of a test seed."""
    if test_seed is None:
        return secrets.token_bytes(KEY_BYTES), secrets.token_bytes(KEY_BYTES)
    purposes = [f"{name} after {num_lost} lost steps" if num_lost else name for name in ("noise", "sampling")]
    return key_from_test_seed(test_seed, purposes[0]), key_from_test_seed(test_seed, purposes[1])


class Releases:
    """Adds the noise of every step from a secret key, and records what is released.

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

    Attributes:
        noise: of these keys.
        draws: the batches of these keys.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        plan: StepPlan,
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
        self._ranks, self._made_here = ranks or Ranks(), made_here
        self.noise = _noise(settings, keys[0], since)
        if not resumed:
            _RELEASED.setdefault(keys[0], {})
        self.draws = Draws(settings, keys[1], canaries=canaries, placement=placement)
        self._condense = Condenser(self.draws.secret(b"condenser"))
        self._process = os.getpid()

    def number(self, step: int) -> int:
        """Returns the number of a step's release in the ledger."""
        return len(self._settings.prior_releases) + self.num_lost + step

    def release(
        self, step: int, sums: dict[str, Tensor], stddevs: Mapping[str, float], places: Mapping[str, int] | None = None
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
        if step == self.since and (step or self.num_lost):
            fingerprint += BEGUN
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
        number = self.draws.placement.slice_number if isinstance(self.draws.placement, Ranked) else 0
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
        takes 3 % of the time of drawing the noise; blake2b alone would take 40 %. Of large tensors on a GPU it takes
        what `Condenser` leaves of them.
        """
        digest = hashlib.blake2b(self.draws.sampler.key + step.to_bytes(8, "big"), key=self.noise.key, digest_size=8)
        digest.update(self.draws.indices(step).tobytes())
        digest.update(self.tag(step, release.values(), b"fingerprint"))
        return digest.hexdigest()

    def tag(self, step: int, tensors: Iterable[Tensor], purpose: bytes = b"tag") -> bytes:
        """Returns 16 bytes that depend on every bit of the tensors, and reveal nothing without the key."""
        tag = Poly1305(self.draws.secret(purpose, step))
        elsewhere: dict[torch.device, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.is_cpu:
                tag.update(_bytes_of(tensor))
            else:
                elsewhere.setdefault(tensor.device, []).append(tensor)
        for several in elsewhere.values():  # the host waits once for each GPU
            if sum(tensor.nbytes for tensor in several) > COPIED:
                there = self._condense(several)
            else:
                there = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in several])
            tag.update(_bytes_of(there.cpu()))
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


def _in_few(sums: dict[str, Tensor], stddevs: Mapping[str, float]) -> tuple[Mapping[str, Tensor], Mapping[str, float]]:
    """Moves small sums into one tensor, of which they become views, because a call costs more than its arithmetic.

    Returns it, or one for each kind of neighbors, by the name of its first, with their standard deviations; the sums as
    they are if they are large or few.
    """
    if len(sums) < FEW or sum(map(Tensor.numel, sums.values())) > SMALL:
        return sums, stddevs
    groups: list[tuple[Any, list[str]]] = []  # neighbors of one kind
    for name, total in sums.items():
        kind = stddevs[name], total.dtype, total.device
        if not groups or groups[-1][0] != kind:
            groups.append((kind, []))
        groups[-1][1].append(name)
    few, scales = dict[str, Tensor](), dict[str, float]()
    for (scale, _, _), names in groups:
        few[names[0]] = whole = torch.cat([sums[name].view(-1) for name in names])
        scales[names[0]], end = scale, 0
        for name in names:
            start, end = end, end + sums[name].numel()
            sums[name] = whole[start:end].view(sums[name].shape)
    return few, scales


def _bytes_of(tensor: Tensor) -> memoryview:
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor.numpy().reshape(-1).view(np.uint8).data  # views of numpy cost less than those of torch
    return tensor.view(-1).view(torch.uint8).numpy().data
