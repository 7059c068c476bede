# SPDX-License-Identifier: Apache-2.0
"""The shape of a file, and templates that state it."""

import numpy as np
import pandas as pd
import pytest

from torch_privacy.tables import Column, Schema, read_table, shape_of

N = 300


def written(path, decimal, order, separator):
    rng = np.random.default_rng(0)
    day = pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 900, N), unit="D")
    frame = pd.DataFrame(
        {
            "price": [f"{value:.2f}".replace(".", decimal) for value in rng.lognormal(3, 1, N)],
            "count": rng.integers(0, 9, N),
            "when": day.strftime(order),
            "word": rng.choice(["a", "b, c", "1st"], N),
        }
    )
    frame.to_csv(path, index=False, sep=separator)


@pytest.mark.parametrize("decimal", [".", ","])
@pytest.mark.parametrize(("order", "day_first"), [("%d/%m/%Y", True), ("%m/%d/%Y", False), ("%Y-%m-%d", None)])
@pytest.mark.parametrize("separator", [";", "\t"])
def test_template_states_the_shape_of_the_file(tmp_path, decimal, order, day_first, separator):
    path = tmp_path / "table.csv"
    written(path, decimal, order, separator)
    shape = shape_of(read_table(path), Schema.missing)
    assert (shape.decimal, shape.day_first, shape.separator, shape.encoding) == (decimal, day_first, separator, "UTF-8")
    schema = Schema.template(path, "word", shape=shape)
    text = schema.to_toml()
    assert f"separator {separator!r}" in text
    again = Schema.from_toml(text)
    assert (again.decimal, again.day_first) == (decimal, day_first)


def test_one_row_does_not_change_the_shape(tmp_path):
    path = tmp_path / "table.csv"
    written(path, ",", "%d/%m/%Y", ";")
    with path.open("a") as file:
        file.write("1.5;3;12/31/2021;a\n")
    shape = shape_of(read_table(path), Schema.missing)
    assert (shape.decimal, shape.day_first) == (",", True)


def test_a_declared_target_says_the_task():
    feature = Column("x", "number", (0, 1), scale=(0, 1))
    classes = Schema((feature, Column("y", "category", categories=("a", "b"))), "y")
    number = Schema((feature, Column("y", "number", (0, 9))), "y")
    assert (classes.task, number.task) == ("classification", "regression")
    assert classes.is_complete
    assert Schema((feature, Column("y", "learn")), "y").task is None


def test_a_schema_file_leaves_its_gaps_to_the_shape_and_declared_dates_follow_it(tmp_path):
    path = tmp_path / "table.csv"
    written(path, ",", "%d/%m/%Y", ";")
    shape = shape_of(read_table(path), Schema.missing)
    columns = 'target = "n"\n{}[columns.when]\nkind = "date"\n{}[columns.n]\nkind = "number"\n'
    cases = [  # of the table, of the column, shape -> decimal mark, order of the table, of the column, whether found
        ("", "", shape, (",", True, True, True)),
        ("", "", None, (".", None, False, False)),
        ('decimal = "."\nday_first = false\n', "", shape, (".", False, False, False)),
        ("day_first = true\n", "", None, (".", True, True, False)),
        ("day_first = true\n", "day_first = false\n", shape, (",", True, False, True)),
    ]
    for table, column, found, expected in cases:
        schema = Schema.from_toml(columns.format(table, column), shape=found)
        assert (schema.decimal, schema.day_first, schema.columns[0].day_first, bool(schema.file)) == expected
