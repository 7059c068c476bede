# SPDX-License-Identifier: Apache-2.0
"""Provides ``train``, which starts or resumes one private training in a run folder."""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from torch_privacy.cli._shared import (
    AsJson,
    Quiet,
    ResumePath,
    RunPath,
    app,
    check_alone,
    folder_named,
    naming,
    print_result,
    say,
    saying_warnings,
)
from torch_privacy.cli.own_table import (
    Owner,
    PerOwner,
    Schema,
    SchemaShare,
    Target,
    TestShare,
    check_is_experiment,
    is_table,
    settings_of_table,
)
from torch_privacy.cli.processes import again, open_run, to_resume
from torch_privacy.cli.signals import DeferredSignals
from torch_privacy.experiments import OWN_TABLE, TRAININGS

KNOWN = ", ".join(TRAININGS)

# The options have no defaults here, since every experiment has its own (torch_privacy/experiments).
Name = Annotated[
    str | None,
    typer.Argument(
        help=f"A table of your own, a CSV or Parquet file; or an experiment: {KNOWN}.",
        metavar="FILE|EXPERIMENT",
        show_default=False,
    ),
]
TrainNoise = Annotated[
    float | None,
    typer.Option(
        help="Noise's standard deviation over the clip norm; no unit, above 0.", show_default="calibrated to --epsilon"
    ),
]
TrainTarget = Annotated[
    float | None,
    typer.Option(
        help="Epsilon that is never exceeded, no unit: calibrates the noise, in place of --noise-multiplier.",
        show_default="adult: 2",
    ),
]
TrainDelta = Annotated[
    float | None, typer.Option(help="Delta of (epsilon, delta), a probability below 1/n.", show_default="adult: 1e-5")
]
BatchSize = Annotated[
    int | None,
    typer.Option(help="Expected batch size, in examples; every step draws its own size.", show_default="adult: 256"),
]
LearningRate = Annotated[
    float | None, typer.Option(help="Step length per unit of gradient, above 0.", show_default="adult: 0.15")
]
ClipNorm = Annotated[
    float | None,
    typer.Option(help="Bound on the L2 norm of each example's gradient, in its unit.", show_default="adult: 1"),
]
Epochs = Annotated[
    float | None,
    typer.Option(
        help="Passes over the data, on average; gives epochs x n / batch size steps, rounded up.",
        show_default="adult: 12",
    ),
]
HiddenUnits = Annotated[int | None, typer.Option(help="Width of the hidden layer, in units.", show_default="adult: 16")]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Public seed, an integer: data split and first weights; not noise, not batches.", show_default="0"
    ),
]
Baseline = Annotated[
    bool | None,
    typer.Option("--baseline/--no-baseline", help="Also train without privacy, to compare.", show_default="baseline"),
]
Data = Annotated[
    Path | None,
    typer.Option(
        parser=folder_named,
        help="Folder of data sets.",
        metavar="DIR",
        show_default="$TORCH_PRIVACY_DATA",
    ),
]


@app.command()
def train(
    experiment: Name = None,
    noise_multiplier: TrainNoise = None,
    epsilon: TrainTarget = None,
    delta: TrainDelta = None,
    batch_size: BatchSize = None,
    learning_rate: LearningRate = None,
    clip_norm: ClipNorm = None,
    epochs: Epochs = None,
    hidden_units: HiddenUnits = None,
    seed: Seed = None,
    baseline: Baseline = None,
    data: Data = None,
    target: Target = None,
    schema: Schema = None,
    schema_share: SchemaShare = None,
    owner: Owner = None,
    per_owner: PerOwner = None,
    test_share: TestShare = None,
    run: RunPath = None,
    resume: ResumePath = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train privately on a table of your own, or on an experiment's data.

    Writes a folder with the model, its privacy statement and a report. A table needs --target and --epsilon; all other
    settings have defaults for its size. After Ctrl-C, --resume continues the run.
    """
    options = {
        "noise_multiplier": noise_multiplier,
        "target_epsilon": epsilon,
        "delta": delta,
        "expected_batch_size": batch_size,
        "learning_rate": learning_rate,
        "clip_norm": clip_norm,
        "epochs": epochs,
        "hidden_units": hidden_units,
        "seed": seed,
        "baseline": baseline,
        "data": None if data is None else str(data.absolute()),
    }
    of_table = {
        "target": target,
        "schema": None if schema is None else str(schema.absolute()),
        "schema_share": schema_share,
        "owner": owner,
        "per_owner": per_owner,
        "test_share": test_share,
    }
    own = {name: value for name, value in of_table.items() if value is not None}
    chosen = {name: value for name, value in options.items() if value is not None} | own
    if resume is not None:
        check_alone("train", experiment, run, *chosen)
        train_in(resume, None, {}, quiet=quiet, as_json=as_json)
        return
    if experiment is None:
        raise ValueError(
            f"train: name an experiment ({KNOWN}), a table's file, or continue a run with --resume FOLDER."
        )
    if {"noise_multiplier", "target_epsilon"} <= chosen.keys():
        raise ValueError("train: --noise-multiplier and --epsilon exclude each other; give one of them.")
    if to_resume("train", run):
        assert run is not None
        train_in(run, None, {}, quiet=quiet, as_json=as_json)
        return
    name = experiment
    if is_table(experiment):
        chosen, name = settings_of_table(experiment, chosen), Path(experiment).name.partition(".")[0] or OWN_TABLE
        experiment = OWN_TABLE
    else:
        check_is_experiment(experiment, own)
    folder = run or Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    train_in(folder, experiment, chosen, quiet=quiet, as_json=as_json)


def train_in(
    folder: Path,
    experiment: str | None,
    chosen: dict[str, Any],
    *,
    quiet: bool,
    as_json: bool,
    more: dict[str, Any] | None = None,
) -> None:
    """Starts a run, or resumes one if ``experiment`` is None, and finishes it unless a signal stops it.

    ``more`` is added to the results printed as JSON.
    """
    with DeferredSignals() as signals:
        from torch_privacy.cli.progress import run_to_end
        from torch_privacy.privacy.summary import privacy_lines
        from torch_privacy.runs.table import score_lines

        with naming(folder), saying_warnings(), open_run(folder, experiment, chosen) as job:
            if not quiet and not as_json:
                for note in (*job.task.notes, *job.task.exact):
                    say(note)
            if not run_to_end(job, signals, silent=quiet or as_json):
                say(f"stopped after step {job.training.step_count} of {job.training.settings.num_steps}; continue with")
                say(f"  {again()} train --resume {folder}")
                raise typer.Exit(128 + (signals.received or 0))
            results = job.finish()
    lines = [*score_lines(results), *privacy_lines(job.summary()), ("report", str(job.folder.report))]
    if job.experiment == OWN_TABLE:
        lines.append(("to predict other rows", f"torch-privacy predict {folder} FILE"))
    notes = {"notes": list(job.task.notes)} if job.task.notes else {}
    print_result({**results, "run": str(folder), **notes, **(more or {})}, lines, as_json)
