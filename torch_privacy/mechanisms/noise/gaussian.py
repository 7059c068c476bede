# SPDX-License-Identifier: Apache-2.0
"""Provides Gaussian noise from cryptographic generators, as a function of key, step and place.

Why not torch.Generator: on a CPU its seed has 32 bits (``manual_seed(s)`` and ``manual_seed(s + 2**32)`` draw the same
numbers), a user's script can fix its seed by accident, the state of the Mersenne twister can be recovered from its
outputs, and its normal numbers end at 5.8 standard deviations. AES has none of these weaknesses (times:
docs/benchmarks.md).
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable, Mapping

from torch import Tensor

from ...support.validate import whole
from .chacha import DeviceNormals
from .chunks import MIN_STDDEV, Part, places_of
from .processor import KEY_BYTES, MAX_STEP, ProcessorNormals

FEW_NUMBERS = 2**17  # drawn on a CPU in 1.3 ms; without the kernel the 500 ops of ChaCha20 take a GPU 2.5 ms and more


class Noise:
    """Gaussian noise: a function of a secret key, the step's number and the place, computed in float64.

    The numbers of a step's tensors are the entries of one long vector. The number at a place of it is the same however
    the vector is divided into tensors.

    Args:
        key: 32 secret bytes; by default from the operating system's cryptographic generator. Anyone who knows the key
            can subtract the noise from every release made with it, past and future.

    Guarantees:
        - Numbers of different steps and places are independent.
        - One (key, step, place) gives the same number, bit for bit, on every call, for every number of threads and for
          every split of the batch.
        - No seed set by a user's script affects it, and it does not change torch's random state.
        - Magnitudes end at 14.3 standard deviations, which a normal number exceeds with probability below 1e-45; on a
          GPU at 9.4 and 1e-20.
        - Low bits reveal nothing: see ``add_to``.

    Source: AES-256-CTR, NIST SP 800-38A; McFarland (2016) for the normal numbers, see processor.py; I. Mironov (2012),
        "On significance of the least significant bits for differential privacy".
    """

    def __init__(self, key: bytes | None = None):
        self.key = secrets.token_bytes(KEY_BYTES) if key is None else key
        if len(self.key) != KEY_BYTES:
            raise ValueError(f"Noise: key of {len(self.key)} bytes; must be {KEY_BYTES} bytes.")
        self._processor, self._device = ProcessorNormals(self.key), DeviceNormals(self.key)

    def add_to(
        self,
        step: int,
        sums: Mapping[str, Tensor],
        stddev: float | Mapping[str, float],
        places: Mapping[str, int] | None = None,
    ) -> None:
        """Adds ``stddev`` times the step's standard normal numbers z to the tensors s, in place.

        The result is exactly ``u·(round(s/u) + round(stddev·z/u))``, and is then rounded to the tensor's dtype; u is
        2^-32 standard deviations, rounded down to a power of two. That equals ``u·round(r/u)`` of a release
        ``r = u·round(s/u) + stddev·z`` in real numbers. Rounding s adds at most ``u √p`` to a change of p numbers: for
        a billion of them 1e-5 standard deviations.

        Args:
            step: number of the step, from 0 to 2^64 - 1; one number must never be used for two releases.
            sums: name -> contiguous tensor of any floating-point dtype.
            stddev: absolute standard deviation, in the units of the sums; one for all, or by name. 0 adds nothing.
            places: name -> place of the tensor's first number among all numbers of the step, below 2^47; by default one
                tensor follows the other. Who holds a slice of a tensor adds the noise of that slice by its place.

        Raises:
            ValueError: a standard deviation that is negative, not finite, or below 2^-900; places that are missing, or
                that two tensors would share; nothing was added.
        """
        whole("Noise.add_to", at_most=MAX_STEP, step=step)
        firsts, parts = places_of("Noise.add_to", sums, places), list[Part]()
        for name, total in sums.items():
            scale = checked_stddev(stddev[name] if isinstance(stddev, Mapping) else stddev)
            parts.append((total, firsts[name], scale))
        for generator, its in self._by_generator(parts):
            generator.add(step, its)

    def fill(self, step: int, tensors: Mapping[str, Tensor], places: Mapping[str, int] | None = None) -> None:
        """Overwrites the tensors with the step's standard normal numbers, rounded to their dtype.

        This is for random directions and the like; use ``add_to``, which rounds to the grid, to protect data.

        Args:
            step: number of the step, from 0 to 2^64 - 1; one number must never be used twice.
            tensors: name -> contiguous tensor of any floating-point dtype.
            places: as for `add_to`.
        """
        whole("Noise.fill", at_most=MAX_STEP, step=step)
        firsts = places_of("Noise.fill", tensors, places)
        for generator, parts in self._by_generator((tensors[name], firsts[name], 1.0) for name in tensors):
            generator.fill(step, parts)

    def _by_generator(self, parts: Iterable[Part]) -> list[tuple[ProcessorNormals | DeviceNormals, list[Part]]]:
        """Returns the parts that have noise, with their generator; the device's is first, as it makes no one wait."""
        here: list[Part] = []
        there: list[Part] = []
        for part in parts:
            if part[2]:
                (there if has_generator(part[0]) else here).append(part)
        return [(g, its) for g, its in ((self._device, there), (self._processor, here)) if its]


def is_made_here(tensors: Iterable[Tensor]) -> bool:
    """True if the noise of these tensors is few numbers, which a processor makes sooner than a GPU starts."""
    return sum(tensor.numel() for tensor in tensors) <= FEW_NUMBERS


def generators(tensors: Iterable[Tensor]) -> str:
    """Returns the names of the generators that make a training's noise in these tensors, its parameters."""
    tensors = list(tensors)
    there = [not is_made_here(tensors) and has_generator(tensor) for tensor in tensors]
    return " and ".join(sorted({DeviceNormals.name if of_device else ProcessorNormals.name for of_device in there}))


def has_generator(tensor: Tensor) -> bool:
    """True if noise is made on the tensor's device itself, which needs float64."""
    return not tensor.is_cpu and tensor.device.type != "mps"


def checked_stddev(stddev: float) -> float:
    """Returns a standard deviation of noise; refuses one that is negative, not finite, or tiny."""
    if stddev != 0 and not MIN_STDDEV <= stddev < math.inf:
        raise ValueError(f"Noise.add_to: stddev={stddev!r} must be 0, or a finite number of at least 2^-900.")
    return float(stddev)


def key_from_test_seed(seed: int, purpose: str) -> bytes:
    """Returns a key that anyone can compute: for tests only, never for a private run."""
    return hashlib.sha256(f"torch_privacy test seed {seed} for {purpose}".encode()).digest()
