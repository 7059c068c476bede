# SPDX-License-Identifier: Apache-2.0
"""Provides ``Scheduled``, a way of clipping whose bounds change from step to step by factors that are fixed before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..support.validate import plain_number, positive

Schedule = Callable[[int], float] | Sequence[float] | Tensor  # (num_steps,)


def factors_of(where: str, name: str, schedule: Schedule | None, num_steps: int) -> tuple[float, ...] | None:
    """Returns the factor of every step, (num_steps,), from a function of the step or from numbers; None for None.

    They are computed once, before the first batch, so that they cannot follow the data.

    Raises:
        ValueError: another number of factors, or one that is not finite and above 0.
    """
    if schedule is None:
        return None
    check_schedule(where, name, schedule)
    listed: Any = map(schedule, range(num_steps)) if callable(schedule) else schedule
    factors = tuple(plain_number(factor) for factor in listed)
    if len(factors) != num_steps:
        raise ValueError(f"{where}: {name} has {len(factors)} factors for {num_steps} steps: give one for each.")
    for step, factor in enumerate(factors):
        positive(where, **{f"{name}[{step}]": factor})
    return tuple(map(float, factors))


def check_schedule(where: str, name: str, schedule: Any) -> None:
    """Raises a ``ValueError`` unless the schedule is a function or holds numbers."""
    if isinstance(schedule, (str, bytes)) or not (callable(schedule) or hasattr(schedule, "__iter__")):
        raise ValueError(f"{where}: {name}={schedule!r} must be a function of the step, or numbers, one for each step.")


@dataclass(frozen=True)
class Scheduled:
    """Clipping with bounds that are multiplied by a factor in every step; ``rule.scheduled(factors)`` makes it.

    Args:
        rule: a clipping rule, or `Sketched`.
        factors: a function of the step, from 0 on, or a number for each step.

    Guarantees:
        - Noise and bounds shrink and grow together, so that a schedule changes no epsilon.
        - All factors are computed before the first batch, so that they cannot follow the data.
    """

    rule: Any
    factors: Schedule

    def __post_init__(self) -> None:
        check_schedule(f"{type(self.rule).__name__}.scheduled", "factors", self.factors)

    def for_steps(self, num_steps: int) -> Scheduled:
        """Returns the same with a tuple of factors, one for each step."""
        factors = factors_of("PrivateTraining", "clipping.factors", self.factors, num_steps)
        return Scheduled(self.rule, factors)  # pyright: ignore[reportArgumentType]  # there are factors


def unscheduled(clipping: Any) -> Any:
    """Returns the clipping without its schedule."""
    return clipping.rule if isinstance(clipping, Scheduled) else clipping
