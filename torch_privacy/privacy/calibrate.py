# SPDX-License-Identifier: Apache-2.0
"""How much noise a privacy target needs."""

from collections.abc import Callable
from itertools import count
from math import exp, log, log1p

from .._check import in_range, positive, strictly_between, whole
from .compose import compose
from .curve import bisect
from .gaussian import SubsampledGaussian
from .tradeoff import Gaussian

Point = tuple[float, float]  # noise multiplier, log of ε over the target: nearly a straight line in log-log
SMALLEST, LARGEST = 0.1, 1e4  # noise multipliers among which to search


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

    def excess(noise_multiplier: float) -> float:
        event = SubsampledGaussian(noise_multiplier, sampling_probability)
        return _log_ratio(compose([(event, num_steps)]).epsilon_high(delta), target_epsilon)

    start = min(max(_clt_guess(target_epsilon, delta, sampling_probability, num_steps), SMALLEST), LARGEST)
    fails, enough = _enclose(excess, start, f"calibrate: target_epsilon={target_epsilon!r}")
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


def _clt_guess(epsilon: float, delta: float, sampling_probability: float, num_steps: int) -> float:
    """Noise multiplier whose CLT μ has the target's δ: a few percent too low, hence a good place to start."""
    mu = bisect(lambda mu: float(Gaussian(mu).delta(epsilon)) <= delta, 1e3, 1e-9, 1e-6)[1]
    return log1p((mu / sampling_probability) ** 2 / num_steps) ** -0.5
