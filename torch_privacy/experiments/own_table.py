# SPDX-License-Identifier: Apache-2.0
"""Trains a perceptron on a table of the user's own: ``torch-privacy train FILE --target COLUMN --epsilon 2``.

What the schema leaves open is learnt privately from the training rows, for a share of epsilon, before the first step.
A run keeps the completed schema: `torch_privacy.experiments.predictions` encodes other tables with it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import Subset

import torch_privacy as tp
from torch_privacy import privacy, tables
from torch_privacy.experiments import table_notes, table_scores
from torch_privacy.experiments.study import Study
from torch_privacy.experiments.table_budget import Draft, learning_budget
from torch_privacy.experiments.table_file import (
    SHAPE,
    check_column,
    check_owner,
    column_names,
    declared,
    digest_of,
    needing_extra,
    num_owners,
    num_units,
    owners_in,
    shape_in,
    table_in,
)
from torch_privacy.experiments.table_notes import declared_in
from torch_privacy.experiments.table_settings import TEST_SHARE, TableSettings
from torch_privacy.experiments.task import Task, check_settings, seeded
from torch_privacy.runs.rows import ACCURACY_COLUMN, SCORE
from torch_privacy.support import validate as _check
from torch_privacy.support.ranks import Ranks
from torch_privacy.tables.learnt import as_plain, event_for, releases_in

if TYPE_CHECKING:
    from pandas import DataFrame

MOST_UNITS = 65536
SHOWN_WITHOUT_NOISE = "the number of rows of the table, and that its target is not refused"


DEFAULTS = TableSettings(target_epsilon=2.0, expected_batch_size=256, learning_rate=0.01, clip_norm=5.0, epochs=10)


def template(path: Path, target: str | None, *, ignore: tuple[str, ...] = ()) -> str:
    """Returns the template of a table's schema file, from names, storage types and the shape of the file."""
    with needing_extra():
        if target is None:
            raise ValueError(
                f"schema: name the column to predict with --target, one of {column_names(table_in(path))}; or give "
                "--target '', for synthetic rows."
            )
        if target:
            check_column("schema", "target", target, table_in(path), path)
        return tables.Schema.template(path, target, ignore=ignore, shape=shape_in(path)).to_toml()


def complete(path: Path, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a training on a table: the chosen ones, and defaults for the number of its rows.

    Raises:
        ValueError: the file is no table, a column is unknown, or a setting is missing.
    """
    with needing_extra():
        frame = table_in(path)
        if "target" not in chosen:
            raise ValueError(f"train: name the column to predict with --target, one of {column_names(frame)}.")
        check_column("train", "target", chosen["target"], frame, path)
        check_owner(chosen, frame, path)
        schema = declared(path, chosen["target"], chosen.get("schema"), chosen.get("owner"))
        if "target_epsilon" not in chosen and not ("noise_multiplier" in chosen and schema.is_complete):
            reason = "; --noise-multiplier needs a complete schema" if "noise_multiplier" in chosen else ""
            raise ValueError(f"train: name the total privacy loss with --epsilon, such as 2{reason}.")
        share = chosen.get("test_share", TEST_SHARE)
        _check.strictly_between("train", 0, 1, test_share=share)
        owners = owners_in(frame, chosen.get("owner"), path)
        seed = chosen.get("seed", 0)
        _check.whole("train", seed=seed)
        try:
            train_rows, _ = tables.split(len(frame), seed=seed, share=share, owners=owners)
        except ValueError:
            what = "row" if owners is None else "person"
            raise ValueError(
                f"train: no {what} of {path} would be left to train on, or to test on ({len(frame)} in all). Choose "
                "another --test-share, or another --seed."
            ) from None
        epsilon = chosen.get("target_epsilon", 1.0)
        _check.positive("train", target_epsilon=epsilon)
        n = num_units(owners, train_rows)
        found = tables.defaults(n, epsilon, chosen.get("delta"))
    settings: dict[str, Any] = {
        "file": str(path.absolute()),
        "delta": found.delta,
        "expected_batch_size": found.expected_batch_size,
        "epochs": found.epochs,
        "learning_rate": found.learning_rate,
        "weight_decay": None,
        "clip_norm": found.clip_norm,
        "schema_share": found.learning_share,
        "test_share": share,
        "average": found.average,
        **chosen,
    }
    units = chosen.get("hidden_units")
    if units is not None:
        _check.whole("train", at_least=0, at_most=MOST_UNITS, hidden_units=units)
    widths = list(found.hidden_units) if units is None else [units] * (units != 0)
    return {**settings, "hidden_units": widths}


class _SplitTable(NamedTuple):
    """The table, and which of its rows train and which test."""

    frame: DataFrame
    digest: str  # of the file
    owners: Any  # of each row, or None
    train_rows: Any
    test_rows: Any

    @staticmethod
    def of(settings: TableSettings, path: Path) -> _SplitTable:
        frame = table_in(path)
        owners = owners_in(frame, settings.owner, path)
        rows = tables.split(len(frame), seed=settings.seed, share=settings.test_share, owners=owners)
        return _SplitTable(frame, digest_of(path), owners, *rows)

    @property
    def num_units(self) -> int:
        """Returns the number of training rows, or of their owners."""
        return num_units(self.owners, self.train_rows)

    def owners_of(self, rows: Any) -> Any:
        return None if self.owners is None else self.owners[rows]


def build_task(
    settings: TableSettings,
    released: Mapping[str, Any] | None = None,
    new_ledger: Callable[..., privacy.Ledger] | None = None,
) -> Task:
    """Returns the split table and a perceptron; a resumed run passes what was ``released``, the completed schema.

    What is learnt privately is recorded in a ``new_ledger()`` before it is used.
    """
    for units in settings.hidden_units:
        _check.whole("train", at_least=1, at_most=MOST_UNITS, hidden_units=units)
    _check.strictly_between("train", 0, 1, schema_share=settings.schema_share, test_share=settings.test_share)
    if settings.weight_decay:
        _check.in_range("train", 0, 1 / settings.learning_rate, weight_decay=settings.weight_decay)
        if not settings.hidden_units:
            raise ValueError(
                "train: --weight-decay needs hidden layers: their weights decay, and --hidden-units 0 has none."
            )
    path, ranks = Path(settings.file), Ranks.here("train")
    with ranks.together("reads the table"), needing_extra():
        split = _SplitTable.of(settings, path)
        if released and released["digest"] != split.digest:
            raise ValueError(f"train: {path}: was changed since the run began. Restore it; another table is a new run.")
    owners = split.owners
    draft = None if settings.budget is None else Draft(settings, split.num_units, num_owners(owners))
    known = released or {**_learnt_on_first(settings, split, ranks, new_ledger, draft), "digest": split.digest}
    with ranks.together("opens the budget"):
        budget = draft.bound(tables.rows_of(split.frame)) if draft is not None and ranks.is_first else None
    return _task(settings, split, known, ranks.from_first(budget))


def _learnt_on_first(
    settings: TableSettings,
    split: _SplitTable,
    ranks: Ranks,
    new_ledger: Callable[..., privacy.Ledger] | None,
    draft: Draft | None,
) -> dict[str, Any]:
    """Returns what the first rank learns privately of the training rows, on all ranks."""
    n = split.num_units  # all of these before anything is spent
    hint = f"It must be below 1/n for the {n:,} that train; 1 / (10 n) or less is usual."
    _check.strictly_between("train", 0, 1 / n, delta=settings.delta, hint=hint)
    check_settings(settings, n)
    with ranks.together("learns what the schema leaves open"):
        schema = declared(Path(settings.file), settings.target, settings.schema, settings.owner)
        table_scores.check_threshold(settings, schema, split.frame, split.test_rows)
        if ranks.is_first and (doubt := table_scores.check_targets(settings, schema, split.frame, split.test_rows)):
            warnings.warn(doubt, stacklevel=2)
        of_rows = split.owners_of(split.train_rows)
        found = _learn(settings, split.frame, split.train_rows, of_rows, new_ledger, draft) if ranks.is_first else None
    learnt = ranks.from_first(found)
    assert learnt is not None
    return learnt


def _task(settings: TableSettings, split: _SplitTable, released: Mapping[str, Any], budget: Any) -> Task:
    """Returns the training on a split table by a completed schema."""
    path, frame, n = Path(settings.file), split.frame, split.num_units
    schema = tables.Schema.from_toml(released["schema"])
    encoder = tables.Encoder(schema)
    train, test = encoder.encode(frame.iloc[split.train_rows]), encoder.encode(frame.iloc[split.test_rows])
    threshold = table_scores.threshold_of(settings.threshold, schema)
    known = torch.nonzero(test.has_target).flatten().tolist()
    if not known:
        raise ValueError(f"train: {path}: no test row has a target; take a larger --test-share.")
    scored, declarations = Subset(test.dataset(), known), released.get("declared", ())
    tested_owners = None if split.owners is None else split.owners[split.test_rows][known]
    choice = _choice(settings, schema, n)
    settings = replace(settings, weight_decay=choice.weight_decay)
    private = _private_settings(settings, released, budget)
    prior = private["prior_releases"]
    found = released.get("shape", "" if settings.schema else shape_in(path).in_words())  # older runs lack it
    shape = (f"{path.name}: {found}; taken as public.",) if found else ()
    return Task(
        train=train.dataset(),
        test=scored,
        new_model=partial(seeded, partial(tables.new_model, schema, settings.hidden_units), settings.seed),
        new_optimizer=choice.new_optimizer,
        losses=tables.losses,
        score=table_scores.score_of(schema, encoder, threshold),
        more_scores=partial(table_scores.more_scores, encoder, scored, threshold, tested_owners),
        private=lambda model: private,
        owners=_owner_settings(settings, split),
        average=settings.average,
        released=released,
        not_covered=(SHOWN_WITHOUT_NOISE, *((SHAPE,) if found else ())),
        num_threads=1,
        num_units=n,
        unit=table_notes.unit(settings),
        schema=released["schema"],
        rows=tables.rows_of(frame),
        notes=(*frame.attrs.get("notes", ()), *shape, *table_notes.notes(settings, schema, n, released, prior)),
        declared=tuple(declarations),
        exact=(
            *(() if prior else table_notes.exact(train)),
            *table_notes.rare(schema, frame.iloc[split.train_rows], declarations),
        ),
    )


def _choice(settings: TableSettings, schema: tables.Schema, n: int) -> tables.Defaults:
    """Returns the settings of the optimizer; the decay of weights depends on the number of classes."""
    found = tables.defaults(n, settings.target_epsilon or 1.0, settings.delta, classes=len(schema.classes) or math.inf)
    decay = found.weight_decay if settings.weight_decay is None else settings.weight_decay
    if not settings.hidden_units:
        decay = 0.0  # of a linear model nothing decays
    return replace(found, learning_rate=settings.learning_rate, weight_decay=decay)


def _private_settings(settings: TableSettings, released: Mapping[str, Any], budget: Any) -> dict[str, Any]:
    """Returns the arguments of `PrivateTraining` that follow from what was learnt."""
    prior = releases_in(released)
    rule = tp.Flat(settings.clip_norm) if settings.clipping == "flat" else tp.Automatic(settings.clip_norm)
    found: dict[str, Any] = {"clipping": rule, "prior_releases": prior, "budget": budget}
    if noise := released.get("noise_multiplier"):  # reserved together with what was learnt
        found |= {"noise_multiplier": noise, "target_epsilon": None}
    return found


def _owner_settings(settings: TableSettings, split: _SplitTable) -> dict[str, Any]:
    """Returns the arguments of `Examples` for rows that have owners."""
    if split.owners is None:
        return {}
    return {
        "owners": split.owners_of(split.train_rows),
        "per_owner": settings.per_owner,
        "owner_name": table_notes.event_unit(settings),
    }


def _learn(
    settings: TableSettings,
    frame: DataFrame,
    train_rows: Any,
    owners: Any,
    new_ledger: Callable[..., privacy.Ledger] | None,
    draft: Draft | None,
) -> dict[str, Any]:
    """Learns privately what the schema leaves open; returns the completed schema with its price, as plain data."""
    path, unit = Path(settings.file), table_notes.event_unit(settings)
    schema = declared(path, settings.target, settings.schema, settings.owner)
    if schema.is_complete and not (settings.target_epsilon and schema.has_scales_to_learn):
        return {**declared_in(settings, schema), "shape": schema.file, **as_plain(schema, unit)}
    share, kept, noise = settings.schema_share, _Kept(unit, new_ledger), None
    assert settings.target_epsilon is not None, "noise alone leaves nothing to learn with"
    doubt = checked_target(settings, schema, len(train_rows) if owners is None else len(set(owners)))
    mark = table_notes.other_mark(settings, schema, frame)
    for warning in (mark, doubt, table_notes.identifiers(settings, schema)):
        if warning is not None:
            warnings.warn(f"train: {warning}", stacklevel=2)
    if draft is not None:
        noise = draft.reserve(schema, tables.rows_of(frame), kept.open)
    try:
        learnt = tables.learn(
            frame.iloc[train_rows],
            schema,
            epsilon=share * settings.target_epsilon,
            delta=share * settings.delta,
            owners=owners,
            per_owner=settings.per_owner or 1,
            record=kept.record,
            scales=True,
        )
    except tables.TableError as error:
        price = (
            table_notes.cost_of([release.event for release in error.releases], settings.delta)
            if error.releases
            else "nothing"
        )
        lines = table_notes.to_write(settings, error.lines)
        raise ValueError(f"{path}: {str(error).rstrip('.')}. {lines}To learn this has cost {price}.") from None
    finally:
        kept.close()
    return {
        **declared_in(settings, schema),
        "shape": schema.file,
        **as_plain(learnt.schema, unit, learnt.releases, learnt.notes),
        **({} if noise is None else {"noise_multiplier": noise}),
    }


def checked_target(settings: TableSettings, schema: tables.Schema, n: int) -> str | None:
    """Returns a sentence on what n rows, or owners, are too few to learn of the target, if anything.

    Raises:
        ValueError: the learning cannot work, or is likely not to; nothing was released.
    """
    doubt = tables.doubt_of(schema, n, learning_budget(settings, schema, n))
    if doubt is None:
        return None
    lines = table_notes.to_write(settings, doubt.lines)
    if doubt.is_likely:
        raise ValueError(
            f"train: {Path(settings.file).name}: {doubt.what}. {lines}Nothing was learnt, and it has cost nothing."
        )
    return f"{Path(settings.file).name}: {doubt.what}. If there is one: {lines[0].lower()}{lines[1:]}".rstrip()


class _Kept:
    """Records releases for a unit of protection, in a ledger that is made with the first of them."""

    def __init__(self, unit: str, new_ledger: Callable[..., privacy.Ledger] | None):
        self._unit, self._new_ledger = unit, new_ledger
        self._ledger: privacy.Ledger | None = None

    def open(self, run: str) -> Path | None:
        """Makes the ledger of a run in the budget of the data; returns its path."""
        self._ledger = None if self._new_ledger is None else self._new_ledger(run=run)
        return None if self._ledger is None else self._ledger.path

    def record(self, release: privacy.Release) -> None:
        if self._ledger is None and self._new_ledger is not None:
            self._ledger = self._new_ledger()
        if self._ledger is not None:
            self._ledger.record(event_for(release, self._unit), len(self._ledger), release.fingerprint)

    def close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()


def _no_rows(quick: bool) -> Sequence[Any]:
    return ()


STUDY = Study({SCORE: ACCURACY_COLUMN}, _no_rows, (), DEFAULTS, build_task, releases_itself=True)
