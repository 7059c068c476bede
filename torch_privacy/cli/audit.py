# SPDX-License-Identifier: Apache-2.0
"""Provides ``audit``, which tests by canaries whether the epsilon of a training is believable."""

from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from torch_privacy.cli._shared import AsJson, app, naming, path_option, print_result, say
from torch_privacy.support.units import dated

REJECTED = 1
STOPPED = "stopped-"  # how the ledgers of audits that were stopped begin
USUAL_DELTA = 1e-5
USUAL_SIGNIFICANCE, STRICT_SIGNIFICANCE = 0.05, 1e-6
SCORES = {
    "type": "object",
    "required": ["inside", "outside"],
    "properties": {name: {"type": "array", "items": {"type": "number"}} for name in ("inside", "outside")},
}

Subject = Annotated[
    str | None,
    typer.Argument(
        help="Folder of a run of train, to be repeated with canaries; an experiment; or "
        "package.module:factory, a function that returns (train, dataset) as for torch_privacy.audit.",
        metavar="RUN",
        show_default=False,
    ),
]
Loop = Annotated[
    str | None,
    typer.Option(
        help="Instead of RUN: package.module:function, a training loop of any library as for torch_privacy.audit_loop.",
        metavar="LOOP",
    ),
]
Canaries = Annotated[
    str | None,
    typer.Option(
        help="Number of gradient canaries; or a .npz or .safetensors file with one array for each part of an example.",
        metavar="NUMBER|FILE",
        show_default="1000",
    ),
]
Scores = Annotated[
    Path | None,
    typer.Option(
        help="Own scores, a JSON object with the lists inside and outside, to test the ledger in RUN; trains nothing.",
        metavar="FILE",
    ),
]
HowScored = Annotated[
    str | None,
    typer.Option(
        help="gradient: the attacker sees every release; loss: only the final model.",
        metavar="HOW",
        show_default="gradient",
    ),
]
Significance = Annotated[
    float | None, typer.Option(help="Probability of a false alarm, in (0, 1).", show_default="0.05; 1e-06 with --loop")
]
AuditDelta = Annotated[
    float | None, typer.Option(help="Delta at which epsilon is shown.", show_default="the training's")
]
AuditEpochs = Annotated[
    float | None, typer.Option(help="Passes over the data, on average.", show_default="the training's")
]
Spend = Annotated[
    bool, typer.Option("--spend", help="Train again, which spends the training's epsilon once more on the same data.")
]
AuditOut = Annotated[
    Path | None,
    path_option("--out", help="New folder for ledger, numbers and page.", metavar="FOLDER", show_default="RUN/audit"),
]


@app.command()
def audit(
    run: Subject = None,
    loop: Loop = None,
    canaries: Canaries = None,
    score: HowScored = None,
    significance: Significance = None,
    delta: AuditDelta = None,
    epochs: AuditEpochs = None,
    scores: Scores = None,
    out: AuditOut = None,
    spend: Spend = False,
    as_json: AsJson = False,
) -> None:
    """Test by canaries whether the epsilon of a training is believable.

    With --spend, trains once more, with canaries that fair coins put into the data, and guesses the coins. The exit
    code is 1 if the ledger's claim is rejected. The audited training spends epsilon on the same data, and its model is
    not kept. Without --spend nothing is trained: the command says what the audit would spend.

    With --loop, tests a training loop of any library from outside, on data of the audit's own.
    """
    of_training = {"--canaries": canaries, "--score": score, "--epochs": epochs, "--spend": spend or None}
    if loop is not None:
        others = {"RUN": run, "--delta": delta, "--scores": scores, "--out": out, **of_training}
        _refuse_given("--loop brings data and settings of its own", others)
        _of_loop(loop, significance, as_json)
    if run is None:
        raise ValueError("audit: name a RUN, or a loop of any library by --loop package.module:function.")
    from torch_privacy.runs.report import audit as page

    canaries, score, significance = canaries or "1000", score or "gradient", _given(significance, USUAL_SIGNIFICANCE)
    if scores is not None:
        _refuse_given("--scores are of a training that was made", of_training)
        result = _of_scores(Path(run), scores, significance, delta)
        folder = out
    else:
        folder = out or _default_folder(run)
        if not spend:
            raise ValueError(_price_of(run))
        result = _of_training(run, canaries, score, significance, delta, epochs, folder)
    content = result.as_json()
    lines = page.lines(content)
    if folder is not None:
        from torch_privacy.runs.folder import RunFolder

        files = RunFolder(folder)
        with naming(folder):
            folder.mkdir(parents=True, exist_ok=True)
            files.write_checked(folder / "audit.json", content)
            files.write_report(page.render(content))
        lines.append(("report", str(folder / "report.html")))
    print_result(content, lines, as_json)
    raise typer.Exit(REJECTED if content["rejected"] else 0)


def _given(value: float | None, usual: float) -> float:
    return usual if value is None else value


def _refuse_given(why: str, options: dict[str, Any]) -> None:
    if given := [name for name, value in options.items() if value is not None]:
        raise ValueError(f"audit: {why}. Leave out {', '.join(given)}.")


def _of_loop(loop: str, significance: float | None, as_json: bool) -> NoReturn:
    """Audits a loop of any library, prints the tests, and ends the command."""
    from torch_privacy import audit_loop
    from torch_privacy.cli.subjects import function_named, is_factory

    if not is_factory(loop):
        raise ValueError(f"audit: --loop {loop!r} must be package.module:function.")
    result = audit_loop(function_named("audit", loop), significance=_given(significance, STRICT_SIGNIFICANCE))
    content = result.as_json()
    verdict = "REJECTED: it does not do what it claims" if result.is_rejected else "nothing was found"
    lines = [("loop", verdict), ("p-value, all tests", f"{result.p_value:.2g}")]
    lines += [(test.name, f"p = {test.p_value:.2g}") for test in result.tests]
    print_result(content, lines + [("mistake", text) for text in content["mistakes"]], as_json)
    raise typer.Exit(REJECTED if result.is_rejected else 0)


def _price_of(run: str) -> str:
    """Returns what an audit of this run would spend, in words; refuses what cannot be audited."""
    from torch_privacy.cli.subjects import is_factory
    from torch_privacy.experiments.auditing import subject_of
    from torch_privacy.privacy.rounding import round_up, short
    from torch_privacy.runs.folder import RunFolder

    price = "the epsilon of one more training"
    if not is_factory(run):
        subject_of(run)
        folder = RunFolder(Path(run))
        if folder.results.exists() and "privacy" in (results := folder.read_results()):
            stated = results["privacy"]
            price = f"epsilon {round_up(stated['epsilon']['high'])} at delta = {short(stated['delta'])} once more"
    return (
        f"audit: nothing was trained. An audit trains again, with canaries, on the same data, and spends {price}; that "
        "adds to what they have spent. To do so, add --spend. To spend nothing, test scores of your own with --scores"
    )


def _default_folder(run: str) -> Path:
    return Path(run) / "audit" if Path(run).is_dir() else Path("audits") / dated(run.replace(":", "."))


def _of_training(
    run: str, canaries: str, score: str, significance: float, delta: float | None, epochs: float | None, folder: Path
) -> Any:
    from torch_privacy import audit
    from torch_privacy.cli.subjects import is_factory, made_by
    from torch_privacy.experiments.auditing import audit_experiment, read_canaries, subject_of

    options = {"score": score, "significance": significance, "delta": delta}
    if is_factory(run):
        parts = made_by("audit", run, "(train, dataset)")
        if len(parts) != 2 or not callable(parts[0]) or epochs is not None:
            what = "--epochs, which is the function's own" if epochs is not None else f"{len(parts)} values"
            raise ValueError(f"audit: {run!r} must return (train, dataset), as for torch_privacy.audit; got {what}.")
        return audit(*parts, read_canaries(canaries), **options)
    experiment, settings = subject_of(run)
    _make_room(folder)
    if epochs is not None:
        settings["epochs"] = epochs
    return audit_experiment(experiment, settings, read_canaries(canaries), folder=folder, **options)


def _make_room(folder: Path) -> None:
    """Lets an audit that was stopped be repeated: its ledger, of what it has spent, stays under another name."""
    from torch_privacy.privacy import Ledger
    from torch_privacy.runs.folder import RunFolder

    there = {path.name for path in folder.iterdir()} if folder.is_dir() else {"a file"} if folder.exists() else set()
    stopped, ledger = {name for name in there if name.startswith(STOPPED)}, RunFolder(folder).ledger
    if not there or there == stopped:
        return
    if there - stopped != {ledger.name}:
        raise ValueError(f"{folder}: exists already. Name another folder with --out.")
    kept = folder / f"{STOPPED}{1 + len(stopped)}.jsonl"
    with naming(ledger):
        spent = Ledger.load(ledger)  # refused while another process audits here
        ledger.rename(kept)
        spent.close()
    say(f"torch-privacy: an audit was stopped here after {len(spent)} releases, which {kept} has. They count, too.")


def _of_scores(run: Path, scores: Path, significance: float, delta: float | None) -> Any:
    from torch_privacy.privacy import Ledger
    from torch_privacy.privacy.audit import audit_scores
    from torch_privacy.support.read_file import read_json
    from torch_privacy.support.schema import violation

    path = run / "ledger.jsonl" if run.is_dir() else run
    if not path.exists():
        raise ValueError(f"audit: {str(run)!r} is no ledger, and no folder with one; --scores test a ledger.")
    try:
        content = read_json(scores)
    except ValueError as error:
        raise ValueError(f"{scores}: cannot be read ({error}). Name a JSON file.") from None
    if wrong := violation(SCORES, content):
        raise ValueError(f"{scores}: {wrong}. Give a JSON object with two lists of numbers, inside and outside.")
    ledger = Ledger.read(path)
    inside, outside = content["inside"], content["outside"]
    delta = _given(delta, _delta_of(path.parent))
    return audit_scores(inside, outside, ledger.profile(), significance=significance, delta=delta)


def _delta_of(run: Path) -> float:
    """Returns the delta in the settings of a run; the usual one, if there is none."""
    from torch_privacy.runs.folder import RunFolder

    folder = RunFolder(run)
    given = folder.read_settings().get("delta") if folder.settings.exists() else None
    return _given(given, USUAL_DELTA)
