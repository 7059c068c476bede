# SPDX-License-Identifier: Apache-2.0
"""Provides ``budget``: makes the budget of a data set, shows what is drawn from it, and ends runs that were killed."""

from pathlib import Path
from typing import Annotated

import typer

from torch_privacy.cli._shared import AsJson, app, path_argument, path_option, print_result, say

File = Annotated[Path, path_argument("The budget's file.", "FILE")]
Run = Annotated[str, typer.Argument(help="Name of the run, as list shows it.", metavar="RUN")]
Epsilon = Annotated[float, typer.Option(help="Of all runs on the data together.")]
Delta = Annotated[float, typer.Option(help="Below one over the number of examples.")]
Unit = Annotated[str, typer.Option(help="What is protected, such as customer.", metavar="WORD")]
LedgerPath = Annotated[
    Path | None,
    path_option(
        "--ledger",
        help="Ledger of the run: what it has not released is given back.",
        show_default="none, and all that the run has reserved is spent",
    ),
]
Reason = Annotated[
    str, typer.Option(help="Why the run ended early, a reason that is independent of the data.", show_default="none")
]

budget = typer.Typer(
    help="Make the budget of a data set, from which all runs on it draw; show it; end runs that were killed."
)
app.add_typer(budget, name="budget")


@budget.command("open")
def open_budget(file: File, *, epsilon: Epsilon, delta: Delta, unit: Unit = "example") -> None:
    """Make the budget of a data set; one that is there must have these numbers."""
    from torch_privacy.privacy import Budget

    Budget.open(file, epsilon=epsilon, delta=delta, unit=unit)
    _say_drawn(file)


def _say_drawn(file: Path) -> None:
    """Says in one line what the budget allows, and what is drawn from it."""
    from torch_privacy.privacy.budget_file import state_in
    from torch_privacy.privacy.rounding import round_up, short

    state = state_in(file)
    drawn = round_up(state.as_json()["epsilon_drawn"])
    say(f"{file}: epsilon {state.epsilon:g} at delta = {short(state.delta)}, of which at most {drawn} is drawn.")


@budget.command()
def status(file: File, as_json: AsJson = False) -> None:
    """Show how much of a budget is drawn. The file is only read."""
    from torch_privacy.privacy.budget_file import state_in
    from torch_privacy.privacy.rounding import round_up, short
    from torch_privacy.support.units import ONE_EXAMPLE, plural

    state = state_in(file)
    content = state.as_json()
    number = state.data.get("num_examples")
    items = f"{plural(state.unit)}, their number is not shown" if number is None else f"{number} {plural(ONE_EXAMPLE)}"
    broken = content.get("num_not_private", 0)
    lines = [
        ("budget", f"epsilon {state.epsilon:g} at delta = {short(state.delta)}"),
        ("protects", state.neighboring_relation.words(state.unit)),
        ("drawn", f"epsilon at most {round_up(content['epsilon_drawn'])}"),
        ("runs", f"{content['num_runs']}, of which {content['num_unsettled']} have not ended"),
        *([("NOT PRIVATE", f"{broken} of them: what they have drawn says nothing; see list")] if broken else []),
        ("next run", "declared in advance" if state.is_open else "may be chosen from outcomes of earlier runs"),
        ("data", items if state.data else "not bound yet: the first run binds them"),
    ]
    print_result(content, lines, as_json)


@budget.command("list")
def list_runs(file: File, as_json: AsJson = False) -> None:
    """List the runs that draw from a budget. The file is only read."""
    from torch_privacy.privacy.budget_file import state_in
    from torch_privacy.privacy.events.base import releases_to_json
    from torch_privacy.privacy.rounding import round_up

    runs, lines = [], []
    for run in state_in(file).runs:
        how = "declared in advance" if run.share is None else f"{round_up(100 * run.share, 2)} % of the budget"
        warning = f"; {run.warning}" if run.warning else ""
        lines.append((run.run, f"{run.status}, {how}, {run.date}: {run.what}{warning}"))
        known = {name: getattr(run, name) for name in ("run", "what", "ledger", "date", "status", "share", "reason")}
        known |= {"warning": run.warning} if run.warning else {}
        runs.append({**known, "releases": releases_to_json(run.releases)})
    print_result({"runs": runs}, lines, as_json)


@budget.command()
def settle(file: File, run: Run, ledger: LedgerPath = None, reason: Reason = "") -> None:
    """End a run that was killed and will not be resumed.

    With its ledger, and a reason that is independent of the data, what it has not released is given back.
    """
    from torch_privacy.privacy import Budget, Ledger

    opened = Budget.open(file)
    if ledger is None:
        opened.settle(run, reason=reason)
        _say_drawn(file)
        return
    found = Ledger.load(ledger)  # refused while the run has it
    try:
        opened.settle_from(run, found, reason=reason)
    finally:
        found.close()
    _say_drawn(file)
