# SPDX-License-Identifier: Apache-2.0
"""Files as people have them: what is read, what is said about it, and one sentence for what is no table."""

import csv
import datetime
import decimal
import io
import math
import os
from pathlib import Path
from time import process_time

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_privacy.tables import read, read_table
from torch_privacy.tables.cells import parse_number
from torch_privacy.tables.read import column_types


@pytest.fixture
def write(tmp_path):
    def write(content, name="table.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_delimiter_follows_from_the_names_alone(write, delimiter):
    path = write(
        f'a{delimiter}"b,;|\t"{delimiter}c\n1,5{delimiter}2;3|\n'.replace("2;3|\n", f'x{delimiter}"2;3|"\n')
        if delimiter != ","
        else 'a,"b,;|\t",c\n"1,5",x,2;3|\n'
    )
    frame = read_table(path)
    assert list(frame) == ["a", "b,;|", "c"]
    assert frame.iloc[0].tolist() == ["1,5", "x", "2;3|"]


def test_one_column_is_a_table(write):
    assert read_table(write("name\nx\n\ny\n")).iloc[:, 0].tolist() == ["x", "", "y"]


def test_cells_stay_text(write):
    frame = read_table(write("a,b\n007,1e3\nTRUE,NA\n,2020-01-01\n"))
    assert frame.to_numpy().tolist() == [["007", "1e3"], ["TRUE", "NA"], ["", "2020-01-01"]]


def test_quotes_line_ends_and_blank_lines(write):
    frame = read_table(write('\r\na,b\r\n"x\ny","say ""hi"""\r\n\r\n1,2\r\n'))
    assert frame.to_numpy().tolist() == [["x\ny", 'say "hi"'], ["1", "2"]]


@pytest.mark.parametrize(
    ("encoding", "note"),
    [("utf-8", None), ("utf-8-sig", None), ("cp1252", "Windows-1252"), ("utf-16", "UTF-16")],
)
def test_encodings_are_said(write, encoding, note):
    frame = read_table(write("größe,b\nä,5 €\n".encode(encoding)))
    assert list(frame) == ["größe", "b"]
    assert frame.iloc[0].tolist() == ["ä", "5 €"]
    assert (note is None and frame.attrs["notes"] == []) or note in frame.attrs["notes"][0]


def test_a_row_in_another_encoding_changes_no_other_row(write):
    rows = "größe,b\nä,5 €\nö,1\n".encode()
    frame = read_table(write(rows + "ü,2\n".encode("cp1252")))
    assert frame.to_numpy().tolist() == [["ä", "5 €"], ["ö", "1"], ["ü", "2"]]
    assert (list(frame), frame.attrs["encoding"], frame.attrs["notes"]) == (["größe", "b"], "UTF-8", [])


@pytest.mark.parametrize("line", ["sep=;\n", "sep=;\n\n", "\ufeffsep=;\r\n", '"sep=;"\n', "\nSEP=;;\n"])
def test_a_first_line_that_names_the_separator_is_no_header(write, line):
    path = write(f"{line}a;b, c\n1;2\n".encode())
    frame = read_table(path)
    assert (list(frame), frame.attrs["separator"]) == (["a", "b, c"], ";")
    assert frame.iloc[0].tolist() == ["1", "2"]
    assert list(column_types(path)) == ["a", "b, c"]


def test_names_become_unique_and_say_so(write):
    frame = read_table(write("a,,a,column 2, a \n1,2,3,4,5\n"))
    assert list(frame) == ["a", "column 2 (2)", "a (2)", "column 2", "a (3)"]
    assert len(frame.attrs["notes"]) == 3
    assert "column 2 is empty" in frame.attrs["notes"][0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"\n \n", "names no column"),
        (b"a,b\n", "the table has no rows"),
        (b"a,b\n1,2\n3\n", r"line 3 has 1 cell, but line 1 names 2 columns"),
        (b"a,b\n1,2\n\n1,2,3\n", r"line 4 has 3 cells, but line 1 names 2 columns"),
        (b'a,b\n"x\ny",1\n2\n', "line 4 has 1 cell"),
        (b'a,b\n1,"2\n', "line 2 is not CSV"),
        (b'a,b\n1,"2"3\n', "line 2 is not CSV"),
        (b"PK\x03\x04" + bytes(50), "Excel workbook"),
        (b"\x1f\x8b\x08abc", "packed with gzip"),
        (b"a,b\n1,\x00\n", "zero bytes"),
        (b"PAR1 but no more", "damaged Parquet"),
    ],
)
def test_what_is_no_table_is_one_sentence_with_the_path(write, content, message):
    path = write(content)
    with pytest.raises(ValueError, match=message) as error:
        read_table(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


@pytest.mark.every_case
@pytest.mark.parametrize("content", ["a,b\n1,2\n3\n", "", "a,b\n1,2\n", 40 * "a"], ids=len)
def test_reading_leaves_the_csv_module_as_it_was(write, content, monkeypatch):
    """The limit of a cell belongs to the whole process, and a refusal is kept while its traceback is."""
    monkeypatch.setattr("torch_privacy.tables.read.LONGEST_HEADER", 40)
    limit = csv.field_size_limit()
    path = write(content)
    for reader in read_table, column_types:
        try:
            reader(path)
        except ValueError as error:
            kept = error
            assert kept.__traceback__ is not None
            assert csv.field_size_limit() == limit
    assert csv.field_size_limit() == limit


def test_folders_and_missing_files_are_one_sentence(tmp_path):
    for path, message in ((tmp_path, "folder"), (tmp_path / "no.csv", "No such file"), (tmp_path / "a\0b", "name")):
        for function in (read_table, column_types):
            with pytest.raises(ValueError, match=message):
                function(path)


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


def test_parquet_keeps_storage_types(tmp_path):
    path = parquet(
        tmp_path / "t.parquet",
        i=pa.array([1, None, 3]),
        f=pa.array([1.5, None, float("nan")]),
        b=pa.array([True, None, False]),
        s=pa.array(["x", None, ""]),
        d=pa.array([datetime.date(2020, 1, 2), None, None]),
        t=pa.array([datetime.datetime(2020, 1, 2, 3), None, None]),
        m=pa.array([decimal.Decimal("1.5"), None, None]),
        c=pa.array(["u", "v", None]).dictionary_encode(),
        l=pa.array([[1], None, []]),
    )
    frame = read_table(path)
    assert str(frame["i"].dtype) == "int64[pyarrow]"
    assert column_types(path) == {
        "i": "integer", "f": "number", "b": "boolean", "s": "text", "d": "date", "t": "date", "m": "number",
        "c": "text", "l": "list<element: int64>",
    }  # fmt: skip
    assert column_types(path).keys() == set(frame)


def test_types_of_parquet_do_not_depend_on_cells(tmp_path):
    full = parquet(tmp_path / "a", x=pa.array([1, 2]), y=pa.array(["1", "2"]))
    empty = parquet(tmp_path / "b", x=pa.array([None, None], pa.int64()), y=pa.array([None, None], pa.string()))
    assert column_types(full) == column_types(empty)
    assert [str(kind) for kind in read_table(full).dtypes] == [str(kind) for kind in read_table(empty).dtypes]


def test_damaged_parquet_is_one_sentence(tmp_path):
    path = parquet(tmp_path / "t.parquet", x=pa.array(range(1000)))
    content = bytearray(path.read_bytes())
    content[8:40] = b"\xff" * 32
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged Parquet"):
        read_table(path)


CELLS = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=6)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=5))
def test_what_pandas_writes_is_read_again(tmp_path_factory, rows):
    frame = pd.DataFrame(rows, columns=["a", "b", "c"])
    buffer = io.StringIO()
    frame.to_csv(buffer, index=False)
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    path.write_text(buffer.getvalue(), encoding="utf-8", newline="")
    assert read_table(path).to_numpy().tolist() == frame.to_numpy().tolist()


def bomb(frame, **options):
    """Returns a small file of Parquet that holds each value of a column once."""
    content = io.BytesIO()
    pq.write_table(pa.table(frame), content, compression="zstd", **options)
    return content.getvalue()


def many_values(count):
    return bomb({"a": pa.array(np.zeros(count, np.int8)), "b": pa.array(np.zeros(count, np.int8))})


HOSTILE = {  # content -> words of the refusal; each took minutes, or gigabytes
    "columns": (lambda: "a," * 20_000 + "a\n", "20,001 columns, and at most 16,384"),
    "a line of names without end": (lambda: "a" * 5000, "the line of column names has no end"),
    "a quote of names without end": (lambda: '"' + "a\n" * 2**23, "is not CSV|has no end"),
    "values of Parquet": (lambda: many_values(300), "600 cells, and at most 500"),
    "texts of Parquet": (lambda: bomb({"a": pa.array(["x" * 5000] * 200)}), "unpack to more than 500000 bytes, at"),
    "cells": (lambda: "a,b\n" + "1,2\n" * 300, "has 502 cells, and at most 500"),
    "bytes": (lambda: "a,b\n" + "1,2\n" * 130_000, "too large .it has more than 500000 bytes"),
}


@pytest.mark.parametrize(("content", "words"), HOSTILE.values(), ids=HOSTILE)
def test_a_small_file_that_asks_for_much_is_refused_in_a_sentence(write, content, words, monkeypatch):
    if words.startswith("the line"):
        monkeypatch.setattr(read, "LONGEST_HEADER", 4096)
    elif not words.startswith(("20,001", "is not")):
        monkeypatch.setattr(read, "MOST_CELLS", 500)
        monkeypatch.setattr(read, "LARGEST", 500_000)
    path = write(content())
    with pytest.raises(ValueError, match=words) as refused:
        read_table(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert "\n" not in str(refused.value)


def test_texts_of_parquet_are_read_as_they_were_written(write):
    kinds = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
    table = pa.table({str(kind): pa.array(["x", None, "x", "y"], kind) for kind in kinds} | {"n": [1, 2, 3, 4]})
    content = io.BytesIO()
    pq.write_table(table, content)
    frame = read_table(write(content.getvalue()))
    assert [frame.dtypes.iloc[k].pyarrow_dtype for k in range(3)] == kinds
    assert frame.iloc[:, 0].isna().tolist() == [False, True, False, False]


def test_equal_names_take_linear_time(write):
    start = process_time()
    frame = read_table(write(",".join(["a"] * 4_000) + "\n" + ",".join("1" * 4_000) + "\n"))
    assert list(frame)[:3] == ["a", "a (2)", "a (3)"]
    assert process_time() - start < 10  # it was over a minute for 4,000
    assert len(column_types(write("\n" * 2**18 + 'a,"b\n' + "\n" * 2**18 + '"\n'))) == 2


@pytest.mark.parametrize("text", ["1 111" + " 111" * 50_000 + "1", "1'111" + "'111" * 50_000 + "x", "9" * 200_000])
def test_a_long_cell_is_no_number_and_takes_no_time(text):
    start = process_time()
    assert math.isnan(parse_number(text))
    assert process_time() - start < 1


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "huge.csv").write_bytes(b"a,b\n")
    os.truncate(path, read.LARGEST + 1)
    monkeypatch.setattr(read, "read_at_most", lambda *_: pytest.fail("it is read"))
    with pytest.raises(ValueError, match=r"too large .it has more than 4294967296 bytes"):
        read.read_table(path)
