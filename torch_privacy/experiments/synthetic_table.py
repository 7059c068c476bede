# SPDX-License-Identifier: Apache-2.0
"""Synthesizes a table of the user's own: ``torch-privacy synthesize FILE --epsilon 2 --rows 10000 --out fake.csv``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from torch_privacy.experiments.table_settings import TEST_SHARE
from torch_privacy.experiments.task import Option
from torch_privacy.support import validate as _check

if TYPE_CHECKING:
    from pandas import DataFrame

    from torch_privacy.tables.synthesis import GeneratorRun, Synthesizer

WHERE = "synthesize"
OfRun = partial(Option, panel="The generator")


@dataclass(frozen=True, kw_only=True)
class SyntheticTableSettings:
    """The settings of a generator as the command takes them; run folders store them under these names."""

    file: str = ""
    epsilon: Annotated[float, OfRun("Epsilon of everything together, never exceeded.")] = 0.0
    delta: Annotated[float | None, OfRun("Delta, a probability below 1/n.", shown="1/(10 n) or less", kind=float)] = (
        None
    )
    generator: Annotated[
        str, OfRun("aim: chosen marginals; mst: a tree of pairs; network: an autoregressive network.", shown="aim")
    ] = "aim"
    target: Annotated[
        str, OfRun("Column that the rows should help to predict: it counts twice.", shown="none", metavar="COLUMN")
    ] = ""
    schema: Annotated[
        str | None,
        OfRun(
            "What is public about the columns; the rest is learnt privately.", shown="none", kind=Path, metavar="FILE"
        ),
    ] = None
    schema_share: Annotated[float, OfRun("Share of epsilon for what the schema leaves open.", shown="0.3")] = 0.3
    owner: Annotated[
        str | None, OfRun("Column that names the person of each row: protects persons.", shown="none", metavar="COLUMN")
    ] = None
    per_owner: Annotated[int | None, OfRun("Largest number of rows of one person, with --owner.", kind=int)] = None
    test_share: Annotated[float, OfRun("Share of the rows kept to judge the others.", shown=f"{TEST_SHARE:g}")] = (
        TEST_SHARE
    )
    budget: Annotated[
        str | None, OfRun("Budget of the data, to draw from.", shown="none", kind=Path, metavar="FILE")
    ] = None


@dataclass(eq=False)
class Job:
    """A run of a generator on a file, with the rows that judge it."""

    run: GeneratorRun
    name: str  # of the file
    train: DataFrame
    test: DataFrame
    not_covered: tuple[str, ...] = ()  # what was read from the rows without noise

    def write_page(self, synthesizer: Synthesizer, canaries: int | None) -> None:
        """Judges the generator, and writes the page for the owner of the data."""
        from torch_privacy.support.write_file import write_whole
        from torch_privacy.tables.synthesis import page
        from torch_privacy.tables.synthesis.judge import audit, judge

        run = self.run
        audited = None if canaries is None else audit(run, canaries).as_json()
        found = judge(synthesizer, self.train, self.test, private=run)
        budget, settings = run.data_budget.get("data_budget"), run.settings
        html = page.render(
            self.name, settings.generator, settings.protected, run.profile(), settings.delta, found, audited, budget
        )
        write_whole(run.folder.synthesis, lambda file: file.write(html.encode()))


def begin(folder: Path, file: Path, chosen: Mapping[str, Any]) -> Job:
    """Returns the job of a new run; refuses settings and tables that cannot be synthesized."""
    if not file.exists():
        raise ValueError(
            f"{WHERE}: {file}: no such file or folder. Name a CSV or Parquet file, or the folder of a finished run."
        )
    if "epsilon" not in chosen:
        raise ValueError(f"{WHERE}: name the total privacy loss with --epsilon, such as 2.")
    return _job(folder, SyntheticTableSettings(file=str(file.absolute()), **chosen))


def resume(folder: Path) -> Job:
    """Returns the job of a run that was stopped, with its own settings."""
    from torch_privacy.runs.folder import RunFolder
    from torch_privacy.tables.synthesis.run import EXPERIMENT

    found = RunFolder(folder)
    found.check_begun()
    if not found.settings.is_file():
        raise ValueError(f"{WHERE}: {folder}: is not a run folder (it has no settings.json).")
    settings = found.with_paths(found.read_settings())
    if settings.pop("experiment", None) != EXPERIMENT:
        raise ValueError(f"{WHERE}: {folder}: is no run of synthesize.")
    if not found.checkpoint.is_file():
        what = f"has no checkpoint, so it cannot be resumed. {found.ledger} has what was released. Name a new folder."
        if found.generator.is_file():
            what = f"is complete. Draw rows with: torch-privacy synthesize {shlex.quote(str(folder))} --rows N"
        raise ValueError(f"{WHERE}: {folder}: this run {what}")
    return _job(folder, SyntheticTableSettings(**settings))


def _job(folder: Path, settings: SyntheticTableSettings) -> Job:
    from torch_privacy import privacy, tables
    from torch_privacy.experiments import table_file
    from torch_privacy.experiments.table_notes import to_write
    from torch_privacy.support.units import ONE_EXAMPLE, plural, unit_of_column
    from torch_privacy.tables.synthesis import GeneratorRun, SynthesisSettings
    from torch_privacy.tables.synthesis.source import FEWEST
    from torch_privacy.training.bound_data import bind_data

    path, target = Path(settings.file), settings.target
    with table_file.needing_extra():
        frame = table_file.table_in(path)
        if len(frame) < FEWEST:
            raise ValueError(
                f"{WHERE}: {path} has {len(frame)} rows, and {FEWEST} or more are needed beside epsilon's noise."
            )
        if not target and settings.schema is not None:
            target = tables.Schema.read(settings.schema).target
        if target:
            table_file.check_column(WHERE, "target", target, frame, path)
        table_file.check_owner(
            {"owner": settings.owner, "per_owner": settings.per_owner, "target": ""}, frame, path, WHERE
        )
        schema = table_file.declared(path, target, settings.schema, settings.owner, WHERE)
        _check.strictly_between(WHERE, 0, 1, test_share=settings.test_share)
        owners = table_file.owners_in(frame, settings.owner, path, WHERE)
        train_rows, test_rows = tables.split(len(frame), share=settings.test_share, owners=owners)
        n = table_file.num_units(owners, train_rows)
        if n < FEWEST:
            what = "rows" if owners is None else plural(unit_of_column(settings.owner or ""))
            raise ValueError(
                f"{WHERE}: {n} {what} of {path} are left to learn from, and {FEWEST} or more are needed: the others "
                f"are held out to judge the generator. A smaller --test-share than {settings.test_share:g} leaves more."
            )
        of_run = SynthesisSettings(
            generator=settings.generator,
            epsilon=settings.epsilon,
            delta=tables.defaults(max(n, 2), settings.epsilon, settings.delta).delta,
            learning_share=settings.schema_share,
            per_owner=settings.per_owner,
            unit=ONE_EXAMPLE if settings.owner is None else unit_of_column(settings.owner),
        )
        budget, num_owners = None, None if owners is None else len(set(owners))
        if settings.budget is not None:
            budget = bind_data(privacy.Budget.open(settings.budget), tables.rows_of(frame), num_owners=num_owners)
        run = GeneratorRun(
            folder,
            frame.iloc[train_rows],
            schema,
            of_run,
            owners=None if owners is None else owners[train_rows],
            budget=budget,
            of_budget=(frame, num_owners),
            written={**asdict(settings), "delta": of_run.delta},
            to_write=partial(to_write, settings),
        )
    shape = (table_file.SHAPE,) if schema.file else ()
    return Job(run, path.name, frame.iloc[train_rows], frame.iloc[test_rows], shape)
