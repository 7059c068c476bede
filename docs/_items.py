# SPDX-License-Identifier: Apache-2.0
"""Writes papers.md, every item of the papers and what is here of it: ``python docs/_items.py``.

The text stands in papers.txt. Where it names an experiment and rows in braces, such as ``{gdp-mnist: sigma 1.3, *}``,
the page has the scores of these rows from docs/results, with their seeds and standard error. Patterns are separated by
semicolons. ``{items}`` and ``{counts}`` are the numbers of items, of all and by status.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

HERE = Path(__file__).parent
KEPT, TEXT, PAGE = HERE / "results", HERE / "papers.txt", HERE / "papers.md"
STATUSES = {"done": "done", "another way": "done another way", "left": "left"}
TESTED = {  # test examples of experiments that have not 10,000
    **{"gdp-imdb": 25_000, "gdp-imdb-lstm": 25_000, "jl-imdb": 25_000, "jl-imdb-trials": 25_000},
    **{"gdp-adult": 3_256, "gep-ablations": 8_000, "pate-mnist": 1_000, "pate-cifar10": 1_000},
}


@cache
def kept(experiment: str) -> dict[str, Any]:
    """The results of one experiment."""
    return json.loads((KEPT / f"{experiment}.json").read_text())


def scores(experiment: str, pattern: str) -> Iterator[list[float]]:
    """The scores over the seeds of every row that fits."""
    found = [row for row in kept(experiment)["rows"] if fnmatchcase(row["row"], pattern)]
    if not found:
        raise SystemExit(f"papers.txt: no row of {experiment} fits {pattern!r}")
    for row in found:
        if known := [run["numbers"]["score"] for run in row["runs"] if run["numbers"].get("score") is not None]:
            yield known


def ours(experiment: str, patterns: list[str]) -> str:
    """The mean score of every row that fits, with the numbers of seeds and the largest standard error."""
    found = [values for pattern in patterns for values in scores(experiment, pattern)]
    if not found:
        raise SystemExit(f"papers.txt: the rows of {experiment} that fit {patterns} have no scores")
    percent = kept(experiment)["columns"]["score"]["percent"]
    unit, digits = (100, 1) if percent else (1, 3)
    error = max(unit * error_of(values, TESTED.get(experiment, 10_000)) for values in found)
    places = 4 if not percent else 1 if error >= 0.05 else 2  # 0.03, not 0.0
    numbers = sorted({len(values) for values in found})
    seeds = f"{' or '.join(map(str, numbers))} seed{'s' if numbers != [1] else ''}"
    text = " / ".join(f"{unit * mean(values):.{digits}f}" for values in found)
    return f"{text}{' %' if percent else ''} ({seeds}, {error:.{places}f})"


def error_of(values: list[float], tested: int) -> float:
    """The standard error of the mean; of one accuracy, that of its test examples."""
    if len(values) > 1:
        return stdev(values) / len(values) ** 0.5
    return (values[0] * (1 - values[0]) / tested) ** 0.5


def page() -> str:
    """The whole page."""
    text = TEXT.read_text()
    found = Counter(line.split(" | ")[1] for line in text.splitlines() if line.startswith("| ") and " | " in line)
    del found["status"]  # of the headings
    if unknown := set(found) - set(STATUSES):
        raise SystemExit(f"papers.txt: unknown status {', '.join(map(repr, unknown))}")
    counts = [f"{found[status]} are {words}" for status, words in STATUSES.items()]
    text = text.replace("{items}", str(found.total())).replace("{counts}", f"{', '.join(counts[:-1])} and {counts[-1]}")
    return "".join(filled(line) if line.startswith("| ") else line for line in text.splitlines(keepends=True))


def filled(line: str) -> str:
    """A line of a table with the scores of the rows that it names."""
    return re.sub(r"\{([\w-]+): ([^}]+)\}", lambda match: ours(match[1], match[2].split("; ")), line)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
