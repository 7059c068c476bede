# SPDX-License-Identifier: Apache-2.0
"""Reads a table of the user's own from its file, and checks what the user says of its columns."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_privacy import tables
from torch_privacy.experiments import table_notes
from torch_privacy.support import validate as _check
from torch_privacy.support.read_file import opened

if TYPE_CHECKING:
    from pandas import DataFrame

SHAPE = "how the file writes letters, numbers and dates, as most cells show (no schema file says it)"


@contextmanager
def needing_extra() -> Iterator[None]:
    """Refuses in one sentence, which names the extra, if a library for tables is missing."""
    try:
        yield
    except ImportError as error:
        raise ValueError(str(error)) from None


def num_owners(owners: Any) -> int | None:
    """Returns the number of owners of all rows, if rows have owners."""
    return None if owners is None else len(set(owners))


def num_units(owners: Any, rows: Any) -> int:
    """Returns the number of rows, or of their owners."""
    return len(rows) if owners is None else len(set(owners[rows]))


def declared(path: Path, target: str, file: str | None, owner: str | None, where: str = "train") -> tables.Schema:
    """Returns the schema that the user declares public, or the cautious template."""
    ignored = () if owner is None else (owner,)
    if file is None:
        return tables.Schema.template(path, target, ignore=ignored, shape=shape_in(path))
    schema = tables.Schema.read(file, shape=shape_in(path))
    if schema.target != target:
        raise ValueError(f"{where}: {file}: is the schema for the target {schema.target!r}, not for {target!r}.")
    columns = list(schema.columns)
    for place, column in enumerate(columns):
        if owner is not None and column.name == owner and column.kind != "ignored":
            if column.bounds is not None or column.categories is not None:
                raise ValueError(
                    f'{where}: {file}: {owner!r} names the persons; give it kind = "ignored" in the schema.'
                )
            columns[place] = tables.Column(owner, "ignored", reason="left out by the command")  # as in the template
    schema = schema.with_columns(columns, schema.task)
    schema.check_frame(table_in(path), str(path), declared_in=file)
    return schema


@lru_cache(maxsize=1)
def _shape(path: Path, changed: int, size: int) -> tables.Shape:
    return tables.shape_of(_read(path, changed, size), tables.Schema.missing)


def shape_in(path: Path) -> tables.Shape:
    """Returns how the numbers and dates of a file are written, which is public by declaration."""
    state = path.stat()
    return _shape(path.absolute(), state.st_mtime_ns, state.st_size)


def check_column(where: str, option: str, name: str, frame: DataFrame, path: Path) -> None:
    """Refuses the name of a column that the table lacks."""
    if name not in frame.columns:
        close = get_close_matches(name, map(str, frame.columns), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{where}: --{option} {name!r} is no column of {path}, which has {column_names(frame)}.{hint}")


def check_owner(chosen: Mapping[str, Any], frame: DataFrame, path: Path, where: str = "train") -> None:
    """Refuses options of the persons that do not belong together, or name no column."""
    owner, most = chosen.get("owner"), chosen.get("per_owner")
    if (owner is None) != (most is None):
        raise ValueError(
            f"{where}: --owner COLUMN and --per-owner K belong together: the column that names the person of each row, "
            "and the largest number of rows of one person to use."
        )
    if owner is None or most is None:
        return
    _check.whole(where, at_least=1, per_owner=most)
    check_column(where, "owner", owner, frame, path)
    if owner == chosen["target"]:
        raise ValueError(f"{where}: --owner {owner!r} is the target; name the column of the persons.")


def owners_in(frame: DataFrame, owner: str | None, path: Path, where: str = "train") -> Any:
    """Returns the person of each row, or None; refuses rows without a person, which would not be protected."""
    if owner is None:
        return None
    column = frame[owner]
    empty = column.isna() | (column.astype("string").str.strip() == "")
    if empty.any():
        raise ValueError(
            f"{where}: {path}: some rows have no {owner!r}. Every row must name its person: fill in what is missing, "
            "or delete these rows."
        )
    return column.astype("string").str.split().str.join(" ").to_numpy(dtype=str)  # as `tables.split` reads them


def column_names(frame: DataFrame) -> str:
    """Returns the first names of a table's columns, in quotes."""
    return _check.quoted(map(str, frame.columns), at_most=table_notes.MOST_NAMES)


def table_in(path: Path) -> DataFrame:
    """Returns the table in a file, from memory if the file is unchanged."""
    try:
        state = path.stat()
    except OSError:
        return tables.read_table(path)
    return _read(path.absolute(), state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=1)
def _read(path: Path, changed: int, size: int) -> DataFrame:
    return tables.read_table(path)


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of the table, which is as secret as the table: a guess of it can be verified."""
    with opened(path) as file:
        digest = hashlib.sha256()
        while part := file.read(2**20):
            digest.update(part)
        return digest.hexdigest()
