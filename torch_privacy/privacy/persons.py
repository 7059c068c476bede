# SPDX-License-Identifier: Apache-2.0
"""Compares the two ways to protect a person with several examples: sampling examples, and sampling persons."""

import math
from dataclasses import dataclass
from typing import Any

from ..support.validate import plain_numbers, strictly_between, whole
from .bracket import Bracket
from .calibrate import calibrate_schedule
from .compose import Profile, compose
from .events.gaussian import SubsampledGaussian
from .events.groups import SubsampledGroup
from .rounding import round_down, round_up

LARGEST = 30.0  # ε of one example up to which the generic bound is looked for


@dataclass(frozen=True)
class Persons:
    """Holds what protecting a person costs if examples are sampled, and if persons are (owners of `Examples`).

    Attributes:
        group_size: G, the largest number of a person's examples.
        delta: δ of all values.
        one: ε of one example or, where persons are sampled, of one person.
        person: ε of a person where examples are sampled.
        generic: ε of a person by the generic group privacy of (ε, δ), for comparison; None if there is none below 30 G.
        noise_multiplier: noise multiplier with which sampling examples gives a person ``one.high``.
        noise_ratio: noise of sampling examples over that of sampling persons, for that ε, equal clip norms and equally
            many examples in a step.
    """

    group_size: int
    delta: float
    one: Bracket[float]
    person: Bracket[float]
    generic: float | None
    noise_multiplier: float
    noise_ratio: float

    @property
    def rule(self) -> str:
        """Says which of the two to choose."""
        return (
            f"Sample persons (owners of Examples, per_owner={self.group_size}) if the mean of a person's gradients is "
            f"shorter than about {self.noise_ratio:.2f} of the gradient of one example. The more diverse a person's "
            f"examples are, the shorter it is, down to {self.group_size**-0.5:.2f}."
        )

    def lines(self) -> list[tuple[str, str]]:
        """Returns the comparison as lines of a table: name and value."""
        most, generic = self.group_size, self.generic
        return [
            ("sampling persons: epsilon of one person", _interval(self.one)),
            (f"sampling examples: epsilon of a person with {most}", _interval(self.person)),
            (
                "  by generic group privacy, for comparison",
                f"none below {LARGEST * most:g}" if generic is None else round_up(generic, 2),
            ),
            (f"  noise multiplier for epsilon {round_up(self.one.high)}", round_up(self.noise_multiplier)),
            ("  noise over that of sampling persons", f"{self.noise_ratio:.3f}"),
            ("rule", self.rule),
        ]

    def as_json(self) -> dict[str, Any]:
        """Returns the comparison as plain values."""
        return {
            "group_size": self.group_size,
            "epsilon_sampling_persons": self.one._asdict(),
            "epsilon_sampling_examples": self.person._asdict(),
            "epsilon_by_generic_group_privacy": self.generic,
            "noise_multiplier_sampling_examples": self.noise_multiplier,
            "noise_ratio": self.noise_ratio,
            "rule": self.rule,
        }


def _interval(bracket: Bracket[float]) -> str:
    return f"[{round_down(bracket.low)}, {round_up(bracket.high)}]"


@plain_numbers
def compare_persons(
    noise_multiplier: float, sampling_probability: float, num_steps: int, delta: float, group_size: int
) -> Persons:
    """Returns what it costs to protect a person with up to ``group_size`` examples, in both ways.

    Args:
        noise_multiplier: of either training, over the sensitivity to what is sampled.
        sampling_probability: with which an example, or a person, joins a step.
        num_steps: of either training.
        delta: in (0, 1).
        group_size: G, at least 1.

    Example:
        >>> found = compare_persons(1.0, 0.01, 1000, 1e-5, group_size=4)
        >>> f"{found.one.high:.2f} {found.person.high:.2f} {found.generic:.2f} {found.noise_ratio:.3f}"
        '1.83 8.90 11.80 0.719'

    Source: Charles et al. (2024), arXiv:2407.07737; the generic bound is Vadhan (2017), Lemma 2.2.
    """
    strictly_between("compare_persons", 0, 1, delta=delta, hint="Take one well below 1/n.")
    whole("compare_persons", at_least=1, num_steps=num_steps, group_size=group_size)
    profile = compose([(SubsampledGaussian(noise_multiplier, sampling_probability), num_steps)])
    group = compose([(SubsampledGroup(noise_multiplier, sampling_probability, group_size), num_steps)])
    one = profile.epsilon(delta)
    noise = noise_multiplier
    if group_size > 1:
        noise = calibrate_schedule(
            lambda noise: [(SubsampledGroup(noise, sampling_probability, group_size), num_steps)],
            one.high,
            delta,
            start=group_size * noise_multiplier,
        )
    generic = _generic(profile, delta, group_size)
    return Persons(
        group_size, delta, one, group.epsilon(delta), generic, noise, noise / (group_size * noise_multiplier)
    )


def _generic(profile: Profile, delta: float, group_size: int) -> float | None:
    """Returns the least ``G ε`` with ``δ(ε) (e^(Gε) - 1) / (e^ε - 1) <= delta``."""

    def suffices(epsilon: float) -> bool:
        small = max(profile.delta(epsilon).high, 5e-324)
        growth = (group_size - 1) * epsilon + math.log(-math.expm1(-group_size * epsilon) / -math.expm1(-epsilon))
        return math.log(small) + growth <= math.log(delta)

    grid = [LARGEST * (k / 150) for k in range(1, 151)]
    first = next((k for k, epsilon in enumerate(grid) if suffices(epsilon)), None)
    if first is None:
        return None
    low, high = (grid[first - 1] if first else 0.0), grid[first]
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return group_size * high
