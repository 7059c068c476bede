# SPDX-License-Identifier: Apache-2.0
"""Tests the releases of a loop of any library: who joined each step, how much noise it added, by what it divided."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy

from ..support.validate import Refused
from .bracket import Array

MOST_NOISE = 0.1  # of a canary's part in a release, so that each step shows who joined
LEAST_SCALE = 8.0  # standard errors by which a canary's part may be smaller than estimated: wrong in one of 1e15
MOST_RANKS = 8  # that may draw equal masks
LEAST_P = 1e-300  # smaller p-values are rounded up
TOO_FEW = 1e-12  # chance of as few that joined; ranks with equal masks are rarely so few
FFT_ERROR = 1e-12  # added to tails of the law of batch sizes, which has rounding errors near 1e-15


@dataclass(frozen=True)
class LoopTest:
    """One test of a loop: its name, its p-value, and what a small one says."""

    name: str
    p_value: float
    meaning: str


@dataclass(frozen=True)
class LoopAudit:
    """The result of `audit_loop`: prints as one line for each test.

    Guarantees:
        - For a loop that does what it was asked to do, each test's ``p_value`` is at most s with probability at most s.
        - ``p_value`` is the smallest one times the number of tests, so the same holds for it.

    A loop that passes has none of these mistakes in these runs. That is no proof of its epsilon.
    """

    tests: tuple[LoopTest, ...]
    significance: float

    @property
    def p_value(self) -> float:
        return min(1.0, len(self.tests) * min(test.p_value for test in self.tests))

    @property
    def is_rejected(self) -> bool:
        """True if a right loop would look like this with a probability of at most ``significance``."""
        return self.p_value <= self.significance

    @property
    def mistakes(self) -> list[LoopTest]:
        """The tests that reject the loop, each corrected for the number of tests; the smallest p-value first."""
        found = [test for test in self.tests if len(self.tests) * test.p_value <= self.significance]
        return sorted(found, key=lambda test: test.p_value)

    def as_json(self) -> dict[str, Any]:
        """Returns the numbers as plain data."""
        return {
            "rejected": self.is_rejected,
            "p_value": self.p_value,
            "significance": self.significance,
            "tests": [{"name": test.name, "p_value": test.p_value} for test in self.tests],
            "mistakes": [f"{test.name}: {test.meaning}" for test in self.mistakes],
        }

    def __str__(self) -> str:
        lines = [f"{test.name}: p = {test.p_value:.2g}" for test in self.tests]
        verdict = (
            f"REJECTED (p = {self.p_value:.2g})" if self.is_rejected else f"nothing was found (p = {self.p_value:.2g})"
        )
        return "\n".join([verdict, *lines, *(f"{test.name}: {test.meaning}" for test in self.mistakes)])


class LoopReleases:
    """The releases of some runs on canaries with gradients that do not overlap, as the tests of a loop see them.

    Under the claim, release t of a run has the entries ``a (M_ti + σ Z_ti)``: a an unknown constant, M_ti independent
    with ``P(M_ti = 1) = q``, Z_ti independent and standard normal. The noise is so small that each entry shows M_ti.

    Args:
        releases: (runs, T, n), entry i that of canary i.
        sampling_probability: q.
        noise_multiplier: σ, of the noise against the part of one canary.

    Raises:
        Refused: entries are missing or not finite, the noise hides who joined, or fewer joined than q says.
    """

    def __init__(self, releases: Array, sampling_probability: float, noise_multiplier: float):
        self.q, self.sigma = sampling_probability, noise_multiplier
        self.runs, self.steps, self.count = releases.shape
        entries = releases.reshape(-1, self.count)
        level = float(np.median(entries.max(1)))
        joined = entries > level / 2
        if level <= 0 or joined.all() or entries[~joined].std() > MOST_NOISE * level:
            raise Refused(
                f"audit_loop: the releases do not show who joined: noise must be {noise_multiplier:g} times a canary's "
                "part. Return the gradients as the optimizer gets them, in the order of the model's weights, from a "
                "loop with trial.noise_multiplier, trial.clip_norm and trial.loss."
            )
        if scipy.stats.binom.cdf(joined.sum(), joined.size, self.q) < TOO_FEW:
            raise Refused(
                f"audit_loop: examples joined in {joined.mean():.3g} of the cases, and trial.sampling_probability is "
                f"{self.q:.3g}. That is no fault, but the tests know the law of the stated one alone. Train with it, "
                "or with batches of trial.expected_batch_size on all ranks together."
            )
        self.entries, self.joined = entries, joined
        self.sizes = joined.sum(1)

    @cached_property
    def scale(self) -> float:
        """A lower bound on a, wrong with a probability of 1e-15."""
        parts = self.entries[self.joined]
        return float(parts.mean()) / (1 + LEAST_SCALE * self.sigma / np.sqrt(len(parts)))

    @cached_property
    def noise(self) -> Array:
        """The entries that are noise alone, in the units of the claim; 0 where a canary joined."""
        return np.where(self.joined, 0.0, self.entries) / (self.scale * self.sigma)


def noise_too_small(seen: LoopReleases) -> float:
    """Returns the p-value of the noise's size: the sum of squares is χ² in all steps together, and in each step."""
    squares, free = (seen.noise**2).sum(1), (~seen.joined).sum(1)
    each = scipy.stats.chi2.cdf(squares, np.maximum(free, 1))[free > 0]
    return 2 * min(float(scipy.stats.chi2.cdf(squares.sum(), free.sum())), len(each) * float(each.min()))


def noise_used_twice(seen: LoopReleases) -> float:
    """Returns the p-value of the largest correlation of two steps' noise.

    Over the d entries in which both steps have noise alone, the direction of one is uniform given the other: the square
    of the correlation has a Beta(1/2, (d - 1)/2) law.
    """
    alone = (~seen.joined).astype(float)
    pairs = np.triu_indices(len(alone), 1)
    d, products = (alone @ alone.T)[pairs], (seen.noise @ seen.noise.T)[pairs]
    squares = seen.noise**2 @ alone.T
    norms = (squares * squares.T)[pairs]
    enough = d >= 2
    if not enough.any():
        return 1.0
    r2 = np.minimum(products[enough] ** 2 / np.maximum(norms[enough], np.finfo(float).tiny), 1.0)
    return int(enough.sum()) * float(scipy.stats.beta.sf(r2, 0.5, (d[enough] - 1) / 2).min())


def joined_too_often(seen: LoopReleases) -> float:
    """Returns the p-value of the number of times that canaries joined: binomial, with probability q."""
    return float(scipy.stats.binom.sf(seen.joined.sum() - 1, seen.joined.size, seen.q))


def once_in_an_epoch(seen: LoopReleases) -> float:
    """Returns the p-value of how often a canary joins exactly once in 1/q steps: independently for each."""
    length = round(1 / seen.q)
    epochs = seen.steps // length
    masks = seen.joined.reshape(seen.runs, seen.steps, seen.count)[:, : epochs * length]
    once = masks.reshape(seen.runs, epochs, length, seen.count).sum(2) == 1
    return float(scipy.stats.binom.sf(once.sum() - 1, once.size, length * seen.q * (1 - seen.q) ** (length - 1)))


def _alike(masks: Array, q: float) -> float:
    """Returns the p-value of the largest agreement of two rows, times the number of pairs."""
    signs = np.where(masks, 1, -1)
    agreements = (signs @ signs.T + masks.shape[1]) // 2
    pairs = np.triu_indices(len(masks), 1)
    return len(pairs[0]) * float(scipy.stats.binom.sf(agreements[pairs].max() - 1, masks.shape[1], q**2 + (1 - q) ** 2))


def examples_drawn_alike(seen: LoopReleases) -> float:
    """Returns the p-value of the two canaries that join the same steps of a run most often."""
    masks = seen.joined.reshape(seen.runs, seen.steps, seen.count)
    return seen.runs * min(_alike(own.T, seen.q) for own in masks)


def steps_drawn_alike(seen: LoopReleases) -> float:
    """Returns the p-value of the two steps, of any runs, which the same canaries join most often."""
    return _alike(seen.joined, seen.q)


def sizes_divisible(seen: LoopReleases) -> float:
    """Returns the p-value of how often the batch size is a multiple of 2, 3, ..., as with equal masks on ranks."""
    law = scipy.stats.binom.pmf(np.arange(seen.count + 1), seen.count, seen.q)
    multiples = [
        float(scipy.stats.binom.sf((seen.sizes % ranks == 0).sum() - 1, len(seen.sizes), min(law[::ranks].sum(), 1.0)))
        for ranks in range(2, MOST_RANKS + 1)
    ]
    return len(multiples) * min(multiples)


def sizes_spread(seen: LoopReleases) -> float:
    """Returns the two-sided p-value of the batch sizes' squared deviations, by the exact law of their sum."""
    center = round(seen.count * seen.q)
    squares = (np.arange(seen.count + 1) - center) ** 2
    law = np.bincount(squares, scipy.stats.binom.pmf(np.arange(seen.count + 1), seen.count, seen.q))
    most = len(seen.sizes) * (len(law) - 1)
    length = 1 << most.bit_length()
    of_sum = np.fft.irfft(np.fft.rfft(law, length) ** len(seen.sizes), length)[: most + 1]
    found = int(((seen.sizes - center) ** 2).sum())
    return 2 * (max(0.0, min(float(of_sum[: found + 1].sum()), float(of_sum[found:].sum()))) + FFT_ERROR)


def divisor_follows_the_batch(seen: LoopReleases) -> float:
    """Returns the two-sided p-value of a trend of the canaries' part in a release with the batch size.

    Given who joined, the mean part in step t is ``a (1 + σ ζ_t / √k_t)`` with k_t canaries and ζ_t standard normal: the
    slope over k_t, divided by the spread of the entries of noise alone, has Student's t law.
    """
    steps = seen.sizes > 0
    k = seen.sizes[steps].astype(float)
    sums = (seen.entries * seen.joined).sum(1)[steps]
    along = k - (k * k).sum() / k.sum()
    error = np.sqrt((k * along**2).sum())
    alone = seen.entries[~seen.joined]
    spread = np.sqrt((alone**2).mean())
    if not error * spread:  # without any noise the test of its size rejects
        return 1.0
    return 2 * float(scipy.stats.t.sf(abs((along * sums).sum()) / (error * spread), len(alone)))


TESTS: dict[str, tuple[Callable[[LoopReleases], float], str]] = {
    "size of the noise": (
        noise_too_small,
        "there is less noise than the noise multiplier says. Clip each gradient to the clip norm, and add noise with "
        "the noise multiplier times the clip norm to the sum, in every step.",
    ),
    "fresh noise": (noise_used_twice, "two steps have the same noise. Draw it anew in every step of every run."),
    "sampling probability": (
        joined_too_often,
        "examples join more often than the sampling probability says. Claim the expected batch size over n, or more.",
    ),
    "once in an epoch": (
        once_in_an_epoch,
        "examples join exactly once in an epoch: the loader shuffles. Draw Poisson batches, as the claim says.",
    ),
    "pairs of examples": (
        examples_drawn_alike,
        "two examples join the same steps, as when two ranks have equal masks. Give each rank a generator of its own.",
    ),
    "pairs of steps": (
        steps_drawn_alike,
        "two steps have nearly the same batch. Draw each anew, and seed no two runs alike.",
    ),
    "multiples": (
        sizes_divisible,
        "batch sizes are multiples of one number, as if ranks have equal masks. Give each rank its own generator.",
    ),
    "spread of batch sizes": (
        sizes_spread,
        "batch sizes vary less, or more, than those of independent examples: fixed sizes, or examples that join "
        "together. Draw each example on its own.",
    ),
    "divisor": (
        divisor_follows_the_batch,
        "the divisor follows the real batch size, which shows who else joined. Divide by the expected batch size.",
    ),
}


def judge(releases: Array, sampling_probability: float, noise_multiplier: float, significance: float) -> LoopAudit:
    """Returns the audit of the releases (runs, T, n) of a loop; see `LoopReleases`."""
    seen = LoopReleases(releases, sampling_probability, noise_multiplier)
    tests = (LoopTest(name, min(1.0, max(test(seen), LEAST_P)), meaning) for name, (test, meaning) in TESTS.items())
    return LoopAudit(tuple(tests), significance)
