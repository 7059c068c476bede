# SPDX-License-Identifier: Apache-2.0
"""Decides how the examples of a batch are drawn, how many steps there are, and which event a step is priced as."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

from .. import privacy
from ..mechanisms.clipping import Adaptive, MicroBatches
from ..mechanisms.estimated_norms import Sketched
from ..mechanisms.scheduled import Schedule, check_schedule, factors_of, unscheduled
from ..sampling.samplers import BinsSampler, PoissonSampler, Sampler, TruncatedSampler, VaryingSampler
from ..support.steps import steps_of
from ..support.validate import Refused, plain_number, plain_numbers, positive, whole

WHERE = "PrivateTraining"
WHOLE = 1e-6  # relative distance of n/B to a whole number that is taken for rounding
NEAR = 0.05  # the same, up to which the mean batch size is moved where nobody chose the sampling


class Sampling(ABC):
    """Says how the examples, or the owners, of each batch are drawn: the setting ``sampling`` of `PrivateTraining`."""

    needs_places = False  # True if steps draw different examples, so that none may move to another's place

    def mean_size(self, expected_batch_size: float, num_units: int) -> float:
        """Returns the mean batch size, which is the given one up to rounding; refuses one that is not possible."""
        return expected_batch_size

    @abstractmethod
    def sampler(self, num_units: int, sampling_probability: float, key: bytes) -> Sampler:
        """Returns what draws the batches, from a secret key."""

    @abstractmethod
    def event(self, of_step: privacy.Event, step: int, num_units: int) -> privacy.Event:
        """Returns what a step releases, from its event under Poisson sampling with the same mean size."""

    @abstractmethod
    def releases(self, of_step: privacy.Event, num_steps: int, num_units: int) -> list[tuple[privacy.Event, int]]:
        """Returns the events of equal steps, in order, each with its count."""

    def check_schedule(self, factors: Sequence[float], num_bins: int) -> None:  # noqa: B027
        """Refuses a schedule of the noise under which steps have no price."""

    def for_steps(self, num_steps: int, num_units: int, mean_size: float, clipping: object) -> Sampling:
        """Returns the same, with what it needs to know of the training."""
        return self

    @property
    def sizes(self) -> tuple[float, ...] | None:
        """The mean size of each batch over that of all; None if all have the same."""
        return None


@dataclass(frozen=True)
class Poisson(Sampling):
    """Every example joins every batch independently, with probability q = ``expected_batch_size / n``.

    An example is in ``epochs`` batches on average, in some run in none and in some in more. Every mechanism has a price
    under it, every number of steps, and every mean batch size.

    Source: Abadi et al. (2016), arXiv:1607.00133.
    """

    def sampler(self, num_units: int, sampling_probability: float, key: bytes) -> Sampler:
        return PoissonSampler(num_units, sampling_probability, key=key)

    def event(self, of_step: privacy.Event, step: int, num_units: int) -> privacy.Event:
        return of_step

    def releases(self, of_step: privacy.Event, num_steps: int, num_units: int) -> list[tuple[privacy.Event, int]]:
        return [(of_step, num_steps)]


@plain_numbers
@dataclass(frozen=True)
class Truncated(Poisson):
    """Poisson sampling in which at most ``most`` examples of a batch stay, chosen uniformly by the secret key.

    Batches have a largest size, so that memory and time have a bound. The divisor stays ``expected_batch_size``. The
    price depends on n, which is public: it grows with the chance that a batch is cut, and is that of `Poisson` to 0.1 %
    where ``most`` is 5 standard deviations above the mean batch size B, at about B + 5 √B.

    Args:
        most: largest number of examples, or of owners, in a batch, at least 1.

    Raises:
        ValueError: ``most`` is no whole number above 0.
        Refused: norms are estimated or several sums are released, so that no price is known.

    Source: arXiv:2508.15089, as dp-accounting implements it.
    """

    most: int

    def __post_init__(self) -> None:
        whole("Truncated", at_least=1, most=self.most)

    def sampler(self, num_units: int, sampling_probability: float, key: bytes) -> Sampler:
        return TruncatedSampler(num_units, sampling_probability, self.most, key=key)

    def event(self, of_step: privacy.Event, step: int, num_units: int) -> privacy.Event:
        try:
            return privacy.truncated(of_step, num_units, self.most)
        except ValueError as error:
            raise _no_price(self, of_step, error) from None

    def releases(self, of_step: privacy.Event, num_steps: int, num_units: int) -> list[tuple[privacy.Event, int]]:
        return [(self.event(of_step, 0, num_units), num_steps)]


@dataclass(frozen=True)
class Varying(Poisson):
    """Poisson sampling with a mean batch size that changes during training: small at first, say, and larger later.

    Step t draws each example with probability ``q_t = q · factor_t / mean factor``, with q the batch size over n, so
    that the mean size of all batches stays ``expected_batch_size``. A sum is divided by its own mean size ``q_t n``.
    Every step is priced with its own q_t.

    Args:
        factors: a function of the step, from 0 on, or a number for each step, all above 0. They are computed before the
            first batch, so that they cannot follow the data.

    Raises:
        ValueError: another number of factors, one that is not finite and above 0, or a mean batch size above n.
        Refused: clipping with a price or a divisor for one batch size alone: `Sketched`, `Adaptive`, `MicroBatches`.

    Source: the "adaptive control of the lot size" of Abadi et al. (2016), arXiv:1607.00133, section 5.2.
    """

    factors: Schedule

    def __post_init__(self) -> None:
        check_schedule("Varying", "factors", self.factors)

    def __repr__(self) -> str:
        known = self.sizes
        if known is None:
            return f"Varying({self.factors!r:.60})"
        return f"Varying({len(known)} factors, digest {hashlib.sha256(repr(known).encode()).hexdigest()[:16]})"

    @property
    def sizes(self) -> tuple[float, ...] | None:
        return self.factors if isinstance(self.factors, tuple) else None

    def for_steps(self, num_steps: int, num_units: int, mean_size: float, clipping: object) -> Sampling:
        rule = unscheduled(clipping)
        if isinstance(rule, Sketched | Adaptive | MicroBatches):
            raise Refused(
                f"{WHERE}: sampling=Varying(...) has no rule for clipping={type(rule).__name__}(...), which needs "
                "batches of one mean size. Take Flat, EachLayer, PerLayer, Groups, Automatic, GEP or BGEP."
            )
        factors = factors_of(WHERE, "sampling.factors", self.factors, num_steps) or ()
        mean = sum(factors) / len(factors)
        sizes = tuple(factor / mean for factor in factors)
        if not max(sizes) * mean_size <= num_units * (1 + WHOLE):
            raise ValueError(
                f"{WHERE}: sampling=Varying(...) makes batches of up to {max(sizes) * mean_size:.6g} on average, and n "
                f"is {num_units}. Lower expected_batch_size, or the largest factors."
            )
        return Varying(sizes)

    def sampler(self, num_units: int, sampling_probability: float, key: bytes) -> Sampler:
        assert self.sizes is not None
        probabilities = tuple(min(1.0, sampling_probability * size) for size in self.sizes)
        return VaryingSampler(num_units, probabilities, key=key)

    def event(self, of_step: privacy.Event, step: int, num_units: int) -> privacy.Event:
        assert self.sizes is not None
        q: float = getattr(of_step, "sampling_probability")  # noqa: B009  # the events of all other rules have one
        return replace(of_step, sampling_probability=min(1.0, q * self.sizes[step]))  # type: ignore[type-var]

    def releases(self, of_step: privacy.Event, num_steps: int, num_units: int) -> list[tuple[privacy.Event, int]]:
        return [(self.event(of_step, step, num_units), 1) for step in range(num_steps)]


@dataclass(frozen=True)
class BallsAndBins(Sampling):
    """Every example is in exactly one of the t = ``n / expected_batch_size`` batches of each epoch.

    Each example draws its batch by itself, anew in every epoch, so that batches differ in size: Binomial(n, 1/t). An
    epoch costs less than t Poisson batches; one that is broken off costs a whole one, and so does what is made of an
    epoch again under new keys, after a resumed training did not repeat.

    `PrivateTraining` takes it by default for a whole number of ``epochs``, where the clipping has exact norms and the
    noise is the same in all steps. The mean batch size is then moved by at most 5 %, to n over a whole number.

    Guarantees:
        - the price is that of `privacy.BallsAndBins` for each epoch begun, which is certified.

    Raises:
        Refused: n / expected_batch_size is not whole; norms are estimated, so that no price is known; or the noise
            changes within an epoch.

    Source: Chua et al. (2024), arXiv:2412.16802. Other texts draw the bins once for all epochs, which costs more.
    """

    needs_places = True

    def mean_size(self, expected_batch_size: float, num_units: int) -> float:
        if not 0 < expected_batch_size <= num_units:
            return expected_batch_size  # `TrainingSettings` refuses it
        exact = num_units / expected_batch_size
        bins = round(exact)
        if abs(exact - bins) <= WHOLE * bins:
            return num_units / bins
        near = sorted({max(1, int(exact)), int(exact) + 1}, key=lambda t: abs(exact - t))
        sizes = " or ".join(f"{num_units / t:.10g} ({t} batches)" for t in near)
        raise Refused(
            f"{WHERE}: sampling=BallsAndBins() needs a whole number of batches in an epoch, but "
            f"expected_batch_size={expected_batch_size!r} gives {num_units} / {expected_batch_size!r} = {exact:.6g}. "
            f"Nearest: {sizes}."
        )

    def sampler(self, num_units: int, sampling_probability: float, key: bytes) -> Sampler:
        return BinsSampler(num_units, round(1 / sampling_probability), key=key)

    def event(self, of_step: privacy.Event, step: int, num_units: int) -> privacy.Event:
        epoch, bins = self._epoch(of_step)
        return privacy.LaterBatch(epoch) if step % bins else epoch

    def releases(self, of_step: privacy.Event, num_steps: int, num_units: int) -> list[tuple[privacy.Event, int]]:
        epoch, bins = self._epoch(of_step)
        releases: list[tuple[privacy.Event, int]] = []
        for start in range(0, num_steps, bins):
            later = min(bins, num_steps - start) - 1
            releases += [(epoch, 1), (privacy.LaterBatch(epoch), later)] if later else [(epoch, 1)]
        return releases

    def check_schedule(self, factors: Sequence[float], num_bins: int) -> None:
        for start in range(0, len(factors), num_bins):
            of_epoch = factors[start : start + num_bins]
            if len({*of_epoch}) > 1:
                raise Refused(
                    f"{WHERE}: noise_schedule changes within the epoch of steps {start} to "
                    f"{start + len(of_epoch) - 1}, and sampling=BallsAndBins() has a price only for epochs with equal "
                    "noise. Change it between epochs, or pass sampling=tp.Poisson()."
                )

    def _epoch(self, of_step: privacy.Event) -> tuple[privacy.BallsAndBins, int]:
        """Returns the event of an epoch of these steps, and the number of its batches."""
        bins = round(1 / getattr(of_step, "sampling_probability", 1.0))
        try:
            return privacy.in_bins(of_step, bins), bins
        except ValueError as error:
            raise _no_price(self, of_step, error) from None


POISSON = Poisson()


def _no_price(sampling: Sampling, of_step: privacy.Event, error: ValueError) -> Refused:
    return Refused(
        f"{WHERE}: sampling={sampling!r} has no known price for {type(of_step).__name__}: {error} Pass "
        "sampling=tp.Poisson(), or clip by exact norms."
    )


def sampling_of(
    given: Sampling | None, epochs: float | None, expected_batch_size: float, num_units: int, clipping: object,
    noise_schedule: object,
) -> tuple[Sampling, float]:  # fmt: skip
    """Returns how examples are drawn, and the mean batch size: the setting, or what `BallsAndBins` says by default."""
    size, passes = plain_number(expected_batch_size), plain_number(epochs)
    if given is not None:
        if not isinstance(given, Sampling):
            known = "tp.Poisson(), tp.BallsAndBins(), tp.Truncated(most=...) or tp.Varying(factors)"
            raise ValueError(f"{WHERE}: sampling={given!r} must be {known}.")
        return given, given.mean_size(size, num_units)
    numbers = isinstance(size, int | float) and isinstance(passes, int | float)
    if not numbers or not 0 < size <= num_units or not (passes >= 1 and passes == round(passes)):  # not NaN either
        return POISSON, size
    rule = unscheduled(clipping)
    if isinstance(rule, Sketched) or noise_schedule is not None:
        return POISSON, size
    mean = num_units / max(1, round(num_units / size))
    return (BallsAndBins(), mean) if abs(mean - size) <= NEAR * size else (POISSON, size)


def number_of_steps(num_steps: int | None, epochs: float | None, num_examples: int, batch_size: float) -> int:
    """Returns the number of steps: the one given, or the smallest with ``epochs * n`` examples drawn on average.

    Raises:
        ValueError: both or none are given, or ``epochs`` is not a finite number above 0.
    """
    if (num_steps is None) == (epochs is None):
        raise ValueError(f"{WHERE}: num_steps={num_steps!r} and epochs={epochs!r}: give exactly one of the two.")
    if num_steps is not None or epochs is None:
        return num_steps  # pyright: ignore[reportReturnType]  # checked above
    passes, mean_size = plain_number(epochs), plain_number(batch_size)
    positive(WHERE, epochs=passes, expected_batch_size=mean_size)
    return steps_of(passes, num_examples, mean_size)


@lru_cache
def under(relation: privacy.NeighboringRelation, event: Any) -> privacy.Event:
    """Returns the event under another relation; asked for in every step."""
    return replace(event, neighboring_relation=relation)


class StepPlan:
    """Holds the event of every planned step.

    Args:
        releases: events in the order of the steps, each with the number of steps that it is for.
    """

    def __init__(self, releases: Iterable[tuple[privacy.Event, int]]):
        self.releases: list[tuple[privacy.Event, int]] = []  # equal neighbors are one entry
        for event, count in releases:
            if self.releases and self.releases[-1][0] == event:
                count += self.releases.pop()[1]
            self.releases.append((event, count))
        self._ends = [*accumulate(count for _, count in self.releases)]

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def is_constant(self) -> bool:
        """True if all steps have one event."""
        return len(self.releases) == 1

    def at(self, step: int) -> privacy.Event:
        """Returns the event of a step; after the last one, that of the last."""
        return self.releases[min(bisect_right(self._ends, step), len(self.releases) - 1)][0]

    def begun_anew(self, step: int, number: int) -> StepPlan:
        """Returns the plan where a run begins at a step, as under new keys, with this number in the ledger."""
        event = self.at(step)
        if isinstance(event, privacy.BandedGaussian):
            return StepPlan([*self.between(0, step), (replace(event, run=number), len(self) - step)])
        if not isinstance(event, privacy.LaterBatch):
            return self
        return StepPlan([*self.between(0, step), (event.epoch, 1), *self.between(step + 1, len(self))])

    def between(self, start: int, end: int) -> list[tuple[privacy.Event, int]]:
        """Returns the releases of the steps from ``start`` up to ``end``, without ``end``."""
        bounds = [0, *self._ends]
        counts = [min(high, end) - max(low, start) for low, high in pairwise(bounds)]
        return [(event, count) for (event, _), count in zip(self.releases, counts, strict=True) if count > 0]
