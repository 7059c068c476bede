# SPDX-License-Identifier: Apache-2.0
"""Single cells: numbers, dates and missing markers, each read without a look at other cells."""

import datetime
import math
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_privacy.tables import Column, Schema
from torch_privacy.tables.cells import MISSING, Rules, dates, numbers, parse_date, parse_number, read_cells

RULES = Rules.of(MISSING, ".")
NAN = float("nan")


@pytest.mark.parametrize(
    ("text", "point", "comma"),
    [
        ("1,234.50", 1234.5, NAN), ("1.234,50", NAN, 1234.5), ("1,5", NAN, 1.5), ("1.234.567", NAN, 1234567),
        ("1,234,567", 1234567, NAN), ("12,34,567", NAN, NAN), ("1 234", 1234, 1234), ("1'234.5", 1234.5, NAN),
        ("-5", -5, -5), ("−5", -5, -5), ("+7", 7, 7), ("--5", NAN, NAN), ("(1,200)", -1200, -1.2), ("$-5", -5, -5),
        ("-$5", -5, -5), ("$ 1,234.50", 1234.5, NAN), ("5 €", 5, 5), ("USD 5", 5, 5), ("12 kg", 12, 12),
        ("12%", 12, 12), ("0,123", NAN, 0.123), ("-0.123", -0.123, NAN), ("10,000", 10000, 10),
        ("10th", NAN, NAN), ("12A", NAN, NAN), ("1e3", 1000, 1000), ("1e999", 1e300, 1e300), ("-inf", -1e300, -1e300),
        ("0x10", NAN, NAN), ("1_000", NAN, NAN), ("nan", NAN, NAN), ("7th-8th", NAN, NAN), (".5", 0.5, NAN),
        ("1.2.3", NAN, NAN), ("192.168.0.1", NAN, NAN), ("5 Main Street", NAN, NAN), ("", NAN, NAN),
    ],
)  # fmt: skip
def test_numbers(text, point, comma):
    np.testing.assert_equal([parse_number(text), parse_number(text, ",")], [point, comma])


@pytest.mark.parametrize(
    ("text", "month_first", "day_first"),
    [
        ("2024-03-01", "2024-03-01", "2024-03-01"), ("2024/3/1", "2024-03-01", "2024-03-01"),
        ("20240301", "2024-03-01", "2024-03-01"), ("2024-03", "2024-03-01", "2024-03-01"),
        ("2024", "2024-01-01", "2024-01-01"), ("03/01/2024", "2024-03-01", "2024-01-03"),
        ("13/01/2024", None, "2024-01-13"), ("1.3.24", "2024-01-03", "2024-03-01"),
        ("Mar 1, 2024", "2024-03-01", "2024-03-01"), ("1 March 2024", "2024-03-01", "2024-03-01"),
        ("1-Mar-2024", "2024-03-01", "2024-03-01"), ("2024-02-30", None, None), ("12 kg", None, None),
        ("0001-01-01", "0001-01-01", "0001-01-01"), ("9999-12-31", "9999-12-31", "9999-12-31"),
        ("2024-03/01", None, None), ("today", None, None), ("1/1/70", "1970-01-01", "1970-01-01"),
    ],
)  # fmt: skip
def test_dates(text, month_first, day_first):
    for expected, first in ((month_first, False), (day_first, True)):
        days = parse_date(text, day_first=first)
        epoch = datetime.date(1970, 1, 1)
        assert math.isnan(days) if expected is None else days == (datetime.date.fromisoformat(expected) - epoch).days


@pytest.mark.parametrize("decimal", [".", ","])
def test_stored_numbers_are_the_same_under_each_decimal_mark(decimal):
    """Numbers of a Parquet file were written with a point and read with a comma: 26.388 was 26388, and 19.5 none."""
    stored, rules = [19.5, 26.388, -3.0, 1.5e-7, 1e300], Rules.of(MISSING, decimal)
    for kind in (float, object):
        assert numbers(read_cells(pd.Series(stored, dtype=kind), rules), rules).tolist() == stored


@pytest.mark.parametrize("text", ["1970-01-02T12:00", "1970-01-02 12:00:00.000Z", "1/2/1970 12:00 PM"])
def test_time_of_day_is_a_fraction(text):
    assert parse_date(text) == 1.5


@pytest.mark.thorough
@settings(max_examples=200, deadline=None)
@given(st.datetimes(datetime.datetime(1, 1, 1)))
def test_iso_dates_are_those_of_python(moment):
    expected = (moment - datetime.datetime(1970, 1, 1)).total_seconds() / 86400
    assert parse_date(moment.isoformat()) == pytest.approx(expected, rel=1e-12, abs=1e-9)


@settings(max_examples=200, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_those_of_python(value):
    assert parse_number(repr(value)) == float(np.clip(value, -1e300, 1e300))
    assert parse_number(f"{value:,.2f}" if abs(value) < 1e15 else "0") == float(
        f"{value:.2f}" if abs(value) < 1e15 else "0"
    )


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=30))
def test_any_text_is_read_without_an_error(text):
    for decimal in ".,":
        assert isinstance(parse_number(text, decimal), float)
    assert isinstance(parse_date(text), float)


@pytest.mark.parametrize("marker", ["", " ", "?", "NA", "n/a", "nan", "NULL", " null ", "NaT", "-"])
def test_missing_markers_in_any_case(marker):
    assert read_cells(pd.Series([marker, "x"], dtype=object), RULES).is_missing.tolist() == [True, False]


def test_missing_markers_can_be_others():
    cells = read_cells(pd.Series(["NA", "-999", ""], dtype=object), Rules.of(["-999"], "."))
    assert cells.is_missing.tolist() == [False, True, True]


NASTY = [
    "1",
    " 1",
    "1.0",
    "?",
    "",
    "03/04/2020",
    "04.03.2020",
    "x",
    "1e400",
    "9999-12-31",
    "2020-01-01T00:00:00.5",
    "-",
]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(NASTY) | st.text(max_size=4), min_size=1, max_size=8))
def test_a_cell_is_read_the_same_alone_and_among_others(texts):
    together = read_cells(pd.Series(texts, dtype=object), RULES)
    for i, text in enumerate(texts):
        alone = read_cells(pd.Series([text], dtype=object), RULES)
        assert together.is_missing[i] == alone.is_missing[0]
        for read in (lambda cells: numbers(cells, RULES), lambda cells: dates(cells, day_first=False)):
            np.testing.assert_equal(read(together)[i], read(alone)[0])


NOON = datetime.datetime(2020, 1, 1, 23, tzinfo=datetime.UTC)
EQUAL = [True, 1, 1.0, Decimal("1.00"), NOON, NOON.astimezone(datetime.timezone(datetime.timedelta(hours=2)))]


@pytest.mark.parametrize("values", [EQUAL, EQUAL[::-1]], ids=["first", "last"])
def test_equal_values_of_other_types_have_their_own_texts(values):
    """One row with True made all the ones after it "True": with another first row, all counts were others."""
    together = read_cells(pd.Series(values, dtype=object), RULES)
    alone = [read_cells(pd.Series([value], dtype=object), RULES).values[0] for value in values]
    assert [together.values[code] for code in together.codes] == alone
    assert len(set(alone)) == 5  # 1 and 1.0 are one number


@pytest.mark.parametrize("dtype", [object, pd.StringDtype("python")], ids=["object", "string"])
def test_a_zero_character_is_a_letter_like_others(dtype):
    """To pandas 2.2 a text ended there: one row could change all of the same beginning."""
    cells = read_cells(pd.Series(["Rome\0x", "Rome", "Rome"], dtype=dtype), RULES)
    assert cells.values == ("Rome\0x", "Rome")
    assert cells.codes.tolist() == [0, 1, 1]


def test_half_of_a_letter_becomes_one_that_a_file_can_hold():
    cells = read_cells(pd.Series(["Rome", "Ro\ud800me"], dtype=object), RULES)
    assert cells.values == ("Rome", "Ro\N{REPLACEMENT CHARACTER}me")
    for column in (Column("\udc80", "number"), Column("job", "category", categories=("nurse", "\ud800"))):
        with pytest.raises(ValueError, match="has half of a pair of surrogates, which no file can hold"):
            Schema((column, Column("age", "number", (0, 99))), "")


@pytest.mark.parametrize(
    "values",
    [
        pd.array([3, None], "int64[pyarrow]"), pd.array([3.0, None], "float64[pyarrow]"), np.array([3.0, np.nan]),
        np.array(["3", "nan"], object), np.array([3, None], object), pd.Categorical(["3", None]),
    ],
    ids=["int", "double", "numpy", "text", "object", "categorical"],
)  # fmt: skip
def test_storage_types_read_alike(values):
    cells = read_cells(pd.Series(values), RULES)
    assert cells.values == ("3",)
    assert cells.codes.tolist() == [0, -1]
    np.testing.assert_equal(numbers(cells, RULES), [3.0, np.nan])


def test_cells_that_hold_several_values_are_no_number():
    cells = read_cells(pd.Series([[1, 2], {"a": 1}, np.array([3])], dtype=object), RULES)
    assert np.isnan(numbers(cells, RULES)).all()
