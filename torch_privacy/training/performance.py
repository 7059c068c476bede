# SPDX-License-Identifier: Apache-2.0
"""Provides ``Performance``: what a training takes of memory and time."""

from __future__ import annotations

from dataclasses import dataclass

from ..jacobian.tape import MEMORY_BUDGET
from ..support.validate import plain_numbers, positive, whole


@plain_numbers
@dataclass(frozen=True, kw_only=True)
class Performance:
    """Memory and time of a `PrivateTraining`: these settings change no release but by rounding.

    Args:
        microbatch_size: largest number of examples handed out at once, to limit memory; the noise stays the same bit
            for bit, the clipped sum the same up to rounding. None hands out whole batches.
        memory_budget: peak memory that a step may take, as a multiple of that of non-private training (up to 100) or in
            bytes; it determines what is kept for the clipped sum.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> Performance(microbatch_size=256, memory_budget=1.5)
        Performance(microbatch_size=256, memory_budget=1.5)
    """

    microbatch_size: int | None = None
    memory_budget: float = MEMORY_BUDGET

    def __post_init__(self) -> None:
        positive("Performance", memory_budget=self.memory_budget)
        if self.microbatch_size is not None:
            whole("Performance", microbatch_size=self.microbatch_size, at_least=1)


USUAL = Performance()  # of a training that gives none
