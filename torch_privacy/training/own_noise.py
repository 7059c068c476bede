# SPDX-License-Identifier: Apache-2.0
"""Provides `OwnNoise`, noise of any symmetric law with the price that its author states, and compares the two."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np

from .. import privacy
from ..mechanisms.clipping import Adaptive
from ..mechanisms.estimated_norms import Sketched
from ..mechanisms.gep import BGEP, GEP
from ..mechanisms.noise import SMALLEST_TAIL
from ..mechanisms.scheduled import Scheduled
from ..privacy.events.base import check_event
from ..support.read_file import shown
from ..support.validate import Refused, positive
from .sampling import POISSON

WHERE = "PrivateTraining"
SLACK = 1e-9  # of a delta without sampling
LEAST = 1e-290  # mass of a cell that the law may leave empty
LARGEST_EPSILON = 600.0
CELLS = np.concatenate([np.geomspace(1e-12, 0.1, 350)[:-1], np.linspace(0.1, 1, 100)])  # their tails
PROBES = np.concatenate([np.geomspace(SMALLEST_TAIL, 0.01, 200)[:-1], np.linspace(0.01, 1, 200)])
Array = np.ndarray


class OwnNoise(ABC):
    """Noise of one's own for `PrivateTraining`: derive a frozen dataclass from it, and pass it as ``noise_multiplier``.

    Every number of the clipped sums gets an independent number of one symmetric law. A subclass states the law, by
    `magnitude`, what an example changes, by ``sensitivity``, and what a step costs, by `event`. Its fields are numbers
    and texts; they are in the statement.

    Attributes:
        sensitivity: the largest L2 change of the clipped sums for which the price holds: that of the clipping rule.

    Guarantees:
        - The law that is drawn is the one compared with the price. Keys, grid, ranks and resuming are as for Gaussian
          noise; the library multiplies the noise by the same factor above 1 that covers rounding.
        - A law and an event that disagree are refused at the start, where that shows when an example changes one number
          of the sums, or all of them equally: the law's delta is certainly larger than the event's, at some epsilon.
        - That no other change is easier to see is the author's claim, and every statement says so.

    Raises:
        Refused: the sensitivity is not the clipping rule's; the event is for another unit, relation or sampling
            probability; the law has an atom, no finite variance, or a larger delta than the event; or the setting has
            no price: another sampling than Poisson, correlated noise, a schedule, adaptive clipping, estimated norms.

    Source: the pairs are those of Zhu, Dong & Wang (2022), arXiv:2106.08567. That merged outcomes are no easier to tell
        apart, so that a table of cells bounds delta from below, is post-processing.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch
        >>> import torch_privacy as tp
        >>> from scipy.special import ndtri
        >>> @dataclass(frozen=True)
        ... class Normal(tp.OwnNoise):
        ...     stddev: float
        ...     sensitivity: float
        ...     def magnitude(self, tail):
        ...         return -self.stddev * ndtri(tail / 2)
        ...     def event(self, sampling_probability, unit):
        ...         noise = self.stddev / self.sensitivity
        ...         return tp.privacy.SubsampledGaussian(noise, sampling_probability, unit=unit)
        >>> model, data = torch.nn.Linear(5, 2), torch.utils.data.TensorDataset(torch.randn(1000, 5))
        >>> training = tp.PrivateTraining(model, torch.optim.SGD(model.parameters(), lr=0.1), data,
        ...                               expected_batch_size=50, num_steps=20, clipping=tp.Flat(clip_norm=0.5),
        ...                               noise_multiplier=Normal(stddev=0.5, sensitivity=0.5))
        >>> training.settings.noise_multiplier
        1.0
    """

    sensitivity: float

    @abstractmethod
    def event(self, sampling_probability: float, unit: str) -> privacy.Event:
        """Returns the price of one step on a Poisson sample.

        Args:
            sampling_probability: q, with which every example, or owner, joins a step.
            unit: the unit of privacy, which the event must have, too.
        """

    @abstractmethod
    def magnitude(self, tail: Array) -> Array:
        """Returns the magnitude that a number of the noise exceeds with this probability: the inverse of the tail.

        Args:
            tail: (n,) float64 in (0, 1].

        Returns:
            (n,) float64, at least 0; it falls strictly in ``tail``, one number at a time. An error of 1e-12 standard
            deviations is covered by the price.
        """


def described(noise: OwnNoise) -> str:
    """Returns class and fields of the noise; refuses what is no frozen dataclass of numbers and texts."""
    kind: Any = type(noise)
    if "__dataclass_params__" not in kind.__dict__ or not kind.__dataclass_params__.frozen:  # of its base is not enough
        raise Refused(
            f"{WHERE}: noise_multiplier={kind.__name__}(...) must be a frozen dataclass, so that its law cannot change "
            "during the training. Decorate the class with @dataclass(frozen=True)."
        )
    given = {field.name: getattr(noise, field.name) for field in fields(kind)}
    values = {name: value.item() if isinstance(value, np.generic) else value for name, value in given.items()}
    odd = [name for name, value in values.items() if type(value) not in (int, float, str, bool)]
    if odd:
        raise Refused(
            f"{WHERE}: {kind.__name__}.{odd[0]}={values[odd[0]]!r} must be a number or a text: the fields of "
            "the noise are public, and identify it in statements and states."
        )
    return f"{kind.__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"


@dataclass(frozen=True)
class StatedNoise:
    """Noise of one's own with what its author states of it, computed once.

    Attributes:
        law: the noise.
        name: its class and fields.
        stddev: of one number.
        event: of one step.
    """

    law: OwnNoise
    name: str
    stddev: float
    event: privacy.Event


def stated(noise: OwnNoise, sampling_probability: float, unit: str) -> StatedNoise:
    """Returns the noise with its name, scale and event; refuses an event for another setting."""
    stddev, event = stddev_of(noise), _event_of(noise, sampling_probability, unit)
    return StatedNoise(noise, described(noise), stddev, event)


def _event_of(noise: OwnNoise, sampling_probability: float, unit: str) -> privacy.Claimed:
    """Returns the event of a step, with the author's claim."""
    event: Any = noise.event(sampling_probability, unit)
    name = f"{WHERE}: {described(noise)}.event returned {shown(event)}"
    try:
        check_event(WHERE, event)
        found = privacy.Claimed(event, described(noise), privacy.NeighboringRelation.REPLACE_SPECIAL)
    except ValueError as error:
        raise Refused(f"{name}, which is no price of a step: {error}") from error
    if getattr(event, "sampling_probability", sampling_probability) != sampling_probability:
        raise Refused(
            f"{name}, but examples join a step with probability {sampling_probability!r}. Give that to the event."
        )
    if event.unit != unit:
        raise Refused(
            f"{name}, which protects one {event.unit}, but the training protects one {unit}. Give that to the event."
        )
    return found


def check_setting(
    noise: OwnNoise, clipping: Any, sampling: Any, correlation: Any, noise_schedule: Any, target_epsilon: Any
) -> None:
    """Refuses what has no price, or no meaning, together with noise of one's own."""
    name = described(noise)
    positive(name, sensitivity=getattr(noise, "sensitivity", None))  # pyright: ignore[reportArgumentType]
    given = {"correlation": correlation, "noise_schedule": noise_schedule, "target_epsilon": target_epsilon}
    if sampling != POISSON:
        given["sampling"] = sampling
    if isinstance(clipping, Adaptive | Scheduled | Sketched | GEP | BGEP):
        given["clipping"] = clipping
    hints = {
        "target_epsilon": "its scale is fixed. Leave it out, and choose the scale by privacy.compose",
        "sampling": "its price is that of Poisson samples. Leave it out",
        "clipping": "its price is that of one sum with a fixed bound. Take a rule such as Flat",
    }
    for setting, value in given.items():
        if value is not None:
            hint = hints.get(setting, "its price is that of equal, independent steps. Leave it out")
            raise Refused(f"{WHERE}: {setting}={value!r:.200} with noise_multiplier={name}: {hint}.")


def stddev_of(noise: OwnNoise) -> float:
    """Returns the standard deviation of one number, by Gauss' rule over -log tail, to 12 digits.

    Refuses a law with an infinite variance, or a magnitude that is not one.
    """
    _check_magnitude(noise)
    points, weights = np.polynomial.legendre.leggauss(16)
    starts = np.arange(0.0, -math.log(SMALLEST_TAIL), 0.5)
    tail = np.exp(-(starts[:, None] + 0.25 * (points + 1)).ravel())
    parts = noise.magnitude(tail) ** 2 * tail * np.tile(weights, len(starts)) / 4
    variance = float(parts.sum())
    if not 0 < variance < math.inf or parts[-16:].sum() > 1e-6 * variance:
        raise Refused(f"{WHERE}: {described(noise)} must have a finite variance. Take a law with lighter tails.")
    return float(f"{math.sqrt(variance):.12g}")


def _check_magnitude(noise: OwnNoise) -> None:
    """Refuses a magnitude that is not finite, falling, continuous, and a function of each tail alone."""
    name = f"{WHERE}: {described(noise)}.magnitude"
    found, alone = noise.magnitude(PROBES.copy()), noise.magnitude(PROBES[::-7].copy())
    for values, tails in ((found, PROBES), (alone, PROBES[::-7])):
        if not isinstance(values, np.ndarray) or values.dtype != np.float64 or values.shape != tails.shape:
            raise Refused(f"{name} must return an array of float64 with a number for each tail; got {values!r:.200}.")
    odd = found[~((found >= 0) & np.isfinite(found))]
    if len(odd):
        raise Refused(f"{name} must be finite and at least 0; got {float(odd[0])!r}.")
    if (np.diff(found) > 0).any():
        at = PROBES[1:][np.diff(found) > 0][0]
        raise Refused(f"{name} must fall in tail, but it rises before tail={at:.6g}.")
    if not np.allclose(alone, found[::-7], rtol=1e-12, atol=0):
        raise Refused(f"{name} must compute each number from its own tail alone, always in the same way.")
    middle = PROBES[PROBES >= 0.01]
    if not (noise.magnitude(middle * (1 - 1e-11)) > noise.magnitude(middle)).all():
        raise Refused(
            f"{name} is the same for different tails: the law would have an atom, which shows what was added to it. "
            "Take a law with a density, and compute it in float64."
        )


@lru_cache(maxsize=8)  # asked for in every step, as parameters may be unfrozen
def check_law(noise: StatedNoise, sensitivity: float, num_trained: int, sampling_probability: float) -> None:
    """Refuses a sensitivity that is not the clipping rule's, and a law that certainly costs more than its event.

    For ``1 + q (e^ε' - 1) = e^ε``, a step on a sample has the delta ``δ(ε) = q δ'(ε')``, δ' being that of the same
    change without sampling: `_lower_bounds` bounds it from below, and the event's own profile from above.
    """
    name, own = noise.name, float(noise.law.sensitivity)
    if not math.isclose(own, sensitivity, rel_tol=1e-12):
        raise Refused(
            f"{WHERE}: {name} is priced for a sensitivity of {own!r}, but one example changes the clipped sums by up "
            f"to {sensitivity!r}, which clipping says. Make the two equal."
        )
    profile = privacy.compose([(noise.event, 1)])
    for change, epsilon, delta in _lower_bounds(noise.law, num_trained):
        at = math.log1p(sampling_probability * math.expm1(epsilon))
        least, most = sampling_probability * delta, profile.delta(at).high
        if least > most + SLACK * sampling_probability:
            raise Refused(
                f"{WHERE}: {name} and its event disagree. Where an example changes {change}, the noise has a delta of "
                f"at least {least:.6g} at epsilon {at:.6g}, but its event states at most {most:.6g}. Correct the event "
                "or the law."
            )


def _lower_bounds(noise: OwnNoise, num_trained: int) -> Iterator[tuple[str, float, float]]:
    """Yields epsilons of a step on all data, each with a delta that the law has at least, for two changes of the sums.

    The numbers of a change of all are independent: their pairs compose.
    """
    changes = {1: "one number of the sums", num_trained: "all numbers of the sums equally"}
    for count, change in changes.items():
        p, q = _cells(noise, noise.sensitivity / math.sqrt(count))
        pair = privacy.FinitePair(tuple((p / p.sum()).tolist()), tuple((q / q.sum()).tolist()))
        profile = privacy.compose([(pair, count)])
        loss = np.clip(np.log(p) - np.log(q), -50, 50)
        mean = float(p @ loss)
        spread = math.sqrt(count * float(p @ (loss - mean) ** 2))
        epsilons = {0.0, *(max(0.0, count * mean + z * spread) for z in range(-1, 6))}
        for epsilon in sorted(epsilons):
            if epsilon <= LARGEST_EPSILON:
                yield change, epsilon, profile.delta(epsilon).low


def _cells(noise: OwnNoise, shift: float) -> tuple[Array, Array]:
    """Returns the masses of cells of a line, under the law with and without a shift, each at least `LEAST`."""
    ends = noise.magnitude(CELLS.copy())
    ends = np.concatenate([-ends, ends, [0.0]])
    ends = np.unique(np.concatenate([ends, ends + shift]))
    return _masses(noise, ends - shift), _masses(noise, ends)


def _masses(noise: OwnNoise, ends: Array) -> Array:
    """Returns the mass of the law before, between and after these ends; one of them is 0."""
    tail = np.where(ends == 0, 1.0, _tail(noise, np.abs(ends)))
    inner = np.where(ends[:-1] >= 0, tail[:-1] - tail[1:], tail[1:] - tail[:-1])
    return np.maximum(np.concatenate([tail[:1], inner, tail[-1:]]) / 2, LEAST)


def _tail(noise: OwnNoise, magnitudes: Array) -> Array:
    """Returns the probability of exceeding each magnitude (n,), by bisection; at least 1e-300."""
    low, high = np.full(len(magnitudes), math.log(1e-300)), np.zeros(len(magnitudes))
    for _ in range(64):
        middle = (low + high) / 2
        is_lower = noise.magnitude(np.exp(middle)) >= magnitudes
        low, high = np.where(is_lower, middle, low), np.where(is_lower, high, middle)
    return np.exp(low)
