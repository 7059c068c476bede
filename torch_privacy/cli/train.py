# SPDX-License-Identifier: Apache-2.0
"""Provides ``train``, which starts or resumes one private training in a run folder."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from torch_privacy.cli._options import Chosen, with_options
from torch_privacy.cli._shared import (
    CommandOutput,
    ResumePath,
    RunPath,
    app,
    check_alone,
    naming,
    print_result,
    say,
    saying_preparations,
    saying_warnings,
)
from torch_privacy.cli.own_table import check_is_experiment, is_table, settings_of_table
from torch_privacy.cli.processes import Processes, again, to_resume
from torch_privacy.cli.signals import ONCE_MORE, DeferredSignals
from torch_privacy.experiments import OWN_TABLE, TRAININGS
from torch_privacy.experiments.table_settings import TableSettings
from torch_privacy.support.units import dated

KNOWN = ", ".join(TRAININGS)

Name = Annotated[
    str | None,
    typer.Argument(
        help=f"A table of your own, a CSV or Parquet file; or an experiment: {KNOWN}.",
        metavar="FILE|EXPERIMENT",
        show_default=False,
    ),
]
Method = Annotated[
    str | None,
    typer.Option(help="How text-imdb trains: linear, last, lora or full.", metavar="NAME", show_default="linear"),
]

Plan = Annotated[
    bool, typer.Option("--plan", help="Only show what a training on a table would learn and release; costs nothing.")
]


@app.command()
@with_options
def train(
    context: typer.Context,
    *,
    experiment: Name = None,
    chosen: Annotated[dict[str, Any], Chosen(TableSettings)],  # every experiment has its own defaults
    method: Method = None,
    plan: Plan = False,
    run: RunPath = None,
    resume: ResumePath = None,
    output: CommandOutput,
) -> None:
    """Train privately on a table of your own, or on an experiment's data.

    Writes a folder with the model, its privacy statement and a report. A table needs --target and --epsilon; all other
    settings have defaults for its size. After Ctrl-C, --resume continues the run.
    """
    if resume is not None:
        check_alone("train", experiment, run, method, *chosen)
        train_in(resume, None, {}, output, context.ensure_object(Processes))
        return
    if experiment is None:
        raise ValueError(
            f"train: name an experiment ({KNOWN}), a table's file, or continue a run with --resume FOLDER."
        )
    if {"noise_multiplier", "target_epsilon"} <= chosen.keys():
        raise ValueError("train: --noise-multiplier and --epsilon exclude each other; give one of them.")
    if to_resume("train", run):
        assert run is not None
        train_in(run, None, {}, output, context.ensure_object(Processes))
        return
    name = experiment
    if method is not None:
        chosen = {**chosen, "method": method}
    if is_table(experiment):
        chosen, name = settings_of_table(experiment, chosen), Path(experiment).name.partition(".")[0] or OWN_TABLE
        experiment = OWN_TABLE
        if plan:
            from torch_privacy.experiments.own_table import STUDY
            from torch_privacy.experiments.table_plan import plan_lines

            lines = plan_lines(STUDY.settings(**chosen))  # pyright: ignore[reportArgumentType]
            print_result({"plan": dict(lines)}, lines, output.as_json)
            return
    elif plan:
        raise ValueError("train: --plan is for a table of your own; torch-privacy plan compares batches and steps.")
    else:
        check_is_experiment(experiment, chosen)
    folder = run or Path("runs") / dated(name)
    train_in(folder, experiment, chosen, output, context.ensure_object(Processes))


def train_in(
    folder: Path,
    experiment: str | None,
    chosen: dict[str, Any],
    output: CommandOutput,
    processes: Processes,
    more: dict[str, Any] | None = None,
) -> None:
    """Starts a run, or resumes one if ``experiment`` is None, and finishes it unless a signal stops it.

    ``more`` is added to the results printed as JSON.
    """
    with DeferredSignals(ONCE_MORE) as signals:
        from torch_privacy.cli.progress import run_to_end
        from torch_privacy.privacy.summary import privacy_lines
        from torch_privacy.runs.quality import warnings_of
        from torch_privacy.runs.report.table_sections import coefficient_rows
        from torch_privacy.runs.table import score_lines

        resume = f"{again()} train --resume"
        with (
            naming(folder, resume),
            saying_warnings(),
            saying_preparations(silent=output.silent),
            processes.open_run(folder, experiment, chosen) as job,
        ):
            if not output.silent:
                for note in (*job.task.notes, *job.task.exact):
                    say(note)
            if not run_to_end(job, signals, silent=output.silent):
                say(f"stopped after step {job.training.step_count} of {job.training.settings.num_steps}; continue with")
                say(f"  {resume} {folder}")
                raise typer.Exit(128 + (signals.received or 0))
            results = job.finish()
    for warning in warnings_of(results):
        say(f"torch-privacy: {warning}")
    lines = [*score_lines(results), *privacy_lines(job.summary()), ("report", str(job.folder.report))]
    if rows := coefficient_rows(results):
        lines.append(("coefficients", "; ".join(" ".join(filter(None, row)) for row in rows[:10])))
    if job.experiment == OWN_TABLE:
        lines.append(("to predict other rows", f"torch-privacy predict {shlex.quote(str(folder))} FILE"))
    notes = {"notes": list(job.task.notes)} if job.task.notes else {}
    print_result({**results, "run": str(folder), **notes, **(more or {})}, lines, output.as_json)
