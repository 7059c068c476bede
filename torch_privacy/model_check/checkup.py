# SPDX-License-Identifier: Apache-2.0
"""Defines ``Checkup``, the result of ``check``: a verdict on every parameter, and all problems."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

from ..jacobian.rows.operator import PlanRow
from ..support.validate import Refused

if TYPE_CHECKING:  # a training imports this module, and needs rich for nothing
    from rich.console import Console, ConsoleOptions, Group, RenderResult
    from rich.measure import Measurement
    from rich.table import Table

ANY_WIDTH = 10_000  # columns; wider than any table
EXACT, REFUSED, NOT_CHECKED = "exact", "refused", "not checked"


@dataclass(frozen=True)
class Problem:
    """Describes what training would refuse, or what would void its guarantee; ``text`` says what to do."""

    check: str  # name of the check that found it
    names: tuple[str, ...]  # of the parameters and buffers concerned
    text: str

    def __str__(self) -> str:
        return f"{self.check}: {self.text}"


@dataclass(frozen=True)
class ParameterUse:
    """Describes a call of a torch function that used a parameter."""

    op: str  # name of the function
    module: str  # dotted name of the innermost module that made the call in its forward; the model itself is ""
    layout: str  # output shape with n for the examples' dimension, "(n, 16, 64)", "(n·16, 64)"; "" if not measured
    generic: bool  # True if the op has no rule of its own: its rows come from its own backward, which is slower


@dataclass(frozen=True)
class Verdict:
    """Describes what the check found about one trainable parameter."""

    name: str
    shape: tuple[int, ...]
    meetings: tuple[ParameterUse, ...]
    plan: tuple[PlanRow, ...]
    verdict: str  # "exact", "refused", "not checked"

    @property
    def ops(self) -> tuple[str, ...]:
        """Returns the torch functions that used the parameter; a star marks those without a rule of their own."""
        return tuple(dict.fromkeys(met.op + "*" * met.generic for met in self.meetings))

    @property
    def layouts(self) -> tuple[str, ...]:
        """Returns the shapes of these functions' outputs, with n for the examples' dimension."""
        return tuple(dict.fromkeys(met.layout for met in self.meetings if met.layout))

    @property
    def methods(self) -> tuple[str, ...]:
        """Returns the methods by which the norms are computed."""
        return tuple(dict.fromkeys(row.norms_by for row in self.plan))

    @property
    def kept(self) -> tuple[str, ...]:
        """Returns what is kept for the clipped sum."""
        return tuple(dict.fromkeys(row.keeps for row in self.plan))


@dataclass(frozen=True)
class Checkup:
    """Holds the result of ``check``; prints as a table of verdicts, followed by every problem and its cure."""

    num_examples: int  # 0 if there were no usable losses
    verdicts: tuple[Verdict, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]  # what could not be checked, and other remarks

    @property
    def ok(self) -> bool:
        """True if no check found a problem."""
        return not self.problems

    def raise_if_refused(self) -> None:
        """Raises ``Refused`` with all problems, if there are any."""
        if self.problems:
            raise Refused("\n".join(map(str, self.problems)))

    def as_json(self) -> dict[str, Any]:
        """Returns the same as plain data."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        return _text(self)


def checkup_view(checkup: Checkup, *, prices: bool = False) -> Group:
    """Returns a line per parameter, the problems and the notes; with ``prices`` also the costs of the plan."""
    from rich.console import Group
    from rich.text import Text

    n, count = checkup.num_examples, len(checkup.problems)
    of_what = f"{len(checkup.verdicts)} parameters" + (f", a batch of {n} examples" if n else "")
    outcome = f"{count or 'no'} problem{'s' * (count > 1)} found"
    generic = any(met.generic for verdict in checkup.verdicts for met in verdict.meetings)
    footnote = [Text("* generic rule: rows by the function's own backward, which is slower")] * generic
    problems = [_paragraph(f"{i}. ", str(problem)) for i, problem in enumerate(checkup.problems, 1)]
    notes = [_paragraph("note: ", note) for note in checkup.notes]
    return Group(_Verdicts(checkup, prices), *footnote, Text(), Text(f"{of_what}: {outcome}"), *problems, *notes)


class _Verdicts:
    """Renders a table if it fits, else a paragraph for each parameter."""

    def __init__(self, checkup: Checkup, prices: bool):
        self._rows = [_cells(checkup, verdict, prices) for verdict in checkup.verdicts]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        return Measurement(1, Measurement.get(console, options.update(width=ANY_WIDTH), self._table()).maximum)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        if self.__rich_measure__(console, options).maximum <= options.max_width:
            yield self._table()
            return
        for row in self._rows:
            named = [f"{name} {', '.join(cells)}" for name, cells in row.items() if any(cells)]
            yield Text(row["parameter"][0], style="bold")
            yield _paragraph("    ", "; ".join((row["verdict"][0], *named[1:-1])))

    def _table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in self._rows[0]:
            table.add_column(name, justify="right" if name in ("flops", "memory") else "left", no_wrap=True)
        for row in self._rows:
            table.add_row(*(Text("\n".join(cells)) for cells in row.values()))
        return table


def _cells(checkup: Checkup, verdict: Verdict, prices: bool) -> dict[str, tuple[str, ...]]:
    """Returns the cells of a parameter's row by column; a cell may have several lines."""
    numbers = [i for i, problem in enumerate(checkup.problems, 1) if verdict.name in problem.names]
    outcome = verdict.verdict + (f" ({', '.join(map(str, numbers))})" if numbers else "")
    cells = {"parameter": (verdict.name,), "op": verdict.ops, "output": verdict.layouts, "norms by": verdict.methods}
    if prices:
        flops, held = sum(row.operations for row in verdict.plan), sum(row.held_bytes for row in verdict.plan)
        known = bool(verdict.plan)
        cells |= {"sum from": verdict.kept, "flops": (_si(flops),) * known, "memory": (f"{_si(held)}B",) * known}
    return {**cells, "verdict": (outcome,)}


def _si(number: float) -> str:
    """Returns three digits and a prefix: 123, 12.3k, 1.23M."""
    power = min(4, max(0, math.floor(math.log10(max(number, 1)) / 3 + 1e-4)))
    return f"{number / 1000**power:.3g}{'kMGT'[power - 1] if power else ''}"


def _paragraph(label: str, text: str) -> Table:
    """Returns text behind a label, with further lines aligned."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid()
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(label), Text(text))
    return grid


def _text(checkup: Checkup) -> str:
    """Returns the view as plain text for print and logs: 100 columns wide, or as wide as the table."""
    from rich.console import Console

    plain = {"color_system": None, "force_terminal": False, "legacy_windows": False}
    console = Console(file=StringIO(), width=ANY_WIDTH, **plain)
    table = _Verdicts(checkup, prices=False)
    console.width = max(100, console.measure(table).maximum)
    console.print(checkup_view(checkup))
    assert isinstance(console.file, StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
