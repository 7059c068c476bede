# SPDX-License-Identifier: Apache-2.0
"""Releases which classes occur in the data: those with a noisy count above a threshold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri

from .. import privacy
from ..mechanisms.noise import Noise, key_from_test_seed
from ..privacy.release import new_fingerprint
from ..support.validate import Refused

Array = NDArray[Any]

SHARE = 4  # epsilon of the counts alone is this part of the whole; noise adds up in squares, so less of it is lost
SHARE_OF_DELTA = 10
LARGEST = 50.0  # epsilon of the counts; more is of no use


@dataclass(frozen=True)
class FoundClasses:
    """The classes found, and what finding them cost."""

    classes: Array
    threshold: float
    noise: float
    releases: tuple[privacy.Release, ...]


def noise_and_threshold(epsilon: float, delta: float) -> tuple[float, float]:
    """Returns the standard deviation of the noise on the counts, and the count from which on a class is found."""
    failure = delta / SHARE_OF_DELTA
    noise = privacy.calibrate(min(epsilon / SHARE, LARGEST), failure, sampling_probability=1.0, num_steps=1)
    return noise, float(1 - noise * ndtri(failure))


def events_of(noise: float, delta: float) -> tuple[privacy.Event, privacy.Event]:
    """Returns what finding the classes releases, with this noise on the counts."""
    return privacy.Gaussian(noise), privacy.KnownProfile((0.0,), (delta / SHARE_OF_DELTA,))


def check_one_type(where: str, y: Any) -> None:
    """Refuses labels of several types: a single one would show in the type of all classes, or cannot be sorted.

    Arrays and columns have a type of their own, but for those of objects.
    """
    if hasattr(y, "dtype") and getattr(y.dtype, "kind", "") != "O":
        return
    kinds = sorted({type(label).__name__ for label in np.asarray(y, dtype=object).flat})
    if len(kinds) > 1:
        raise Refused(
            f"{where}: y has labels of the types {', '.join(kinds)}, and classes=None: one label of another type would "
            "change the type of all classes, without noise. Nothing was released. Give labels of one type, such as "
            "[str(label) for label in y], or an array, and leave out rows without a label (None, NaN); or give "
            "classes=[...] if they are known without the data."
        )


def find_classes(y: Array, epsilon: float, delta: float, test_seed: int | None) -> FoundClasses:
    """Returns the classes with ``count + noise > threshold``, the noise being normal.

    One example changes one count by 1. If it is the only one of its class, that class is found with a probability of at
    most ``delta / 10``; if not, the noise hides it. So the release is covered by a Gaussian release and a
    (0, ``delta / 10``)-private one together.

    Source: Korolova, Kenthapadi, Mishra & Ntoulas (2009), WWW, with Gaussian noise in place of Laplace noise.
    """
    noise, threshold = noise_and_threshold(epsilon, delta)
    classes, counts = np.unique(y, return_counts=True)
    noisy = {"counts": torch.tensor(counts, dtype=torch.float64)}
    key = None if test_seed is None else key_from_test_seed(test_seed, "classes of PrivateClassifier")
    Noise(key).add_to(0, noisy, noise)
    found = classes[noisy["counts"].numpy() > threshold]
    if found.dtype.kind in "SU":  # as wide as the longest label of y, be it found or not
        found = np.array(found.tolist())
    releases = tuple(privacy.Release(event, new_fingerprint("classes")) for event in events_of(noise, delta))
    return FoundClasses(found, threshold, noise, releases)
