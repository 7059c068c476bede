# SPDX-License-Identifier: Apache-2.0
"""Says the scores of a training on a table in words: each with its standard error, beside what a constant reaches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PERCENT = ("accuracy", "balanced accuracy")
HEADLINES = ("AUC", "R²")  # that a constant cannot make large
CONSTANTS = {
    "accuracy": "always the most frequent class: {}",
    "balanced accuracy": "a constant: {}",
    "AUC": "a constant: {}",
    "log loss": "the shares of the classes: {}; smaller is better",
    "RMSE": "the mean of the test rows: {}; smaller is better",
    "mean absolute error": "the median of the test rows: {}; smaller is better",
    "R²": "the mean of the test rows: {}",
}


def warnings_of(results: Mapping[str, Any]) -> list[str]:
    """Returns sentences on scores that say less than they seem to."""
    return list(results.get("quality", {}).get("warnings", ()))


def quality_lines(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns all scores with their standard errors and those of constants, as lines of a table."""
    quality = results.get("quality", {})
    return [(f"test {one['name']}", in_words(one)) for one in quality.get("measures", ())]


def in_words(measured: Mapping[str, Any]) -> str:
    """Returns a score with its standard error, and that of a constant.

    Example:
        >>> in_words({"name": "AUC", "value": 0.8512, "error": 0.0123, "baseline": 0.5})
        '0.851 ± 0.012 (a constant: 0.500)'
    """
    name, constant = measured["name"], measured["baseline"]
    text = f"{number(name, measured['value'], measured['error'])}"
    if constant is None:
        return f"{text} (0 is best)"
    return f"{text} ({CONSTANTS.get(name, 'a constant: {}').format(number(name, constant))})"


def number(name: str, value: float, error: float | None = None) -> str:
    """Returns a value in its unit, with its standard error if it has one.

    Example:
        >>> number("RMSE", 215908.1, 8712.3), number("RMSE", 0.012345)
        ('215,900 ± 8,700', '0.01235')
    """
    if name in PERCENT:
        return f"{100 * value:.1f} %" if error is None else f"{100 * value:.1f} ± {100 * error:.1f} %"
    large = name in ("RMSE", "mean absolute error")
    plain, small = (_rounded(value, 4), _rounded(error or 0, 2)) if large else (f"{value:.3f}", f"{error or 0:.3f}")
    return plain if error is None else f"{plain} ± {small}"


def _rounded(value: float, digits: int) -> str:
    """Returns a number with this many digits that count, and commas between thousands."""
    return f"{float(f'{value:.{digits}g}'):,.10g}"


def headlines(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the scores to show large, each with its caption; none that a constant reaches, too."""
    found = []
    for one in results.get("quality", {}).get("measures", ()):
        gain = None if one["gain_error"] is None else one["value"] - one["baseline"] > 2 * one["gain_error"]
        if one["name"] in HEADLINES or (one["name"] == "accuracy" and gain):
            shown, said = number(one["name"], one["value"]), in_words(one)
            found.append((shown, f"test {one['name']}, {said[said.index('±') :]}"))
    return sorted(found, key=lambda pair: not any(f"test {name}" in pair[1] for name in HEADLINES))
