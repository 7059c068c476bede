# SPDX-License-Identifier: Apache-2.0
"""The command ``torch-privacy``: parses, calls the library, prints. Only ``train`` and ``explain`` wait for torch."""

import errno
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from typer.exceptions import TyperException

from torch_privacy._signals import DeferredSignals
from torch_privacy.experiments import EXPERIMENTS

PROBLEM = 1
USER_MISTAKE = 2
KNOWN = ", ".join(EXPERIMENTS)

app = typer.Typer(
    name="torch-privacy",
    help="Differentially private deep learning with a certified epsilon.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

OPTIONS = {  # names that differ between library and command
    "target_epsilon": "--epsilon",
    "expected_batch_size": "--batch-size",
    "num_steps": "--steps",
    **{
        name: f"--{name.replace('_', '-')}"
        for name in (
            "noise_multiplier", "sampling_probability", "delta", "learning_rate", "clip_norm", "epochs", "hidden_units",
            "seed", "alpha",
        )
    },
}  # fmt: skip


def _folder(text: str) -> Path:
    """A path as given; the empty one, which would be the current folder, is refused."""
    if not text:
        raise typer.BadParameter("it is empty; name a folder")
    return Path(text)


Noise = Annotated[float, typer.Option(help="Noise's standard deviation over the sensitivity; no unit, above 0.")]
Probability = Annotated[float, typer.Option(help="Chance of an example to join a step, batch size / n; in (0, 1].")]
Steps = Annotated[int, typer.Option(help="Number of noisy steps: epochs / sampling probability, an integer.")]
Delta = Annotated[float, typer.Option(help="Delta of (epsilon, delta), a probability; well below 1/n for n examples.")]
Target = Annotated[float, typer.Option(help="Epsilon that is never exceeded; no unit, above 0.")]
Alphas = Annotated[
    list[float] | None,
    typer.Option(help="False positive rate in [0, 1]; repeatable.", show_default="0.001 0.01 0.05 0.1 0.2 0.5"),
]


def _picture(text: str) -> Path:
    """A file to draw into, its format known."""
    if Path(text).suffix.lower() not in PICTURES:
        raise typer.BadParameter(f"{text!r} must end in {', '.join(PICTURES)}")
    return Path(text)


PICTURES = (".svg", ".png", ".pdf")
Plot = Annotated[
    Path | None,
    typer.Option(
        parser=_picture,
        help="Also draw a picture into this file: .svg, .png or .pdf.",
        metavar="FILE",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@app.command()
def epsilon(
    noise_multiplier: Noise,
    sampling_probability: Probability,
    steps: Steps,
    delta: Delta = 1e-5,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Epsilon of a private training, as a certified bracket, beside what other accountants say.

    Poisson sampling; neighboring data sets differ by one example, added or removed.
    """
    from torch_privacy.summary import privacy_lines, summarize

    _check_steps("epsilon", steps)
    summary = summarize(noise_multiplier, sampling_probability, steps, delta)
    if plot is not None:
        from torch_privacy import _pictures, privacy

        mark = _pictures.epsilon_mark(privacy.Bracket(summary.epsilon_low, summary.epsilon_high), delta)
        _draw(_pictures.profile_picture(noise_multiplier, sampling_probability, steps, mark), plot)
    _print(summary.as_json(), privacy_lines(summary), as_json)


@app.command()
def delta(
    epsilon: Annotated[float, typer.Option(help="Epsilon at which to ask, a number of either sign; no unit.")],
    noise_multiplier: Noise,
    sampling_probability: Probability,
    steps: Steps,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Delta of a private training at an epsilon, as a certified bracket."""
    from torch_privacy import privacy
    from torch_privacy.summary import compose_steps, delta_lines

    _check_steps("delta", steps)
    setting = noise_multiplier, sampling_probability, steps
    bracket = compose_steps(*setting).delta(epsilon)
    if plot is not None:
        from torch_privacy import _pictures

        _draw(_pictures.profile_picture(*setting, _pictures.delta_mark(epsilon, bracket)), plot)
    content = {
        "noise_multiplier": noise_multiplier,
        "sampling_probability": sampling_probability,
        "num_steps": steps,
        "epsilon": epsilon,
        "delta": bracket._asdict(),
        "clt": {"delta": privacy.clt(*setting).delta(epsilon), "note": "an approximation, not a bound"},
    }
    _print(content, delta_lines(*setting, epsilon), as_json)


@app.command()
def calibrate(
    epsilon: Target,
    sampling_probability: Probability,
    steps: Steps,
    delta: Delta = 1e-5,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """The smallest noise multiplier whose certified epsilon does not exceed a target."""
    from torch_privacy import privacy
    from torch_privacy.summary import privacy_lines, summarize

    _check_steps("calibrate", steps)
    noise = privacy.calibrate(epsilon, delta, sampling_probability=sampling_probability, num_steps=steps)
    summary = summarize(noise, sampling_probability, steps, delta)
    lines = [("noise multiplier", repr(noise)), ("target epsilon", f"{epsilon:g}"), *privacy_lines(summary)]
    if plot is not None:
        from torch_privacy import _pictures

        _draw(_pictures.calibration_picture(noise, sampling_probability, steps, delta, epsilon), plot)
    _print({"target_epsilon": epsilon, **summary.as_json()}, lines, as_json)


@app.command()
def tradeoff(
    noise_multiplier: Noise,
    sampling_probability: Probability,
    steps: Steps,
    alpha: Alphas = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """What an attacker can do at best: how many members are missed at each rate of false positives."""
    from torch_privacy._display import tradeoff_view
    from torch_privacy.summary import attacker_as_json, attacker_lines, compose_steps, tradeoff_points

    _check_steps("tradeoff", steps)
    profile = compose_steps(noise_multiplier, sampling_probability, steps)
    points = tradeoff_points(profile, alpha or [0.001, 0.01, 0.05, 0.1, 0.2, 0.5])
    attacker = attacker_as_json(profile)
    if plot is not None:
        from torch_privacy import _pictures

        _draw(_pictures.tradeoff_picture(noise_multiplier, sampling_probability, steps), plot)
    _print({"tradeoff": points, **attacker}, tradeoff_view(points, attacker_lines(attacker)), as_json)


@app.command()
def compare(
    noise_multiplier: Noise,
    sampling_probability: Probability,
    steps: Steps,
    delta: Delta = 1e-5,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """What every accountant says of one training, which claims are true, and how long each took.

    dp-accounting and prv-accountant are asked if they are installed.
    """
    from torch_privacy import comparison
    from torch_privacy._display import claims_table

    _check_steps("compare", steps)
    with _quiet_libraries():
        claims = comparison.compare(noise_multiplier, sampling_probability, steps, delta)
    setting = (
        f"{steps:,} steps, noise multiplier {noise_multiplier:.4g}, q = {sampling_probability:.4g}, delta = {delta:g}"
    )
    if plot is not None:
        from torch_privacy import _pictures

        _draw(_pictures.claims_picture(claims, setting), plot)
    content = {"noise_multiplier": noise_multiplier, "sampling_probability": sampling_probability, "num_steps": steps}
    _print({**content, "delta": delta, "claims": comparison.as_json(claims)}, claims_table(claims), as_json)


ModelName = Annotated[
    str,
    typer.Argument(
        help=f"An experiment ({KNOWN}), or package.module:factory, a function that returns (model, loss_fn, batch).",
        metavar="MODEL",
        show_default=False,
    ),
]


@app.command()
def explain(model: ModelName, as_json: AsJson = False) -> None:
    """How the gradients of a model's parameters are bounded and summed, and what training would refuse.

    Nothing is trained. The exit code is 1 if there is a problem.
    """
    from torch_privacy._display import checkup_view
    from torch_privacy._subjects import load_subject
    from torch_privacy.checkup import check

    subject = load_subject(model)
    checkup = check(subject.model, subject.loss_fn, subject.batch)
    _print(checkup.as_json(), checkup_view(checkup, prices=True), as_json)
    raise typer.Exit(0 if checkup.ok else PROBLEM)


# The options of train have no defaults here: what is not given is the experiment's own (torch_privacy/experiments).
Name = Annotated[str | None, typer.Argument(help=f"What to train: {KNOWN}.", metavar="EXPERIMENT", show_default=False)]
TrainNoise = Annotated[
    float | None,
    typer.Option(help="Noise's standard deviation over the clip norm; no unit, above 0.", show_default="0.55"),
]
TrainTarget = Annotated[
    float | None,
    typer.Option(help="Epsilon that is never exceeded, no unit: calibrates the noise; in place of --noise-multiplier."),
]
TrainDelta = Annotated[
    float | None, typer.Option(help="Delta of (epsilon, delta), a probability below 1/n.", show_default="1e-5")
]
BatchSize = Annotated[
    int | None,
    typer.Option(help="Expected batch size, in examples; every step draws its own number.", show_default="256"),
]
LearningRate = Annotated[
    float | None, typer.Option(help="Step length per unit of gradient, above 0.", show_default="0.15")
]
ClipNorm = Annotated[
    float | None, typer.Option(help="Bound on the L2 norm of each example's gradient, in its unit.", show_default="1")
]
Epochs = Annotated[
    float | None,
    typer.Option(
        help="Passes over the data, on average; epochs x n / batch size rounded is the steps.", show_default="18"
    ),
]
HiddenUnits = Annotated[int | None, typer.Option(help="Width of the hidden layer, in units.", show_default="16")]
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
        parser=_folder, help="Folder with adult/a9a.xz or a9a.xz.", metavar="DIR", show_default="the package's copy"
    ),
]
RunPath = Annotated[
    Path | None,
    typer.Option(
        "--run", parser=_folder, help="New folder for the run.", metavar="FOLDER", show_default="runs/NAME-TIME"
    ),
]
ResumePath = Annotated[
    Path | None,
    typer.Option(
        "--resume", parser=_folder, help="Unfinished run's folder, to go on with its settings.", metavar="FOLDER"
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]


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

    Ctrl-C leaves a run that --resume continues.
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
        _check_alone("--resume", experiment, run, *chosen)
        _train_in(resume, None, {}, quiet=quiet, as_json=as_json)
        return
    if experiment is None:
        raise ValueError(f"train: name an experiment ({KNOWN}), or continue a run with --resume FOLDER.")
    if {"noise_multiplier", "target_epsilon"} <= chosen.keys():
        raise ValueError("train: --noise-multiplier and --epsilon exclude each other; give one of them.")
    folder = run or Path("runs") / f"{experiment}-{datetime.now():%Y%m%d-%H%M%S}"
    _train_in(folder, experiment, chosen, quiet=quiet, as_json=as_json)


def _train_in(folder: Path, experiment: str | None, chosen: dict[str, Any], *, quiet: bool, as_json: bool) -> None:
    """Start a run, or resume one if no experiment is named, and see it through or leave it resumable."""
    with DeferredSignals() as signals:
        from torch_privacy._display import TrainingDisplay
        from torch_privacy.experiments.runner import Run
        from torch_privacy.summary import accuracy_lines, privacy_lines

        with (
            _naming(folder),
            closing(Run.resume(folder) if experiment is None else Run.start(folder, experiment, **chosen)) as job,
        ):
            with TrainingDisplay(Console(stderr=True), silent=quiet or as_json) as display:
                for progress in job.steps():
                    display.show(progress, job.epsilon_high)
                    if signals.received:
                        break
            if signals.received:
                job.checkpoint()
                _say(f"stopped after step {job.training.step_count} of {job.training.num_steps}; continue with")
                _say(f"  torch-privacy train --resume {folder}")
                raise typer.Exit(128 + signals.received)
            results = job.finish()
    lines = [*accuracy_lines(results), *privacy_lines(job.summary()), ("report", str(job.folder.report))]
    _print({**results, "run": str(folder)}, lines, as_json)


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """An ``OSError`` that does not say which file it is about, such as a full disk, names the folder."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or isinstance(error, BrokenPipeError):
            raise
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(folder)) from error


def _draw(figure: Any, path: Path) -> None:
    """Write a picture and say so."""
    from torch_privacy.privacy import plots

    with _naming(path):
        plots.save(figure, path)
    _say(f"picture: {path}")


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Other accountants' warnings and logs stay out of the table."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _check_steps(where: str, steps: int) -> None:
    """Raise a ``ValueError`` unless there is a step."""
    from torch_privacy import _check

    _check.whole(where, at_least=1, num_steps=steps)


def _check_alone(option: str, *others: Any) -> None:
    """Raise a ``ValueError`` if anything was given beside an option that stands alone."""
    if any(other is not None for other in others):
        raise ValueError(
            f"train: {option} takes every setting from the run; give no experiment, --run or settings with it."
        )


def _print(content: dict[str, Any], shown: list[tuple[str, str]] | RenderableType, as_json: bool) -> None:
    """Print a result for a program or for people."""
    from torch_privacy._display import lines_table

    if as_json:
        typer.echo(json.dumps(content, indent=2, allow_nan=False))
    else:
        Console(highlight=False).print(lines_table(shown) if isinstance(shown, list) else shown)


def _say(message: str) -> None:
    typer.echo(message, err=True)


def _with_option_names(message: str) -> str:
    """The library's words for what is wrong, with its arguments by the names that they have on the command line."""
    return re.sub(rf"(?<![\w(])({'|'.join(OPTIONS)})=", lambda found: f"{OPTIONS[found[1]]} ", message)


def _complain(message: str) -> int:
    """One line on stderr, and the exit code of a user's mistake."""
    _say(f"torch-privacy: {' '.join(message.split())}")
    return USER_MISTAKE


def run(arguments: list[str]) -> int:
    """The exit code of one command line: 0, 1 if ``explain`` found a problem, 2 after a mistake of the user's, 130 or
    143 when interrupted.
    """
    try:
        return app(arguments, prog_name="torch-privacy", standalone_mode=False) or 0
    except BrokenPipeError:  # as in `torch-privacy tradeoff ... | head -1`
        sys.stdout = None
        return 0
    except TyperException as error:
        return _complain(f"{error.format_message().rstrip('.')}; torch-privacy --help lists what there is.")
    except OSError as error:
        return _complain(f"{error.filename or 'file'}: {error.strerror or error}.")
    except ValueError as error:
        return _complain(_with_option_names(str(error)))
    except OverflowError as error:
        return _complain(f"a number given is too large or too small to compute with ({error}).")
    except (KeyboardInterrupt, typer.Abort):
        return 130


def main() -> None:
    """Entry point of the command."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
