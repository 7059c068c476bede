# SPDX-License-Identifier: Apache-2.0
"""Shows a training while it runs: a live bar on a terminal, a line per epoch elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from signal import Signals
from time import monotonic
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeElapsedColumn

from torch_privacy.cli._shared import new_console
from torch_privacy.privacy.summary import round_up
from torch_privacy.runs.metrics import Progress as Step

if TYPE_CHECKING:
    from torch_privacy.cli.signals import DeferredSignals
    from torch_privacy.experiments.runner import Run

ROOM_FOR_BAR = 90  # columns; a narrower terminal shows numbers only
MARGIN = 4  # columns kept free, so that the ^C that a terminal prints does not wrap the line and leave a copy of it
SHARE = 0.01  # of the time may be spent on computing epsilon

Price = Callable[[int], float]  # number of releases -> certified upper bound on epsilon


def run_to_end(run: Run, signals: DeferredSignals, *, silent: bool) -> bool:
    """Trains until the end and returns True, or saves a checkpoint after a signal and returns False.

    Several processes stop together, whichever got the signal.
    """
    with TrainingDisplay(new_console(stderr=True), silent=silent) as display:
        for progress in run.steps():
            display.show(progress, run.epsilon_high)
            if agreed := run.agreed(signals.received):
                break
        else:
            agreed = run.agreed(signals.received)  # after the last step
    if agreed:
        signals.received = Signals(agreed)
        run.checkpoint()
    return not agreed


class LiveBar(Progress):
    """A progress bar that leaves the end of its line free."""

    def get_renderables(self) -> Iterable[RenderableType]:
        for renderable in super().get_renderables():
            yield _Narrower(renderable)


class _Narrower:
    """Renders its content ``MARGIN`` columns narrower."""

    def __init__(self, inner: RenderableType):
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self._inner, options.update_width(max(options.max_width - MARGIN, 1)))


class EpsilonAhead:
    """An upper bound on epsilon of the step shown, computed for a later step so that it holds in between.

    Guarantees:
        - The bound is never below the certified epsilon of the given step.
        - Its computation takes about ``SHARE`` of the time, and at most that once the speed is known.
    """

    def __init__(self) -> None:
        self._step, self._epsilon = 0, 0.0  # of the last computation
        self._asked, self._time, self._cost = (0, 0.0, 0.0)  # given step, end and seconds of the last computation

    def bound(self, step: int, num_steps: int, price: Price) -> float:
        """Returns a bound on epsilon of the first ``step`` steps, at most that of all ``num_steps``."""
        if step > self._step:
            start = monotonic()
            self._step = min(num_steps, step + self._ahead(step, num_steps, start))
            self._epsilon = price(self._step)
            self._asked, self._time = step, monotonic()
            self._cost = max(self._time - start, 0.0)
        return self._epsilon

    def _ahead(self, step: int, num_steps: int, now: float) -> int:
        """Returns how many steps ahead to compute epsilon; a hundredth of all while the speed is unknown."""
        if self._asked == 0:
            return num_steps // 100
        speed = (step - self._asked) / max(now - self._time, 1e-6)
        return min(math.ceil(speed * self._cost / SHARE), num_steps)


class TrainingDisplay:
    """Shows a training's steps, with epsilon computed ahead of them."""

    def __init__(self, console: Console, *, silent: bool):
        self._console = console
        self._silent = silent
        self._live = LiveBar(*_columns(console.width), console=console, disable=silent or not console.is_terminal)
        self._bars: dict[str, TaskID] = {}
        self._epsilon = EpsilonAhead()

    def __enter__(self) -> TrainingDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, step: Step, price: Price) -> None:
        """Shows one step; ``price`` maps a number of releases to a bound on epsilon."""
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
        """Returns epsilon, loss and score, or epsilon alone on a narrow terminal."""
        parts = [f"loss {step.loss:.3f}", f"{step.measure.name} {step.measure.text(step.score)}"]
        if step.training == "private":
            made, planned = step.step + step.num_lost, step.num_steps + step.num_lost
            parts.insert(0, f"ε ≤ {round_up(self._epsilon.bound(made, planned, price))}")
        state = "  ".join(parts if self._console.width >= 60 else parts[:1])
        return state if self._console.width >= 70 else state.replace(f"{step.measure.name} ", "")


def _columns(width: int) -> tuple[ProgressColumn, ...]:
    """Returns the columns that fit into ``width``; steps and epsilon are always among them."""
    name, steps, state = TextColumn("{task.description:<11}"), MofNCompleteColumn(), TextColumn("{task.fields[state]}")
    if width < ROOM_FOR_BAR:
        return name, steps, state
    return name, BarColumn(bar_width=None), steps, state, TimeElapsedColumn()


def _epoch_line(step: Step) -> str:
    row = step.metrics
    assert row is not None
    text = f"{row.training:<11} epoch {row.epoch:<4g} step {row.step:>5}/{step.num_steps}  loss {row.loss:.3f}"
    text += f"  test {step.measure.name} {step.measure.text(row.test_score)}"
    return text if row.epsilon_high is None else f"{text}  epsilon <= {round_up(row.epsilon_high)}"
