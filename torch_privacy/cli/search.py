# SPDX-License-Identifier: Apache-2.0
"""Provides ``search``, which chooses settings on stand-in data or, at a price, on the private data."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from torch_privacy.cli._options import Chosen, with_options
from torch_privacy.cli._shared import CommandOutput, RunPath, app, naming, path_option, print_result, say
from torch_privacy.cli.own_table import is_table
from torch_privacy.cli.processes import Processes
from torch_privacy.cli.train import KNOWN, train_in
from torch_privacy.experiments.task import Settings
from torch_privacy.support.units import dated

Name = Annotated[str, typer.Argument(help=f"What to train: {KNOWN}.", metavar="EXPERIMENT", show_default=False)]
Where = Annotated[
    Literal["synthetic", "public", "private"],
    typer.Option("--on", help="Data on which settings are compared; on private data the choice costs epsilon."),
]
StandIn = Annotated[Path | None, path_option(help="Public data in the same format, for --on public.", metavar="DIR")]
Tries = Annotated[
    int | None, typer.Option(help="Number of combinations to try, drawn at random.", show_default="all of them")
]
Projections = Annotated[
    int, typer.Option(help="Random projections by which norms are estimated on stand-in data; 0 for exact norms.")
]
Train = Annotated[bool, typer.Option("--train/--no-train", help="Then train with the best settings on private data.")]
BudgetPath = Annotated[
    Path | None,
    path_option(
        "--budget",
        help="Budget of the data, for --on private: a search that does not fit is refused.",
        show_default="none",
    ),
]
FIXED = "noise_multiplier", "target_epsilon", "delta", "epochs", "seed", "data"  # settings that all tries share


@dataclass(frozen=True)
class Compared:
    """The data on which settings are compared."""

    on: Where = "synthetic"
    stand_in: StandIn = None


@dataclass(frozen=True)
class Tried:
    """The values to try."""

    learning_rate: Annotated[list[float] | None, typer.Option(help="A step length; repeatable.")] = None
    clip_norm: Annotated[list[float] | None, typer.Option(help="A bound on gradients; repeatable.")] = None
    expected_batch_size: Annotated[
        list[int] | None, typer.Option("--batch-size", help="A mean batch size; repeatable.")
    ] = None


@dataclass(frozen=True)
class Runs:
    """The runs of a search on the private data."""

    mean_runs: Annotated[
        float, typer.Option(help="Expected number of runs on private data; the number itself is secret.")
    ] = 10.0
    distribution: Annotated[
        Literal["logarithmic", "geometric", "poisson"],
        typer.Option("--stopping", help="Law of the number of private runs."),
    ] = "logarithmic"
    score_noise: Annotated[
        float, typer.Option(help="Noise on the count that ranks runs on private data; standard deviation in examples.")
    ] = 10.0


@app.command()
@with_options
def search(
    *,
    experiment: Name,
    compared: Compared,
    tried: Tried,
    tries: Tries = None,
    projections: Projections = 3,
    runs: Runs,
    then_train: Train = True,
    chosen: Annotated[dict[str, Any], Chosen(Settings, FIXED)],
    budget: BudgetPath = None,
    run: RunPath = None,
    output: CommandOutput,
) -> None:
    """Choose learning rate, clip norm and batch size, and train with them.

    On synthetic or public data the search costs no privacy, and a private training with the best settings follows. On
    private data every try is a private training; their number is secret, only the best is released, and epsilon covers
    the whole search.
    """
    if is_table(experiment):
        raise ValueError(
            f"search: {experiment} is a table, and the command searches with experiments alone. train takes a table, "
            "with settings chosen for its size; docs/sklearn.md has a private search on rows of your own."
        )
    values = {name: given for name, given in asdict(tried).items() if given}
    if not values:
        raise ValueError("search: give values to try, as in --learning-rate 0.1 --learning-rate 0.3 --clip-norm 1.")
    if (compared.on == "public") != (compared.stand_in is not None):
        raise ValueError("search: --on public needs --stand-in DIR, and nothing else does.")
    if budget is not None and compared.on != "private":
        raise ValueError("search: --budget is for --on private; on other data the choice costs nothing.")
    if {"noise_multiplier", "target_epsilon"} <= chosen.keys():
        raise ValueError("search: --noise-multiplier and --epsilon exclude each other; give one of them.")
    fixed = {name: value for name, value in chosen.items() if name != "data"}
    folder = run or Path("runs") / dated(f"search-{experiment}")
    from torch_privacy.experiments.search import grid

    candidates = grid(values, tries, chosen.get("seed", 0))
    if compared.on == "private":
        _search_privately(folder, experiment, candidates, asdict(runs) | chosen, budget, output)
        return
    public = None if compared.stand_in is None else str(compared.stand_in.absolute())
    best, content = _try(experiment, candidates, projections, public, fixed, quiet=output.silent)
    if not then_train or not output.as_json:
        print_result(content, _lines(content), output.as_json)
    if then_train and content["score"] is None:
        raise ValueError("search: no setting has a finite score, so nothing was trained. Try smaller learning rates.")
    if then_train:
        train_in(folder, experiment, chosen | best, output, Processes(), {"search": content})


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
    from torch_privacy.privacy.summary import finite_or_none

    trials = []
    for trial in on_stand_in(experiment, candidates, projections=projections, folder=folder, **fixed):
        trials.append(trial)
        if not quiet:
            say(f"{len(trials)} of {len(candidates)}: {_words(trial.candidate)}: {trial.score:.4f}")
    best = best_of(trials)
    tried = [{"settings": trial.candidate, "score": finite_or_none(trial.score)} for trial in trials]
    return best.candidate, {"tried": tried, "chosen": best.candidate, "score": finite_or_none(best.score)}


def _search_privately(
    folder: Path,
    experiment: str,
    candidates: list[dict[str, Any]],
    settings: dict[str, Any],
    budget: Path | None,
    output: CommandOutput,
) -> None:
    from torch_privacy.experiments.private_search import PrivateSearch
    from torch_privacy.privacy import Budget
    from torch_privacy.privacy.rounding import round_down, round_up, short
    from torch_privacy.runs.folder import RunFolder

    place = RunFolder(folder)
    place.check_new()
    job = PrivateSearch(experiment, candidates, **settings)
    if not output.silent:
        say(f"searching among {len(candidates)} settings; the number of runs is secret, so no progress is shown")
    with naming(folder):
        results = job.run(place, None if budget is None else Budget.open(budget))
    low, high = (results["epsilon"][side] for side in ("low", "high"))
    lines = [
        ("chosen", _words(results["chosen"])),
        ("score, with noise", f"{100 * results['noisy_score']:.2f} %"),
        (f"epsilon of the search at delta = {short(results['delta'])}", f"[{round_down(low)}, {round_up(high)}]"),
        ("model and statement", str(folder)),
    ]
    print_result({**results, "run": str(folder)}, lines, output.as_json)


def _lines(content: dict[str, Any]) -> list[tuple[str, str]]:
    score = "none is finite" if content["score"] is None else f"{content['score']:.4f} on stand-in data"
    return [("chosen", _words(content["chosen"])), ("score", score)]


def _words(candidate: dict[str, Any]) -> str:
    return ", ".join(
        f"{name.replace('expected_', '').replace('_', ' ')} {value:g}" for name, value in candidate.items()
    )
