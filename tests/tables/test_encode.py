# SPDX-License-Identifier: Apache-2.0
"""Encoding: each row by its own cells and the schema alone; predictions in the target's unit."""

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.preprocessing import MinMaxScaler, OrdinalEncoder

from torch_privacy.tables import Column, Encoder, Schema

COLUMNS = (
    Column("age", "number", (0, 100)),
    Column("city", "category", categories=("Rome", "Oslo")),
    Column("note", "ignored"),
    Column("day", "date", ("2020-01-01", "2020-12-31")),
)
CLASSES = Schema((*COLUMNS, Column("y", "category", categories=("no", "yes"))), "y", "classification")
NUMBER = Schema((*COLUMNS, Column("y", "number", (-50, 150))), "y", "regression")


def frame(**columns):
    plain = {"age": ["50"], "city": ["Rome"], "note": ["x"], "day": ["2020-07-01"], "y": ["no"], **columns}
    n = max(map(len, plain.values()))
    return pd.DataFrame({name: list(cells) * (n if len(cells) == 1 else 1) for name, cells in plain.items()})


def test_numbers_are_scaled_clipped_and_imputed():
    cells = ["0", "100", "75", "-5", "1e400", "?", "old", "", "$1,000"]
    encoded = Encoder(CLASSES).encode(frame(age=cells))
    expected = [[-1, 0], [1, 0], [0.5, 0], [-1, 0], [1, 0], [0, 1], [0, 1], [0, 1], [1, 0]]
    assert encoded.numbers[:, :2].tolist() == expected
    assert encoded.numbers.dtype == torch.float32
    assert (encoded.num_missing["age"], encoded.num_not_understood["age"]) == (2, 1)


def test_categories_have_codes_for_missing_and_other():
    encoded = Encoder(CLASSES).encode(frame(city=["Rome", " Oslo ", "Bern", "NA", "rome"]))
    assert encoded.categories.tolist() == [[2], [3], [1], [0], [1]]
    assert (encoded.num_missing["city"], encoded.num_not_understood["city"]) == (1, 2)


def test_dates_are_scaled_and_have_seasons():
    encoded = Encoder(CLASSES).encode(frame(day=["2020-01-01", "31 December 2020", "1970-01-08", "soon"]))
    numbers = encoded.numbers[:, 2:].numpy()
    np.testing.assert_allclose(numbers[:2, 0], [-1, 1])
    thursday = [math.sin(2 * math.pi * 7 / 365.2425), math.cos(2 * math.pi * 7 / 365.2425), 0.0, 1.0]
    np.testing.assert_allclose(numbers[2], [-1, *thursday, 0], atol=1e-6)
    assert numbers[3].tolist() == [0, 0, 0, 0, 0, 1]


def test_rows_without_a_target_stay_and_are_marked():
    encoded = Encoder(CLASSES).encode(frame(y=["no", "yes", "", "perhaps"]))
    assert encoded.targets.tolist() == [0, 1, -100, -100]
    assert encoded.has_target.tolist() == [True, True, False, False]
    encoded = Encoder(NUMBER).encode(frame(y=["-50", "50", "?", "many", "1e9"]))
    np.testing.assert_array_equal(encoded.targets, [-1, 0, np.nan, np.nan, 1])
    assert encoded.has_target.tolist() == [True, True, False, False, True]
    assert (encoded.num_missing["y"], encoded.num_not_understood["y"]) == (1, 1)
    assert len(encoded.dataset()) == 5


def test_inputs_are_numbers_and_categories():
    encoded = Encoder(CLASSES).encode(frame(age=["25", "?"]))
    inputs, target = encoded.dataset()[1]
    np.testing.assert_array_equal(inputs, [*encoded.numbers[1], *encoded.categories[1]])
    assert target == 0


def test_oracles_of_scikit_learn():
    rng = np.random.default_rng(0)
    ages, cities = rng.uniform(0, 100, 50), rng.choice(["Rome", "Oslo"], 50)
    ages[:2] = 0, 100
    encoded = Encoder(CLASSES).encode(frame(age=[repr(float(age)) for age in ages], city=cities))
    np.testing.assert_allclose(encoded.numbers[:, 0], MinMaxScaler((-1, 1)).fit_transform(ages[:, None])[:, 0], 1e-6)
    codes = OrdinalEncoder(categories=[["Rome", "Oslo"]]).fit_transform(cities[:, None])[:, 0]
    np.testing.assert_array_equal(encoded.categories[:, 0] - 2, codes)


CELL = st.sampled_from(["", "?", "5", "2020-02-02", "Rome", "yes", "1e300", "x"]) | st.text(max_size=5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(CELL, CELL, CELL, CELL, CELL), min_size=1, max_size=6), st.sampled_from([CLASSES, NUMBER]))
def test_a_row_does_not_depend_on_other_rows(rows, schema):
    table = pd.DataFrame(rows, columns=["age", "city", "note", "day", "y"], dtype=object)
    together = Encoder(schema).encode(table)
    for i in range(len(rows)):
        alone = Encoder(schema).encode(table.iloc[[i]])
        for name in ("numbers", "categories", "targets"):
            np.testing.assert_array_equal(getattr(alone, name)[0], getattr(together, name)[i])
    assert together.numbers.abs().max() <= 1
    assert together.categories.max() < 4


def test_new_tables_need_features_alone():
    table = frame(age=["1", "2"]).drop(columns=["y", "note"]).assign(more="x")
    encoded = Encoder(CLASSES).encode(table, with_target=False)
    assert encoded.targets is None
    assert not encoded.has_target.any()
    with pytest.raises(ValueError, match="was encoded without its target"):
        encoded.dataset()
    with pytest.raises(ValueError, match=r"new.csv: lacks the column 'age' of the schema.* add an empty one"):
        Encoder(CLASSES).encode(table.drop(columns="age"), with_target=False, where="new.csv")


def test_incomplete_schemas_are_refused():
    columns = (*COLUMNS[:3], Column("day", "learn"), Column("y", "number"))
    with pytest.raises(ValueError, match="leaves 'day', 'y' to be learnt"):
        Encoder(Schema(columns, "y", "regression"))
    with pytest.raises(ValueError, match="leaves 'y' to be learnt"):
        Encoder(dataclasses.replace(CLASSES, columns=(*COLUMNS, Column("y", "learn")), task=None))


def test_predictions_are_in_the_unit_of_the_target():
    found = Encoder(NUMBER).predictions(torch.tensor([-1.0, 0.0, 0.5, 7.0, float("nan")]))
    np.testing.assert_allclose(found["prediction"], [-50, 50, 100, 150, np.nan])
    assert Encoder(NUMBER).target_scale == 100
    found = Encoder(CLASSES).predictions(torch.tensor([[0.0, math.log(3)], [5.0, -5.0]]))
    assert found["prediction"].tolist() == ["yes", "no"]
    np.testing.assert_allclose(found["probability of yes"], [0.75, 1 / (1 + math.exp(10))])
    assert Encoder(CLASSES).target_scale == 1
