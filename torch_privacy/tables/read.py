# SPDX-License-Identifier: Apache-2.0
"""Reads CSV and Parquet files into a table of pandas, without guessing anything from the cells."""

from __future__ import annotations

import codecs
import csv
import io
import os
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..support.read_file import opened, read_at_most
from .extra import needed

if TYPE_CHECKING:
    from pandas import DataFrame

DELIMITERS = ",;\t|"
PARQUET = b"PAR1"
UTF_16 = b"\xff\xfe", b"\xfe\xff"
LONGEST_CELL = 2**20  # characters; a longer one is an open quote or not a table
LONGEST_HEADER = 2**24  # characters of the line of names
MOST_COLUMNS = 2**14  # as in a spreadsheet
MOST_CELLS = 2**28
LARGEST = 2**32  # bytes of a file, and of the texts in it when they are unpacked
SPLIT = "Take fewer rows or columns."
SEPARATOR_LINE = re.compile(r'"?sep=([,;\t|])"?[,;\t|]*\r?\n[\r\n]*', re.IGNORECASE)  # which Excel reads
WINDOWS = {i: bytes([i]).decode("cp1252") for i in range(128, 160) if i not in (129, 141, 143, 144, 157)}
NO_HEADER = "the line of column names has no end, so that this is no table, or its first quote is not closed."
OTHER_FORMATS = {  # how files begin that people take for tables
    b"PK\x03\x04": "is an Excel workbook or a zip file. Save the sheet as CSV",
    b"\xd0\xcf\x11\xe0": "is an old Excel workbook. Save the sheet as CSV",
    b"\x1f\x8b": "is packed with gzip. Unpack it",
    b"BZh": "is packed with bzip2. Unpack it",
    b"\xfd7zXZ": "is packed with xz. Unpack it",
    b"%PDF": "is a PDF document. Export the table as CSV",
    b"\x89HDF": "is an HDF5 file. Export the table as CSV or Parquet",
    b"ARROW1": "is an Arrow (Feather) file. Save it as Parquet",
    b"SQLite": "is a database. Export the table as CSV",
}


def rows_of(frame: DataFrame) -> list[tuple[Any, ...]]:
    """Returns the rows of a table, missing cells as None: what the fingerprint of a run on this table was made of.

    ``tp.matches_fingerprint("runs/people/privacy.json", rows_of(read_table("people.csv")),
    "runs/people/fingerprint.key")`` says whether the table is the one that the run was made with.
    """
    plain = frame.astype(object)
    return list(plain.where(plain.notna(), None).itertuples(index=False, name=None))


def read_table(path: str | Path, *, allow_empty: bool = False) -> DataFrame:
    """Returns the table in a CSV or Parquet file.

    The file's first bytes show which it is. Cells of CSV stay text, so that no type follows silently from the data;
    columns of Parquet keep their storage types. Only the line of column names determines the delimiter, one of comma,
    semicolon, tab and ``|``.

    Args:
        path: CSV in UTF-8 (with or without BOM), UTF-16 with BOM, or else, line by line, Windows-1252, with a first
            line of column names, after a line ``sep=;`` if there is one, and quotes as in RFC 4180; or Parquet.
        allow_empty: whether the table may have no rows.

    Returns:
        The rows in the file's order. ``frame.attrs["notes"]`` lists sentences on how the file was read: another
        encoding, names that were empty or came twice.

    Guarantees:
        - A cell of CSV is a function of its own lines and of the line of column names.
        - Column names are unique and not empty: an empty one becomes ``column 3``, a second ``a`` becomes ``a (2)``.
        - Time and memory grow with the size of the file, and no more than `MOST_CELLS` cells and `MOST_COLUMNS` columns
          are read: a small file of Parquet may stand for any number of cells.
        - A line with fewer or more cells than the first is refused, not filled. Blank lines are left out of a table
          with several columns.

    Raises:
        ValueError: one sentence with the path, what is wrong and, of CSV, the line.
        ImportError: pandas or pyarrow is not installed.
    """
    place = Path(path)
    with _opened(place) as file:
        if file.read(4) == PARQUET:
            frame, notes = _parquet(place)
        else:
            file.seek(0)
            frame, notes = _csv(place, _content(place, file))
    if not len(frame) and not allow_empty:
        raise ValueError(f"{place}: the table has no rows.")
    frame.attrs["notes"] = notes
    return frame


def column_types(path: str | Path) -> dict[str, str]:
    """Returns the name of each column and its storage type in words; of CSV, ``"text"``.

    It reads the line of names of CSV, and the schema in the footer of Parquet: no cell enters.
    """
    place = Path(path)
    with _opened(place) as file:
        if file.read(4) != PARQUET:
            file.seek(0)
            is_wide = file.read(2) in UTF_16
            file.seek(0)
            content = _content(place, file) if is_wide else _first_line(place, file)
            with closing(_rows(place, _text(place, content)[0])) as rows:
                _, header = _header(place, rows)
            return dict.fromkeys(_names(place, header)[0], "text")
    schema = _parquet_file(place).schema_arrow
    names, _ = _names(place, schema.names)
    return {name: _storage_type(field.type) for name, field in zip(names, schema, strict=True)}


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for reading; one that cannot be opened is refused in one sentence."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(opened(path))
        except ValueError as error:
            raise ValueError(f"{path}: cannot be read ({str(error).rstrip('.')}).") from None
        yield file


def _content(path: Path, file: BinaryIO) -> bytes:
    try:
        if os.fstat(file.fileno()).st_size > LARGEST:  # before the first 4 GiB are in memory
            raise ValueError(f"it has more than {LARGEST} bytes")
        return read_at_most(file, LARGEST)
    except ValueError as error:
        raise ValueError(f"{path}: is too large ({error}). {SPLIT}") from None


def _first_line(path: Path, file: BinaryIO) -> bytes:
    """Returns the bytes of the first record, which may hold quoted line ends."""
    parts, size, quotes, is_blank = [], 0, 0, True
    while line := file.readline(LONGEST_HEADER + 1):
        parts.append(line)
        size += len(line)
        if size > 4 * LONGEST_HEADER:
            raise ValueError(f"{path}: {NO_HEADER}")
        quotes += line.count(b'"')
        said = line.removeprefix(codecs.BOM_UTF8).decode("latin-1")
        is_blank = is_blank and (not line.strip() or SEPARATOR_LINE.fullmatch(said) is not None)
        if not is_blank and quotes % 2 == 0:
            break
    return b"".join(parts)


def _parquet_file(path: Path, **options: Any) -> Any:
    parquet, arrow = needed("pyarrow.parquet"), needed("pyarrow")
    try:
        return parquet.ParquetFile(path, **options)
    except (arrow.ArrowException, ValueError, OSError) as error:
        raise ValueError(f"{path}: is a damaged Parquet file ({_one_line(error)}).") from None


def _parquet(path: Path) -> tuple[DataFrame, list[str]]:
    pandas, arrow = needed("pandas"), needed("pyarrow")
    file = _parquet_file(path)
    names, notes = _names(path, file.schema_arrow.names)
    _check_cells(path, _num_cells(file.metadata))
    try:
        table = _parquet_file(path, read_dictionary=_text_columns(file.schema_arrow)).read()
    except MemoryError:
        raise ValueError(f"{path}: does not fit into memory when it is unpacked. {SPLIT}") from None
    except (arrow.ArrowException, ValueError, OSError) as error:
        raise ValueError(f"{path}: is a damaged Parquet file ({_one_line(error)}).") from None
    table = _unpacked(path, table, file.schema_arrow).rename_columns(names)
    # indexes that pandas wrote are columns, and storage types stay, also where cells are null
    frame = table.replace_schema_metadata(None).to_pandas(types_mapper=pandas.ArrowDtype)
    return frame, notes


def _text_columns(schema: Any) -> list[str]:
    """Returns the columns of texts, which a file may hold once for any number of cells."""
    types = needed("pyarrow").types
    tests = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return [field.name for field in schema if any(is_text(field.type) for is_text in tests)]


def _num_cells(metadata: Any) -> int:
    """Returns how many values a Parquet file says it holds, those within lists included."""
    groups = (metadata.row_group(k) for k in range(metadata.num_row_groups))
    inside = sum(group.column(k).num_values for group in groups for k in range(group.num_columns))
    return max(inside, metadata.num_rows * metadata.num_columns)


def _unpacked(path: Path, table: Any, schema: Any) -> Any:
    """Returns a table with the storage types of its file, once it is known how long its texts are in all."""
    compute, types = needed("pyarrow.compute"), needed("pyarrow").types
    size, columns = 0, []
    for name, column, kind in zip(table.column_names, table.columns, schema.types, strict=True):
        is_unpacked = types.is_dictionary(column.type) and not types.is_dictionary(kind)
        for part in column.chunks if is_unpacked else ():
            lengths = compute.binary_length(part.dictionary).cast("int64")
            size += compute.sum(lengths.take(part.indices)).as_py() or 0
        if size > LARGEST:
            raise ValueError(f"{path}: its texts unpack to more than {LARGEST} bytes, at column {name!r}. {SPLIT}")
        columns.append(column.cast(kind) if is_unpacked else column)
    return needed("pyarrow").table(columns, names=table.column_names)


def _check_cells(path: Path, count: int) -> None:
    if count > MOST_CELLS:
        raise ValueError(f"{path}: has {count:,} cells, and at most {MOST_CELLS:,} are read. {SPLIT}")


def _storage_type(kind: Any) -> str:
    types = needed("pyarrow").types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_boolean(kind):
        return "boolean"
    if types.is_integer(kind):
        return "integer"
    if types.is_floating(kind) or types.is_decimal(kind):
        return "number"
    if types.is_timestamp(kind) or types.is_date(kind):
        return "date"
    if types.is_string(kind) or types.is_large_string(kind) or str(kind) == "string_view":
        return "text"
    return str(kind)


def _csv(path: Path, content: bytes) -> tuple[DataFrame, list[str]]:
    pandas = needed("pandas")
    for magic, what in OTHER_FORMATS.items():
        if content.startswith(magic):
            raise ValueError(f"{path}: {what}.")
    text, notes = _text(path, content)
    encoding = "UTF-16" if content[:2] in UTF_16 else "Windows-1252" if notes else "UTF-8"
    del content
    with closing(_rows(path, text)) as rows:
        header_line, header = _header(path, rows)
        names, more = _names(path, header)
        columns: list[list[str]] = [[] for _ in names]
        for line, row in rows:
            if not row and len(names) > 1:
                continue
            if len(row) != len(names) and not (not row and len(names) == 1):
                raise ValueError(
                    f"{path}: line {line} has {_cells(len(row))}, but line {header_line} names {_columns(len(names))}."
                )
            for column, cell in zip(columns, row or [""], strict=True):
                column.append(cell)
            if len(columns[0]) * len(columns) > MOST_CELLS:
                _check_cells(path, len(columns[0]) * len(columns))
    frame = pandas.DataFrame(dict(zip(names, columns, strict=True)), columns=names, dtype=object)
    frame.attrs |= {"encoding": encoding, "separator": _start(path, text)[1]}
    return frame, [*notes, *more]


def _text(path: Path, content: bytes) -> tuple[str, list[str]]:
    """Returns the content as text, and a note if most lines with other letters than those of ASCII are not UTF-8."""
    if content[:2] in UTF_16:
        try:
            return content.decode("utf-16"), ["The file was read as UTF-16."]
        except UnicodeDecodeError:
            raise ValueError(f"{path}: is damaged UTF-16. Save it as UTF-8.") from None
    if b"\0" in content[: 2**16]:
        raise ValueError(f"{path}: is not a CSV or Parquet file (it holds zero bytes).")
    try:
        return content.decode("utf-8-sig"), []
    except UnicodeDecodeError:
        pass
    texts, votes = [], 0
    for line in content.removeprefix(codecs.BOM_UTF8).splitlines(keepends=True):
        try:  # each by itself: else one row would change the letters of all others
            texts.append(line.decode())
            votes -= not line.isascii()
        except UnicodeDecodeError:
            texts.append(line.decode("latin-1").translate(WINDOWS))  # bytes that mean no letter there stay
            votes += 1
    note = "The file is not UTF-8 and was read as Windows-1252: save it as UTF-8 if letters look wrong."
    return "".join(texts), [note] if votes > 0 else []


def _rows(path: Path, text: str) -> Generator[tuple[int, list[str]]]:
    """Yields the line number and the cells of each record, the column names first.

    Close it: while it runs, the csv module of the whole process takes longer cells.
    """
    start, delimiter = _start(path, text)
    skipped = len(text[:start].splitlines())
    line, limit = skipped + 1, csv.field_size_limit(LONGEST_CELL)
    try:
        reader = csv.reader(io.StringIO(text[start:], newline=""), delimiter=delimiter, strict=True)
        for row in reader:
            yield line, row
            line = skipped + reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}: line {line} is not CSV ({_one_line(error)}).") from None
    finally:
        csv.field_size_limit(limit)


def _start(path: Path, text: str) -> tuple[int, str]:
    """Returns where the line of column names begins, and the delimiter: that of a line ``sep=;`` before it, if any."""
    start = len(text) - len(text.lstrip("\r\n"))
    if said := SEPARATOR_LINE.match(text, start):
        return said.end(), said[1]
    return start, _delimiter(path, text[start : start + LONGEST_HEADER])


def _delimiter(path: Path, text: str) -> str:
    """Returns the delimiter that is most frequent in the first line, outside of quotes; a comma if none is there."""
    counts, quoted = dict.fromkeys(DELIMITERS, 0), False
    for letter in text:
        if letter == '"':
            quoted = not quoted
        elif not quoted and letter in "\r\n":
            break
        elif not quoted and letter in counts:
            counts[letter] += 1
    else:
        if len(text) == LONGEST_HEADER:
            raise ValueError(f"{path}: {NO_HEADER}")
    return max(counts, key=lambda one: counts[one])


def _header(path: Path, rows: Iterator[tuple[int, list[str]]]) -> tuple[int, list[str]]:
    """Returns the line number and the cells of the column names."""
    try:
        return next(rows)
    except StopIteration:
        raise ValueError(f"{path}: the file is empty. The first line must hold the column names.") from None


def _names(path: Path, header: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns unique names of the columns, and notes on those that were changed."""
    if not header or not any(name.strip() for name in header):
        raise ValueError(f"{path}: the first line names no column.")
    if len(header) > MOST_COLUMNS:
        raise ValueError(f"{path}: has {len(header):,} columns, and at most {MOST_COLUMNS:,} are read. {SPLIT}")
    names: dict[str, None] = {}
    notes: list[str] = []
    given = {name.strip() for name in header}
    counts: dict[str, int] = {}  # of each name, the last number that it got
    for place, name in enumerate(header, start=1):
        stripped = " ".join(name.split())
        chosen = first = stripped or f"column {place}"
        while chosen in names or (chosen in given and chosen != stripped):
            counts[first] = counts.get(first, 1) + 1
            chosen = f"{first} ({counts[first]})"
        if chosen != stripped:
            what = "comes twice, the later one is" if stripped else "is empty, it is"
            notes.append(f"The name of column {place} {what} called {chosen!r}.")
        names[chosen] = None
    return list(names), notes


def _cells(count: int) -> str:
    return f"{count} cell" if count == 1 else f"{count} cells"


def _columns(count: int) -> str:
    return f"{count} column" if count == 1 else f"{count} columns"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")[:200]
