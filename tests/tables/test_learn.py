# SPDX-License-Identifier: Apache-2.0
"""Private learning: what is found, what it costs, its sensitivities, and what is refused or said."""

import inspect
import math
import re

import numpy as np
import opendp.domains
import opendp.measurements
import opendp.metrics
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from torch_privacy import privacy, tables
from torch_privacy.mechanisms import scales
from torch_privacy.mechanisms.histograms import (
    FEWER,
    SHARE_OF_DECADE,
    STANDS_OUT,
    bins_in_decade,
    ends_of_numbers,
    fine_ends,
    histogram,
    standing_out,
)
from torch_privacy.privacy import ZeroConcentrated
from torch_privacy.tables import Column, Encoder, Schema, TableError, learn, mechanisms, ranges
from torch_privacy.tables import learn as _learn_function
from torch_privacy.tables.mechanisms import CountNoise
from torch_privacy.tables.price import LearningBudget
from torch_privacy.tables.ranges import ends_of_days, rounded, with_margin

N = 4000
MUCH = {"epsilon": 20.0, "delta": 1e-6}  # little noise, so that what is found is almost certain


def table(n=N, seed=0):
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "age": rng.normal(40, 10, n).round().astype(int).astype(str),
            "price": [f"${value:,.2f}" for value in rng.uniform(1000, 9000, n)],
            "city": rng.choice(["Rome", "Oslo", "Bern"], n, p=[0.5, 0.3, 0.2]),
            "joined": pd.to_datetime("2020-01-01").strftime("%d.%m.%Y"),
            "born": (pd.Timestamp("2000-01-01") + pd.to_timedelta(rng.integers(0, 3650, n), "D")).strftime("%d/%m/%Y"),
            "name": [f"person {i}" for i in range(n)],
            "empty": "NA",
            "same": "7",
            "year": rng.integers(1990, 2021, n).astype(str),
            "y": rng.choice(["no", "yes", "perhaps"], n, p=[0.6, 0.399, 0.001]),
        }
    )


def open_schema(frame, target="y", task=None):
    return Schema(tuple(Column(name, "learn") for name in frame), target, task)


@pytest.fixture(scope="module")
def learnt():
    frame = table()
    frame.loc[: N // 2, "age"] = "?"
    frame.loc[: N // 10, "year"] = "around 2000"
    frame.loc[: N // 4, "y"] = ""
    return learn(frame, open_schema(frame), **MUCH)


def test_kinds_categories_and_bounds_are_found(learnt):
    found = {column.name: column for column in learnt.schema.columns}
    kinds = {name: column.kind for name, column in found.items()}
    assert kinds == {
        "age": "number", "price": "number", "city": "category", "joined": "date", "born": "date", "name": "ignored",
        "empty": "ignored", "same": "number", "year": "number", "y": "category",
    }  # fmt: skip
    assert learnt.schema.is_complete
    assert learnt.schema.task == "classification"
    assert found["city"].categories == ("Bern", "Oslo", "Rome")
    assert learnt.schema.classes == ("no", "yes")
    assert found["born"].day_first
    low, high = found["age"].bounds
    assert 0 <= low < 35 < 45 < high < 90
    low, high = found["year"].bounds
    assert 1950 < low < 2000 < 2010 < high < 2050
    assert "1995" < found["born"].bounds[0] < "2003" < "2007" < found["born"].bounds[1] < "2015"
    assert 6 < found["same"].bounds[0] < 7 < found["same"].bounds[1] < 8


def test_what_is_missing_is_counted_with_noise_and_said(learnt):
    error = 6 * learnt.count_stddev
    assert abs(learnt.counts["age"]["missing"] - N / 2) < error
    assert abs(learnt.counts["year"]["not understood"] - N / 10) < error
    assert abs(learnt.counts["y"]["missing"] - N / 4) < error
    notes = "\n".join(learnt.notes)
    assert "'age': about" in notes
    assert "cells are missing and are imputed" in notes
    assert "'year': about" in notes
    assert "cells are no number and are imputed" in notes
    assert "'y': about" in notes
    assert "have the loss 0" in notes
    assert "'name' is ignored: no value is frequent enough" in notes
    assert "'empty' is ignored: empty" in notes
    assert "'y' was taken for classification" in notes
    assert "'city'" not in notes


def test_price_is_within_the_budget_and_nearly_used(learnt):
    assert 0.9 * 20 < learnt.epsilon(1e-6) <= 20
    assert [type(release.event) for release in learnt.releases] == [ZeroConcentrated] * 4
    assert learnt.epsilon(1e-6) == privacy.compose([(release.event, 1) for release in learnt.releases]).epsilon_high(
        1e-6
    )
    assert len({release.fingerprint for release in learnt.releases}) == 4


def test_two_learnings_with_one_outcome_are_two_releases():
    """Where no category was found, both had one fingerprint: a budget, and an engine of Opacus, counted one."""
    columns = Column("rare", "category"), Column("y", "category", categories=("a", "b"))
    frame = pd.DataFrame({"rare": [str(k) for k in range(50)], "y": ["a", "b"] * 25})
    twice = [learn(frame, Schema(columns, "", None), epsilon=1.0, delta=1e-6).releases for _ in range(2)]
    assert len({(release.event, release.fingerprint) for releases in twice for release in releases}) == 4


@pytest.mark.thorough
@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-6), (8.0, 1e-9)])
def test_budget_is_met_from_below(epsilon, delta):
    budget = LearningBudget.of(open_schema(table(2)), 500, 1, epsilon, delta)
    assert len(budget.events) == 4
    assert 0.9 * epsilon < privacy.compose(budget.events).epsilon_high(delta) <= epsilon


@pytest.mark.thorough
def test_prices_depend_on_schema_and_number_of_rows_alone():
    frame = table(500)
    other = pd.DataFrame({name: ["1"] * 250 + ["2"] * 250 for name in frame})
    events = []
    for rows in (frame, other):
        found = learn(rows, open_schema(frame), epsilon=8.0, delta=1e-5)
        events.append([release.event for release in found.releases])
    assert (
        events[0]
        == events[1]
        == [event for event, _ in LearningBudget.of(open_schema(frame), 500, 1, 8.0, 1e-5).events]
    )


def test_digits_after_a_zero_are_codes_and_no_numbers():
    """Postcodes became numbers, so that a synthetic table had 1528 where the real one has 00123 and 12345."""
    zips, n = np.array(["00123", "12345", "54321"]), 3000
    cells = {"zip": zips[np.arange(n) % 3], "few": np.where(np.arange(n) % 1000, "7", "07"), "zero": ["0", "10"] * 1500}
    found = learn(pd.DataFrame(cells), Schema(tuple(Column(name, "learn") for name in cells), ""), **MUCH).schema
    assert [column.kind for column in found.columns] == ["category", "number", "number"]
    assert found.columns[0].categories == tuple(zips)
    regression = Schema((Column("zip", "learn"), Column("zero", "learn")), "zip", "regression")
    assert learn(pd.DataFrame(cells)[["zip", "zero"]], regression, **MUCH).schema.target_column.kind == "number"


def test_complete_schema_costs_counts_alone():
    columns = Column("x", "number", (0, 1)), Column("y", "category", categories=("a", "b"))
    frame = pd.DataFrame({"x": ["0.5", "?", "z", "3"] * 500, "y": ["a", "b", "c", ""] * 500})
    found = learn(frame, Schema(columns, "y", "classification"), epsilon=1.0, delta=1e-6)
    assert found.schema.columns == columns
    assert len(found.releases) == 1
    assert found.epsilon(1e-6) < 1
    assert found.count_stddev == pytest.approx(0.005 * 2000, rel=1e-3) or found.count_stddev > 10
    error = 6 * found.count_stddev
    for sort, expected in (("missing", 500), ("used", 1000), ("not understood", 500)):
        assert abs(found.counts["x"][sort] - expected) < error
        assert abs(found.counts["y"][sort] - expected) < error


def test_cells_of_no_declared_category_are_said_to_be_other():
    """Of misspelt categories nothing was said if another column was learnt."""
    columns = Column("x", "category", categories=("A",)), Column("y", "category", categories=("a", "b"))
    frame = pd.DataFrame({"x": ["a", "a", "A", ""] * 500, "y": ["a", "b", "c", ""] * 500})
    notes = "\n".join(learn(frame, Schema(columns, "y", "classification"), **MUCH).notes)
    assert re.search(r"'x': about \d+ cells are of no declared category and count as \"other\"\.", notes)
    assert re.search(r"'x': about \d+ cells are missing and are imputed\.", notes)
    assert re.search(r"'y': about \d+ cells are of no declared category and have the loss 0\.", notes)


@pytest.mark.thorough
def test_a_task_that_is_stated_is_kept():
    frame = table()[["age", "city", "year"]]
    frame["y"] = np.random.default_rng(0).choice(["1", "2", "3"], N)
    assert learn(frame, open_schema(frame, "y"), **MUCH).schema.classes == ("1", "2", "3")
    found = learn(frame, open_schema(frame, "y", "regression"), **MUCH)
    assert found.schema.target_column.kind == "number"
    assert learn(frame, open_schema(frame, "age"), **MUCH).schema.task == "classification"
    frame["y"] = np.random.default_rng(0).normal(size=N).round(4).astype(str)
    assert learn(frame, open_schema(frame, "y"), **MUCH).schema.task == "regression"


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(
    ("target", "task", "message"),
    [
        (["a"] * N, None, r"'y' has one frequent value alone, 'a', so there is nothing to predict"),
        (["1"] * N, None, "has one frequent value alone, '1'"),
        (["1"] * N, "regression", "has one frequent value alone, '1'"),
        ([f"v{i}" for i in range(N)], None, "has no value in about"),
        (
            [""] * N,
            None,
            r"'y' has no value in about .*; about [34],\d{3} of its cells are missing",
        ),  # counted with noise
        ([""] * N, "regression", "has too few rows to learn its bounds"),
    ],
)
def test_targets_that_cannot_be_predicted_are_one_sentence_and_say_what_was_spent(target, task, message):
    frame = table()[["age", "city"]].assign(y=target)
    with pytest.raises(TableError, match=message) as error:
        learn(frame, open_schema(frame, task=task), **MUCH)
    assert "\n" not in str(error.value)
    assert len(error.value.releases) >= 2


@pytest.mark.thorough
def test_nothing_learnt_of_any_column_is_said():
    frame = pd.DataFrame({"x": [f"v{i}" for i in range(N)], "y": ["a", "b"] * (N // 2)})
    with pytest.raises(TableError, match="Nothing can be learnt of any column at this epsilon") as error:
        learn(frame, open_schema(frame), **MUCH)
    assert error.value.lines.startswith('[columns.x], kind = "category", categories = ["...", "..."]')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, "epsilon=0.0 must be greater than 0"),
        ({"delta": 1.0}, "delta=1.0 must lie in"),
        ({"owners": ["a"]}, "got 1 owners for 8 rows"),
        ({"owners": ["a"] * 7 + [None]}, "some rows have no owner"),
        ({"owners": range(8), "per_owner": 0}, "per_owner=0 must be an integer of at least 1"),
    ],
)
def test_wrong_arguments_release_nothing(change, message, monkeypatch):
    monkeypatch.setattr(inspect.getmodule(_learn_function), "noisy_counts", None)
    frame = table(8)
    with pytest.raises(ValueError, match=message):
        learn(frame, open_schema(frame), **{"epsilon": 1.0, "delta": 1e-6, **change})


TOO_FEW_ROWS = {  # target, task, rows, epsilon -> what is refused
    "classes": (Column("y", "category"), None, 60, 0.5, "The classes of the target 'y' cannot be"),
    "left open": (Column("y", "learn"), "classification", 60, 0.5, "The classes of the target 'y' cannot be"),
    "numbers": (Column("y", "number"), "regression", 60, 0.2, "The bounds of the target 'y' take"),
    "numbers of any task": (Column("y", "number"), None, 60, 0.2, "The bounds of the target 'y' take"),
    "numbers left open": (Column("y", "learn"), "regression", 60, 0.2, "The bounds of the target 'y' take"),
}


@pytest.mark.parametrize("case", TOO_FEW_ROWS)
def test_a_target_that_no_rows_of_this_number_can_show_is_refused_before_a_release(case, monkeypatch):
    target, task, n, epsilon, message = TOO_FEW_ROWS[case]
    monkeypatch.setattr(inspect.getmodule(_learn_function), "noisy_counts", None)
    frame = pd.DataFrame({"x": ["1"] * n, "y": ["0"] * n})
    with pytest.raises(TableError, match=message) as error:
        learn(frame, Schema((Column("x", "number", (0, 5)), target), "y", task), epsilon=epsilon, delta=1e-6)
    assert error.value.releases == ()
    assert error.value.lines.startswith("[columns.y], kind = ")


def test_many_open_columns_that_no_rows_of_this_number_can_show_are_refused_before_a_release(monkeypatch):
    """It had cost its epsilon to learn that all of them are noise, in a message that named each of them."""
    monkeypatch.setattr(inspect.getmodule(_learn_function), "noisy_counts", None)
    frame = pd.DataFrame({f"c{i}": ["1"] * 300 for i in range(200)})
    schema = Schema(tuple(Column(name, "learn") for name in frame), "")
    with pytest.raises(TableError, match="No column can be learnt at this epsilon: each of 200 takes about ") as error:
        learn(frame, schema, epsilon=0.3, delta=1e-6)
    assert error.value.releases == ()
    assert error.value.lines.startswith("[columns.c0], kind = ")
    few = Schema(schema.columns[:5], "")
    assert tables.doubt_of(few, 300, LearningBudget.of(few, 300, 1, 1.0, 1e-6)) is None


def test_only_what_rows_and_epsilon_show_is_doubted():
    columns = (Column("x", "number", (0, 5)), Column("y", "category"))
    schema = Schema(columns, "y")
    doubts = {
        n: tables.doubt_of(schema, n, LearningBudget.of(schema, n, 1, 1.0, 1e-6)) for n in (60, 600, 6000, 60_000)
    }
    assert [doubt is not None for doubt in doubts.values()] == [True, True, False, False]
    assert doubts[60].is_certain
    assert not doubts[600].is_certain
    of_owners = tables.doubt_of(schema, 300, LearningBudget.of(schema, 300, 2, 1.0, 1e-6))
    assert "of at most 600 rows" in of_owners.what
    declared = Schema((columns[0], Column("y", "category", categories=("a", "b"))), "y")
    assert tables.doubt_of(declared, 60, LearningBudget.of(declared, 60, 1, 1.0, 1e-6)) is None


def exact_counts(monkeypatch, frame, schema, **options):
    """Returns the exact statistics that the three releases would make noisy, without noise."""
    seen = {"histograms": []}
    module = inspect.getmodule(_learn_function)

    def counts(exact, noise):
        seen["histograms"].append((exact.copy(), noise))
        return exact

    def categories(exact, noise, delta):
        seen["categories"], seen["category noise"] = dict(exact), noise
        return {key: count for key, count in exact.items() if count > 1}, 1

    for room in (module, ranges):
        monkeypatch.setattr(room, "noisy_counts", counts)
    monkeypatch.setattr(module, "frequent", categories)
    monkeypatch.setattr(scales, "STANDS_OUT", (0.0, 0.0))
    seen["learnt"] = learn(frame, schema, **MUCH, **options)
    return seen


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("per_owner", [None, 1, 3])
def test_neighboring_tables_change_statistics_by_no_more_than_the_sensitivity(monkeypatch, per_owner):
    """With the owner's rows moved to the end of the table, so that they can be removed."""
    frame = table(60)
    rows = 1 if per_owner is None else 7
    frame.iloc[-rows:] = frame.iloc[-1]  # the worst case: all rows of the owner are alike
    options = {} if per_owner is None else {"per_owner": per_owner}
    owners = np.array([f"o{i // 3}" for i in range(60 - rows)] + ["removed"] * rows)
    with_owner = {} if per_owner is None else {"owners": owners}
    without = {} if per_owner is None else {"owners": owners[:-rows]}
    schema = open_schema(frame)
    capped = inspect.getmodule(_learn_function).capped
    monkeypatch.setattr(
        inspect.getmodule(_learn_function), "capped", lambda owners, k, n: _first_rows(capped, owners, k, n)
    )
    a = exact_counts(monkeypatch, frame, schema, **options, **with_owner)
    b = exact_counts(monkeypatch, frame.iloc[:-rows], schema, **options, **without)
    most = per_owner or 1
    assert len(a["histograms"]) == len(b["histograms"]) == 3
    for (more, noise), (fewer, same) in zip(a["histograms"], b["histograms"], strict=True):
        assert noise == same
        change = np.linalg.norm(more - fewer)
        assert change == pytest.approx(most * math.sqrt(noise.groups))  # attained
        assert change <= noise.sensitivity * (1 + 1e-15)
    assert a["histograms"][0][1].groups == len(frame.columns)
    assert_scales_have_the_sensitivity(monkeypatch, frame, rows, (options | with_owner, options | without), most)
    keys = a["categories"].keys() | b["categories"].keys()
    changes = np.array([a["categories"].get(key, 0) - b["categories"].get(key, 0) for key in keys])
    noise = a["category noise"]
    assert np.linalg.norm(changes) <= noise.sensitivity
    assert (np.abs(changes).max(), np.abs(changes).sum()) <= (most, most * noise.groups)


def assert_scales_have_the_sensitivity(monkeypatch, frame, rows, options, most):
    """Asserts the same of histograms within declared bounds, which are made where scales are asked for alone."""
    columns = (
        Column("age", "number", (0, 1000)),
        Column("same", "number", (0, 5)),
        Column("y", "category", categories=("no", "yes")),
    )
    frame, schema = frame[["age", "same", "y"]], Schema(columns, "y", "classification")
    parts = (frame, frame.iloc[:-rows])
    assert len(exact_counts(monkeypatch, frame, schema, **options[0])["histograms"]) == 1
    a, b = (exact_counts(monkeypatch, part, schema, scales=True, **of) for part, of in zip(parts, options, strict=True))
    assert len(a["histograms"]) == len(b["histograms"]) == 3
    for (more, noise), (fewer, same) in zip(a["histograms"], b["histograms"], strict=True):
        assert noise == same
        assert np.linalg.norm(more - fewer) == pytest.approx(most * math.sqrt(noise.groups))
    assert noise.groups == 2


@pytest.mark.parametrize("beyond", ["101", "-1", "1e9"])
def test_values_beyond_declared_bounds_count_at_their_end_before_the_histograms(beyond, monkeypatch):
    end = "0" if beyond == "-1" else "100"
    inside = [end] * 40 + [str(value) for value in np.random.default_rng(0).uniform(20, 60, 60)]
    schema = Schema((Column("x", "number", (0, 100)), Column("y", "category", categories=("a", "b"))), "y")
    a, b = (
        exact_counts(monkeypatch, pd.DataFrame({"x": x, "y": ["a", "b"] * 50}), schema, scales=True)
        for x in (inside, [beyond if value == end else value for value in inside])
    )
    assert len(a["histograms"]) == len(b["histograms"]) == 3
    for (counts, _), (others, _) in zip(a["histograms"], b["histograms"], strict=True):
        np.testing.assert_array_equal(counts, others)
    assert a["learnt"].schema == b["learnt"].schema
    assert a["histograms"][-1][0].sum() == 100


@pytest.mark.parametrize("times", [1, 3, 1000])
def test_scales_find_the_values_within_wide_bounds_for_a_small_price(times):
    rng = np.random.default_rng(0)
    n, half = 5000, 30 * times
    frame = pd.DataFrame(
        {
            "size": rng.normal(70, 10, n),
            "wage": rng.lognormal(10, 1, n) * (rng.random(n) > 0.3),
            "joined": (pd.Timestamp("2015-01-01") + pd.to_timedelta(rng.integers(0, 3000, n), unit="D")).astype(str),
            "y": rng.lognormal(3, 1, n),
        }
    ).astype(str)
    columns = (
        Column("size", "number", (70 - half, 70 + half)),
        Column("wage", "number", (0, 1e6 * times)),
        Column("joined", "date", ("1990-01-01", "2030-01-01")),
        Column("y", "number", (0, 1e3 * times)),
    )
    schema = Schema(columns, "y", "regression")
    learnt = learn(frame, schema, epsilon=0.6, delta=1e-6, scales=True)
    assert learnt.epsilon(1e-6) <= 0.6
    assert [column.bounds for column in learnt.schema.columns] == [column.bounds for column in columns]
    assert [column.log is not None for column in learnt.schema.columns] == [False, True, False, False]
    numbers = Encoder(learnt.schema).encode(frame).numbers
    spread = numbers[:, [0, 2, 4]].std(0).tolist()
    assert all(0.2 < one < 0.9 for one in spread), spread
    again = Schema.from_toml(learnt.schema.to_toml())
    assert again == learnt.schema
    assert not again.has_scales_to_learn


SPREAD = {  # columns of a small table: numbers around 0, skewed ones, whole ones, some that crowd, and many zeros
    "around 0": lambda rng, n: rng.normal(size=n),
    "skewed": lambda rng, n: rng.lognormal(10, 0.8, n),
    "ages": lambda rng, n: rng.normal(45, 15, n).clip(18, 95).round(),
    "counts": lambda rng, n: rng.poisson(2, n),
    "latitudes": lambda rng, n: rng.normal(40.7, 0.05, n),
    "mostly zero": lambda rng, n: np.where(rng.random(n) < 0.7, 0.0, rng.lognormal(7, 1, n)),
}


def test_few_rows_lose_no_column_of_numbers_and_few_values():
    """One of these six columns was ignored, and of another one more than half of the values were clipped."""
    rng, n = np.random.default_rng(0), 1500
    values = {name: make(rng, n).astype(float) for name, make in SPREAD.items()}
    frame = pd.DataFrame(values).astype(str).assign(y=["a", "b"] * (n // 2))
    schema = Schema((*(Column(name, "learn") for name in SPREAD), Column("y", "category", categories=("a", "b"))), "y")
    columns = {column.name: column for column in learn(frame, schema, epsilon=0.9, delta=3e-6).schema.columns}
    assert {name: columns[name].kind for name in SPREAD} == dict.fromkeys(SPREAD, "number")
    for name, of in values.items():
        low, high = columns[name].limits
        assert np.mean((low <= of) & (of <= high)) > 0.7, name
    low, high = columns["latitudes"].scale_limits
    assert high - low < 20 * 0.05


@pytest.mark.parametrize("per_decade", FEWER)
def test_first_bins_are_as_fine_as_the_noise_allows(per_decade):
    noise = SHARE_OF_DECADE / STANDS_OUT[0] / math.sqrt(per_decade)
    assert bins_in_decade(0.999 * noise) == per_decade
    assert bins_in_decade(1.001 * noise) < per_decade or per_decade == 1
    assert np.all(np.diff(ends_of_numbers(per_decade)) > 0)


def _first_rows(capped, owners, per_owner, n):
    """Returns the first rows of each owner instead of random ones, as many as ``capped`` keeps."""
    seen: dict[str, int] = {}
    kept = [
        i for i, owner in enumerate(owners) if (seen := {**seen, owner: seen.get(owner, 0) + 1})[owner] <= per_owner
    ]
    assert len(capped(owners, per_owner, n)) == len(kept)
    return np.array(kept)


def test_rows_of_owners_are_capped_at_random_and_independently():
    capped = inspect.getmodule(_learn_function).capped
    owners = np.repeat(np.arange(400), 5)[np.random.default_rng(0).permutation(2000)]
    kept = capped(owners, 2, 2000)
    assert np.array_equal(np.bincount(owners[kept]), np.full(400, 2))
    assert not np.array_equal(kept, capped(owners, 2, 2000))
    chosen = np.zeros(5)
    place = np.argsort(owners, kind="stable")
    for _ in range(50):
        mine = np.isin(place.reshape(400, 5), capped(owners, 2, 2000))
        chosen += mine.sum(0)
    np.testing.assert_allclose(chosen / (50 * 400), 0.4, atol=0.03)


@pytest.mark.parametrize(("rows", "groups", "rho"), [(1, 1, 0.01), (1, 14, 0.3), (5, 9, 1e-4)])
def test_counts_have_the_noise_of_their_price(rows, groups, rho):
    noise = CountNoise(rows, groups, rho)
    assert noise.stddev == pytest.approx(rows * math.sqrt(groups / (2 * rho)))
    sample = mechanisms.noisy_counts(np.full(4000, 10), noise) - 10
    assert np.std(sample) == pytest.approx(noise.stddev, rel=0.08)
    assert abs(np.mean(sample)) < 5 * noise.stddev / math.sqrt(4000)


def test_a_measurement_dearer_than_planned_is_never_run(monkeypatch):
    monkeypatch.setattr(mechanisms, "ROUNDING", 0.9)
    with pytest.raises(AssertionError, match=r"above the 0\.09999999"):
        mechanisms.noisy_counts(np.ones(3, np.int64), CountNoise(1, 1, 0.1))
    with pytest.raises(AssertionError, match="planned"):
        mechanisms.frequent({"a": 10}, CountNoise(1, 1, 0.1), 1e-6)


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (1, 8), (4, 3)])
@pytest.mark.parametrize("delta", [1e-3, 1e-9])
def test_threshold_hides_values_of_one_row_or_owner(rows, groups, delta):
    """The chance that any of the values that only one owner has passes is below delta, and not much below.

    The noise is a discrete Gaussian, with a heavier tail than the normal one of opendp's own map.
    """
    noise = CountNoise(rows, groups, 0.05)
    _, threshold = mechanisms.frequent({"a": 10**6}, noise, delta)
    numbers = np.arange(-4000, 4001)
    chances = np.exp(-0.5 * (numbers / noise.stddev) ** 2)
    chances /= chances.sum()
    assert rows * groups * chances[numbers >= threshold - rows].sum() <= delta
    assert rows * groups * chances[numbers >= threshold - rows - 3].sum() > delta


def test_the_threshold_is_that_of_the_release():
    noise = CountNoise(1, 2, 0.1)
    _, threshold = mechanisms.frequent({"a": 10**6}, noise, 1e-6)
    found, _ = mechanisms.frequent({f"{i}": threshold for i in range(2000)}, noise, 1e-6)
    assert min(found.values()) == threshold


@pytest.mark.thorough
def test_opendp_alone_would_understate_the_chance_to_pass_a_threshold():
    """The reason for a threshold that is higher by one: if this fails, opendp has changed."""
    domain = opendp.domains.map_domain(opendp.domains.atom_domain(T="String"), opendp.domains.atom_domain(T="u32"))
    space = domain, opendp.metrics.l02inf_distance(opendp.metrics.absolute_distance(T="f64"))
    release = opendp.measurements.make_gaussian_threshold(*space, 1.0, 3)
    observed = len(release({str(i): 1 for i in range(20_000)})) / 20_000
    assert observed == pytest.approx(0.0586, abs=0.01)
    assert release.map((1, 1.0, 1.0))[1] < 0.03


def test_rare_values_are_never_released_and_frequent_ones_are():
    noise = CountNoise(1, 2, 0.1)
    found, threshold = mechanisms.frequent({f"{i}": 1 for i in range(2000)} | {"x": 10**5}, noise, 1e-9)
    assert list(found) == ["x"]
    assert abs(found["x"] - 10**5) < 8 * noise.stddev
    assert threshold < 40


def test_a_zero_character_in_a_cell_changes_no_other_value():
    """opendp takes texts to end there."""
    noise = CountNoise(1, 1, 10.0)
    counts = {"Rome": 500, "Rome\0": 1, "Oslo": 400, "Oslo\0x": 300}
    found, threshold = mechanisms.frequent(counts, noise, 1e-6)
    assert threshold < 300
    assert found == pytest.approx({"Rome": 500, "Oslo": 400, "Oslo\0x": 300}, abs=10)


RANGES = {  # name -> values, the largest part of the width that may be lost or added at each end
    "normal": (lambda rng, n: rng.normal(40, 10, n), 0.4),
    "narrow": (lambda rng, n: rng.normal(1000, 2, n), 0.4),
    "years": (lambda rng, n: rng.integers(1990, 2021, n), 0.2),
    "coins": (lambda rng, n: rng.integers(0, 2, n), 0.1),
    "negative": (lambda rng, n: -rng.uniform(1e-3, 2e-3, n), 0.2),
    "large": (lambda rng, n: rng.uniform(-1e9, 3e9, n), 0.2),
    "nanoseconds": (lambda rng, n: rng.uniform(1.6e18, 1.7e18, n), 0.4),
    "larger": (lambda rng, n: -rng.uniform(2e14, 5e15, n), 0.2),
    "concentrations": (lambda rng, n: rng.normal(3e-9, 4e-10, n), 0.4),
    "masses": (lambda rng, n: rng.uniform(2e-14, 9e-14, n), 0.2),
}


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("stddev", [0.1, 20.0])
def test_histograms_find_the_range_of_values(name, stddev):
    make, tolerance = RANGES[name]
    rng = np.random.default_rng(0)
    values, ends = make(rng, 10_000).astype(float), ends_of_numbers()
    for least in STANDS_OUT:
        counts = histogram(values, ends) + rng.normal(0, stddev, len(ends) - 1).round().astype(int)
        found = standing_out(counts, ends, least * stddev)
        assert found is not None
        ends = fine_ends(*found)
    low, high = with_margin(*found)
    width = values.max() - values.min()
    np.testing.assert_allclose([low, high], [values.min(), values.max()], atol=tolerance * width)


def test_noise_alone_does_not_stand_out():
    rng = np.random.default_rng(0)
    ends = ends_of_numbers()
    found = [standing_out(rng.normal(0, 50, len(ends) - 1).round().astype(int), ends, 250.0) for _ in range(50)]
    assert found == [None] * 50


def test_a_long_tail_stands_out_in_bins_together():
    rng = np.random.default_rng(0)
    values = np.where(rng.random(20_000) < 0.9, 0.0, rng.lognormal(8, 1, 20_000))
    counts = histogram(values, ends_of_numbers()) + rng.normal(0, 30, len(ends_of_numbers()) - 1).round().astype(int)
    low, high = standing_out(counts, ends_of_numbers(), 150.0)
    assert low == 0.0
    assert 1000 < high < 1e5
    alone = standing_out(histogram(np.zeros(100), ends_of_numbers()), ends_of_numbers(), 10.0)
    assert alone == (0.0, 1.0)


@pytest.mark.parametrize("sign", [1, -1])
def test_values_beyond_the_first_range_do_not_make_the_second_one_a_bin(sign):
    """Two fifths of these values lie below what stands out first, and count in the outermost of the finer bins."""
    values = sign * np.linspace(0.0, 10.0, 2255)
    numbers = scales.Numbers(values, ends_of_numbers())
    low, high = scales.find_ranges({"x": numbers}, 48.0, lambda counts: counts)["x"].range
    assert np.mean((low <= values) & (values <= high)) > 0.5


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(allow_nan=True) | st.integers(-5, 5), max_size=30))
def test_every_value_is_in_one_bin(values):
    exact = np.array([float(value) for value in values])
    for ends in (ends_of_numbers(), ends_of_days(), fine_ends(-1.0, 1.0)):
        assert np.all(np.diff(ends) > 0)
        counts = histogram(exact, ends)
        assert len(counts) == len(ends) - 1
        assert counts.sum() == (~np.isnan(exact)).sum()
        if len(exact):
            fewer = histogram(exact[1:], ends)
            assert np.abs(counts - fewer).sum() == (not np.isnan(exact[0]))


def test_margins_do_not_cross_zero():
    assert with_margin(0.0, 100.0) == (0.0, 105.0)
    assert with_margin(-100.0, -1.0)[1] == 0.0
    assert with_margin(10.0, 110.0) == (5.0, 115.0)


@pytest.mark.parametrize("ends", [(0.0, 1e-6), (-1e12, 1e12), (1999.5, 2000.25), (1e9, 1e9 + 1), (-3.14159, 2.71828)])
def test_rounding_is_outwards_and_small(ends):
    low, high = rounded(*ends)
    width = ends[1] - ends[0]
    assert ends[0] - 0.011 * width <= low <= ends[0] + 1e-9 * abs(ends[0])
    assert ends[1] - 1e-9 * abs(ends[1]) <= high <= ends[1] + 0.011 * width


def test_opendp_prices_thresholds_for_all_values_of_an_owner():
    """Its privacy map takes the L0, L2 and L∞ changes; here 6 rows in 2 groups may be 12 values."""
    domain = opendp.domains.map_domain(opendp.domains.atom_domain(T="String"), opendp.domains.atom_domain(T="u32"))
    space = domain, opendp.metrics.l02inf_distance(opendp.metrics.absolute_distance(T="f64"))
    noise = CountNoise(6, 2, 0.01)
    release = opendp.measurements.make_gaussian_threshold(*space, noise.stddev, 500)
    rho, delta = release.map((12, noise.sensitivity, 6.0))
    assert rho <= 0.01
    assert delta == pytest.approx(12 * norm.sf((500 - 6) / noise.stddev), rel=0.02)


def test_learnt_releases_count_in_a_training():
    import torch

    import torch_privacy as tp

    columns = Column("x", "number", (0, 1)), Column("y", "category", categories=("a", "b"))
    frame = pd.DataFrame({"x": ["0.5"] * 2000, "y": ["a"] * 2000})
    learnt = learn(frame, Schema(columns, "y", "classification"), epsilon=1.0, delta=1e-6)
    model = torch.nn.Linear(2, 1)
    training = tp.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.utils.data.TensorDataset(torch.randn(2000, 2), torch.randn(2000)),
        expected_batch_size=200,
        num_steps=1,
        clipping=tp.Automatic(),
        noise_multiplier=1.0,
        delta=1e-6,
        prior_releases=learnt.releases,
    )
    for x, y in training:
        training.step(tables.losses(model(x).squeeze(1), y))
    assert sum(count for _, count in training.ledger.events) == 2
    assert {release.event for release in learnt.releases} < {event for event, _ in training.ledger.events}
    assert learnt.epsilon(1e-6) < training.spent().epsilon.high
