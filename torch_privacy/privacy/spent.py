# SPDX-License-Identifier: Apache-2.0
"""The privacy that was spent, in one line; and the warnings that no line may leave out."""

from dataclasses import dataclass

from .bracket import Bracket

NOT_PRIVATE = "NOT PRIVATE (test_seed fixes noise and batches, so anyone can take the noise off)"
NOT_FOR_RELEASE = "NOT PRIVATE (made with not_for_release=True, on data that need no protection)"


@dataclass(frozen=True)
class Spent:
    """Privacy spent so far; prints as one line.

    ``epsilon`` is a certified bracket (low, high) at ``delta`` for the steps made; ``epsilon.high`` is the one to
    report. Where training stopped early because of what it released (early stopping), ``planned.high`` is: the bracket
    for all planned steps, which holds wherever one stops.
    """

    epsilon: Bracket
    delta: float
    text: str
    planned: Bracket

    def __str__(self) -> str:
        return self.text
