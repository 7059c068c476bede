# SPDX-License-Identifier: Apache-2.0
"""Trains a perceptron on a table of the user's own: ``torch-privacy train FILE --target COLUMN --epsilon 2``.

What the schema leaves open is learnt privately from the training rows, for a share of epsilon, before the first step.
A run keeps the completed schema: `torch_privacy.experiments.predictions` encodes other tables with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Subset

import torch_privacy as tp
from torch_privacy import privacy, tables
from torch_privacy.experiments import task
from torch_privacy.experiments.study import Study
from torch_privacy.experiments.table_settings import TEST_SHARE, Settings
from torch_privacy.experiments.task import ACCURACY, Score, Task, seeded
from torch_privacy.privacy.rounding import round_up
from torch_privacy.runs import metrics as log
from torch_privacy.runs.rows import ACCURACY_COLUMN, SCORE
from torch_privacy.support import validate as _check
from torch_privacy.support.ranks import Ranks
from torch_privacy.support.read_file import opened
from torch_privacy.support.units import ONE_EXAMPLE, plural, unit_of_column

if TYPE_CHECKING:
    from pandas import DataFrame

MOST_UNITS = 65536
MOST_NAMES = 20  # of columns, in a message
MOST_CLASSES = 6  # of a column, in a message
SHOWN_WITHOUT_NOISE = "the number of rows of the table, and that its target is not refused"


DEFAULTS = Settings(target_epsilon=2.0, expected_batch_size=256, learning_rate=0.01, clip_norm=5.0, epochs=10)


def template(path: Path, target: str | None, *, ignore: tuple[str, ...] = ()) -> str:
    """Returns the template of a table's schema file, from names and storage types alone."""
    with needing_extra():
        if target is None:
            raise ValueError(f"schema: name the column to predict with --target, one of {_names(_table(path))}.")
        _check_column("schema", "target", target, _table(path), path)
        return tables.Schema.template(path, target, ignore=ignore).to_toml()


def complete(path: Path, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a training on a table: the chosen ones, and defaults for the number of its rows.

    Raises:
        ValueError: the file is no table, a column is unknown, or a setting is missing.
    """
    with needing_extra():
        frame = _table(path)
        if "target" not in chosen:
            raise ValueError(f"train: name the column to predict with --target, one of {_names(frame)}.")
        _check_column("train", "target", chosen["target"], frame, path)
        _check_owner(chosen, frame, path)
        schema = _declared(path, chosen["target"], chosen.get("schema"), chosen.get("owner"))
        if "target_epsilon" not in chosen and not ("noise_multiplier" in chosen and schema.is_complete):
            reason = "; --noise-multiplier needs a complete schema" if "noise_multiplier" in chosen else ""
            raise ValueError(f"train: name the total privacy loss with --epsilon, such as 2{reason}.")
        share = chosen.get("test_share", TEST_SHARE)
        _check.strictly_between("train", 0, 1, test_share=share)
        owners = _owners(frame, chosen.get("owner"), path)
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
        n = _num_units(owners, train_rows)
        found = tables.defaults(n, epsilon, chosen.get("delta"))
    settings: dict[str, Any] = {
        "file": str(path.absolute()),
        "delta": found.delta,
        "expected_batch_size": found.expected_batch_size,
        "epochs": found.epochs,
        "learning_rate": found.learning_rate,
        "clip_norm": found.clip_norm,
        "schema_share": found.learning_share,
        "test_share": share,
        "average": found.average,
        **chosen,
    }
    units = chosen.get("hidden_units")
    return {**settings, "hidden_units": list(found.hidden_units) if units is None else [units]}


def build_task(
    settings: Settings,
    released: Mapping[str, Any] | None = None,
    new_ledger: Callable[[], privacy.Ledger] | None = None,
) -> Task:
    """Returns the split table and a perceptron; a resumed run passes what was ``released``, the completed schema.

    What is learnt privately is recorded in a ``new_ledger()`` before it is used.
    """
    for units in settings.hidden_units:
        _check.whole("train", at_least=1, at_most=MOST_UNITS, hidden_units=units)
    _check.strictly_between("train", 0, 1, schema_share=settings.schema_share, test_share=settings.test_share)
    path, ranks = Path(settings.file), Ranks.here("train")
    with ranks.together("reads the table"), needing_extra():
        frame, digest = _table(path), _digest(path)
        owners = _owners(frame, settings.owner, path)
        train_rows, test_rows = tables.split(len(frame), seed=settings.seed, share=settings.test_share, owners=owners)
        if released and released["digest"] != digest:
            raise ValueError(f"train: {path}: was changed since the run began. Restore it; another table is a new run.")
    n = _num_units(owners, train_rows)
    if not released:
        hint = f"It must be below 1/n for the {n:,} that train; 1 / (10 n) or less is usual."
        _check.strictly_between("train", 0, 1 / n, delta=settings.delta, hint=hint)  # before anything is spent
        of_rows = None if owners is None else owners[train_rows]
        with ranks.together("learns what the schema leaves open"):
            found = _learn(settings, frame.iloc[train_rows], of_rows, new_ledger) if ranks.is_first else None
        released = ranks.from_first(found)
        assert released is not None
        released = {**released, "digest": digest}
    schema = tables.Schema.from_toml(released["schema"])
    encoder = tables.Encoder(schema)
    train, test = encoder.encode(frame.iloc[train_rows]), encoder.encode(frame.iloc[test_rows])
    known = torch.nonzero(test.has_target).flatten().tolist()
    if not known:
        raise ValueError(f"train: {path}: no test row has a target; take a larger --test-share.")
    prior = [
        privacy.Release(privacy.event_from_dict(event), fingerprint)
        for event, fingerprint in zip(released["events"], released["fingerprints"], strict=True)
    ]
    found = tables.defaults(n, settings.target_epsilon or 1.0, settings.delta)
    rule = tp.Flat(settings.clip_norm) if settings.clipping == "flat" else tp.Automatic(settings.clip_norm)
    private: dict[str, Any] = {"clipping": rule, "prior_releases": prior}
    if owners is not None:
        private |= {
            "owners": owners[train_rows],
            "per_owner": settings.per_owner,
            "owner_name": _event_unit(settings),
        }
    return Task(
        train=train.dataset(),
        test=Subset(test.dataset(), known),
        new_model=partial(seeded, partial(tables.new_model, schema, settings.hidden_units), settings.seed),
        new_optimizer=replace(found, learning_rate=settings.learning_rate).new_optimizer,
        losses=tables.losses,
        score=_score(schema, encoder),
        private=lambda model: private,
        average=settings.average,
        released=released,
        not_covered=(SHOWN_WITHOUT_NOISE,),
        num_threads=1,
        num_units=n,
        unit=_unit(settings),
        schema=released["schema"],
        rows=tables.rows_of(frame),
        notes=(*frame.attrs.get("notes", ()), *_notes(settings, schema, n, released, prior)),
        exact=() if prior else _exact(train),
    )


def _learn(
    settings: Settings, frame: DataFrame, owners: Any, new_ledger: Callable[[], privacy.Ledger] | None
) -> dict[str, Any]:
    """Learns privately what the schema leaves open; returns the completed schema with its price, as plain data."""
    path = Path(settings.file)
    schema = _declared(path, settings.target, settings.schema, settings.owner)
    if schema.is_complete:
        return {"schema": schema.to_toml(), "events": [], "fingerprints": [], "notes": []}
    share, kept = settings.schema_share, _Kept(_event_unit(settings), new_ledger)
    assert settings.target_epsilon is not None, "noise alone leaves nothing to learn with"
    try:
        learnt = tables.learn(
            frame,
            schema,
            epsilon=share * settings.target_epsilon,
            delta=share * settings.delta,
            owners=owners,
            per_owner=settings.per_owner or 1,
            record=kept.record,
        )
    except tables.TableError as error:
        price = _price([release.event for release in error.releases], settings.delta) if error.releases else "nothing"
        raise ValueError(f"{path}: {str(error).rstrip('.')}. To learn this has cost {price}.") from None
    finally:
        kept.close()
    return {
        "schema": learnt.schema.to_toml(),
        "events": [privacy.event_to_dict(kept.event(release)) for release in learnt.releases],
        "fingerprints": [release.fingerprint for release in learnt.releases],
        "notes": list(learnt.notes),
    }


class _Kept:
    """Records releases for a unit of protection, in a ledger that is made with the first of them."""

    def __init__(self, unit: str, new_ledger: Callable[[], privacy.Ledger] | None):
        self._unit, self._new_ledger = unit, new_ledger
        self._ledger: privacy.Ledger | None = None

    def event(self, release: privacy.Release) -> privacy.Event:
        return replace(release.event, unit=self._unit)  # type: ignore[call-arg]

    def record(self, release: privacy.Release) -> None:
        if self._ledger is None and self._new_ledger is not None:
            self._ledger = self._new_ledger()
        if self._ledger is not None:
            self._ledger.record(self.event(release), len(self._ledger), release.fingerprint)

    def close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()


def _notes(
    settings: Settings,
    schema: tables.Schema,
    n: int,
    released: Mapping[str, Any],
    prior: Sequence[privacy.Release],
) -> tuple[str, ...]:
    """Returns sentences on what was chosen, and on what was learnt and its price."""
    name, steps = Path(settings.file).name, task.number_of_steps(settings, n)
    clipping = "automatic clipping" if settings.clipping == "automatic" else f"clip norm {settings.clip_norm:g}"
    whom = "rows" if settings.owner is None else plural(_event_unit(settings))  # the number of their rows is private
    chosen = (
        f"{name}: trains on {n:,} {whom}; a share of {settings.test_share:g} is kept for the test. Protected: "
        f"{_unit(settings)}.",
        f"Chosen: delta {settings.delta:g}, batches of {settings.expected_batch_size:,}, {steps:,} steps "
        f"({settings.epochs:.3g} epochs), {_units(settings)}, {clipping}, learning rate {settings.learning_rate:g}, "
        "averaged weights.",
    )
    if not prior:
        price = "The schema says all that is needed: nothing was learnt privately, and all of epsilon is for training."
    else:
        cost = _price([release.event for release in prior], settings.delta)
        total = settings.target_epsilon
        of = "" if total is None else f" of the total {total:g}; the training has the rest"
        price = f"Learnt privately, for {cost}{of}: {_in_words(schema)}."
    return (*chosen, *released["notes"], *_hints(schema), price)


def _hints(schema: tables.Schema) -> tuple[str, ...]:
    """Returns what may help if columns were taken for rare texts."""
    rare = [column.name for column in schema.columns if column.kind == "ignored" and "frequent" in column.reason]
    if not rare or schema.decimal == ",":
        return ()
    return (f'If {_check.quoted(rare[:1])} has numbers with a decimal comma, write decimal = "," into a schema.',)


def _in_words(schema: tables.Schema) -> str:
    """Returns what a complete schema says of the columns that are used; of many, the first."""
    found = []
    for column in (schema.target_column, *schema.features):
        name = f"{column.name!r} (target)" if column.name == schema.target else repr(column.name)
        if column.kind == "category":
            categories = column.categories or ()
            names = f": {', '.join(categories)}" if len(categories) <= MOST_CLASSES else ""
            found.append(f"{name} {len(categories)} categories{names}")
        else:
            low, high = column.bounds or ("", "")
            found.append(f"{name} {low} to {high}")
    more = [f"and {len(found) - MOST_NAMES} more in schema.toml"] if len(found) > MOST_NAMES else []
    return "; ".join([*found[:MOST_NAMES], *more])


def _exact(train: tables.Encoded) -> tuple[str, ...]:
    """Returns how many cells are missing or wrong; exact, since nothing was paid for counting."""
    found = []
    for counts, words in ((train.num_missing, "missing"), (train.num_not_understood, "not of the declared kind")):
        listed = ", ".join(f"{count:,} of {name!r}" for name, count in counts.items() if count)
        found += [f"{words}: {listed}"] if listed else []
    if not found:
        return ()
    return (f"Imputed in the training rows ({'; '.join(found)}). These are exact counts, so keep them to yourself.",)


def _units(settings: Settings) -> str:
    return f"{' and '.join(map(str, settings.hidden_units))} hidden units"


def _unit(settings: Settings) -> str:
    """Returns the unit of protection in words."""
    if settings.owner is None:
        return "one row of the table"
    return f"one {_event_unit(settings)}, at most {settings.per_owner} rows in a step"


def _event_unit(settings: Settings) -> str:
    """Returns the word for the unit of protection in events: those of learning and training must agree."""
    return ONE_EXAMPLE if settings.owner is None else unit_of_column(settings.owner)


def _num_units(owners: Any, rows: Any) -> int:
    """Returns the number of rows, or of their owners."""
    return len(rows) if owners is None else len(set(owners[rows]))


def _price(events: Sequence[privacy.Event], delta: float) -> str:
    """Returns the certified epsilon of the releases, in words."""
    return f"epsilon {round_up(privacy.compose([(event, 1) for event in events]).epsilon_high(delta))}"


def _score(schema: tables.Schema, encoder: tables.Encoder) -> Score:
    """Returns the accuracy, or the root mean squared error in the unit of the target."""
    if schema.task == "classification":
        return ACCURACY
    scale = encoder.target_scale
    return Score(log.Measure("RMSE", larger_is_better=False), _squared_error, lambda mean: scale * mean**0.5)


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the squared errors, (n,); 0 for a row without a target."""
    return torch.where(targets.isnan(), 0.0, outputs - targets).square()


def _declared(path: Path, target: str, file: str | None, owner: str | None) -> tables.Schema:
    """Returns the schema that the user declares public, or the cautious template."""
    ignored = () if owner is None else (owner,)
    if file is None:
        return tables.Schema.template(path, target, ignore=ignored)
    schema = tables.Schema.read(file)
    if schema.target != target:
        raise ValueError(f"train: {file}: is the schema for the target {schema.target!r}, not for {target!r}.")
    if any(column.name == owner and column.kind != "ignored" for column in schema.columns):
        raise ValueError(f'train: {file}: {owner!r} names the persons; give it kind = "ignored" in the schema.')
    schema.check_frame(_table(path), str(path))
    return schema


def _check_column(where: str, option: str, name: str, frame: DataFrame, path: Path) -> None:
    if name not in frame.columns:
        close = get_close_matches(name, map(str, frame.columns), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{where}: --{option} {name!r} is no column of {path}, which has {_names(frame)}.{hint}")


def _check_owner(chosen: Mapping[str, Any], frame: DataFrame, path: Path) -> None:
    owner, most = chosen.get("owner"), chosen.get("per_owner")
    if (owner is None) != (most is None):
        raise ValueError(
            "train: --owner COLUMN and --per-owner K belong together: the column that names the person of each row, "
            "and the largest number of rows of one person to use."
        )
    if owner is None or most is None:
        return
    _check.whole("train", at_least=1, per_owner=most)
    _check_column("train", "owner", owner, frame, path)
    if owner == chosen["target"]:
        raise ValueError(f"train: --owner {owner!r} is the target; name the column of the persons.")


def _owners(frame: DataFrame, owner: str | None, path: Path) -> Any:
    """Returns the person of each row, or None; refuses rows of nobody, who would not be protected."""
    if owner is None:
        return None
    column = frame[owner]
    empty = column.isna() | (column.astype("string").str.strip() == "")
    if empty.any():
        raise ValueError(
            f"train: {path}: some rows have no {owner!r}. Every row must name its person: fill in what is missing, or "
            "delete these rows."
        )
    return column.astype("string").str.strip().to_numpy(dtype=str)


def _names(frame: DataFrame) -> str:
    return _check.quoted(map(str, frame.columns), at_most=MOST_NAMES)


def _table(path: Path) -> DataFrame:
    """Returns the table in a file, from memory if the file is unchanged."""
    try:
        state = path.stat()
    except OSError:
        return tables.read_table(path)
    return _read(path.absolute(), state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=1)
def _read(path: Path, changed: int, size: int) -> DataFrame:
    return tables.read_table(path)


def _digest(path: Path) -> str:
    """Returns the SHA-256 of the table, which is as secret as the table: a guess of it can be verified."""
    with opened(path) as file:
        digest = hashlib.sha256()
        while part := file.read(2**20):
            digest.update(part)
        return digest.hexdigest()


@contextmanager
def needing_extra() -> Iterator[None]:
    """Refuses in one sentence, which names the extra, if a library for tables is missing."""
    try:
        yield
    except ImportError as error:
        raise ValueError(str(error)) from None


def _no_rows(quick: bool) -> Sequence[Any]:
    return ()


STUDY = Study({SCORE: ACCURACY_COLUMN}, _no_rows, (), DEFAULTS, build_task, releases_itself=True)
