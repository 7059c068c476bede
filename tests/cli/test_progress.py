# SPDX-License-Identifier: Apache-2.0
import io
import logging
import re
import signal

import pytest
from rich.console import Console

from torch_privacy import privacy
from torch_privacy.cli import progress as module
from torch_privacy.cli._shared import saying_preparations
from torch_privacy.cli.signals import ONCE_MORE, DeferredSignals
from torch_privacy.experiments.task import PREPARATION
from torch_privacy.runs.metrics import Metrics, Progress


def steps(num_steps, training="private"):
    for step in range(1, num_steps + 1):
        metrics = Metrics(training, 1.0, step, 0.345, 0.8, 0.8, 0.1, 0.1) if step % 50 == 0 else None
        yield Progress(training, step, num_steps, 0.345, 0.843, metrics)


def lines_of(text):
    """The lines that a terminal shows in the end, one after the other, of all that was written to it."""
    return [re.split(r"[\r]|\x1b\[2K|\x1b\[1A", line)[-1] for line in text.split("\n")]


def shown_on_a_terminal(width, progress, price=lambda step: step / 8):
    """What the display writes for one step."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    with module.TrainingDisplay(console, silent=False) as display:
        display.show(progress, price)
    return console.file.getvalue()


def certified(step):
    return float(privacy.compose([(privacy.SubsampledGaussian(1.1, 0.01), step)]).epsilon(1e-5).high)


@pytest.mark.thorough
@pytest.mark.parametrize("slow_from", [0, 100, 10**9], ids=["slow", "slowing down", "fast"])
def test_bar_epsilon_is_never_below_that_of_the_step_shown(slow_from, monkeypatch):
    now = 0.0

    def price(step):
        nonlocal now
        now += 0.005
        priced.append(step)
        return certified(step)

    monkeypatch.setattr(module, "monotonic", lambda: now)
    console = Console(file=io.StringIO(), force_terminal=True, width=200, color_system=None)
    display, priced = module.TrainingDisplay(console, silent=False), []
    for progress in steps(400):
        now += 0.3 if progress.step > slow_from else 0.001
        display.show(progress, price)
        shown = float(re.search(r"ε ≤ (\S+)", display._live.tasks[0].fields["state"])[1])
        if progress.step % 20 == 1 or progress.step % 50 == 0:
            truth = privacy.compose([(privacy.SubsampledGaussian(1.1, 0.01), progress.step)]).epsilon(1e-5)
            assert shown >= truth.high
    assert max(priced) <= 400


def test_bar_prices_ahead_for_less_than_a_hundredth_of_the_time(monkeypatch):
    now, spent = 0.0, 0.0

    def price(step):
        nonlocal now, spent
        now, spent = now + 0.1, spent + 0.1
        return step

    monkeypatch.setattr(module, "monotonic", lambda: now)
    ahead = module.EpsilonAhead()
    for step in range(1, 100_001):
        now += 0.002
        assert ahead.bound(step, 100_000, price) >= step
    assert spent < 0.01 * now + 0.2  # two prices before the speed is known


@pytest.mark.parametrize("width", [60, 69, 70, 80, 89, 90, 120, 200])
def test_bar_shows_steps_epsilon_loss_and_accuracy(width):
    text = lines_of(shown_on_a_terminal(width, Progress("private", 1234, 2061, 0.345, 0.843)))[-2]
    for part in ("private", "1234/2061", "ε ≤ 156.750", "0.345", "84.3 %"):
        assert part in text
    assert ("loss 0.345" in text, "accuracy 84.3 %" in text) == (True, width >= 70)
    assert len(text.rstrip()) <= width - 4  # the terminal's ^C has room


def test_bar_keeps_steps_and_epsilon_in_the_narrowest_terminal():
    text = lines_of(shown_on_a_terminal(40, Progress("private", 1234, 2061, 0.345, 0.843)))[-2]
    assert "1234/2061" in text
    assert "ε ≤ 156.750" in text


def test_bar_of_the_baseline_has_no_epsilon():
    text = lines_of(shown_on_a_terminal(80, Progress("non-private", 12, 2061, 0.345, 0.843)))[-2]
    assert "ε" not in text
    assert "loss 0.345" in text


def test_a_cell_of_a_notebook_gets_lines_and_no_escape_codes(monkeypatch, capsys):
    for name, value in {"JPY_PARENT_PID": "1", "FORCE_COLOR": "1", "CLICOLOR": "1", "TERM": "xterm-color"}.items():
        monkeypatch.setenv(name, value)  # as a kernel sets them for `!torch-privacy train ...`
    with module.TrainingDisplay(module.new_console(stderr=True), silent=False) as display:
        for progress in steps(100):
            display.show(progress, lambda step: step / 8)
    shown = capsys.readouterr().err
    assert len(shown.splitlines()) == 2
    assert "\x1b" not in shown
    assert "\r" not in shown


@pytest.fixture
def interruptible():
    """A process that a shell starts in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_the_first_signal_says_that_a_second_one_stops_at_once(capfd):
    with pytest.raises(KeyboardInterrupt), DeferredSignals(ONCE_MORE) as signals:  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        assert signals.received == signal.SIGINT
        assert capfd.readouterr().err == f"\n{ONCE_MORE}\n"
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("silent", [False, True])
def test_what_a_long_preparation_logs_is_said_once_and_nothing_afterwards(silent, capsys):
    log = logging.getLogger(PREPARATION)
    with saying_preparations(silent=silent):
        log.info("features of %d of %d texts", 2500, 25000)
    log.info("of others")
    assert capsys.readouterr().err == ("" if silent else "features of 2500 of 25000 texts\n")
