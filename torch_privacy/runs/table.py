# SPDX-License-Identifier: Apache-2.0
"""Formats an experiment's results as text, with ours above the paper's, for terminal, report and documentation."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR
from statistics import mean, stdev
from typing import Any

from torch_privacy.privacy.rounding import round_down, round_up, scientific, short
from torch_privacy.runs.metrics import Measure
from torch_privacy.runs.quality import quality_lines
from torch_privacy.runs.rows import TableColumn

MISSING = "-"


@dataclass(frozen=True)
class Line:
    """One line of the table: its row, the source of its numbers, and a text for every column."""

    row: str
    source: str  # "ours" or "paper"
    cells: Sequence[str]


def headings(results: Mapping[str, Any]) -> list[str]:
    """Returns the columns' headings."""
    return [column.heading for column in _columns(results).values()]


def lines(results: Mapping[str, Any]) -> Iterator[Line]:
    """Yields our numbers of every row, and the paper's if it has any."""
    columns = _columns(results)
    for row in results["rows"]:
        ours = [cell([run["numbers"].get(key) for run in row["runs"]], column) for key, column in columns.items()]
        yield Line(row["row"], "ours", ours)
        if row["paper"]:
            paper = [cell([row["paper"].get(key)], column) for key, column in columns.items()]
            yield Line(row["row"], "paper", paper)


def cell(values: Sequence[Any], column: TableColumn) -> str:
    """Returns the mean over the seeds, with the standard deviation if they differ, or the widest bracket.

    Example:
        >>> cell([0.95, 0.96], TableColumn("accuracy", digits=1, percent=True)), cell([2.0322], TableColumn("mu"))
        ('95.5 ± 0.7 %', '2.032')
        >>> cell([{"low": 0.8641, "high": 0.8642}], TableColumn("epsilon"))
        '[0.864, 0.865]'
    """
    known = [value for value in values if value is not None]
    if not known:
        return MISSING
    if isinstance(known[0], dict):  # brackets of all seeds are nearly equal; the widest holds for all
        low, high = min(value["low"] for value in known), max(value["high"] for value in known)
        return _with_unit(f"[{_below(low, column)}, {_above(high, column)}]", column)
    scaled = [100 * value if column.percent else value for value in known]
    text = f"{mean(scaled):{_format(column)}}"
    if len(set(scaled)) > 1:
        text += f" ± {stdev(scaled):{_format(column)}}"
    return _with_unit(text, column)


def _below(value: float, column: TableColumn) -> str:
    if column.scientific:
        return scientific(value, ROUND_FLOOR)
    return round_down(100 * value if column.percent else value, column.digits)


def _above(value: float, column: TableColumn) -> str:
    if column.scientific:
        return scientific(value)
    return round_up(100 * value if column.percent else value, column.digits)


def _format(column: TableColumn) -> str:
    return ".3g" if column.scientific else f".{column.digits}f"


def _with_unit(text: str, column: TableColumn) -> str:
    return f"{text} %" if column.percent else text


def summary(results: Mapping[str, Any]) -> str:
    """Returns a summary of the run: seeds, time, machine and delta."""
    runs = [run for row in results["rows"] for run in row["runs"]]
    parts = ["Quick look"] if results["quick"] else []
    if any(row["seeded"] for row in results["rows"]):
        most, *others = rows_by_seeds(results).items()
        apart = [
            f"{_listed(seeds)} for {' and '.join(names) if len(names) < 3 else f'{len(names)} rows'}"
            for seeds, names in others
        ]
        of_some = f" ({'; '.join(apart)})" if apart else ""
        parts.append(f"seed{'s' * (len(most[0]) > 1)} {_listed(most[0])}{of_some}")
    parts.append(f"{duration(sum(run['seconds'] for run in runs))} on {results['machine']}")
    if deltas := results.get("deltas"):
        parts.append(f"epsilon at delta = {' and '.join(short(delta) for delta in deltas)}")
    text = ", ".join(parts)
    return text[0].upper() + text[1:]


def rows_by_seeds(results: Mapping[str, Any]) -> dict[tuple[int, ...], list[str]]:
    """Returns the rows' names by their seeds, most rows first; rows that need no seed are with the first."""
    found: dict[tuple[int, ...], list[str]] = {}
    for row in results["rows"]:
        if row["seeded"]:
            found.setdefault(tuple(run["seed"] for run in row["runs"]), []).append(row["row"])
    found = dict(sorted(found.items(), key=lambda item: -len(item[1]))) or {tuple(results["seeds"]): []}
    next(iter(found.values())).extend(row["row"] for row in results["rows"] if not row["seeded"])
    return found


def _listed(seeds: Sequence[int]) -> str:
    if len(seeds) > 2 and list(seeds) == [*range(seeds[0], seeds[-1] + 1)]:
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds))


def duration(seconds: float) -> str:
    """Returns a time as text.

    Example:
        >>> duration(8.4), duration(700), duration(9000)
        ('8 s', '12 min', '2.5 h')
    """
    if seconds < 100:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def what(results: Mapping[str, Any]) -> str:
    """Returns what the experiment shows, with a capital letter."""
    return results["shows"][0].upper() + results["shows"][1:]


def title(results: Mapping[str, Any]) -> str:
    """Returns the table or figure and its paper."""
    return f"{results['reproduce']}: {results['place']} of {results['paper']['authors']}"


def markdown(results: Mapping[str, Any]) -> str:
    """Returns the table in Markdown."""
    head = ["", "", *headings(results)]
    body = [[line.row if line.source == "ours" else "", line.source, *line.cells] for line in lines(results)]
    rule = ["---", "---", *("---:" for _ in headings(results))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *body)) + "\n"


def _columns(results: Mapping[str, Any]) -> dict[str, TableColumn]:
    """Returns the columns that are not empty."""
    columns = {key: TableColumn(**column) for key, column in results["columns"].items()}
    rows = results["rows"]
    return {
        key: column
        for key, column in columns.items()
        if any(row["paper"].get(key) is not None for row in rows)
        or any(run["numbers"].get(key) is not None for row in rows for run in row["runs"])
    }


def score_lines(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns a run's scores, from its ``results.json``, as lines of a table."""
    measure, baseline = Measure(**results["score"]), results["baseline_test_score"]
    digits = 2 if measure.percent else 4
    is_trained = baseline is not None or "non-private" in results.get("diverged", ())
    without = measure.text(baseline, digits) if is_trained else "not trained (--no-baseline)"
    more = quality_lines(results)
    private = f"{measure.text(results['test_score'], digits)} of {results['num_test_examples']:,} held-out examples"
    lines = [(f"test {measure.name}, private", private)] if not more else more
    if is_trained or not more:
        lines.append((f"test {measure.name}, same network, not private", without))
    if results.get("diverged"):
        advice = "loss or score is not a finite number; try a smaller learning rate"
        lines.append(("DIVERGED", f"{', '.join(results['diverged'])} training: {advice}"))
    return lines
