# SPDX-License-Identifier: Apache-2.0
"""Noisy answers: how many are given, that their price covers every outcome, and that one example has one teacher."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.mechanisms.votes import GNMax
from torch_privacy.privacy import compose
from torch_privacy.privacy.events import pate


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)


@pytest.mark.parametrize("tests", [0, 300])
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_all_that_may_be_released_costs_the_epsilon(tests, epsilon):
    mechanism = GNMax.within(epsilon, 1e-5, 100, tests=tests, threshold=200.0, share=0.3)
    assert epsilon - 1e-3 < compose(mechanism.events()).epsilon(1e-5).high <= epsilon
    squares = [number / event.noise_multiplier**2 for event, number in mechanism.events()]
    once = privacy.Gaussian(sum(squares) ** -0.5)
    assert compose([(once, 1)]).epsilon(1e-5).high == pytest.approx(epsilon, abs=1e-3)
    assert len(squares) == 1 or squares[0] == pytest.approx(0.3 * sum(squares))


def test_answers_stop_at_the_number_that_is_paid_for():
    votes = torch.tensor([[90.0, 10.0, 0.0], [34.0, 33.0, 33.0]]).repeat(50, 1)
    answers = GNMax(20, 1.0, tests=80, threshold=60.0, test_noise_stddev=1.0).released(votes)
    assert answers.queries.tolist() == list(range(0, 40, 2))
    assert answers.labels.tolist() == [0] * 20
    assert answers.tested == 39
    few = GNMax(60, 1.0, tests=80, threshold=60.0, test_noise_stddev=1.0).released(votes)
    assert (len(few.queries), few.tested) == (40, 80)
    none = GNMax(60, 1.0, tests=80, threshold=1e6, test_noise_stddev=1.0).released(votes)
    assert (len(none.queries), len(none.labels), none.tested) == (0, 0, 80)
    plain = GNMax(7, 1.0).released(votes)
    assert (plain.queries.tolist(), plain.tested) == (list(range(7)), 0)


def test_answers_are_as_noisy_as_they_say():
    votes = torch.tensor([[60.0, 40.0]]).repeat(20_000, 1)
    mechanism = GNMax(20_000, 20.0, tests=20_000, threshold=70.0, test_noise_stddev=15.0)
    answers = mechanism.released(votes)
    agreed, right = (0.5 * math.erfc(-z / math.sqrt(2)) for z in ((60 - 70) / 15, 20 / (20 * math.sqrt(2))))
    assert len(answers.queries) / 20_000 == pytest.approx(agreed, abs=5 * math.sqrt(0.25 / 20_000))
    share = float((answers.labels == 0).float().mean())
    assert share == pytest.approx(right, abs=5 * math.sqrt(0.25 / len(answers.labels)))


def test_price_of_votes_is_that_of_the_tests_and_answers():
    votes = torch.tensor([[84.0, 83.0, 83.0]]).repeat(50, 1)  # no class leads: as dear as any votes
    mechanism = GNMax(10, 30.0, tests=50, threshold=84.0, test_noise_stddev=50.0)
    answers = mechanism.released(votes)
    assert 0 < len(answers.queries) <= 10
    order = np.array(pate.ORDERS)
    dearest = len(answers.queries) / 30.0**2 + answers.tested / (2 * 50.0**2)
    anyway = (order * dearest + np.log1p(-1 / order) - np.log(1e-5 * order) / (order - 1)).min()
    spent = mechanism.epsilon_of_these_votes(votes, answers, 1e-5)
    assert 0.8 * anyway < spent <= anyway * (1 + 1e-9)


def test_an_example_has_a_teacher_of_its_own_whatever_the_others_are():
    examples = torch.randn(2000, 3)
    teachers = tp.teachers_of(examples, 50, seed=3)
    assert torch.equal(tp.teachers_of(examples[7:], 50, seed=3), teachers[7:])
    assert not torch.equal(tp.teachers_of(examples, 50, seed=4), teachers)
    assert torch.equal(tp.teachers_of(examples.numpy(), 50, seed=3), teachers)
    counts = torch.bincount(teachers, minlength=50)
    assert (counts - 40).abs().max() < 6 * 40**0.5
    assert tp.teachers_of(["a", "b"], 1).tolist() == [0, 0]


@pytest.mark.parametrize(
    "made",
    [
        lambda value: Image.fromarray(np.full((40, 40), value, dtype=np.uint8)),
        lambda value: (torch.zeros(2000).index_fill(0, torch.tensor([1000]), value), 1),
        lambda value: {"text": f"at 0x{value}", "seen": {value, "b"}},
        lambda value: np.array(["a", value], dtype=object),
        lambda value: torch.tensor([value, 1.0], dtype=torch.bfloat16),
    ],
    ids=["image", "large tensor in a tuple", "dict", "array of objects", "half precision"],
)
def test_the_teacher_follows_from_the_content_alone(made):
    teachers = tp.teachers_of([made(value) for value in range(20)], 10**6)
    assert torch.equal(tp.teachers_of([made(value) for value in range(19, -1, -1)], 10**6).flip(0), teachers)
    assert len(teachers.unique()) == 20


TABLES = {
    "texts": lambda rows: np.array(rows),
    "bytes": lambda rows: np.array(rows).astype("S"),
    "structured": lambda rows: (
        pd.DataFrame(rows).to_records(index=False).astype(f"U{max(len(row[0]) for row in rows)},U9")
    ),
    "numbers": lambda rows: np.array([[len(cell) / 2 if len(cell) > 9 else len(cell) for cell in row] for row in rows]),
    "frame": lambda rows: pd.DataFrame(TABLES["numbers"](rows)).itertuples(index=False),
}


@pytest.mark.parametrize("table", TABLES)
def test_one_row_that_changes_the_type_of_a_table_changes_no_other_teacher(table):
    """A long text or a fraction is a wider type for all rows: nearly all teachers were others."""
    rows = [[f"{'x' * (i % 7)}", f"{'y' * (i % 5)}"] for i in range(30)]
    teachers = [tp.teachers_of(TABLES[table]([*rows, last]), 10**6)[:30] for last in (["x", "y"], ["x" * 13, "y"])]
    assert torch.equal(*teachers)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: tp.teachers_of([object()], 5), "shows its place in memory"),
        (lambda: tp.teachers_of([(1, [object()])], 5), "shows its place in memory"),
        (lambda: tp.teachers_of({"age": [1, 2]}, 5), "one element for each example"),
        (lambda: tp.teachers_of(pd.DataFrame({"age": [1, 2]}), 5), "itertuples"),
        (lambda: GNMax(5, 1.0, tests=9, threshold=float("nan"), test_noise_stddev=1.0), "threshold=nan"),
        (lambda: GNMax(0, 1.0), "answers=0"),
        (lambda: GNMax(5, 0.0), "noise_stddev=0.0"),
        (lambda: GNMax(5, 1.0, tests=9), "test_noise_stddev=0.0"),
        (lambda: GNMax.within(1.0, 1e-5, 5, tests=9, share=1.0), "share=1.0"),
        (lambda: tp.teachers_of([1], 0), "num_teachers=0"),
        (lambda: GNMax(5, 1.0).released(torch.rand(5, 3)), r"votes of shape \(5, 3\) must be whole numbers"),
        (lambda: GNMax(5, 1.0).released(torch.ones(5)), r"votes of shape \(5,\)"),
        (lambda: GNMax(5, 1.0).released(-torch.ones(5, 3)), "from 0"),
        (lambda: GNMax(5, 1.0).released(torch.full((5, 3), torch.nan)), "from 0"),
    ],
)
def test_settings_and_votes_without_a_price_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
