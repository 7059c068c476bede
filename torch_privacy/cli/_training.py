# SPDX-License-Identifier: Apache-2.0
"""What ``train`` and ``reproduce`` share: a training shown while it runs, and stopped between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from torch_privacy.cli.signals import DeferredSignals
    from torch_privacy.experiments.runner import Run


def see_through(run: Run, signals: DeferredSignals, *, silent: bool) -> bool:
    """Make a training's steps until it ends (True), or until a signal came (False): then it is saved."""
    from torch_privacy.cli.tables import TrainingDisplay

    with TrainingDisplay(Console(stderr=True), silent=silent) as display:
        for progress in run.steps():
            display.show(progress, run.epsilon_high)
            if signals.received:
                break
    if signals.received:
        run.checkpoint()
    return not signals.received
