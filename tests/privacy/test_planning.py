# SPDX-License-Identifier: Apache-2.0
"""Plans of trainings: each row within the target, the signal as defined, and what was measured with as much."""

import html
import re
from math import sqrt

import pytest

from torch_privacy import privacy
from torch_privacy.privacy.planning import ENOUGH, MEASURED

N, EPSILON, DELTA = 20_000, 2.0, 1e-6


@pytest.fixture(scope="module")
def found():
    return privacy.plan(N, EPSILON, DELTA, num_steps=(300, 100))


def epsilon_of(noise, row):
    event = privacy.SubsampledGaussian(noise, row.expected_batch_size / N)
    return privacy.compose([(event, row.num_steps)]).epsilon_high(DELTA)


def test_every_row_is_within_the_target_and_no_smaller_noise_is(found):
    assert [row.num_steps for row in found.rows] == sorted(row.num_steps for row in found.rows)
    for row in found.rows:
        assert epsilon_of(row.noise_multiplier, row) <= EPSILON < epsilon_of(0.999 * row.noise_multiplier, row)


def test_the_noise_of_every_row_is_within_the_target_as_printed(found):
    printed = [float(line.split()[2]) for line in str(found).split("\n\n")[1].splitlines()[1:]]
    assert len(printed) == len(found.rows)
    for noise, row in zip(printed, found.rows, strict=True):
        assert row.noise_multiplier <= noise < row.noise_multiplier + 1e-3


def test_signal_is_that_of_the_steps_over_that_of_one_whole_release(found):
    one = 1 / found.limit  # noise multiplier of one release of everything
    assert privacy.compose([(privacy.Gaussian(one), 1)]).epsilon_high(DELTA) == pytest.approx(EPSILON, rel=1e-3)
    for row in found.rows:
        signal = row.expected_batch_size / N * sqrt(row.num_steps) / row.noise_multiplier
        assert row.signal == pytest.approx(signal * one, rel=1e-12)
        assert row.signal < 1
        assert row.cost == row.expected_batch_size * row.num_steps


def test_batches_of_all_examples_reach_the_limit():
    (row,) = privacy.plan(2, 30.0, 1e-3, num_steps=(50,), signal=1.0).rows[-1:]
    assert row.expected_batch_size == 2
    assert row.signal == pytest.approx(1, abs=2e-4)  # each of the two noise multipliers is within 1e-4


@pytest.mark.parametrize("signal", [0.75, 0.9])
def test_the_chosen_training_is_the_cheapest_with_enough_signal(signal):
    found = privacy.plan(N, EPSILON, DELTA, num_steps=(100, 300), signal=signal)
    enough = [row for row in found.rows if row.signal >= signal]
    assert [row.num_steps for row in enough] == [100, 300]  # the last of each number of steps, no other
    assert found.chosen == min(enough, key=lambda row: row.cost)
    for steps in (100, 300):
        rows = [row for row in found.rows if row.num_steps == steps]
        assert [row.signal for row in rows] == sorted(row.signal for row in rows)
        assert len(rows) > 1


def test_a_simulation_has_the_same_noise_in_each_mean_gradient(found):
    row = found.chosen
    small = row.small(16)
    assert small["noise_multiplier"] / 16 == pytest.approx(row.noise_multiplier / row.expected_batch_size, rel=1e-12)
    assert (small["num_steps"], small["expected_batch_size"]) == (row.num_steps, 16)
    assert row.small(row.expected_batch_size)["noise_multiplier"] == row.noise_multiplier
    with pytest.raises(ValueError, match="expected_batch_size=99999"):
        row.small(99_999)


@pytest.mark.parametrize("task", MEASURED, ids=lambda task: task.what.split()[-1])
def test_measured_accuracies_grow_from_a_guess_to_that_without_privacy(task):
    signals, accuracies = zip(*task.points, strict=True)
    assert sorted(set(signals)) == list(signals)
    assert sorted(accuracies) == list(accuracies)
    assert task.guess <= accuracies[0] < accuracies[-1] <= task.without_privacy
    for signal, accuracy in task.points:
        assert task.accuracy(signal) == pytest.approx(accuracy)
        assert task.accuracy(signal / 2) <= task.accuracy(signal) <= task.accuracy(2 * signal)
    assert task.accuracy(0) == task.guess  # no example teaches anything: it was that of the first point
    assert task.accuracy(0.999 * signals[0]) == pytest.approx(accuracies[0], rel=1e-2)
    assert task.accuracy(1e12) == accuracies[-1]
    for share in (0.5, 0.7, ENOUGH):
        signal = task.signal_for(share)
        if signal is not None and task.learnt(signals[0]) < share:
            assert task.learnt(signal) == pytest.approx(share)
            assert task.learnt(0.99 * signal) < share
    assert task.signal_for(2.0) is None
    assert task.signal_for(-1.0) == signals[0]


def test_a_notebook_shows_the_printed_table(found):
    assert found._repr_html_() == f"<pre>{html.escape(str(found))}</pre>"
    assert "&lt;- take this" in found._repr_html_()


def test_no_row_comes_twice_and_no_share_either():
    rows = privacy.plan(100, 1.0, 1e-5).rows
    assert len({(row.num_steps, row.expected_batch_size) for row in rows}) == len(rows)
    assert "expect no better than 0 % of what can be learnt" in privacy.plan(10, 0.1, 1e-5).advice()


def test_few_examples_are_said_to_be_too_few_and_many_to_be_enough():
    few = privacy.plan(2_000, 1.0, 1e-5, num_steps=(250,))
    low, high = few.learnt
    assert low < high < ENOUGH
    words = f"With 2,000 examples and epsilon 1 expect no better than {100 * low:.0f} to {100 * high:.0f} %"
    assert words in str(few)
    needed = [int(number.replace(",", "")) for number in re.findall(r"took ([\d,]+) to ([\d,]+)", few.advice())[0]]
    for number, share in zip(needed, (max, min), strict=True):
        found = privacy.plan(number, 1.0, 1e-5, num_steps=(250,))  # μ is that of the same delta
        assert share(found.learnt) == pytest.approx(ENOUGH, abs=1e-3)
    many = privacy.plan(5_000_000, 1.0, 1e-8, num_steps=(250,))
    assert min(many.learnt) >= ENOUGH
    assert "are enough" in many.advice()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_examples": 0}, "num_examples=0"),
        ({"target_epsilon": -1.0}, r"target_epsilon=-1\.0"),
        ({"delta": 0.5}, "must lie in"),
        ({"num_steps": ()}, "must name a number of steps"),
        ({"num_steps": (10, 0)}, "num_steps=0"),
        ({"signal": 1.5}, r"signal=1\.5"),
        ({"target_epsilon": 1e9}, "is met even at"),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused(changed, words):
    with pytest.raises(ValueError, match=words):
        privacy.plan(**{"num_examples": 100, "target_epsilon": 1.0, "delta": 1e-4, **changed})
