# SPDX-License-Identifier: Apache-2.0
"""Provides `Threshold`: from which probability on a class is predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..support.validate import quoted

YES = ("yes", "y", "true", "t", "1", "positive", "pos", "ja", "oui", "si", "sí", "sim")  # classes asked for by a number


@dataclass(frozen=True)
class Threshold:
    """Predicts a class wherever its probability is at least ``at``, and elsewhere the most probable of the others.

    Args:
        place: of the class among the classes.
        at: probability in (0, 1].

    Example:
        >>> Threshold.parse("yes=0.1", ["no", "yes"]).decide(np.array([[0.95, 0.05], [0.85, 0.15]])).tolist()
        [0, 1]
    """

    place: int
    at: float

    @classmethod
    def parse(cls, text: str, classes: Sequence[str], where: str = "threshold") -> Threshold:
        """Returns the threshold in ``CLASS=PROBABILITY``; of two classes, a probability alone is that of "yes".

        Raises:
            ValueError: the class is unknown, the probability is not in (0, 1], or there are no classes.
        """
        if not classes:
            raise ValueError(f"{where}: --threshold {text} is for a target with classes, and this one is a number.")
        name, mark, _ = text.rpartition("=")
        name = name.strip()
        if not mark and len(classes) > 2:
            raise ValueError(
                f"{where}: --threshold {text} names no class. Write --threshold CLASS={text}, with one of "
                f"{quoted(classes, at_most=10)}."
            )
        if mark and name not in classes:
            raise ValueError(f"{where}: --threshold {text}: {name!r} is none of {quoted(classes, at_most=10)}.")
        return cls(classes.index(name) if mark else positive(classes), probability_in(text, where))

    def decide(self, probabilities: NDArray[np.float64]) -> NDArray[np.int64]:
        """Returns the predicted class of each row, (n,), from probabilities (n, classes)."""
        others = probabilities.copy()
        others[:, self.place] = -np.inf
        return np.where(probabilities[:, self.place] >= self.at, self.place, others.argmax(1))


def probability_in(text: str, where: str) -> float:
    """Returns the probability of ``CLASS=PROBABILITY``, or of a probability alone; refuses one outside of (0, 1]."""
    number = text.rpartition("=")[2]
    try:
        at = float(number)
    except ValueError:
        at = 0.0
    if not 0 < at <= 1:
        raise ValueError(f"{where}: --threshold {text}: {number!r} must be a probability in (0, 1], such as 0.2.")
    return at


def positive(classes: Sequence[str]) -> int:
    """Returns the place of the class that stands for yes: by its name, else the last one."""
    found = [place for place, name in enumerate(classes) if name.casefold() in YES]
    return found[0] if len(found) == 1 else len(classes) - 1
