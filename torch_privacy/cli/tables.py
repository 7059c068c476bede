# SPDX-License-Identifier: Apache-2.0
"""Formats results as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, repeat
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from torch_privacy.privacy.rounding import round_down, round_up, scientific
from torch_privacy.runs.table import MISSING, headings, lines, summary, title, what

if TYPE_CHECKING:
    from torch_privacy.privacy.comparison import Claim
    from torch_privacy.privacy.persons import Persons
    from torch_privacy.runs.verify import Verification


def lines_table(lines: Iterable[tuple[str, str]]) -> Table:
    """Returns a table of names and values."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))  # brackets are no markup
    return table


def tradeoff_table(points: Iterable[dict[str, float]]) -> Table:
    """Returns a table of false positive rates with certified bounds on missed and recognized members."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("false positives", "members missed, at least", "members recognized, at most"):
        table.add_column(heading, justify="right")
    for point in points:
        caught = round_up(100 * (1 - point["beta_low"]), 2)
        table.add_row(f"{100 * point['alpha']:g} %", f"{100 - float(caught):.2f} %", f"{caught} %")
    return table


def tradeoff_view(points: Iterable[dict[str, float]], lines: Iterable[tuple[str, str]]) -> Group:
    """Returns the table of rates, followed by lines about the whole curve."""
    return Group(tradeoff_table(points), Text(), lines_table(lines))


VERDICTS = {"differs": "bold red", "agrees": "", "cannot be checked": "dim"}  # the order of the sections, their style


def verification_view(verification: Verification) -> Group:
    """Returns the findings as tables: first what is false, last what cannot be checked."""
    shown: list[Text | Table] = []
    for verdict, style in VERDICTS.items():
        found = [finding for finding in verification.findings if finding.verdict.value == verdict]
        if not found:
            continue
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), style=style)
        table.add_column(width=0)
        table.add_column(ratio=4)
        table.add_column(ratio=5, overflow="fold")
        for finding in found:
            table.add_row(Text(), Text(finding.subject), Text(finding.detail))
        shown += [Text(f"{verdict}: {len(found)}", style="bold"), table, Text()]
    return Group(*shown, Text(str(verification), style="bold red" if verification.is_false else "bold"))


def claims_table(claims: Sequence[Claim]) -> Table:
    """Returns a table of accountants: epsilon, its kind, the true delta there, and the running time."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("accountant")
    table.add_column("epsilon", justify="right", no_wrap=True)
    table.add_column("what it is", min_width=15)
    table.add_column("true delta", justify="right", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    for claim in claims:
        if claim.epsilon is None:
            table.add_row(claim.accountant, "-", claim.note, style="dim")
            continue
        verdict = claim.against(claims[0])
        what = f"{claim.kind}, {verdict}" if verdict == "below the truth" else claim.kind
        delta = "" if claim.true_delta is None else f"{max(claim.true_delta.high, 0.0):.2e}"
        row = (claim.accountant, _epsilon_cell(claim), what, delta, f"{1e3 * claim.seconds:.1f}")
        table.add_row(*row, style={"the interval": "bold", "below the truth": "red"}.get(verdict, ""))
    return table


def persons_view(claims: Sequence[Claim], persons: Persons) -> Group:
    """Returns the table of accountants, followed by the two ways to protect a person."""
    return Group(claims_table(claims), Text(), lines_table(persons.lines()))


def _epsilon_cell(claim: Claim) -> str:
    assert claim.epsilon is not None
    if claim.epsilon >= 1e4:
        return scientific(claim.epsilon)
    shown = round_up(claim.epsilon) if claim.kind != "approximation" else f"{claim.epsilon:.3f}"
    return shown if claim.low is None else f"[{round_down(claim.low)}, {shown}]"


class ResultsTable:
    """Renders an experiment's table with a line for every row if it fits, else with a line for every number."""

    def __init__(self, results: Mapping[str, Any]):
        self._results = results

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = self._wide()
        yield wide if Measurement.get(console, options, wide).maximum < options.max_width else self._long()

    def _wide(self) -> Table:
        """Returns the table with our numbers above the paper's."""
        table = _plain_table(2)
        for heading in headings(self._results):
            table.add_column(heading, justify="right", no_wrap=True)
        for line in lines(self._results):
            paper = line.source == "paper"
            table.add_row("" if paper else line.row, line.source, *line.cells, style="dim" if paper else "")
        return table

    def _long(self) -> Table:
        """Returns the table with our numbers beside the paper's."""
        table = _plain_table(1)
        table.add_column("ours", justify="right", no_wrap=True)
        table.add_column("paper", justify="right", no_wrap=True, style="dim")
        for row, both in groupby(lines(self._results), lambda line: line.row):
            cells = {line.source: line.cells for line in both}
            table.add_row(row, style="bold")
            for heading, ours, paper in zip(
                headings(self._results), cells["ours"], cells.get("paper", repeat(MISSING)), strict=False
            ):
                if (ours, paper) != (MISSING, MISSING):
                    table.add_row(f"  {heading}", ours, paper)
        return table


def _plain_table(columns: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for _ in range(columns):
        table.add_column(overflow="fold")
    return table


def results_view(results: Mapping[str, Any], report: str) -> Group:
    """Returns an experiment's table with heading, notes and the path of the report."""
    notes = [Text(), *(Text(note) for note in results["notes"])] if results["notes"] else []
    heading = Text(title(results), style="bold"), Text(f"{what(results)}. {summary(results)}."), Text()
    return Group(*heading, ResultsTable(results), *notes, Text(), Text(f"report  {report}"))
