# SPDX-License-Identifier: Apache-2.0
"""Schemas: templates from names and storage types alone, files that come back, one sentence for what is wrong."""

import datetime
import tomllib

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_privacy.tables import Column, Schema

FULL = Schema(
    (
        Column("age", "number", (0, 120)),
        Column("a b.c", "category", categories=("x", 'say "hi"', "ä\\")),
        Column("joined", "date", ("2020-01-31", "2024-12-31"), day_first=True),
        Column("note", "ignored", reason="free text"),
        Column("open", "learn"),
        Column("size", "number"),
        Column("city", "category"),
        Column("left", "date"),
        Column("y", "number", (-1.5, 2e20)),
    ),
    "y",
    "regression",
    missing=("", "-999"),
    decimal=",",
)


def test_schema_comes_back_from_its_file(tmp_path):
    path = tmp_path / "schema.toml"
    path.write_text(FULL.to_toml(), encoding="utf-8")
    assert Schema.read(path) == FULL
    assert tomllib.loads(FULL.to_toml())["columns"]["joined"]["day_first"] is True


def test_file_has_comments_for_those_who_edit_it():
    text = FULL.to_toml()
    assert text.startswith("# What is PUBLIC of this table.")
    assert "[columns.y]  # the target" in text
    assert 'bounds = "learn"' in text
    assert 'categories = "learn"' in text


NAMES = st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(st.lists(NAMES, min_size=2, max_size=5, unique=True))
def test_any_names_come_back(names):
    columns = [Column(name, "learn") for name in names]
    schema = Schema(tuple(columns), names[0], "classification")
    assert Schema.from_toml(schema.to_toml()) == schema


def test_native_dates_and_plain_values_of_toml():
    schema = Schema.from_toml(
        'target = "y"\n[columns.d]\nkind = "date"\nbounds = [2020-01-01, 2021-01-01T12:00:00]\n'
        '[columns.c]\nkind = "category"\ncategories = [1, 2.0, 2.5, true]\n[columns.y]\nkind = "learn"\n'
    )
    assert schema.columns[0].bounds == ("2020-01-01", "2021-01-01T12:00:00")
    assert schema.columns[0].limits[1] - schema.columns[0].limits[0] == 366.5
    assert schema.columns[1].categories == ("1", "2", "2.5", "True")
    assert schema.task is None


def toml(x='kind = "number"\nbounds = [0, 1]', y='kind = "category"\ncategories = ["a", "b"]', top='target = "y"'):
    return f"{top}\n[columns.x]\n{x}\n[columns.y]\n{y}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("target = ", r"is not TOML \(Invalid value \(at end of document\)\)"),
        (toml(top='target = "y", task = "learn"'), "at line 1.*Write each entry on a line of its own"),
        (toml(top='target = "y"\ntarget = "x"'), r"is not TOML \(Cannot overwrite a value \(at line 2"),
        ("[columns.x]\nkind = 'number'", r'target = "NAME" is missing'),
        ("target = 'x'", r"\[columns.NAME\] is missing"),
        (toml(top='target = "z"'), r"target = 'z' is not one of its columns"),
        (toml(top='target = "Y"'), r"did you mean 'y'\?"),
        (toml(top='target = "y"\ndelimiter = ";"'), "unknown 'delimiter'; allowed here are 'target'"),
        (toml(top='target = "y"\ntask = "ranking"'), "task = 'ranking' must be 'classification'"),
        (toml(top='target = "y"\ndecimal = ";"'), "decimal = ';' must be"),
        (toml(top='target = "y"\nmissing = "NA"'), "missing = 'NA' must be a list"),
        (toml(top='target = "y"\nmissing = [1]'), r"missing = \[1\] must be a list of texts"),
        (toml(x='kind = "float"'), r"\[columns.x\]: kind = 'float' must be one of 'number', 'category'"),
        (toml(x="bounds = [0, 1]"), r"\[columns.x\]: kind = None must be one of"),
        (toml(x='kind = "number"\nlow = 1'), r"\[columns.x\]: unknown 'low'; allowed here are 'kind', 'bounds'"),
        (toml(x='kind = "learn"\nbounds = [0, 1]'), r"\[columns.x\]: unknown 'bounds'"),
        (toml(x='kind = "number"\nbounds = [1, 0]'), r"bounds = \[1, 0\] must be the smaller one first"),
        (toml(x='kind = "number"\nbounds = [1, 1]'), "must be the smaller one first, and not equal"),
        (toml(x='kind = "number"\nbounds = [0, nan]'), "must be two numbers within"),
        (toml(x='kind = "number"\nbounds = [0, inf]'), "must be two numbers within"),
        (toml(x='kind = "number"\nbounds = [0]'), r"bounds = \[0\] must be two values or 'learn'"),
        (toml(x='kind = "number"\nbounds = [0, true]'), "must be two numbers"),
        (toml(x='kind = "number"\nbounds = ["2020-01-01", "2021-01-01"]'), "must be two numbers"),
        (toml(x='kind = "date"\nbounds = ["today", "2021-01-01"]'), "must be two dates such as 2024-01-31"),
        (toml(x='kind = "date"\nbounds = [0, 1]'), "must be two dates"),
        (toml(x='kind = "date"\nbounds = [2021-01-01, 2020-01-01]'), "must be the smaller one first"),
        (toml(x='kind = "category"\ncategories = "a"'), "must be a list of texts or 'learn'"),
        (toml(x='kind = "category"\ncategories = []'), "must be a list of one or more texts"),
        (toml(x='kind = "category"\ncategories = ["a", "a"]'), "the category 'a' comes twice"),
        (toml(x='kind = "category"\ncategories = ["a", "?"]'), "'[?]' is one of the texts for a missing value"),
        (toml(x='kind = "category"\ncategories = [" a"]'), "' a' has spaces around"),
        (toml(x='kind = "category"\ncategories = [[]]'), r"the category \[\] must be a text"),
        (toml(x='kind = "ignored"'), "every column but the target is ignored"),
        (toml(y='kind = "ignored"'), r"\[columns.y\]: the target cannot be ignored"),
        (toml(y='kind = "date"'), r"\[columns.y\]: a date cannot be the target"),
        (toml(y='kind = "category"\ncategories = ["a"]'), "one category alone, so there is nothing to predict"),
        (toml(top='target = "y"\ntask = "regression"'), "task = 'regression' needs a target of kind = 'number'"),
        ("target = 'x'\ncolumns = 3", r"\[columns.NAME\] is missing"),
        ("target = 'x'\n[columns]\nx = 3", "columns.x must be a section"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_one_sentence(tmp_path, text, message):
    path = tmp_path / "s.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        Schema.read(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_unreadable_files_are_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        Schema.read(tmp_path / "no.toml")
    (tmp_path / "latin.toml").write_bytes("target = 'größe'".encode("latin-1"))
    with pytest.raises(ValueError, match="is not UTF-8"):
        Schema.read(tmp_path / "latin.toml")


def test_template_of_csv_leaves_all_to_be_learnt(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("age,city,y\n1,2,3\n")
    schema = Schema.template(path, "y")
    assert schema == Schema(tuple(Column(name, "learn") for name in ("age", "city", "y")), "y")
    assert not schema.is_complete
    assert Schema.template(path, "y", task="regression").target_column == Column("y", "number")
    assert Schema.template(path, "y", ignore=["city"]).columns[1].kind == "ignored"


CELL = st.sampled_from(["1", "2020-01-01", "x", "", '"a\n,b"', "NA"])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(CELL, CELL), min_size=1, max_size=4))
def test_template_never_depends_on_cells(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("t")
    (folder / "a.csv").write_text("x,y\n" + "".join(f"{a},{b}\n" for a, b in rows))
    (folder / "b.csv").write_text("x,y\n")
    assert Schema.template(folder / "a.csv", "y").to_toml() == Schema.template(folder / "b.csv", "y").to_toml()


def test_template_of_parquet_is_that_of_its_storage_types(tmp_path):
    day = datetime.date(2020, 1, 1)
    for name, rows in (("full", (1, 0.5, "x", True, day, [1])), ("empty", (None,) * 6)):
        types = [pa.int32(), pa.float32(), pa.string(), pa.bool_(), pa.date32(), pa.list_(pa.int64())]
        columns = [pa.array([cell], kind) for cell, kind in zip(rows, types, strict=True)]
        pq.write_table(pa.table(dict(zip("ifsbdl", columns, strict=True))), tmp_path / name)
    schema = Schema.template(tmp_path / "full", "f")
    assert schema.to_toml() == Schema.template(tmp_path / "empty", "f").to_toml()
    assert [column.kind for column in schema.columns] == ["number", "number", "learn", "category", "date", "ignored"]
    assert schema.columns[3].categories == ("False", "True")
    assert (schema.task, Schema.template(tmp_path / "full", "b").task) == ("regression", "classification")
    assert Schema.template(tmp_path / "full", "i").task is None
    with pytest.raises(ValueError, match="the target 'd' is a date"):
        Schema.template(tmp_path / "full", "d")
    with pytest.raises(ValueError, match="its storage type is list"):
        Schema.template(tmp_path / "full", "l")


def test_template_names_unknown_columns(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("Age,city\n1,2\n")
    with pytest.raises(ValueError, match=r"there is no column 'age' \(did you mean 'Age'\?\)"):
        Schema.template(path, "age")
    with pytest.raises(ValueError, match=r"there is no column 'zzz' \(it has 'Age', 'city'\)"):
        Schema.template(path, "city", ignore=["zzz"])
    with pytest.raises(ValueError, match="cannot be both the target and left out"):
        Schema.template(path, "city", ignore=["city"])


def test_columns_of_a_table_must_be_those_of_the_schema():
    schema = Schema((Column("x", "number", (0, 1)), Column("y", "number", (0, 1))), "y", "regression")
    with pytest.raises(ValueError, match=r"a.csv: lacks the column 'x' of the schema"):
        schema.check_frame(pd.DataFrame({"X": [1], "y": [1]}), "a.csv")
    with pytest.raises(ValueError, match=r"does not name the columns 'a', 'b'. Add \[columns.a\]"):
        schema.check_frame(pd.DataFrame({"x": [1], "y": [1], "a": [1], "b": [1]}), "a.csv")
    schema.check_frame(pd.DataFrame({"x": [1], "a": [1]}), "a.csv", with_target=False)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (pd.DataFrame([[1, 2]]), "the column name 0 is no text"),
        (pd.DataFrame([[1, 2, 3]], columns=["x", "y", "x"]), "the column name 'x' is no text, or comes twice"),
        ({"x": [1], "y": [1]}, "is of type dict, and must be a data frame"),
    ],
    ids=["numbers", "twice", "dict"],
)
def test_a_frame_without_a_name_of_its_own_for_each_column_is_refused(frame, message):
    """Of a column that came twice nothing was learnt, and the cause was not said."""
    schema = Schema((Column("x", "number", (0, 1)), Column("y", "number", (0, 1))), "y", "regression")
    with pytest.raises(ValueError, match=message):
        schema.check_frame(frame, "the table")
