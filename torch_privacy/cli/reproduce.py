# SPDX-License-Identifier: Apache-2.0
"""Provides ``reproduce``, which lists the experiments of the papers or runs one of them."""

import os
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from torch_privacy.cli._options import with_options
from torch_privacy.cli._shared import (
    CommandOutput,
    ResumePath,
    RunPath,
    app,
    check_alone,
    naming,
    path_option,
    print_result,
    say,
    saying_preparations,
)
from torch_privacy.cli.processes import Processes, again, num_launched, to_resume
from torch_privacy.cli.signals import ONCE_MORE, DeferredSignals
from torch_privacy.experiments import EXPERIMENTS
from torch_privacy.runs.table import duration
from torch_privacy.support.units import dated

Name = Annotated[
    str | None,
    typer.Argument(help="Experiment to run; without it, all are listed.", metavar="EXPERIMENT", show_default=False),
]
MAX_SEEDS = 1000


def _seeds(text: str) -> list[int]:
    """Parses ``0``, ``0,3,7`` or ``0-4``."""
    try:
        ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
        if sum(part[-1] - part[0] for part in ends) > MAX_SEEDS:
            raise typer.BadParameter(f"{text!r} names more than {MAX_SEEDS} seeds, and each takes a run")
        seeds = [seed for part in ends for seed in range(part[0], part[-1] + 1)]
        if not seeds or any(len(part) > 2 for part in ends) or len(set(seeds)) < len(seeds):
            raise ValueError
    except ValueError:
        raise typer.BadParameter(f"{text!r} must be a seed, or several as in 0,3,7 or 0-4") from None
    return seeds


@dataclass(frozen=True)
class Request:
    """Holds which rows of an experiment to make, and how."""

    quick: Annotated[bool, typer.Option("--quick", help="Run a smaller version, in less than three minutes.")] = False
    seeds: Annotated[
        Any,
        typer.Option(
            "--seed", "--seeds", parser=_seeds, metavar="SEEDS",
            help="Public seeds, one run for each: 3, or 0,3,7, or 0-4.", show_default="0",
        ),
    ] = None  # fmt: skip
    only: Annotated[
        list[str] | None,
        typer.Option(help="Rows to run, such as 'JL*'; may be repeated.", metavar="ROW", show_default="all"),
    ] = None
    skip: Annotated[
        list[str] | None,
        typer.Option(
            help="Rows to leave out, such as 'trained*'; may be repeated.", metavar="ROW", show_default="none"
        ),
    ] = None
    data: Annotated[
        Path | None, path_option(help="Folder of data sets.", metavar="DIR", show_default="$TORCH_PRIVACY_DATA")
    ] = None

    @property
    def is_empty(self) -> bool:
        """True if none of these options was given."""
        return not any([self.quick, self.seeds, self.only, self.skip, self.data])

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `Reproduction.start`."""
        return {
            "quick": self.quick,
            "seeds": self.seeds or [0],
            "data": None if self.data is None else str(self.data.absolute()),
            "only": self.only or (),
            "skip": self.skip or (),
        }


@app.command()
@with_options
def reproduce(
    context: typer.Context,
    *,
    experiment: Name = None,
    request: Request,
    run: RunPath = None,
    resume: ResumePath = None,
    output: CommandOutput,
) -> None:
    """Reproduce a table or figure of a paper, and show the paper's numbers beside ours.

    Without a name it lists all experiments. After Ctrl-C, --resume continues the run.
    """
    if resume is not None:
        check_alone("reproduce", experiment, run, None if request.is_empty else request)
        _reproduce_in(resume, None, {}, output, context.ensure_object(Processes))
        return
    if experiment is None:
        if run is not None or not request.is_empty:
            raise ValueError("reproduce: name an experiment for these options; without them it lists all.")
        from torch_privacy_papers.catalog import as_json as listed

        print_result({"experiments": listed()}, _listed(), output.as_json)
        return
    if to_resume("reproduce", run):
        assert run is not None
        _reproduce_in(run, None, {}, output, context.ensure_object(Processes))
        return
    folder = run or Path("runs") / dated(f"{experiment}{'-quick' * request.quick}")
    _reproduce_in(folder, experiment, request.arguments(), output, context.ensure_object(Processes))


def _listed() -> Group:
    """Returns a table of experiments by paper: what each shows, its data, and its running times."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("experiment", no_wrap=True)
    table.add_column("what it shows", ratio=1)
    table.add_column("data")
    table.add_column("quick", justify="right", no_wrap=True)
    table.add_column("full", justify="right", no_wrap=True)
    for paper, ours in groupby(EXPERIMENTS.values(), lambda experiment: experiment.paper):
        table.add_row()
        table.add_row("", f"{paper.title}, {paper.authors}", style="bold")
        for experiment in ours:
            times = (duration(seconds) for seconds in (experiment.quick_seconds, experiment.seconds))
            shows = f"{experiment.place}: {experiment.shows}"
            table.add_row(experiment.name, shows, experiment.data or "-", *times)
    hint = "torch-privacy reproduce NAME runs one; times are for one seed on two CPU cores"
    return Group(table, Text(), Text(hint))


def _reproduce_in(
    folder: Path, name: str | None, request: dict[str, Any], output: CommandOutput, processes: Processes
) -> None:
    """Starts a run of an experiment, or resumes one if ``name`` is None, and finishes it unless a signal stops it."""
    # Set before torch is loaded: its profiler would warn about memory from before every measurement.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with DeferredSignals(ONCE_MORE) as signals:
        from torch_privacy.cli.tables import results_view
        from torch_privacy_papers.reproduction import Reproduction

        silent, count = output.silent, num_launched()
        with (
            naming(folder, f"{again()} reproduce --resume"),
            saying_preparations(silent=silent),
            closing(
                Reproduction.resume(folder, num_processes=count)
                if name is None
                else Reproduction.start(folder, name, **request, num_processes=count)
            ) as work,
        ):
            jobs = work.unfinished()
            for number, job in enumerate(jobs, 1):
                heading = f"{work.experiment.name}, {number} of {len(jobs)}: {job.title}"
                _do(work, job, processes, signals, "" if silent else heading)
                if signals.received:
                    say(f"stopped; continue with\n  {again()} reproduce --resume {folder}")
                    raise typer.Exit(128 + signals.received)
            results = work.finish()
    print_result({**results, "run": str(folder)}, results_view(results, str(work.folder.report)), output.as_json)


def _do(work: Any, job: Any, processes: Processes, signals: DeferredSignals, heading: str) -> None:
    """Does one row, until it ends or a signal stops it; silently if the heading is empty."""
    from torch_privacy.cli.progress import run_to_end
    from torch_privacy.runs.rows import Computation

    if isinstance(job.row, Computation):
        if heading:
            say(heading)
        work.compute(job)
        return
    with processes.open_run(*work.beginning(job)) as training:
        if heading:  # only after the data were found
            say(heading)
        if run_to_end(training, signals, silent=not heading):
            training.finish()
