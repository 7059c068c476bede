# SPDX-License-Identifier: Apache-2.0
"""Provides the options that describe releases: those of a run, or steps that are planned, and components beside."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torch_privacy.cli._shared import path_argument, say
from torch_privacy.cli.steps import Steps, chosen_delta

if TYPE_CHECKING:
    from torch_privacy import privacy
    from torch_privacy.runs.folder import RunFolder

Releases = list[tuple["privacy.Event", int]]
Lines = list[tuple[str, str]]
PART = re.compile(r"([0-9]{1,18})x([0-9.e+-]+)")


@dataclass(frozen=True)
class Described:
    """Releases as a command is given them: each event, and how often it takes place."""

    releases: Releases
    lines: Lines  # where the releases come from, for a table
    about: dict[str, Any] = field(default_factory=dict)  # the same of a run, for --json
    num_examples: int | None = None
    delta_of_run: float | None = None

    def delta(self, where: str, given: float | None) -> float:
        """Returns the delta given, that of the run, or the usual one; one that was not given is in ``lines`` then."""
        return chosen_delta(where, given, self.delta_of_run, self.num_examples, self.lines)


@dataclass(frozen=True)
class Planned(Steps):
    """The options; messages name them by the library's names for the same numbers."""

    run: Annotated[
        Path | None,
        path_argument(
            "Run to price, in place of steps: its folder, its ledger, or a JSON file with a list of releases, as "
            "--json prints it.",
            "RUN",
        ),
    ] = None
    noise_multiplier: Annotated[
        float | None,
        typer.Option(help="Noise's standard deviation over the sensitivity; no unit, above 0.", show_default=False),
    ] = None
    num_projections: Annotated[
        int | None,
        typer.Option(
            "--projections",
            help="Steps with norms estimated from this number of random projections (JL), at least 1.",
            show_default="exact norms",
        ),
    ] = None
    gep: Annotated[
        bool, typer.Option("--gep", help="Steps of GEP: embedding and residual, each with the noise multiplier.")
    ] = False
    noise_schedule: Annotated[
        str | None,
        typer.Option(
            help="Parts of the training, each with a factor on the noise multiplier; in place of --steps. For example "
            "1000x1,500x1.5: 1,000 steps with the noise multiplier, then 500 with 1.5 times as much.",
            metavar="STEPSxFACTOR,...",
            show_default=False,
        ),
    ] = None
    components_noise: Annotated[
        list[float] | None,
        typer.Option(
            help="Noise multiplier of private principal components (PrivatePCA) of all rows, released beside; "
            "repeatable.",
            show_default=False,
        ),
    ] = None

    def described(self, where: str) -> Described:
        """Returns what the options describe.

        Raises:
            ValueError: the options contradict each other, leave something open, or are out of range; or the run cannot
                be read.
        """
        from torch_privacy import privacy

        components = [
            (privacy.NoisyCovariance(self._checked(where, noise)), 1) for noise in self.components_noise or []
        ]
        of_steps = [one for one in fields(self) if one.name not in BESIDE]
        has_steps = any(getattr(self, one.name) != one.default for one in of_steps)
        if self.run is not None:
            if has_steps:
                raise ValueError(f"{where}: RUN has its own steps. Leave out RUN, or the options that describe steps.")
            found = _of_run(self.run)
        elif has_steps:
            found = self._of_steps(where)
        elif components:
            found = Described([], [])
        else:
            raise ValueError(f"{where}: name a RUN, or give --noise-multiplier and the steps.")
        return replace(found, releases=[*components, *found.releases])

    def _of_steps(self, where: str) -> Described:
        """Returns the steps that are planned."""
        if self.noise_multiplier is None:
            raise ValueError(f"{where}: give --noise-multiplier, or name a RUN.")
        if self.noise_schedule is None:
            sampling = self.sampling(where)
            parts = [(sampling.num_steps, 1.0)]
        elif self.num_steps is not None or self.epochs is not None:
            raise ValueError(f"{where}: --noise-schedule has the number of steps; leave out --steps and --epochs.")
        else:
            parts = _parts(where, self.noise_schedule)
            sampling = replace(self, num_steps=sum(count for count, _ in parts)).sampling(where)
        event = self._event(where, sampling.probability)
        releases = [(event(self.noise_multiplier * factor), count) for count, factor in parts]
        return Described(releases, sampling.lines, num_examples=sampling.num_examples)

    def _event(self, where: str, probability: float) -> Callable[[float], privacy.Event]:
        """Returns the event of a step, for any noise multiplier."""
        from torch_privacy import privacy

        if self.gep and self.num_projections is not None:
            raise ValueError(f"{where}: --gep and --projections exclude each other; give one of them.")
        if self.gep:
            return lambda noise: privacy.SubsampledGEP(noise, probability)
        if self.num_projections is not None:
            return lambda noise: privacy.SubsampledJL(noise, self.num_projections, probability)  # type: ignore[arg-type]
        return lambda noise: privacy.SubsampledGaussian(noise, probability)

    def _checked(self, where: str, noise: float) -> float:
        from torch_privacy.privacy.events.base import LARGEST_NOISE, SMALLEST_NOISE
        from torch_privacy.support.validate import in_range

        in_range(where, SMALLEST_NOISE / 2, LARGEST_NOISE, components_noise=noise)
        return noise


BESIDE = ("run", "components_noise")  # the options that do not describe steps


def _parts(where: str, schedule: str) -> list[tuple[int, float]]:
    """Returns the parts of a schedule: number of steps, and factor on the noise multiplier."""
    from torch_privacy.support.validate import InvalidValue

    found = [PART.fullmatch(part.strip()) for part in schedule.split(",")]
    try:
        parts = [(int(match[1]), float(match[2])) for match in found if match is not None]
    except ValueError:
        parts = []
    if len(parts) < len(found) or not all(count > 0 and 0 < factor < 1e300 for count, factor in parts):
        allowed = "must list parts such as 1000x1,500x1.5: a number of steps, x, and a factor above 0."
        raise InvalidValue(where, "noise_schedule", schedule, allowed)
    return parts


def _of_run(path: Path) -> Described:
    """Returns the releases of a run: from its ledger, its privacy statement, or a list of releases."""
    from torch_privacy.privacy import Ledger
    from torch_privacy.runs.folder import RunFolder

    folder = RunFolder(path)
    ledger = folder.ledger if path.is_dir() else path
    if folder.privacy.is_file():
        return _of_statement(folder)
    if not ledger.is_file():
        lacks = "has neither privacy.json nor ledger.jsonl"
        raise ValueError(f"{path}: {lacks}. Name the folder of a training, its ledger, or a JSON file.")
    if ledger.suffix == ".json":
        return Described(_of_list(ledger), [("releases", f"from {ledger}")], {"run": str(path)})
    lines, found = [("run", f"{path}, the releases so far: it has no privacy statement")], {"run": str(path)}
    releases = Ledger.read(ledger)
    if releases.warning:
        lines, found = [*lines, ("warning", releases.warning)], {**found, "warning": releases.warning}
    return Described(releases.events, lines, found)


def _of_list(path: Path) -> Releases:
    from torch_privacy.privacy.summary import releases_from_json
    from torch_privacy.support.read_file import read_json

    try:
        return list(releases_from_json(read_json(path)))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: cannot be read ({str(error).rstrip('.')}). It must be a JSON object with a list of releases, "
            "each with event and count."
        ) from None


def _of_statement(folder: RunFolder) -> Described:
    """Returns the releases of a run, and what its privacy statement says about their price.

    The ledger has them all; the statement of an unfinished run may be older.
    """
    from torch_privacy.privacy import Ledger
    from torch_privacy.privacy.summary import releases_from_json
    from torch_privacy.runs.agreement import check_ledger
    from torch_privacy.runs.folder import NO_DIGESTS

    statement = folder.read_statement()
    releases = list(releases_from_json(statement))
    if folder.ledger.is_file():
        releases = Ledger.read(folder.ledger).events
    if folder.is_complete:
        check_ledger(folder, statement, releases, NO_DIGESTS)
    found = {"run": str(folder.path)}
    if "warning" in statement:
        found["warning"] = statement["warning"]
        say(f"torch-privacy: {folder.path}: {statement['warning']}")
    made, planned = statement.get("num_steps_made"), statement["num_steps_planned"]
    if made is not None and made < planned and not statement.get("stop", {}).get("independent_of_data"):
        end = f"when the statement was written, after {made:,} of {planned:,} steps"
        found["unfinished"] = f"{end}; if a result decides when to stop, the price is that of all steps"
    num_units = statement.get("num_owners", statement.get("num_examples"))
    return Described(releases, list(found.items()), found, num_units, statement["delta"])
