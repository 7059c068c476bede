# SPDX-License-Identifier: Apache-2.0
"""How much noise a privacy target needs, and how many steps, which sampling, how many projections it allows."""

from collections.abc import Callable, Iterable
from itertools import count
from math import exp, log, log1p

from .._validate import in_range, positive, strictly_between, whole
from .compose import compose
from .engines.curve import bisect
from .events.base import Event
from .events.estimated_norms import SubsampledJL
from .events.gaussian import SubsampledGaussian
from .tradeoff import Gaussian

Point = tuple[float, float]  # noise multiplier, log of ε over the target: nearly a straight line in log-log
SMALLEST, LARGEST = 0.1, 1e4  # noise multipliers among which to search
FEWEST = 8  # projections; fewer are heavy-tailed beyond use


def calibrate(
    target_epsilon: float,
    delta: float,
    *,
    sampling_probability: float,
    num_steps: int,
    tolerance: float = 1e-4,
) -> float:
    """Noise multiplier at which ``num_steps`` Poisson-sampled Gaussian steps are (target_epsilon, delta)-private.

    Args:
        target_epsilon: above 0.
        delta: in (0, 1).
        sampling_probability: q, in (0, 1].
        num_steps: T, at least 1.
        tolerance: how far above the smallest sufficient value the answer may be, relative.

    Guarantees:
        - the certified upper bound on ε at the returned value is at most the target, never above;
        - a value smaller by ``tolerance`` (relative) no longer reaches the target with a certified bound.

    Raises:
        ValueError: the target needs a noise multiplier above 1e4, or is met even at 0.1, where hardly any noise
            is left.

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
    return _smallest(schedule, target_epsilon, delta, start, tolerance, f"calibrate: target_epsilon={target_epsilon!r}")


def calibrate_schedule(
    schedule: Callable[[float], Iterable[tuple[Event, int]]],
    target_epsilon: float,
    delta: float,
    *,
    start: float = 1.0,
    tolerance: float = 1e-4,
) -> float:
    """Smallest scale of the noise at which a whole schedule of releases reaches the target.

    Args:
        schedule: all releases, pairs (event, how often), at a scale; a larger scale must cost less. For instance the
            noise multiplier of a `SubsampledJL`, or a factor to the noise multipliers of steps with growing batches.
        target_epsilon: above 0.
        delta: in (0, 1).
        start: a guess of the scale.
        tolerance: how far above the smallest sufficient value the answer may be, relative.

    Guarantees:
        - the certified upper bound on ε at the returned value is at most the target, never above.

    Raises:
        ValueError: no scale in [0.1, 1e4] will do, or even 0.1 does; or a scale on the way makes no valid event.

    Example:
        >>> from torch_privacy.privacy import SubsampledJL
        >>> noise = calibrate_schedule(lambda noise: [(SubsampledJL(noise, 64, 0.01), 2000)], 2.58384, 1e-5)
        >>> f"{noise:.3f}"
        '1.035'
    """
    positive("calibrate_schedule", target_epsilon=target_epsilon, start=start, tolerance=tolerance)
    strictly_between("calibrate_schedule", 0, 1, delta=delta)
    what = f"calibrate_schedule: target_epsilon={target_epsilon!r}"
    return _smallest(schedule, target_epsilon, delta, start, tolerance, what)


def most_steps(
    event: Event, target_epsilon: float, delta: float, *, beside: Iterable[tuple[Event, int]] = (), most: int = 10**7
) -> int:
    """How many releases of an event the target allows, beside others; 0 if none.

    Args:
        event: what is released in each step.
        target_epsilon: above 0.
        delta: in (0, 1).
        beside: releases that count as well, as pairs (event, how often), such as those made already.
        most: where to stop counting.

    Guarantees:
        - the certified upper bound on ε of that many is at most the target, and of one more (unless ``most``) above.
    """
    positive("most_steps", target_epsilon=target_epsilon)
    strictly_between("most_steps", 0, 1, delta=delta)
    whole("most_steps", at_least=1, most=most)
    others = list(beside)

    def excess(num_steps: int) -> float:
        return _log_ratio(compose([*others, (event, num_steps)]).epsilon_high(delta), target_epsilon)

    good, bad, steps = 0, most + 1, min(1000, most)
    while bad - good > 1:  # ε grows like a power of the steps, between 1/2 and 1
        value = excess(steps)
        good, bad = (good, steps) if value > 0 else (steps, bad)
        guess = round(steps * exp(-min(max(1.5 * value, -5.0), 5.0))) + (1 if value <= 0 else -1)
        middle = (good + bad) // 2 if bad <= most else 4 * good
        steps = guess if good < guess < bad and abs(guess - steps) < (bad - good) / 2 else middle
        steps = min(max(steps, good + 1), bad - 1)
    if good == 0 and others and excess(0) > 0:
        raise ValueError(f"most_steps: the releases beside cost more than target_epsilon={target_epsilon!r} already.")
    return good


def largest_sampling_probability(
    target_epsilon: float, delta: float, *, noise_multiplier: float, num_steps: int, tolerance: float = 1e-4
) -> float:
    """Largest sampling probability at which so many Poisson-sampled Gaussian steps reach the target.

    Guarantees:
        - the certified upper bound on ε at the returned value is at most the target, never above.

    Raises:
        ValueError: even 1e-9 is too much.
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
        raise ValueError(f"largest_sampling_probability: target_epsilon={target_epsilon!r} is out of reach.")
    while log_bad - log_good > tolerance:
        middle = (log_good + log_bad) / 2
        log_good, log_bad = (middle, log_bad) if enough(exp(middle)) else (log_good, middle)
    return exp(log_good)


def fewest_projections(
    target_epsilon: float, delta: float, *, noise_multiplier: float, sampling_probability: float, num_steps: int
) -> int:
    """Fewest random projections at which `SubsampledJL` steps reach the target, at least 8.

    Guarantees:
        - the certified upper bound on ε at the returned number is at most the target, at one fewer above it.

    Raises:
        ValueError: exact norms would not reach the target either, or by so little that 10^6 projections would not.
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
    what: str,
) -> float:
    def excess(scale: float) -> float:
        return _log_ratio(compose(schedule(scale)).epsilon_high(delta), target)

    fails, enough = _enclose(excess, min(max(start, SMALLEST), LARGEST), what)
    return _narrow(excess, fails, enough, tolerance)


def _log_ratio(epsilon: float, target: float) -> float:
    """``log(ε / target)``, at most 0 if and only if ε <= target, kept finite."""
    value = log(min(max(epsilon / target, 1e-9), 1e9))
    return max(value, 1e-15) if epsilon > target else min(value, 0.0)


def _enclose(excess: Callable[[float], float], start: float, what: str) -> tuple[Point, Point]:
    """A noise multiplier that is too small and one that is enough, each with its excess."""
    point, slope, least = (start, excess(start)), 4.0, 0.01
    too_small = point[1] > 0
    while True:
        if too_small and point[0] == LARGEST:
            raise ValueError(f"{what} needs a noise_multiplier above {LARGEST:g}. Take fewer steps.")
        if not too_small and point[0] == SMALLEST:
            raise ValueError(f"{what} is met even at noise_multiplier={SMALLEST:g}. Ask for a smaller epsilon.")
        step = min(max(1.2 * abs(point[1]) / slope, least), max(1.0, least))
        noise = min(max(point[0] * exp(step if too_small else -step), SMALLEST), LARGEST)
        following = (noise, excess(noise))
        if (following[1] > 0) != too_small:
            return (point, following) if too_small else (following, point)
        slope = max(abs((following[1] - point[1]) / log(noise / point[0])), 0.5)
        point, least = following, 2 * least


def _narrow(excess: Callable[[float], float], fails: Point, enough: Point, tolerance: float) -> float:
    """Regula falsi in log-log, aimed alternately just above and just below the root, so that both ends close in."""
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


def clt_noise(epsilon: float, delta: float, sampling_probability: float, num_steps: int) -> float:
    """Noise multiplier whose CLT μ has the target's δ: a few percent too low, hence a good place to start."""
    mu = bisect(lambda mu: float(Gaussian(mu).delta(epsilon)) <= delta, 1e3, 1e-9, 1e-6)[1]
    return log1p((mu / sampling_probability) ** 2 / num_steps) ** -0.5
