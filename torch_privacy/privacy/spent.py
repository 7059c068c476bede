# SPDX-License-Identifier: Apache-2.0
"""Provides `Spent`, the privacy spent in one line, and the warnings that such a line must include."""

from dataclasses import dataclass
from math import inf

from .bracket import Bracket

NOT_PRIVATE = "NOT PRIVATE (test_seed fixes noise and batches, so anyone can take the noise off)"
NOT_FOR_RELEASE = "NOT PRIVATE (made with not_for_release=True, on data that need no protection)"

AUDIT = "AUDIT (trained with canaries to test the guarantee: the model is not for release, the epsilon is spent)"


@dataclass(frozen=True)
class Spent:
    """Privacy spent so far; prints as one line.

    ``epsilon`` is a certified interval (low, high) at ``delta`` for the steps made; ``epsilon.high`` is the one to
    report. If training stopped early because of its outcomes (early stopping), report ``planned.high`` instead: the
    bracket for all planned steps, which is valid wherever training stops.
    """

    epsilon: Bracket
    delta: float
    text: str
    planned: Bracket
    is_public: bool = False  # true if noise or batches can be known, so that nothing is protected

    def __str__(self) -> str:
        return self.text

    def __float__(self) -> float:
        """Returns ``epsilon.high``, the certified upper bound for the steps made; infinity for what is not private."""
        return inf if self.is_public else self.epsilon.high
