# SPDX-License-Identifier: Apache-2.0
"""Provides ``train``, which starts or resumes one private training in a run folder."""

from contextlib import closing
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
from torch_privacy.cli.signals import DeferredSignals
from torch_privacy.experiments import TRAININGS

KNOWN = ", ".join(TRAININGS)

# The options have no defaults here, since every experiment has its own (torch_privacy/experiments).
Name = Annotated[str | None, typer.Argument(help=f"What to train: {KNOWN}.", metavar="EXPERIMENT", show_default=False)]
TrainNoise = Annotated[
    float | None,
    typer.Option(help="Noise's standard deviation over the clip norm; no unit, above 0.", show_default="adult: 0.55"),
]
TrainTarget = Annotated[
    float | None,
    typer.Option(help="Epsilon that is never exceeded, no unit: calibrates the noise, in place of --noise-multiplier."),
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
        help="Passes over the data, on average; gives epochs x n / batch size steps, rounded.",
        show_default="adult: 18",
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
    run: RunPath = None,
    resume: ResumePath = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train privately on real data; write a folder with the model, its privacy statement and a report.

    After Ctrl-C, --resume continues the run.
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
    chosen = {name: value for name, value in options.items() if value is not None}
    if resume is not None:
        check_alone("train", experiment, run, *chosen)
        train_in(resume, None, {}, quiet=quiet, as_json=as_json)
        return
    if experiment is None:
        raise ValueError(f"train: name an experiment ({KNOWN}), or continue a run with --resume FOLDER.")
    if {"noise_multiplier", "target_epsilon"} <= chosen.keys():
        raise ValueError("train: --noise-multiplier and --epsilon exclude each other; give one of them.")
    folder = run or Path("runs") / f"{experiment}-{datetime.now():%Y%m%d-%H%M%S}"
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
        from torch_privacy.experiments.runner import Run
        from torch_privacy.privacy.summary import privacy_lines
        from torch_privacy.runs.table import score_lines

        with (
            naming(folder),
            saying_warnings(),
            closing(Run.resume(folder) if experiment is None else Run.start(folder, experiment, **chosen)) as job,
        ):
            if not run_to_end(job, signals, silent=quiet or as_json):
                say(f"stopped after step {job.training.step_count} of {job.training.settings.num_steps}; continue with")
                say(f"  torch-privacy train --resume {folder}")
                raise typer.Exit(128 + (signals.received or 0))
            results = job.finish()
    lines = [*score_lines(results), *privacy_lines(job.summary()), ("report", str(job.folder.report))]
    print_result({**results, "run": str(folder), **(more or {})}, lines, as_json)
