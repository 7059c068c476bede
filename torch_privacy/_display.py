# SPDX-License-Identifier: Apache-2.0
"""What the command shows: a live bar on a terminal, a line per epoch elsewhere, plain tables. For ``cli.py``."""

import math
from collections.abc import Callable, Iterable
from time import monotonic

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from torch_privacy.experiments.log import Progress as Step
from torch_privacy.summary import round_up

ROOM_FOR_BAR = 90  # columns; a narrower terminal shows numbers alone
MARGIN = 4  # columns kept free, so that the terminal's ^C does not wrap the line, of which then a copy would stay
SHARE = 0.01  # of the time may go into pricing steps

Price = Callable[[int], float]  # number of steps -> certified upper bound on epsilon


class LiveBar(Progress):
    """A progress bar that never fills its line to the end."""

    def get_renderables(self) -> Iterable[RenderableType]:
        for renderable in super().get_renderables():
            yield _Narrowed(renderable)


class _Narrowed:
    """What is shown, in a line that is ``MARGIN`` columns shorter."""

    def __init__(self, inner: RenderableType):
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self._inner, options.update_width(max(options.max_width - MARGIN, 1)))


class EpsilonAhead:
    """An upper bound on epsilon for the step shown, computed for a later one so that it holds in between.

    Guarantees:
        - The bound is never below the certified epsilon of the step that it is asked for.
        - It is computed at most about once a second, and rarer where that would take more than ``SHARE`` of the time.
    """

    def __init__(self) -> None:
        self._step, self._epsilon = 0, 0.0  # priced last
        self._asked, self._time, self._cost = 0, 0.0, 0.0  # of that pricing: asked for which step, when, how long

    def bound(self, step: int, latest: int, price: Price) -> float:
        """Epsilon of all steps up to ``step``, or somewhat more, but no more than of those up to ``latest``."""
        if step > self._step:
            start = monotonic()
            self._step = min(latest, step + self._ahead(step, latest, start))
            self._epsilon = price(self._step)
            self._asked, self._time, self._cost = step, monotonic(), monotonic() - start
        return self._epsilon

    def _ahead(self, step: int, latest: int, now: float) -> int:
        """How many steps are likely made until a new price is due; a hundredth of all while the speed is unknown."""
        if self._asked == 0:
            return latest // 100
        speed = (step - self._asked) / max(now - self._time, 1e-6)
        return math.ceil(speed * max(1.0, self._cost / SHARE))


class TrainingDisplay:
    """Shows a training's steps; epsilon is computed ahead of them, never for every step."""

    def __init__(self, console: Console, *, silent: bool):
        self._console = console
        self._silent = silent
        self._live = LiveBar(*_columns(console.width), console=console, disable=silent or not console.is_terminal)
        self._bars: dict[str, TaskID] = {}
        self._epsilon = EpsilonAhead()

    def __enter__(self) -> "TrainingDisplay":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, step: Step, price: Price) -> None:
        """Show one step; ``price`` tells what so many steps cost at most."""
        if self._silent:
            return
        if self._console.is_terminal:
            self._move_bar(step, price)
        elif step.metrics is not None:
            self._console.print(_epoch_line(step), soft_wrap=True, highlight=False)

    def _move_bar(self, step: Step, price: Price) -> None:
        if step.training not in self._bars:
            self._bars[step.training] = self._live.add_task(step.training, total=step.num_steps, state="")
        self._live.columns = _columns(self._console.width)
        self._live.update(self._bars[step.training], completed=step.step, state=self._state(step, price))

    def _state(self, step: Step, price: Price) -> str:
        """Epsilon first, and alone where there is no room for more."""
        parts = [f"loss {step.loss:.3f}", f"accuracy {100 * step.accuracy:.1f} %"]
        if step.training == "private":
            # No further ahead than the end of the epoch, whose price is due for the metrics anyway.
            latest = max(step.step, step.epoch_end or step.num_steps)
            parts.insert(0, f"ε ≤ {round_up(self._epsilon.bound(step.step, latest, price))}")
        state = "  ".join(parts if self._console.width >= 60 else parts[:1])
        return state if self._console.width >= 70 else state.replace("accuracy ", "")


def _columns(width: int) -> tuple[ProgressColumn, ...]:
    """What a terminal of so many columns has room for; steps and epsilon always."""
    name, steps, state = TextColumn("{task.description:<11}"), MofNCompleteColumn(), TextColumn("{task.fields[state]}")
    if width < ROOM_FOR_BAR:
        return name, steps, state
    return name, BarColumn(bar_width=None), steps, state, TimeElapsedColumn()


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
