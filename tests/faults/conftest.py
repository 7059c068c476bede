# SPDX-License-Identifier: Apache-2.0
"""Counts trials of faults, and prints the counts at the end of the tests: ``make faults`` ends with this table."""

from collections.abc import Callable

import pytest

HEADINGS = "tried", "survived", "nothing lost"
_counts: dict[str, list[int]] = {}


@pytest.fixture(scope="session")
def tally() -> Callable[..., None]:
    """Returns a function that adds to the counts of one kind of fault.

    ``tally(kind, tried, survived, nothing_lost)``: a trial survived if it ended in success or in one sentence of
    refusal; nothing was lost if no release, no file and no answer was wrong or missing after it (by default, in those
    that survived). Call it before the test asserts anything about the trials, so that failures are counted, too.
    """

    def add(kind: str, tried: int, survived: int, nothing_lost: int | None = None) -> None:
        counts = _counts.setdefault(kind, [0, 0, 0])
        for column, number in enumerate((tried, survived, survived if nothing_lost is None else nothing_lost)):
            counts[column] += number

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _counts:
        return
    width = max(map(len, (*_counts, "in all")))
    total = [sum(column) for column in zip(*_counts.values(), strict=True)]
    terminalreporter.section("faults")
    terminalreporter.write_line(f"{'kind':{width}}" + "".join(f"  {heading:>12}" for heading in HEADINGS))
    for kind, counts in (*sorted(_counts.items()), ("in all", total)):
        terminalreporter.write_line(f"{kind:{width}}" + "".join(f"  {number:>12,}" for number in counts))
