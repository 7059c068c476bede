# SPDX-License-Identifier: Apache-2.0
"""Tests the private search against the price stated by its event."""

import math
from collections import Counter

import numpy as np
import pytest

import torch_privacy as tp
from torch_privacy.privacy import FinitePair, KnownProfile, Laplace, Repeated, compose
from torch_privacy.training.search import search_privately

ONE_RUN = ((Laplace(1.0), 1),)


@pytest.mark.thorough
@pytest.mark.parametrize("distribution", ["poisson", "geometric", "logarithmic"])
def test_the_number_of_runs_has_the_priced_distribution(distribution):
    mean, generator = 4.0, np.random.default_rng(0)
    event = Repeated(ONE_RUN, mean, distribution)
    draws = np.array([event.draw(generator) for _ in range(10_000)])
    assert draws.mean() == pytest.approx(mean, abs=5 * draws.std() / 100)
    assert draws.min() == (0 if distribution == "poisson" else 1)
    if distribution == "geometric":
        assert (draws == 1).mean() == pytest.approx(1 / mean, abs=0.01)
    if distribution == "poisson":
        assert (draws == 0).mean() == pytest.approx(math.exp(-mean), abs=0.005)


def test_candidates_are_drawn_uniformly_and_the_best_is_kept():
    event, tried = Repeated(ONE_RUN, 30.0, "geometric"), Counter()

    def run(candidate):
        tried[candidate] += 1
        return float(candidate), f"model {candidate}"

    found = [search_privately(run, [1, 2, 3], event) for _ in range(200)]
    assert all(f is not None and f.result == f"model {f.candidate}" and f.score == f.candidate for f in found)
    assert sum(f is not None and f.candidate == 3 for f in found) > 150
    share = np.array([tried[k] for k in (1, 2, 3)]) / tried.total()
    assert share == pytest.approx([1 / 3] * 3, abs=0.05)


def test_ties_are_broken_at_random():
    event = Repeated(ONE_RUN, 50.0, "geometric")
    chosen = Counter(search_privately(lambda c: (0.0, c), ["a", "b"], event).result for _ in range(400))  # type: ignore[union-attr]
    assert min(chosen["a"], chosen["b"]) > 130


def test_each_of_the_best_runs_is_as_likely_where_a_worse_one_lies_between(monkeypatch):
    monkeypatch.setattr(Repeated, "draw", lambda self, generator: 4)
    chosen: Counter[int] = Counter()
    for _ in range(1500):
        runs = iter([(1.0, 0), (1.0, 1), (0.0, 2), (1.0, 3)])
        found = search_privately(lambda c, runs=runs: next(runs), ["a"], Repeated(ONE_RUN, 4.0))
        chosen[found.result] += 1  # type: ignore[union-attr]
    assert [chosen[k] / 1500 for k in range(4)] == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3], abs=0.06)


def test_a_poisson_number_of_runs_may_be_zero():
    event = Repeated(ONE_RUN, 0.01)
    assert None in [search_privately(lambda c: (0.0, c), [1], event) for _ in range(20)]


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("distribution", ["poisson", "geometric", "logarithmic"])
def test_the_privacy_loss_of_the_search_is_within_its_price(distribution):
    """A run reveals a bit with probability 3/4; the search keeps the larger bit, and its frequencies are compared."""
    p, q = (0.25, 0.75), (0.75, 0.25)
    event = Repeated(((FinitePair(p, q), 1),), 3.0, distribution)
    bit, n = np.random.default_rng(1), 6000

    def released(chance):
        found = [search_privately(lambda _: (float(bit.random() < chance), None), [0], event) for _ in range(n)]
        counts = Counter("none" if f is None else f.score for f in found)
        return np.array([counts[outcome] / n for outcome in ("none", 0.0, 1.0)])

    here, there = released(p[1]), released(q[1])
    profile = compose([(event, 1)])
    for epsilon in (0.0, 0.5, 1.0, 1.5):
        for one, other in ((here, there), (there, here)):
            assert np.maximum(one - math.exp(epsilon) * other, 0).sum() <= profile.delta(epsilon).high + 0.03


@pytest.mark.parametrize("distribution", ["poisson", "geometric", "logarithmic"])
def test_runs_that_fail_with_some_probability_have_a_price(distribution):
    """Their epsilon is infinite at a small delta, which ended in "epsilon=inf must be a finite number"."""
    profile = compose([(Repeated(((KnownProfile((1.0,), (0.01,)), 1),), 3.0, distribution), 1)])
    assert 0.03 <= profile.delta(20.0).high <= 0.034  # three runs fail, on average


def test_nan_scores_and_empty_candidates_are_refused():
    event = Repeated(ONE_RUN, 2.0, "geometric")
    with pytest.raises(tp.Refused, match="not a number"):
        search_privately(lambda c: (math.nan, c), [1], event)
    with pytest.raises(ValueError, match="empty"):
        search_privately(lambda c: (0.0, c), [], event)


def test_other_events_and_runs_that_return_no_pair_are_refused():
    runs = []
    with pytest.raises(ValueError, match="must be a Repeated"):
        search_privately(lambda c: runs.append(c), [1], Laplace(1.0))  # pyright: ignore[reportArgumentType]
    assert not runs
    event = Repeated(((Laplace(1.0), 1),), mean=3, distribution="geometric")
    with pytest.raises(tp.Refused, match=r"returned NoneType: must be the pair \(score, result\)"):
        search_privately(lambda c: runs.append(c), [1], event)  # pyright: ignore[reportArgumentType]
    assert len(runs) == 1


def searched_on_rank(rank: int, means: list[float]) -> tuple[list[int], int, str]:
    tried, event = [], Repeated(ONE_RUN, means[rank], "geometric")
    found = search_privately(lambda c: (tried.append(c) or float(rank - c), f"model {c} of {rank}"), [1, 2, 3], event)
    assert found is not None
    return tried, found.candidate, found.result


def test_ranks_make_the_same_runs_and_find_the_same_best_one(ranks2):
    (tried, best, first), (tried_by_other, best_of_other, second) = ranks2.run(searched_on_rank, [30.0, 30.0])
    assert tried == tried_by_other
    assert best == best_of_other == min(tried)
    assert (first, second) == (f"model {best} of 0", f"model {best} of 1")
    assert "the ranks differ in event" in ranks2.refusal(searched_on_rank, [30.0, 20.0])
