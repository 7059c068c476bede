# SPDX-License-Identifier: Apache-2.0
"""What the command shows: a live bar on a terminal, a line per epoch elsewhere, plain tables. For ``cli.py``."""

from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from torch_privacy.experiments.log import Progress as Step
from torch_privacy.summary import round_up

COLUMNS = (
    TextColumn("{task.description:<11}"),
    BarColumn(bar_width=None),
    MofNCompleteColumn(),
    TextColumn("{task.fields[state]}"),
    TimeElapsedColumn(),
)


class TrainingDisplay:
    """Shows a training's steps; epsilon is computed anew about once a second, never for every step."""

    def __init__(self, console: Console, *, silent: bool):
        self._console = console
        self._silent = silent
        self._live = Progress(*COLUMNS, console=console, disable=silent or not console.is_terminal)
        self._bars: dict[str, TaskID] = {}
        self._epsilon = ""
        self._due = 0.0

    def __enter__(self) -> "TrainingDisplay":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, step: Step, spent: Callable[[], Any]) -> None:
        """Show one step; ``spent`` tells what it has cost so far."""
        if self._silent:
            return
        if self._console.is_terminal:
            self._move_bar(step, spent)
        elif step.metrics is not None:
            self._console.print(_epoch_line(step), soft_wrap=True, highlight=False)

    def _move_bar(self, step: Step, spent: Callable[[], Any]) -> None:
        if step.training not in self._bars:
            self._bars[step.training] = self._live.add_task(step.training, total=step.num_steps, state="")
        state = f"loss {step.loss:.3f}  accuracy {100 * step.accuracy:.1f} %"
        if step.training == "private":
            state += f"  {self._epsilon_text(step, spent)}"
        self._live.update(self._bars[step.training], completed=step.step, state=state)

    def _epsilon_text(self, step: Step, spent: Callable[[], Any]) -> str:
        """What is spent so far, at most a second old, or twenty times as old as computing it takes."""
        if step.metrics is not None and step.metrics.epsilon_high is not None:
            self._epsilon = f"ε ≤ {round_up(step.metrics.epsilon_high)}"
        elif monotonic() > self._due:
            start = monotonic()
            self._epsilon = f"ε ≤ {round_up(spent().epsilon.high)}"
            self._due = monotonic() + max(1.0, 20 * (monotonic() - start))
        return self._epsilon


def _epoch_line(step: Step) -> str:
    row = step.metrics
    assert row is not None
    text = f"{row.training:<11} epoch {row.epoch:<4g} step {row.step:>5}/{step.num_steps}  loss {row.loss:.3f}"
    text += f"  test accuracy {100 * row.test_accuracy:.1f} %"
    return text if row.epsilon_high is None else f"{text}  epsilon <= {round_up(row.epsilon_high)}"


def lines_table(lines: Iterable[tuple[str, str]]) -> Table:
    """Names and values, side by side."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row(*line)
    return table


def tradeoff_table(points: Iterable[dict[str, float]]) -> Table:
    """False positive rates, and the certified bracket of what is missed and what is caught."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("false positives", "members missed, at least", "members recognized, at most"):
        table.add_column(heading, justify="right")
    for point in points:
        caught = round_up(100 * (1 - point["beta_low"]), 2)
        table.add_row(f"{100 * point['alpha']:g} %", f"{100 - float(caught):.2f} %", f"{caught} %")
    return table
