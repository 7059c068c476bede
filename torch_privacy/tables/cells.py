# SPDX-License-Identifier: Apache-2.0
"""Reads single cells as text, numbers or dates: what a cell means depends on that cell and on public rules alone."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .extra import needed

if TYPE_CHECKING:
    from pandas import Series

MISSING = ("", "?", "-", "NA", "N/A", "#N/A", "NaN", "NaT", "NULL", "<NA>")
LARGEST = 1e300  # numbers beyond, infinite ones included, count as this
LONGEST_NUMBER = 400  # characters; patterns take longer on longer texts, by the square of their length
DAY = 86400.0
EPOCH = datetime.date(1970, 1, 1)

_DIGITS = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_SIGN = r"[+\-\u2212]?"
_CURRENCY = r"(?:[$€£¥]|[A-Z]{3}\s)?"
_UNIT = r"(?:\s?[%‰°€$£¥]|\s[A-Za-z°µ/²³%$€£¥]{1,6})?"
NUMBER = re.compile(rf"({_SIGN})\s?{_CURRENCY}\s?({_SIGN})({_DIGITS}|inf|infinity){_UNIT}", re.IGNORECASE)
PLAIN = re.compile(r"-?\d+(?:\.\d+)?")
CODE = re.compile(r"0\d+")
NO_LETTER = re.compile("[\ud800-\udfff]")
MARKS = ",.'\u2019 \u00a0\u202f"  # that may separate thousands
THOUSANDS = {mark: re.compile(rf"(?<![\d.,])[1-9]\d{{0,2}}(?:{re.escape(mark)}\d{{3}})+(?!\d)") for mark in MARKS}
_TIME = r"(?:[T ]\s?(\d{1,2}):?(\d{2})(?::?(\d{2}(?:\.\d+)?))?\s?([AaPp][Mm])?\s?(?:Z|UTC|GMT|[+-]\d{2}:?(?:\d{2})?)?)?"
_MONTH = r"([A-Za-z]{3,9})\.?"
YEAR_FIRST = re.compile(rf"(\d{{4}})([-/.]?)(\d{{1,2}})\2(\d{{1,2}}){_TIME}")
YEAR_ONLY = re.compile(r"(\d{4})(?:[-/](\d{1,2}))?")
YEAR_LAST = re.compile(rf"(\d{{1,2}})([-/.])(\d{{1,2}})\2(\d{{4}}|\d{{2}}){_TIME}")
DAY_MONTH = re.compile(rf"(\d{{1,2}})\.?[ -]{_MONTH}[ ,-]\s?(\d{{4}}|\d{{2}}){_TIME}")
MONTH_DAY = re.compile(rf"{_MONTH} (\d{{1,2}}),? (\d{{4}}){_TIME}")
MONTHS = "january february march april may june july august september october november december".split()


@dataclass(frozen=True)
class Rules:
    """Public rules on how cells are read."""

    missing: frozenset[str]  # in lower case
    decimal: str  # "." or ","

    @classmethod
    def of(cls, missing: Iterable[str], decimal: str) -> Rules:
        """Returns the rules with these missing markers, in any case."""
        return cls(frozenset(" ".join(marker.split()).casefold() for marker in missing) | {""}, decimal)

    def is_missing(self, text: str) -> bool:
        """True if a text, without spaces around, means a missing value."""
        return text.casefold() in self.missing


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of a column, each distinct one once: ``values[codes[i]]`` is the text of row i; code -1 is missing."""

    codes: NDArray[np.int64]  # (n,)
    values: tuple[str, ...]

    @property
    def is_missing(self) -> NDArray[np.bool_]:
        """Returns bool (n,): cells that are empty, null, or a marker of missing values."""
        return self.codes < 0

    def spread(self, of_values: NDArray[Any], missing: Any) -> NDArray[Any]:
        """Returns one value per row, from one per distinct cell."""
        return np.append(of_values, np.array([missing], of_values.dtype))[self.codes]


def read_cells(column: Series | Any, rules: Rules) -> Cells:
    """Returns the cells of a column as text, without spaces around; stored numbers get the rules' decimal mark.

    Half of a pair of surrogates is no letter, and no file can have it: it becomes U+FFFD.
    """
    pandas = needed("pandas")
    try:
        if pandas.api.types.is_object_dtype(column) or getattr(column.dtype, "storage", "") == "python":
            codes, values = _distinct(column, rules)
        else:
            codes, values = pandas.factorize(column)
    except Exception:  # lists and the like cannot be compared, and each library says so in its own way
        codes, values = _distinct(pandas.Series(list(column), dtype=object), rules)
    texts = [NO_LETTER.sub("\N{REPLACEMENT CHARACTER}", _as_text(value, rules)) for value in values]
    kept = {text: None for text in texts if not rules.is_missing(text)}
    place = {text: i for i, text in enumerate(kept)}
    of_value = np.array([place.get(text, -1) for text in texts], np.int64)
    return Cells(np.append(of_value, -1)[codes], tuple(kept))


def _distinct(column: Series, rules: Rules) -> tuple[NDArray[np.int64], list[Any]]:
    """Returns the place of each cell of a column of objects among the distinct ones, and these.

    To pandas True equals 1, a time that of another zone, and to some versions a text ends at a zero character: the
    first one's text would be that of all the others.
    """
    is_text = needed("pandas").api.types.infer_dtype(column) == "string"
    place: dict[Any, int] = {}
    cells = column if is_text else (_as_text(value, rules) for value in column)
    codes = np.fromiter((place.setdefault(cell, len(place)) for cell in cells), np.int64, len(column))
    return codes, list(place)


def _as_text(value: Any, rules: Rules) -> str:
    """Returns a stored value as text: the same number has the same text in every storage type."""
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value))
    if isinstance(value, (float, np.floating)):
        return "" if np.isnan(value) else number_as_text(float(value), rules.decimal)
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return ""
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, (list, dict, tuple, set, bytes, np.ndarray)):
        return "(not a single value)"
    return " ".join(str(value).split())


def number_as_text(value: float, decimal: str) -> str:
    """Returns a finite or infinite number as a cell that `parse_number` reads as the same number.

    Example:
        >>> number_as_text(-2.5, ","), number_as_text(3.0, ","), parse_number(number_as_text(26.388, ","), ",")
        ('-2,5', '3', 26.388)
    """
    return str(int(value)) if value.is_integer() else repr(value).replace(".", decimal)


def numbers(cells: Cells, rules: Rules) -> NDArray[np.float64]:
    """Returns the number in each cell, (n,): NaN where it is missing or no number.

    A number may have a sign, thousands separators, an exponent, a currency before it, and a unit or ``%`` after it,
    which are left out. Infinite numbers count as 1e300.
    """
    parsed = np.array([parse_number(text, rules.decimal) for text in cells.values], np.float64)
    return cells.spread(parsed, np.nan)


def codes(cells: Cells) -> NDArray[np.bool_]:
    """Returns bool (n,): cells with a zero before other digits, as a postcode may have, and no number has."""
    return cells.spread(np.array([CODE.fullmatch(text) is not None for text in cells.values], bool), False)


def parse_number(text: str, decimal: str = ".") -> float:
    """Returns the number in a text; NaN if there is none.

    Example:
        >>> parse_number("$1,234.50"), parse_number("1.234,50", ","), parse_number("12 kg"), parse_number("12th")
        (1234.5, 1234.5, 12.0, nan)
    """
    if len(text) > LONGEST_NUMBER:
        return np.nan
    if decimal == "." and PLAIN.fullmatch(text):
        return max(-LARGEST, min(float(text), LARGEST))
    for mark in MARKS.replace(decimal, ""):
        if mark in text:
            text = THOUSANDS[mark].sub(lambda found, mark=mark: found[0].replace(mark, ""), text)
    if decimal == ",":
        if "." in text:
            return np.nan
        text = text.replace(",", ".")
    is_negative = text.startswith("(") and text.endswith(")")  # as accountants write it
    found = NUMBER.fullmatch(text[1:-1] if is_negative else text)
    if found is None or (found[1] and found[2]):
        return np.nan
    value = float(found[3])
    is_negative ^= (found[1] or found[2]) not in ("", "+")
    return max(-LARGEST, min(-value if is_negative else value, LARGEST))


def dates(cells: Cells, *, day_first: bool) -> NDArray[np.float64]:
    """Returns the days since 1970-01-01 in each cell, (n,): NaN where it is missing or no date."""
    days = np.array([parse_date(text, day_first=day_first) for text in cells.values], np.float64)
    return cells.spread(days, np.nan)


def parse_date(text: str, *, day_first: bool = False) -> float:
    """Returns the days since 1970-01-01 of one date, with the time of day as a fraction; NaN if it is none.

    It may be ``2024-03-01``, with ``/`` or ``.`` or nothing in between, ``03/01/2024`` (or day first), ``1 March 2024``
    or ``Mar 1, 2024``, in English, each with a time; or a year or month alone. Time zones are left out. A year of two
    digits lies in 1970 to 2069.

    Example:
        >>> parse_date("1970-01-11"), parse_date("02/03/1970"), parse_date("02/03/1970 12:00", day_first=True)
        (10.0, 33.0, 60.5)
    """
    if not 4 <= len(text) <= 40:
        return np.nan
    if found := YEAR_FIRST.fullmatch(text):
        year, _, month, day, *time = found.groups()
    elif found := YEAR_LAST.fullmatch(text):
        day, _, month, year, *time = found.groups()
        if not day_first:
            day, month = month, day
    elif found := DAY_MONTH.fullmatch(text):
        day, month, year, *time = found.groups()
    elif found := MONTH_DAY.fullmatch(text):
        month, day, year, *time = found.groups()
    elif found := YEAR_ONLY.fullmatch(text):
        year, month, day, time = found[1], found[2] or "1", "1", [None] * 4
    else:
        return np.nan
    return _days(year, month, day, time)


def _days(year: str, month: str, day: str, time: list[str | None]) -> float:
    number = int(year) if len(year) == 4 else 1970 + (int(year) - 70) % 100
    names = [i for i, name in enumerate(MONTHS, start=1) if name.startswith(month.lower()[:9])]
    try:
        date = datetime.date(number, int(month) if month.isdigit() else names[0], int(day))
    except (ValueError, IndexError):
        return np.nan
    hour, minute, second = (float(part or 0) for part in time[:3])
    if time[3]:
        hour = hour % 12 + 12 * (time[3].lower() == "pm")
    if hour >= 24 or minute >= 60 or second >= 61:
        return np.nan
    return (date - EPOCH).days + (3600 * hour + 60 * minute + second) / DAY
