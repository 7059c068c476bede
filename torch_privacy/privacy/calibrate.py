# SPDX-License-Identifier: Apache-2.0
"""Calibrates to a privacy target: the noise it needs, and the steps, sampling and projections that it allows."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from math import exp, log

from ..support.validate import InvalidValue, in_range, plain_numbers, positive, strictly_between, whole
from .approximate.clt import clt_noise
from .compose import compose
from .events.base import WITHOUT_NOISE, Event
from .events.estimated_norms import SubsampledJL
from .events.gaussian import SubsampledGaussian

Releases = Iterable[tuple[Event, int]]
Point = tuple[float, float]  # noise multiplier, log of ε / target; nearly a straight line in log-log
FEWEST = 8  # projections; with fewer, losses are too heavy-tailed to be useful
SMALLEST, LARGEST = 0.1, 1e4  # range in which noise multipliers are searched


@plain_numbers
def calibrate(
    target_epsilon: float, delta: float, *, sampling_probability: float, num_steps: int, tolerance: float = 1e-4
) -> float:
    """Returns a noise multiplier at which ``num_steps`` Poisson-sampled Gaussian steps reach (target_epsilon, delta).

    Args:
        target_epsilon: above 0.
        delta: in (0, 1).
        sampling_probability: q, in (0, 1].
        num_steps: T, at least 1.
        tolerance: largest relative distance from the smallest sufficient value.

    Guarantees:
        - the certified upper bound on ε at the returned value is at most the target, never above;
        - a value smaller by ``tolerance`` (relative) no longer reaches the target with a certified bound.

    Raises:
        ValueError: if the target needs a noise_multiplier above 1e4, or is met even at 0.1, which is hardly any noise.

    Example:
        >>> sigma = calibrate(3, 1e-5, sampling_probability=256 / 60000, num_steps=10_000)
        >>> f"{sigma:.3f}"
        '0.885'
    """
    positive("calibrate", target_epsilon=target_epsilon, tolerance=tolerance)
    strictly_between("calibrate", 0, 1, delta=delta)
    in_range("calibrate", 0, 1, sampling_probability=sampling_probability)
    whole("calibrate", at_least=1, num_steps=num_steps)

    def schedule(noise_multiplier: float) -> list[tuple[Event, int]]:
        return [(SubsampledGaussian(noise_multiplier, sampling_probability), num_steps)]

    start = clt_noise(target_epsilon, delta, sampling_probability, num_steps)
    return _smallest(schedule, target_epsilon, delta, start, tolerance, "calibrate")


@plain_numbers
def calibrate_schedule(
    schedule: Callable[[float], Iterable[tuple[Event, int]]],
    target_epsilon: float,
    delta: float,
    *,
    start: float = 1.0,
    tolerance: float = 1e-4,
) -> float:
    """Returns the smallest scale of the noise at which a whole schedule of releases reaches the target.

    Args:
        schedule: function from a scale to all releases, as pairs (event, how often); a larger scale must cost less. The
            scale may be the noise multiplier of a `SubsampledJL`, or a factor on the noise of growing batches.
        target_epsilon: above 0.
        delta: in (0, 1).
        start: a guess of the scale; a good one saves time.
        tolerance: largest relative distance from the smallest sufficient value.

    Guarantees:
        - the certified upper bound on ε at the returned value is at most the target, never above.

    Raises:
        ValueError: if no scale in [0.1, 1e4] suffices, or even 0.1 does, or ``schedule`` raises one.

    Example:
        >>> from torch_privacy.privacy import SubsampledJL
        >>> noise = calibrate_schedule(lambda noise: [(SubsampledJL(noise, 64, 0.01), 2000)], 2.58384, 1e-5)
        >>> f"{noise:.3f}"
        '1.035'
    """
    positive("calibrate_schedule", target_epsilon=target_epsilon, start=start, tolerance=tolerance)
    strictly_between("calibrate_schedule", 0, 1, delta=delta)
    return _smallest(schedule, target_epsilon, delta, start, tolerance, "calibrate_schedule")


@plain_numbers
def most_steps(
    event: Event, target_epsilon: float, delta: float, *, beside: Iterable[tuple[Event, int]] = (), most: int = 10**7
) -> int:
    """Returns the largest number of releases of an event within the target, in addition to others; 0 if none.

    Args:
        event: what is released in each step.
        target_epsilon: above 0.
        delta: in (0, 1).
        beside: releases that count as well, as pairs (event, how often), such as those made already.
        most: largest number to return.

    Guarantees:
        - the certified upper bound on ε of that number is at most the target, and above it for one more release
          (unless the number is ``most``).

    Raises:
        ValueError: if the releases ``beside`` cost more than the target by themselves.

    Example:
        >>> most_steps(SubsampledGaussian(1.0, 0.01), target_epsilon=2.0, delta=1e-5)
        1202
    """
    positive("most_steps", target_epsilon=target_epsilon)
    strictly_between("most_steps", 0, 1, delta=delta)
    whole("most_steps", at_least=1, most=most)
    others = list(beside)

    def excess(num_steps: int) -> float:
        return log_ratio(compose([*others, (event, num_steps)]).epsilon_high(delta), target_epsilon)

    good = largest_number(excess, most)
    if good == 0 and others and excess(0) > 0:
        raise ValueError(f"most_steps: the releases in beside cost more than target_epsilon={target_epsilon!r}.")
    return good


def largest_number(excess: Callable[[int], float], most: int) -> int:
    """Returns the largest number of releases, up to ``most``, with an ``excess`` of at most 0; 0 if there is none.

    Args:
        excess: from a number to the logarithm of epsilon over its target.
        most: largest number to return.
    """
    good, bad, steps = 0, most + 1, min(1000, most)
    while bad - good > 1:  # ε grows like a power of the steps, between 1/2 and 1
        value = excess(steps)
        good, bad = (good, steps) if value > 0 else (steps, bad)
        guess = round(steps * exp(-min(max(1.5 * value, -5.0), 5.0))) + (1 if value <= 0 else -1)
        middle = (good + bad) // 2 if bad <= most else 4 * good
        steps = guess if good < guess < bad and abs(guess - steps) < (bad - good) / 2 else middle
        steps = min(max(steps, good + 1), bad - 1)
    return good


@plain_numbers
def largest_sampling_probability(
    target_epsilon: float, delta: float, *, noise_multiplier: float, num_steps: int, tolerance: float = 1e-4
) -> float:
    """Returns the largest sampling probability at which Poisson-sampled Gaussian steps reach the target.

    Times the number of examples, that is the largest expected batch size.

    Args:
        target_epsilon: above 0.
        delta: in (0, 1).
        noise_multiplier: σ, in [1e-6, 1e6].
        num_steps: T, at least 1.
        tolerance: largest relative distance from the largest allowed value.

    Guarantees:
        - the certified upper bound on ε at the returned value is at most the target, never above.

    Raises:
        ValueError: if even a sampling probability of 1e-9 exceeds the target.

    Example:
        >>> probability = largest_sampling_probability(2.0, 1e-5, noise_multiplier=1.0, num_steps=2000)
        >>> round(60_000 * probability)  # the expected batch size
        476
    """
    positive("largest_sampling_probability", target_epsilon=target_epsilon, tolerance=tolerance)
    strictly_between("largest_sampling_probability", 0, 1, delta=delta)

    def enough(probability: float) -> bool:
        event = SubsampledGaussian(noise_multiplier, probability)
        return compose([(event, num_steps)]).epsilon_high(delta) <= target_epsilon

    if enough(1.0):
        return 1.0
    log_good, log_bad = log(1e-9), 0.0
    if not enough(1e-9):
        raise ValueError(
            f"largest_sampling_probability: target_epsilon={target_epsilon!r} is out of reach: even a sampling "
            "probability of 1e-9 exceeds it. Add noise or take fewer steps."
        )
    while log_bad - log_good > tolerance:
        middle = (log_good + log_bad) / 2
        log_good, log_bad = (middle, log_bad) if enough(exp(middle)) else (log_good, middle)
    return exp(log_good)


@plain_numbers
def fewest_projections(
    target_epsilon: float, delta: float, *, noise_multiplier: float, sampling_probability: float, num_steps: int
) -> int:
    """Returns the smallest number of random projections at which `SubsampledJL` steps reach the target, at least 8.

    Args:
        target_epsilon: above 0.
        delta: in (0, 1).
        noise_multiplier: σ, in [0.05, 1e6].
        sampling_probability: q, in (0, 1].
        num_steps: T, at least 1.

    Guarantees:
        - the certified upper bound on ε at the returned number is at most the target, and above it for one fewer
          (unless the number is 8).

    Raises:
        ValueError: if exact norms do not reach the target, or by so little that 10^6 projections do not.

    Example:
        >>> fewest_projections(3.0, 1e-5, noise_multiplier=1.0, sampling_probability=0.01, num_steps=2000)
        40
    """
    positive("fewest_projections", target_epsilon=target_epsilon)
    strictly_between("fewest_projections", 0, 1, delta=delta)

    def enough(projections: int) -> bool:
        event = SubsampledJL(noise_multiplier, projections, sampling_probability)
        return compose([(event, num_steps)]).epsilon_high(delta) <= target_epsilon

    bad, good = FEWEST - 1, 64
    while not enough(good):
        bad, good = good, 4 * good
        if good > 10**6:
            raise ValueError(f"fewest_projections: target_epsilon={target_epsilon!r} is out of reach. Add noise.")
    while good - bad > 1:
        middle = (good + bad) // 2
        bad, good = (bad, middle) if enough(middle) else (middle, good)
    return good


def _smallest(
    schedule: Callable[[float], Iterable[tuple[Event, int]]],
    target: float,
    delta: float,
    start: float,
    tolerance: float,
    where: str,
) -> float:
    """Returns the smallest scale of the noise that reaches the target; ``where`` begins error messages."""

    def excess(scale: float) -> float:
        return log_ratio(compose(schedule(scale)).epsilon_high(delta), target)

    return smallest(excess, start, tolerance, partial(InvalidValue, where, "target_epsilon", target))


def smallest(
    excess: Callable[[float], float],
    start: float,
    tolerance: float,
    unreachable: Callable[[str], Exception],
    ends: tuple[float, float] = (SMALLEST, LARGEST),
) -> float:
    """Returns the smallest noise multiplier between the ends with an ``excess`` of at most 0; see `log_ratio`.

    Args:
        excess: nearly a straight line in the logarithm of the noise multiplier.
        start: a guess.
        tolerance: largest relative distance from the smallest one.
        unreachable: from a reason to the error that is raised if it lies beyond an end.
        ends: of what is searched.
    """
    fails, enough = _enclose(excess, min(max(start, ends[0]), ends[1]), unreachable, *ends)
    return _narrow(excess, fails, enough, tolerance)


def log_ratio(epsilon: float, target: float) -> float:
    """Returns ``log(ε / target)``, at most 0 if and only if ε <= target, clipped to be finite."""
    value = log(min(max(epsilon / target, 1e-9), 1e9))
    return max(value, 1e-15) if epsilon > target else min(value, 0.0)


def _enclose(
    excess: Callable[[float], float], start: float, unreachable: Callable[[str], Exception], low: float, high: float
) -> tuple[Point, Point]:
    """Returns a noise multiplier that is too small and one that suffices, each with its excess."""
    point, slope, least = (start, excess(start)), 4.0, 0.01
    too_small = point[1] > 0
    while True:
        if too_small and point[0] == high:
            raise unreachable(f"needs a noise_multiplier above {high:g}. Take fewer steps.")
        if not too_small and point[0] == low:
            raise unreachable(f"is met even at noise_multiplier={low:g}. Ask for a smaller epsilon. {WITHOUT_NOISE}")
        step = min(max(1.2 * abs(point[1]) / slope, least), max(1.0, least))
        noise = min(max(point[0] * exp(step if too_small else -step), low), high)
        following = (noise, excess(noise))
        if (following[1] > 0) != too_small:
            return (point, following) if too_small else (following, point)
        slope = max(abs((following[1] - point[1]) / log(noise / point[0])), 0.5)
        point, least = following, 2 * least


def _narrow(excess: Callable[[float], float], fails: Point, enough: Point, tolerance: float) -> float:
    """Narrows by regula falsi in log-log, aimed alternately just above and below the root, so that both ends move."""
    above = True
    for attempt in count():
        if enough[0] - fails[0] <= tolerance * enough[0]:
            return enough[0]
        root = fails[0] * (enough[0] / fails[0]) ** (fails[1] / (fails[1] - enough[1]))
        middle = root * (1 + tolerance / 3 if above else 1 - tolerance / 3)
        if attempt > 20 or not fails[0] < middle < enough[0]:
            middle = (fails[0] + enough[0]) / 2
        point = (middle, excess(middle))
        above = point[1] > 0
        fails, enough = (point, enough) if above else (fails, point)
    raise AssertionError  # count() does not end
