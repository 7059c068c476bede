# SPDX-License-Identifier: Apache-2.0
"""Reads and writes schema files (TOML), as plain values from which `Schema` is made."""

from __future__ import annotations

import datetime
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from ..support.read_file import read_bytes
from ..support.validate import quoted
from .cells import MISSING
from .shape import Shape

KINDS = ("number", "category", "date", "ignored", "learn")
LEARN, BOUNDS = "learn", "bounds"
LARGEST_FILE = 2**24
TABLE_KEYS = ("target", "task", "missing", "decimal", "day_first")
COLUMN_KEYS = {
    "number": ("kind", "bounds", "scale", "log", "source"),
    "date": ("kind", "bounds", "scale", "day_first", "source"),
    "category": ("kind", "categories", "source"),
    "ignored": ("kind", "reason"),
    "learn": ("kind",),
}
HEADER = """\
# What is PUBLIC of this table. Write here only what you know without looking at the rows, such as from the form that
# people filled in: whatever stands here is outside of the privacy guarantee. What says "learn" is learnt from the rows,
# with noise, for a share of epsilon. So each "learn" that you replace leaves more of it to the training.
#
#   kind = "number"      bounds = [0, 120]                        values beyond are clipped; take wide, safe ones
#   kind = "date"        bounds = [2020-01-01, 2024-12-31]        day_first = true reads 03/01/2024 as 3 January
#   kind = "category"    categories = ["red", "green"]            all others count as "other"
#   kind = "ignored"     the model does not see the column
#   kind = "learn"       number, date or category: learnt, too
#
# Within bounds, where most values lie is learnt for a small share; scale = "bounds" saves it if they are tight already.
# source = "registration form of 2024" says where bounds or categories are known from: the report lists it.
"""


def read_text(path: str | Path) -> str:
    """Returns the text of a schema file."""
    try:
        content = read_bytes(Path(path), LARGEST_FILE)
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read ({str(error).rstrip('.')}).") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 (byte {error.start}). Save it as UTF-8.") from None


def parse(text: str, where: str, shape: Shape | None = None) -> dict[str, Any]:
    """Returns the arguments of `Schema` in a text of TOML, with those of each `Column` under ``"columns"``.

    Decimal mark and order of days and months that the text does not say are those of a ``shape``.
    """
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits is a ValueError alone
        raise ValueError(
            f"{where}: is not TOML ({str(error).rstrip('.')}). Write each entry on a line of its own, texts in quotes, "
            'dates as 2024-01-31, and names with other letters than A-Z in quotes, too: [columns."Größe"].'
        ) from None
    _check_keys(where, "", document, (*TABLE_KEYS, "columns"))
    target, columns = document.get("target"), document.get("columns")
    if not isinstance(target, str):
        _refuse(where, 'target = "NAME" is missing: the name of the column to predict, or "" to synthesize the table')
    if not isinstance(columns, dict) or not columns:
        _refuse(where, "[columns.NAME] is missing: one for each column of the table")
    task, missing = document.get("task", LEARN), document.get("missing", list(MISSING))
    if not isinstance(missing, list):
        _refuse(where, f"missing = {missing!r} must be a list of texts")
    found = Shape() if shape is None else shape
    decimal, day_first = document.get("decimal", found.decimal), document.get("day_first", found.day_first)
    is_found = "decimal" not in document or ("day_first" not in document and found.day_first is not None)
    return {
        "columns": [_column(where, name, values, day_first is True) for name, values in columns.items()],
        "target": target,
        "task": None if task == LEARN else task,
        "missing": tuple(missing),
        "decimal": decimal,
        "day_first": day_first,
        "file": replace(shape, decimal=decimal, day_first=day_first).in_words() if shape and is_found else "",
    }


def _column(where: str, name: str, values: Any, day_first_in_table: bool) -> dict[str, Any]:
    place = f"[columns.{toml_key(name)}]"
    if not isinstance(values, dict):
        _refuse(where, f"columns.{toml_key(name)} must be a section with kind = ...")
    kind = values.get("kind")
    if kind not in KINDS:
        _refuse(where, f"{place}: kind = {kind!r} must be one of {quoted(KINDS)}")
    _check_keys(where, f"{place}: ", values, COLUMN_KEYS[kind])
    reason, source = values.get("reason", ""), values.get("source", "")
    day_first = values.get("day_first", day_first_in_table)
    if not isinstance(reason, str) or not isinstance(source, str) or not isinstance(day_first, bool):
        _refuse(where, f"{place}: reason and source must be texts, and day_first true or false")
    bounds, categories = values.get("bounds", LEARN), values.get("categories", LEARN)
    if bounds != LEARN and not (isinstance(bounds, list) and len(bounds) == 2):
        _refuse(where, f"{place}: bounds = {bounds!r} must be two values or 'learn'")
    scale = values.get("scale", LEARN)
    if scale not in (LEARN, BOUNDS) and not (isinstance(scale, list) and len(scale) == 2):
        _refuse(where, f"{place}: scale = {scale!r} must be two values, 'learn' or 'bounds'")
    if scale == BOUNDS:
        scale = bounds
    if categories != LEARN and not isinstance(categories, list):
        _refuse(where, f"{place}: categories = {categories!r} must be a list of texts or 'learn'")
    return {
        "name": name,
        "kind": kind,
        "bounds": None if bounds == LEARN else tuple(map(_plain, bounds)),
        "categories": None if categories == LEARN else tuple(_text(where, place, one) for one in categories),
        "day_first": day_first,
        "reason": reason,
        "scale": None if scale == LEARN else tuple(map(_plain, scale)),
        "log": values.get("log"),
        "source": source,
    }


def _plain(end: Any) -> Any:
    """Returns a bound as it is kept: dates as ISO texts."""
    return end.isoformat() if isinstance(end, (datetime.date, datetime.datetime)) else end


def _text(where: str, place: str, category: Any) -> str:
    """Returns a category as text, as the cells of the table are read: 3 is "3", true is "True"."""
    if isinstance(category, str):
        return category
    if isinstance(category, (bool, int)):
        return str(category)
    if isinstance(category, float):
        return str(int(category)) if category.is_integer() else repr(category)
    _refuse(where, f"{place}: the category {category!r} must be a text")


def _check_keys(where: str, place: str, values: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    if unknown := [key for key in values if key not in allowed]:
        _refuse(where, f"{place}unknown {quoted(unknown, at_most=3)}; allowed here are {quoted(allowed)}")


def _refuse(where: str, what: str) -> NoReturn:
    raise ValueError(f"{where}: {what}.")


def write(schema: Mapping[str, Any]) -> str:
    """Returns the text of a schema file, from what `parse` returns."""
    file = [f"# How the file was written, as most of its cells show: {schema['file']}.\n"] if schema.get("file") else []
    lines = [
        HEADER,
        *file,
        f"target = {toml_text(schema['target'])}",
        f"task = {toml_text(schema['task'] or LEARN)}  # classification or regression",
        f"missing = {_list(schema['missing'])}  # cells that mean a missing value, in any case",
        f'decimal = {toml_text(schema["decimal"])}  # "," reads 1.234,5 as 1234.5',
    ]
    if schema.get("day_first") is not None:
        order = str(schema["day_first"]).lower()
        lines.append(f"day_first = {order}  # 03/01/2024 is {'3 January' if schema['day_first'] else '1 March'}")
    for column in schema["columns"]:
        kind, name = column["kind"], column["name"]
        lines += ["", f"[columns.{toml_key(name)}]{'  # the target' if name == schema['target'] else ''}"]
        lines += [f"kind = {toml_text(kind)}"]
        if kind in ("number", "date"):
            lines += [f"bounds = {_bounds(column['bounds'])}"]
            if column["scale"] is not None:
                is_all = column["scale"] == column["bounds"]
                lines += [f"scale = {toml_text(BOUNDS) if is_all else _bounds(column['scale'])}"]
            if column["log"] is not None:
                lines += [f"log = {_number(column['log'])!r}"]
        if kind == "date":
            lines += [f"day_first = {str(column['day_first']).lower()}"]
        elif kind == "category":
            lines += [
                f"categories = {toml_text(LEARN) if column['categories'] is None else _list(column['categories'])}"
            ]
        elif kind == "ignored" and column["reason"]:
            lines += [f"reason = {toml_text(column['reason'])}"]
        if column["source"]:
            lines += [f"source = {toml_text(column['source'])}"]
    return "\n".join(lines) + "\n"


def _bounds(bounds: tuple[Any, Any] | None) -> str:
    if bounds is None:
        return toml_text(LEARN)
    return f"[{', '.join(toml_text(end) if isinstance(end, str) else repr(_number(end)) for end in bounds)}]"


def _number(end: float) -> float | int:
    return float(end) if isinstance(end, float) or abs(end) >= 2**53 else int(end)


def _list(texts: Sequence[str]) -> str:
    one_line = f"[{', '.join(map(toml_text, texts))}]"
    if len(one_line) <= 100:
        return one_line
    return "[\n" + "".join(f"    {toml_text(text)},\n" for text in texts) + "]"


def toml_text(text: str) -> str:
    """Returns a text as a basic string of TOML."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_key(name: str) -> str:
    """Returns a name as a key of TOML, in quotes where it needs them."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_text(name)
