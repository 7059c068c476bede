# SPDX-License-Identifier: Apache-2.0
"""Selects hyper-parameters on private data by a secret number of private runs; only the best run is released."""

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from ..privacy import Repeated, event_to_dict
from ..support.ranks import Ranks
from ..support.validate import Refused

Candidate = TypeVar("Candidate")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Found(Generic[Candidate, Result]):
    """The best run: its candidate, score and result. Exactly these are released."""

    candidate: Candidate
    score: float
    result: Result


def search_privately(
    run: Callable[[Candidate], tuple[float, Result]], candidates: Sequence[Candidate], event: Repeated
) -> Found[Candidate, Result] | None:
    """Runs randomly drawn candidates a secret random number of times, and returns the best run.

    Trying candidates on private data and keeping the best costs privacy, even if each run is private. Drawing the
    number K of runs from ``event.distribution`` bounds that price: the whole search is one ``event``, often not much
    more than twice the epsilon of one run. The price is the same for any number of candidates, even infinitely many.

    Args:
        run: candidate -> (score, result). One call must release no more than ``event.releases`` **for any candidate**:
            score and result are functions of these releases and public data alone. It must have no other output: no
            files, logs, prints or warnings of runs that did not win. The date of the run that won, as in its statement,
            is no part of the result: with that of the search's end it says how many runs came after it.
        candidates: the settings to draw from, each equally likely; chosen independently of the data.
        event: the releases of one run and the distribution of K. Record it in a ledger, once.

    Of several ranks all call it, and make the same runs together, as many as rank 0 draws, ranked by its scores.

    Returns:
        The best run, with ties broken at random; None if no run happened (only with Poisson), which the price includes.

    Raises:
        Refused: a score is NaN, a run returns no pair, or ranks differ in candidates or event. Nothing of the
            search is released then.
        ValueError: there is no candidate, or ``event`` is no `Repeated`; nothing was run.

    Source: Liu & Talwar (2019), arXiv:1811.07971; Papernot & Steinke (2022), arXiv:2110.03620.

    Example:
        >>> from torch_privacy.privacy import Laplace, Repeated
        >>> event = Repeated(((Laplace(1.0), 1),), mean=100, distribution="geometric")
        >>> found = search_privately(lambda c: (-abs(c - 3), f"trained with {c}"), [3], event)
        >>> found.score, found.result
        (0, 'trained with 3')
    """
    if not candidates:
        raise ValueError("search_privately: candidates is empty; give at least one.")
    if not isinstance(event, Repeated):
        raise ValueError(
            f"search_privately: event={event!r} must be a Repeated, such as Repeated(((event, 1),), mean=10): the "
            "releases of one run, and how the number of runs is drawn."
        )
    ranks = Ranks.here("search_privately")
    given = {"number of candidates": len(candidates), "event": json.dumps(event_to_dict(event))}
    ranks.check_same("search_privately", given, "Give all ranks the same candidates and the same event.")
    generator = np.random.default_rng(ranks.from_first(secrets.randbits(256)))
    best: Found[Candidate, Result] | None = None
    ties = 0
    for _ in range(event.draw(generator)):
        candidate = candidates[int(generator.integers(len(candidates)))]
        with ranks.together("has made a run of the search"):
            found = run(candidate)
            if not isinstance(found, (tuple, list)) or len(found) != 2:
                raise Refused(
                    f"search_privately: run returned {type(found).__name__}: must be the pair (score, result)."
                )
        score, result = found
        score = ranks.from_first(score)  # that of another rank may have noise of its own
        if not score == score:  # NaN has no rank
            raise Refused(
                "search_privately: a score is not a number. Return -inf as the score of a failed run, so that the "
                "search does not stop there."
            )
        if best is not None and score < best.score:
            continue
        ties = ties + 1 if best is not None and score == best.score else 1
        if generator.integers(ties) == 0:
            best = Found(candidate, score, result)
    return best
