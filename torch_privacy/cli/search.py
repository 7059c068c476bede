# SPDX-License-Identifier: Apache-2.0
"""Provides ``search``, which chooses settings on stand-in data or, at a price, on the private data."""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from torch_privacy.cli._shared import AsJson, Quiet, RunPath, app, folder_named, naming, print_result, say
from torch_privacy.cli.train import KNOWN, Data, Epochs, Seed, TrainDelta, TrainNoise, TrainTarget, train_in

Name = Annotated[str, typer.Argument(help=f"What to train: {KNOWN}.", metavar="EXPERIMENT", show_default=False)]
Where = Annotated[
    Literal["synthetic", "public", "private"],
    typer.Option("--on", help="Data on which settings are compared; on private data the choice costs epsilon."),
]
StandIn = Annotated[
    Path | None,
    typer.Option(parser=folder_named, help="Public data in the same format, for --on public.", metavar="DIR"),
]
LearningRates = Annotated[list[float] | None, typer.Option("--learning-rate", help="A step length; repeatable.")]
ClipNorms = Annotated[list[float] | None, typer.Option("--clip-norm", help="A bound on gradients; repeatable.")]
BatchSizes = Annotated[list[int] | None, typer.Option("--batch-size", help="A mean batch size; repeatable.")]
Tries = Annotated[
    int | None, typer.Option(help="Number of combinations to try, drawn at random.", show_default="all of them")
]
Projections = Annotated[
    int, typer.Option(help="Random projections by which norms are estimated on stand-in data; 0 for exact norms.")
]
MeanRuns = Annotated[float, typer.Option(help="Expected number of runs on private data; the number itself is secret.")]
Stopping = Annotated[
    Literal["logarithmic", "geometric", "poisson"],
    typer.Option(help="Law of the number of private runs."),
]
ScoreNoise = Annotated[
    float, typer.Option(help="Noise on the count that ranks runs on private data; standard deviation in examples.")
]
Train = Annotated[bool, typer.Option("--train/--no-train", help="Then train with the best settings on private data.")]


@app.command()
def search(
    experiment: Name,
    on: Where = "synthetic",
    stand_in: StandIn = None,
    learning_rate: LearningRates = None,
    clip_norm: ClipNorms = None,
    batch_size: BatchSizes = None,
    tries: Tries = None,
    projections: Projections = 3,
    mean_runs: MeanRuns = 10.0,
    stopping: Stopping = "logarithmic",
    score_noise: ScoreNoise = 10.0,
    then_train: Train = True,
    noise_multiplier: TrainNoise = None,
    epsilon: TrainTarget = None,
    delta: TrainDelta = None,
    epochs: Epochs = None,
    seed: Seed = None,
    data: Data = None,
    run: RunPath = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Choose learning rate, clip norm and batch size, and train with them.

    On synthetic or public data the search costs no privacy, and a private training with the best settings follows. On
    private data every try is a private training; their number is secret, only the best is released, and epsilon covers
    the whole search.
    """
    tried = {"learning_rate": learning_rate, "clip_norm": clip_norm, "expected_batch_size": batch_size}
    if not any(tried.values()):
        raise ValueError("search: give values to try, as in --learning-rate 0.1 --learning-rate 0.3 --clip-norm 1.")
    if (on == "public") != (stand_in is not None):
        raise ValueError("search: --on public needs --stand-in DIR, and nothing else does.")
    if noise_multiplier is not None and epsilon is not None:
        raise ValueError("search: --noise-multiplier and --epsilon exclude each other; give one of them.")
    options = {
        "noise_multiplier": noise_multiplier, "target_epsilon": epsilon, "delta": delta, "epochs": epochs, "seed": seed,
    }  # fmt: skip
    fixed = {name: value for name, value in options.items() if value is not None}
    private = {} if data is None else {"data": str(data.absolute())}
    folder = run or Path("runs") / f"search-{experiment}-{datetime.now():%Y%m%d-%H%M%S}"
    from torch_privacy.experiments.search import grid

    candidates = grid({name: values for name, values in tried.items() if values}, tries, seed or 0)
    if on == "private":
        runs = {"mean_runs": mean_runs, "distribution": stopping, "score_noise": score_noise}
        _search_privately(folder, experiment, candidates, runs | fixed | private, quiet=quiet, as_json=as_json)
        return
    public = None if stand_in is None else str(stand_in.absolute())
    best, content = _try(experiment, candidates, projections, public, fixed, quiet=quiet or as_json)
    if not then_train:
        print_result(content, _lines(content), as_json)
        return
    if not as_json:
        print_result(content, _lines(content), as_json)
    train_in(folder, experiment, fixed | best | private, quiet=quiet, as_json=as_json, more={"search": content})


def _try(
    experiment: str,
    candidates: list[dict[str, Any]],
    projections: int,
    folder: str | None,
    fixed: dict[str, Any],
    *,
    quiet: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the best candidate on stand-in data, and all candidates with their scores."""
    from torch_privacy.experiments.search import best_of, on_stand_in

    trials = []
    for trial in on_stand_in(experiment, candidates, projections=projections, folder=folder, **fixed):
        trials.append(trial)
        if not quiet:
            say(f"{len(trials)} of {len(candidates)}: {_words(trial.candidate)}: {trial.score:.4f}")
    best = best_of(trials)
    tried = [{"settings": trial.candidate, "score": _finite(trial.score)} for trial in trials]
    return best.candidate, {"tried": tried, "chosen": best.candidate, "score": _finite(best.score)}


def _search_privately(
    folder: Path,
    experiment: str,
    candidates: list[dict[str, Any]],
    settings: dict[str, Any],
    *,
    quiet: bool,
    as_json: bool,
) -> None:
    from torch_privacy.experiments.private_search import PrivateSearch
    from torch_privacy.privacy.rounding import round_down, round_up
    from torch_privacy.runs.folder import RunFolder

    place = RunFolder(folder)
    place.check_new()
    job = PrivateSearch(experiment, candidates, **settings)
    if not quiet and not as_json:
        say(f"searching among {len(candidates)} settings; the number of runs is secret, so no progress is shown")
    with naming(folder):
        results = job.run(place)
    low, high = (results["epsilon"][side] for side in ("low", "high"))
    lines = [
        ("chosen", _words(results["chosen"])),
        ("score, with noise", f"{100 * results['noisy_score']:.2f} %"),
        (f"epsilon of the search at delta = {results['delta']:g}", f"[{round_down(low)}, {round_up(high)}]"),
        ("model and statement", str(folder)),
    ]
    print_result({**results, "run": str(folder)}, lines, as_json)


def _lines(content: dict[str, Any]) -> list[tuple[str, str]]:
    score = "none is finite" if content["score"] is None else f"{content['score']:.4f} on stand-in data"
    return [("chosen", _words(content["chosen"])), ("score", score)]


def _words(candidate: dict[str, Any]) -> str:
    return ", ".join(
        f"{name.replace('expected_', '').replace('_', ' ')} {value:g}" for name, value in candidate.items()
    )


def _finite(score: float) -> float | None:
    return score if abs(score) < float("inf") else None
