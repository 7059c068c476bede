# SPDX-License-Identifier: Apache-2.0
"""Provides ``plan``, which says before a training which batch size, steps and noise to take, without torch."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from torch_privacy.cli._options import Chosen, with_options
from torch_privacy.cli._shared import AsJson, app, path_option, print_result, say, saying_warnings
from torch_privacy.cli.accounting import Target
from torch_privacy.cli.steps import chosen_delta
from torch_privacy.cli.train import KNOWN
from torch_privacy.experiments.task import Settings

Examples = Annotated[int, typer.Option("--examples", help="Number of training examples n, an integer.")]
Delta = Annotated[
    float | None,
    typer.Option(
        help="Delta of (epsilon, delta), a probability; well below 1/n for n examples.",
        show_default="1e-5, or 1/(10 n) if that is less",
    ),
]
NumSteps = Annotated[
    list[int] | None,
    typer.Option("--steps", help="Number of noisy steps to consider; repeatable.", show_default="250 500 1000 2000"),
]
Signal = Annotated[
    float, typer.Option(help="Share of the largest possible signal that is enough, in (0, 1]; 0.9 to 0.95 is usual.")
]
USUAL_BATCH = 256  # of the simulation, at most
SETTINGS = "learning_rate", "clip_norm", "seed"


@dataclass(frozen=True)
class Simulation:
    """A training on stand-in data with the same total noise."""

    on: Annotated[
        str | None,
        typer.Option(
            "--simulate", help=f"Also train on stand-in data of: {KNOWN}.", metavar="EXPERIMENT", show_default="no"
        ),
    ] = None
    stand_in: Annotated[
        Path | None, path_option(help="Public data in the same format, for --simulate.", metavar="DIR")
    ] = None
    expected_batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size", help="Expected batch size of that training.", show_default=f"{USUAL_BATCH}, or the planned"
        ),
    ] = None

    @property
    def has_more(self) -> bool:
        """True if something is given that a simulation alone uses."""
        return self.stand_in is not None or self.expected_batch_size is not None


@app.command()
@with_options
def plan(
    *,
    num_examples: Examples,
    target_epsilon: Target,
    delta: Delta = None,
    num_steps: NumSteps = None,
    signal: Signal = 0.9,
    simulation: Simulation,
    chosen: Annotated[dict[str, Any], Chosen(Settings, SETTINGS)],
    as_json: AsJson = False,
) -> None:
    """Print which batch size, steps and noise to take for a number of examples and an epsilon, and what to expect.

    Looks at no data. With --simulate it then trains on synthetic or public data, with a small batch and the same total
    noise, and prints the test scores on the way: the learning curve to expect.
    """
    from rich.text import Text

    from torch_privacy.privacy import planning
    from torch_privacy.support import validate as _check

    if simulation.on is None and (chosen or simulation.has_more):
        raise ValueError("plan: --stand-in, --batch-size and the settings of a training need --simulate EXPERIMENT.")
    _check.whole("plan", at_least=1, num_examples=num_examples)
    delta = chosen_delta("plan", delta, None, num_examples, [])
    found = planning.plan(num_examples, target_epsilon, delta, num_steps=num_steps or planning.STEPS, signal=signal)
    on = simulation.on
    curve = [] if on is None else _curve(on, found.chosen, simulation, chosen, silent=as_json)
    about = {"total_signal": found.total_signal, "learnt": found.learnt, "advice": found.advice(), "curve": curve}
    print_result({**asdict(found), **about}, Text(str(found), no_wrap=True), as_json)


def _curve(
    experiment: str, planned: Any, simulation: Simulation, settings: dict[str, Any], *, silent: bool
) -> list[tuple[int, float]]:
    """Returns steps and scores of the simulation; says each at once."""
    from torch_privacy.experiments.search import simulated

    folder = None if simulation.stand_in is None else str(simulation.stand_in.absolute())
    curve = []
    with saying_warnings():
        small = simulation.expected_batch_size
        small = min(USUAL_BATCH if small is None else small, planned.expected_batch_size)
        for step, score in simulated(experiment, planned, small, folder=folder, **settings):
            curve.append((step, score))
            if not silent:
                say(f"simulation, step {step}: {score:.4f}")
    return curve
