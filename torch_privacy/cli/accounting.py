# SPDX-License-Identifier: Apache-2.0
"""Provides ``epsilon``, ``delta``, ``calibrate``, ``tradeoff`` and ``compare``: accounting, without torch."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from torch_privacy.cli._shared import AsJson, app, naming, print_result, say

Noise = Annotated[float, typer.Option(help="Noise's standard deviation over the sensitivity; no unit, above 0.")]
Probability = Annotated[float, typer.Option(help="Chance that an example joins a step, batch size / n; in (0, 1].")]
Steps = Annotated[int, typer.Option(help="Number of noisy steps: epochs / sampling probability, an integer.")]
Delta = Annotated[float, typer.Option(help="Delta of (epsilon, delta), a probability; well below 1/n for n examples.")]
Target = Annotated[float, typer.Option(help="Epsilon that is never exceeded; no unit, above 0.")]
Alphas = Annotated[
    list[float] | None,
    typer.Option(help="False positive rate in [0, 1]; repeatable.", show_default="0.001 0.01 0.05 0.1 0.2 0.5"),
]


def _figure_path(text: str) -> Path:
    """Returns the path of a figure; refuses an unknown format."""
    if Path(text).suffix.lower() not in PICTURES:
        raise typer.BadParameter(f"{text!r} must end in {', '.join(PICTURES)}")
    return Path(text)


PICTURES = (".svg", ".png", ".pdf")
Plot = Annotated[
    Path | None,
    typer.Option(
        parser=_figure_path,
        help="Also draw a figure into this file: .svg, .png or .pdf.",
        metavar="FILE",
        show_default=False,
    ),
]


@app.command()
def epsilon(
    noise_multiplier: Noise,
    sampling_probability: Probability,
    steps: Steps,
    delta: Delta = 1e-5,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Print epsilon of a private training as a certified interval, beside the values of other accountants.

    Poisson sampling; neighboring data sets differ by one example, added or removed.
    """
    from torch_privacy.privacy.summary import equal_releases, privacy_lines, summarize

    _check_steps("epsilon", steps)
    summary = summarize(equal_releases(noise_multiplier, sampling_probability, steps), delta)
    if plot is not None:
        from torch_privacy import privacy
        from torch_privacy.report import accounting_plots

        mark = accounting_plots.epsilon_mark(privacy.Bracket(summary.epsilon_low, summary.epsilon_high), delta)
        _draw(accounting_plots.profile_figure(noise_multiplier, sampling_probability, steps, mark), plot)
    print_result(summary.as_json(), privacy_lines(summary), as_json)


@app.command()
def delta(
    epsilon: Annotated[float, typer.Option(help="Epsilon at which to ask, a number of either sign; no unit.")],
    noise_multiplier: Noise,
    sampling_probability: Probability,
    steps: Steps,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Print delta of a private training at an epsilon, as a certified interval."""
    from torch_privacy import privacy
    from torch_privacy.privacy.summary import compose_steps, delta_lines

    _check_steps("delta", steps)
    setting = noise_multiplier, sampling_probability, steps
    bracket = compose_steps(*setting).delta(epsilon)
    if plot is not None:
        from torch_privacy.report import accounting_plots

        _draw(accounting_plots.profile_figure(*setting, accounting_plots.delta_mark(epsilon, bracket)), plot)
    content = {
        "noise_multiplier": noise_multiplier,
        "sampling_probability": sampling_probability,
        "num_steps": steps,
        "epsilon": epsilon,
        "delta": bracket._asdict(),
        "clt": {"delta": privacy.clt(*setting).delta(epsilon), "note": "an approximation, not a bound"},
    }
    print_result(content, delta_lines(*setting, epsilon), as_json)


@app.command()
def calibrate(
    epsilon: Target,
    sampling_probability: Probability,
    steps: Steps,
    delta: Delta = 1e-5,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Print the smallest noise multiplier with a certified epsilon of at most a target."""
    from torch_privacy import privacy
    from torch_privacy.privacy.summary import equal_releases, privacy_lines, summarize

    _check_steps("calibrate", steps)
    noise = privacy.calibrate(epsilon, delta, sampling_probability=sampling_probability, num_steps=steps)
    summary = summarize(equal_releases(noise, sampling_probability, steps), delta)
    lines = [("noise multiplier", repr(noise)), ("target epsilon", f"{epsilon:g}"), *privacy_lines(summary)]
    if plot is not None:
        from torch_privacy.report import accounting_plots

        _draw(accounting_plots.calibration_figure(noise, sampling_probability, steps, delta, epsilon), plot)
    print_result({"target_epsilon": epsilon, **summary.as_json()}, lines, as_json)


@app.command()
def tradeoff(
    noise_multiplier: Noise,
    sampling_probability: Probability,
    steps: Steps,
    alpha: Alphas = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Print the best possible attack: the rate of missed members at each false positive rate."""
    from torch_privacy.cli.tables import tradeoff_view
    from torch_privacy.privacy.summary import attacker_as_json, attacker_lines, compose_steps, tradeoff_points

    _check_steps("tradeoff", steps)
    profile = compose_steps(noise_multiplier, sampling_probability, steps)
    points = tradeoff_points(profile, alpha or [0.001, 0.01, 0.05, 0.1, 0.2, 0.5])
    attacker = attacker_as_json(profile)
    if plot is not None:
        from torch_privacy.report import accounting_plots

        _draw(accounting_plots.tradeoff_figure(noise_multiplier, sampling_probability, steps), plot)
    print_result({"tradeoff": points, **attacker}, tradeoff_view(points, attacker_lines(attacker)), as_json)


@app.command()
def compare(
    noise_multiplier: Noise,
    sampling_probability: Probability,
    steps: Steps,
    delta: Delta = 1e-5,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Compare the accountants on one training: their epsilons, whether these are true, and their running times.

    Includes dp-accounting and prv-accountant if they are installed.
    """
    from torch_privacy.cli.tables import claims_table
    from torch_privacy.privacy import comparison

    _check_steps("compare", steps)
    with _quiet_libraries():
        claims = comparison.compare(noise_multiplier, sampling_probability, steps, delta)
    setting = (
        f"{steps:,} steps, noise multiplier {noise_multiplier:.4g}, q = {sampling_probability:.4g}, delta = {delta:g}"
    )
    if plot is not None:
        from torch_privacy.report import accounting_plots

        _draw(accounting_plots.claims_figure(claims, setting), plot)
    content = {"noise_multiplier": noise_multiplier, "sampling_probability": sampling_probability, "num_steps": steps}
    print_result({**content, "delta": delta, "claims": comparison.as_json(claims)}, claims_table(claims), as_json)


def _draw(figure: Any, path: Path) -> None:
    """Writes a figure and reports its path."""
    from torch_privacy.report import figures

    with naming(path):
        figures.save(figure, path)
    say(f"picture: {path}")


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Suppresses warnings and logs of other accountants."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _check_steps(where: str, steps: int) -> None:
    """Raises a ``ValueError`` unless there is at least one step."""
    from torch_privacy.support import validate as _check

    _check.whole(where, at_least=1, num_steps=steps)
