# SPDX-License-Identifier: Apache-2.0
"""Provides ``epsilon``, ``delta``, ``calibrate``, ``tradeoff`` and ``compare``: accounting, without torch."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from torch_privacy.cli._options import with_options
from torch_privacy.cli._shared import AsJson, app, naming, print_result, say
from torch_privacy.cli.releases import Planned
from torch_privacy.cli.steps import Delta, Steps

Target = Annotated[float, typer.Option("--epsilon", help="Epsilon that is never exceeded; no unit, above 0.")]
GroupSize = Annotated[
    int | None,
    typer.Option(
        help="Largest number of examples of a person, at least 1: epsilon is that of a person, not of one example.",
        show_default=False,
    ),
]
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


@dataclass(frozen=True)
class PlotOutput:
    """Holds where a price is shown: printed, and drawn if that is asked for."""

    plot: Plot = None
    as_json: AsJson = False

    def draw(self, figure: Callable[[Any], Any]) -> None:
        """Writes a figure made by `accounting_plots` and says its path, if it is asked for."""
        if self.plot is None:
            return
        from torch_privacy.runs.report import accounting_plots, figures

        with naming(self.plot):
            figures.save(figure(accounting_plots), self.plot)
        say(f"picture: {self.plot}")

    def show(self, content: dict[str, Any], view: Any) -> None:
        """Prints the content as JSON, or the view."""
        print_result(content, view, self.as_json)


@app.command()
@with_options
def epsilon(*, planned: Planned, delta: Delta = None, group_size: GroupSize = None, output: PlotOutput) -> None:
    """Print epsilon of a private training as a certified interval, beside the values of other accountants.

    The training is a RUN, or steps that are described. Poisson sampling; neighboring data sets differ by one example,
    added or removed, or by all examples of one person.
    """
    from torch_privacy import privacy
    from torch_privacy.privacy.summary import privacy_lines, summarize

    described = planned.described("epsilon")
    releases, delta = described.releases, described.delta("epsilon", delta)
    if group_size is not None:
        releases = [(privacy.for_group(event, group_size), count) for event, count in releases]
    summary = summarize(releases, delta)
    bracket = privacy.Bracket(summary.epsilon_low, summary.epsilon_high)
    output.draw(lambda plots: plots.profile_figure(releases, plots.epsilon_mark(bracket, delta)))
    output.show({**described.about, **summary.as_json()}, [*privacy_lines(summary), *described.lines])


@app.command()
@with_options
def delta(
    *,
    epsilon: Annotated[float, typer.Option(help="Epsilon at which to ask, a number of either sign; no unit.")],
    planned: Planned,
    output: PlotOutput,
) -> None:
    """Print delta of a private training at an epsilon, as a certified interval."""
    from torch_privacy import privacy
    from torch_privacy.privacy.summary import delta_lines, limit_of, releases_as_json

    described = planned.described("delta")
    bracket, limit = privacy.compose(described.releases).delta(epsilon), limit_of(described.releases)
    output.draw(lambda plots: plots.profile_figure(described.releases, plots.delta_mark(epsilon, bracket)))
    content = {
        **described.about,
        **releases_as_json(described.releases),
        "epsilon": epsilon,
        "delta": bracket._asdict(),
        "clt": {"delta": None if limit is None else limit.delta(epsilon), "note": "an approximation, not a bound"},
    }
    output.show(content, [*delta_lines(described.releases, epsilon), *described.lines])


@app.command()
@with_options
def calibrate(*, target_epsilon: Target, steps: Steps, delta: Delta = None, output: PlotOutput) -> None:
    """Print the smallest noise multiplier with a certified epsilon of at most a target."""
    from torch_privacy import privacy
    from torch_privacy.privacy.summary import equal_releases, privacy_lines, summarize

    sampling = steps.sampling("calibrate")
    delta = sampling.delta("calibrate", delta)
    training = {"sampling_probability": sampling.probability, "num_steps": sampling.num_steps}
    noise = privacy.calibrate(target_epsilon, delta, **training)
    setting = noise, sampling.probability, sampling.num_steps
    summary = summarize(equal_releases(*setting), delta)
    lines = [
        ("noise multiplier", repr(noise)),
        ("target epsilon", f"{target_epsilon:g}"),
        *privacy_lines(summary),
        *sampling.lines,
    ]
    output.draw(lambda plots: plots.calibration_figure(*setting, delta, target_epsilon))
    output.show({"target_epsilon": target_epsilon, **summary.as_json()}, lines)


@app.command()
@with_options
def tradeoff(*, planned: Planned, alpha: Alphas = None, output: PlotOutput) -> None:
    """Print the best possible attack: the rate of missed members at each false positive rate."""
    from torch_privacy import privacy
    from torch_privacy.cli.tables import tradeoff_view
    from torch_privacy.privacy.summary import attacker_as_json, curve_lines, releases_as_json, tradeoff_points

    described = planned.described("tradeoff")
    profile = privacy.compose(described.releases)
    points = tradeoff_points(profile, alpha or [0.001, 0.01, 0.05, 0.1, 0.2, 0.5])
    attacker = attacker_as_json(profile)
    output.draw(lambda plots: plots.tradeoff_figure(described.releases))
    shown = tradeoff_view(points, [*curve_lines(attacker), *described.lines])
    content = {**described.about, **releases_as_json(described.releases), "tradeoff": points, **attacker}
    output.show(content, shown)


@app.command()
@with_options
def compare(*, planned: Planned, delta: Delta = None, group_size: GroupSize = None, output: PlotOutput) -> None:
    """Compare the accountants on one training: their epsilons, whether these are true, and their running times.

    Includes dp-accounting and prv-accountant if they are installed. With a group size it also compares two ways to
    protect a person with several examples: sampling examples, or persons. It prints the rule by which to choose.
    """
    from rich.console import Group

    from torch_privacy.cli.tables import claims_table, lines_table, persons_view
    from torch_privacy.privacy import comparison
    from torch_privacy.privacy.persons import compare_persons
    from torch_privacy.privacy.rounding import short
    from torch_privacy.privacy.summary import equal_steps, releases_as_json

    described = planned.described("compare")
    releases, delta = described.releases, described.delta("compare", delta)
    persons = None
    if group_size is not None:
        steps = equal_steps(releases)
        if steps is None:
            raise ValueError("compare: --group-size compares equal steps with exact norms alone. Leave it out.")
        persons = compare_persons(*steps, delta, group_size)
    with _quiet_libraries():
        claims = comparison.compare(releases, delta)
    output.draw(lambda plots: plots.claims_figure(claims, f"{plots.in_words(releases)}, delta = {short(delta)}"))
    content = {**described.about, **releases_as_json(releases), "delta": delta, "claims": comparison.as_json(claims)}
    if persons is not None:
        content["persons"] = persons.as_json()
    view = claims_table(claims) if persons is None else persons_view(claims, persons)
    output.show(content, Group(lines_table(described.lines), "", view) if described.lines else view)


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
