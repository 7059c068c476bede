# SPDX-License-Identifier: Apache-2.0
"""Makes the releases of a training: draws batches and noise from its secret keys, and records before use."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from cryptography.hazmat.primitives.poly1305 import Poly1305
from torch import Tensor

from .. import privacy
from ..noise import Noise, key_from_test_seed
from ..sampling.batches import split
from ..sampling.canaries import WithCanaries
from ..sampling.poisson import Poisson
from ..support.validate import Refused
from .repetition import NotRepeated
from .settings import TrainingSettings

# The releases of this process: noise key -> step -> fingerprint
_RELEASED: dict[bytes, dict[int, str]] = {}


class Releases:
    """Draws batches and noise of every step from two secret keys, and records what is released.

    Args:
        settings: settings of the training; a ``test_seed`` fixes the keys.
        event: event of one step.
        ledger: records the releases.
        keys: keys of noise and sampler, from a state; by default new ones from the operating system.
        num_lost: number of releases in the ledger that were not repeated after a crash, so that their steps are made
            again.
        canaries: data set of an audit; leaves its absent canaries out of every batch.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        event: privacy.Event,
        ledger: privacy.Ledger,
        keys: tuple[bytes, bytes] | None = None,
        num_lost: int = 0,
        canaries: WithCanaries | None = None,
    ):
        self._settings, self._event, self.ledger = settings, event, ledger
        self.num_lost, self._is_resumed = num_lost, keys is not None
        seed = settings.test_seed
        if keys is None and seed is not None:
            purposes = [f"{name} after {num_lost} lost steps" if num_lost else name for name in ("noise", "sampling")]
            keys = key_from_test_seed(seed, purposes[0]), key_from_test_seed(seed, purposes[1])
        self.noise = Noise(None if keys is None else keys[0])
        sampler_key = secrets.token_bytes(32) if keys is None else keys[1]
        self.sampler = Poisson(settings.num_examples, settings.sampling_probability, sampler_key)
        self._canaries = canaries
        self.indices = lru_cache(maxsize=64)(self._present)  # used by loader, loop and fingerprint
        self._process = os.getpid()

    def _present(self, step: int) -> np.ndarray:
        indices = self.sampler.indices(step)
        return indices if self._canaries is None else self._canaries.present(indices)

    def secret(self, purpose: bytes, *numbers: int) -> bytes:
        """Returns 32 bytes that are a function of the secret key and of these numbers."""
        return hashlib.blake2b(purpose + repr(numbers).encode(), key=self.sampler.key, digest_size=32).digest()

    def parts(self, step: int) -> Sequence[np.ndarray]:
        """Returns the numbers of the examples in each microbatch of a step; no microbatch if the batch is empty."""
        indices = self.indices(step)
        if self._canaries is not None:
            indices = indices[self._canaries.has_record(indices)]
        return split(indices, self._settings.microbatch_size)

    def gradient_canaries(self, step: int) -> np.ndarray:
        """Returns the canaries of a step that are gradients, not records, counted from 0."""
        if self._canaries is None:
            return np.zeros(0, int)
        indices = self.indices(step)
        return indices[~self._canaries.has_record(indices)] - self._canaries.num_examples

    def number(self, step: int) -> int:
        """Returns the number that the release of a step has in the ledger."""
        return len(self._settings.prior_releases) + self.num_lost + step

    def release(self, step: int, sums: dict[str, Tensor], stddevs: Mapping[str, float]) -> None:
        """Adds the step's noise to the sums in place, and records the release.

        Raises:
            NotRepeated: the step was released before the training was resumed, and this release differs from it.
            Refused: the step was released before with the same noise, or another process may release it.
        """
        self.noise.add_to(step, sums, stddevs)
        fingerprint = self._fingerprint(step, sums)
        self._check_noise(step, fingerprint)
        if self._is_resumed and step not in _RELEASED.get(self.noise.key, {}):
            if self.ledger.differs(self._event, self.number(step), fingerprint):
                raise NotRepeated
        self.ledger.record(self._event, self.number(step), fingerprint)
        _RELEASED.setdefault(self.noise.key, {})[step] = fingerprint

    def _fingerprint(self, step: int, release: Mapping[str, Tensor]) -> str:
        """Returns a keyed digest of step, batch and release, which identifies the release and does not reveal it.

        A replay after a crash has the same fingerprint. The same step after other weights, learning rates or losses has
        another one, and must not be released, because it would have the same noise. No bit is left out: elsewhere the
        last bits of single numbers may differ, and then the difference of two releases would have no noise. Poly1305
        takes 3 % of the time of drawing the noise; blake2b alone would take 40 %.
        """
        digest = hashlib.blake2b(self.sampler.key + step.to_bytes(8, "big"), key=self.noise.key, digest_size=8)
        digest.update(self.indices(step).tobytes())
        tag = Poly1305(self.secret(b"fingerprint", step))
        for part in _bytes_of(release.values()):
            tag.update(part.data)
        digest.update(tag.finalize())
        return digest.hexdigest()

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
