# SPDX-License-Identifier: Apache-2.0
"""Provides strong composition, the baseline of the moments accountant: valid and very loose."""

from collections.abc import Callable

import numpy as np

from ...support.validate import in_range, plain_numbers, strictly_between, whole
from ..bracket import Array
from ..engines.curve import crossing
from ..events.base import check_noise
from ..tradeoff import Gaussian


def sampled_epsilon(epsilon: Array, sampling_probability: float) -> Array:
    """Returns ``log(1 + q (e^ε - 1))``, amplification by Poisson sampling; valid for any (ε, δ) if δ becomes q δ."""
    return np.log1p(sampling_probability * np.expm1(epsilon))


def scaled_epsilon(epsilon: Array, sampling_probability: float) -> Array:
    """Returns ``q ε``, the amplification in the baseline of the 2016 paper. **Not valid**: it is too small."""
    return sampling_probability * epsilon


@plain_numbers
def strong_composition(
    noise_multiplier: float,
    sampling_probability: float,
    num_steps: int,
    delta: float,
    amplification: Callable[[Array, float], Array] = sampled_epsilon,
) -> float:
    """Returns ε by strong composition, the baseline of the moments accountant: valid and very loose.

    One step is ``(ε₀, δ₀)``-private with ``ε₀ = sqrt(2 log(1.25/δ₀)) / σ``, after sampling ``(ε₁, q δ₀)``, and T of
    them are ``ε₁ sqrt(2 T log(1/δ')) + T ε₁ (e^ε₁ - 1)`` at ``δ = T q δ₀ + δ'``; the split of δ is the best of many.

    Args:
        noise_multiplier: σ, in [1e-6, 1e6].
        sampling_probability: q, in (0, 1].
        num_steps: T, at least 1.
        delta: in (0, 1).
        amplification: from (ε₀, q) to ε₁. With the default, `sampled_epsilon`, the answer is a bound. The paper's
            9.34 and 24.22 come out only with `scaled_epsilon`, which is not valid; the valid ones are 26.4 and 82.3.

    Guarantees:
        - with the default never below the true ε: where the formula for ε₀ is invalid (above ε₀ = 1), the exact value
          is used.

    Source: Dwork & Roth (2014), Theorems 3.20 and A.1; Abadi et al. (2016), section 5.1 for the numbers.

    Example:
        >>> setting = dict(noise_multiplier=4.0, sampling_probability=0.01, num_steps=10_000, delta=1e-5)
        >>> round(strong_composition(**setting), 2)
        26.39
        >>> round(strong_composition(**setting, amplification=scaled_epsilon), 2)
        9.35
    """
    check_noise("strong_composition", noise_multiplier)
    in_range("strong_composition", 0, 1, sampling_probability=sampling_probability)
    whole("strong_composition", at_least=1, num_steps=num_steps)
    strictly_between("strong_composition", 0, 1, delta=delta)
    share = 1 / (1 + np.exp(-np.linspace(-12, 12, 241)))  # share of δ for the steps
    step_delta = np.minimum(share * delta / (num_steps * sampling_probability), 0.5)
    with np.errstate(over="ignore"):  # where e^ε overflows, the bound is infinite, which is valid
        step = amplification(_step_epsilon(noise_multiplier, step_delta), sampling_probability)
        spread = step * np.sqrt(-2 * num_steps * np.log((1 - share) * delta))
        total = spread + num_steps * step * np.expm1(step)
    return float(total.min())


def _step_epsilon(noise_multiplier: float, deltas: Array) -> Array:
    """Returns ε of one full-batch Gaussian step at each δ: the textbook formula, or the exact value if larger."""
    textbook = np.sqrt(2 * np.log(1.25 / deltas)) / noise_multiplier
    falls_short = Gaussian(1 / noise_multiplier).delta(textbook) > deltas
    for index in np.flatnonzero(falls_short):
        curve, target = Gaussian(1 / noise_multiplier), deltas[index]
        textbook[index] = crossing(lambda epsilon, f=curve, least=target: bool(f.delta(epsilon) <= least)).high
    return textbook
