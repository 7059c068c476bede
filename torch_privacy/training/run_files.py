# SPDX-License-Identifier: Apache-2.0
"""Writes the run folder of a training: settings at the start, losses on the way, all other files at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from .. import privacy
from ..mechanisms.sums import Summation
from ..privacy.summary import Releases, finite_or_none, summarize
from ..runs.folder import RunFolder
from ..runs.metrics import Log, Metrics
from ..support.ranks import Ranks
from ..support.validate import Refused, plain_number
from .callbacks import Listener
from .draws import Share
from .run_settings import LONGEST_NAME, name_of
from .run_writer import fingerprint_in, size_of, try_page, write_page, write_run
from .settings import TrainingSettings
from .weights import has_diverged


class Losses:
    """Adds up the losses of one rank: of the step in progress, and of the steps since the last row of the metrics.

    Args:
        log: gets the sums.
        ranks: processes of the training; the first one has the sums of all.
    """

    def __init__(self, log: Log, ranks: Ranks):
        self.log, self._ranks = log, ranks
        self._drawn = 0  # examples of the step in progress
        self._sums: Tensor | None = None  # and the number of finite losses with their sum; secret
        self._since_row: Tensor | None = None  # the same of the steps since they were read last

    def begin_step(self) -> None:
        """Forgets the losses of a step that was not made."""
        self._drawn, self._sums = 0, None

    def add(self, losses: Tensor) -> None:
        """Adds the losses (n, views) of a (micro)batch."""
        losses = losses.detach().mean(1).double()
        finite = losses.isfinite()
        sums = torch.stack([finite.sum().double(), torch.where(finite, losses, 0).sum()])
        self._drawn += losses.numel()
        self._sums = sums if self._sums is None else self._sums + sums

    def end_step(self) -> None:
        """Counts the losses of the step that was made."""
        if self._sums is not None:
            self._since_row = self._sums if self._since_row is None else self._since_row + self._sums
        self.log.add_sums(self._drawn, 0, 0.0)
        self.begin_step()

    def read(self) -> Log:
        """Returns the log with all losses of this rank so far; it waits for a GPU."""
        if self._since_row is not None:
            count, total = self._since_row.tolist()
            self.log.add_sums(0, count, total)
            self._since_row = None
        return self.log

    def sum_ranks(self) -> None:
        """Adds up the losses since the last row over all ranks, which call it together; the first one keeps them."""
        log = self.read()
        sums = log.summed(self._ranks)
        log.take(sums) if self._ranks.is_first else log.forget()

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Goes on with the losses in a state; without any, which older ones are, from here on."""
        self._since_row = None
        self.begin_step()
        self.log.load_state_dict(state or {})
        if not self._ranks.is_first:  # it has the sums
            self.log.forget()


WHERE = "PrivateTraining"
LARGEST_SCORE = 1e30
LOSSES_NOT_COVERED = (
    "the training losses in metrics.csv and on the page: exact means over the training data, made without noise"
)
FREE_SECONDS, SHARE_OF_TIME = 2.0, 0.05  # for the epsilon of each epoch
OTHER_FILES = "Give this training a new folder, or delete what is no longer needed."


@dataclass(frozen=True)
class Scores:
    """Test scores of a training by name, and those of the same model trained without privacy."""

    private: Mapping[str, float] = field(default_factory=dict)
    baseline: Mapping[str, float] = field(default_factory=dict)
    num_test_examples: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns the scores as entries of ``results.json``."""
        return {
            **({} if self.num_test_examples is None else {"num_test_examples": self.num_test_examples}),
            "scores": {name: finite_or_none(score) for name, score in self.private.items()},
            "baseline_scores": {name: finite_or_none(score) for name, score in self.baseline.items()},
        }


class RunFiles(Listener):
    """The run folder of a training in a loop of one's own, and the losses for its metrics.

    Every rank has one, and the first rank alone reads and writes files.

    Args:
        path: the folder; None on ranks that do not write.
        settings: those of the training.
        ranks: processes of the training.
    """

    def __init__(self, path: Path | str | None, settings: TrainingSettings, ranks: Ranks):
        self.folder = None if path is None else RunFolder(Path(path))
        n = settings.num_units
        self.delta = settings.delta or _delta_for(n)
        self._settings, self._ranks = settings, ranks
        self.losses = Losses(Log(settings.num_steps, settings.num_steps * settings.expected_batch_size / n), ranks)
        self.is_written = self.folder is not None and self.folder.results.exists()  # and no release made since
        self._settings_to_write: Mapping[str, Any] | None = None
        self._start, self._seconds = time.monotonic(), 0.0  # when the training began; to compute epsilon
        self._data: dict[str, Any] | None = None  # fingerprint of the data

    # The start

    def begin(self, written: Mapping[str, Any], num_released: int) -> None:
        """Writes ``settings.json``; a folder with releases of a training with other settings is refused.

        In a folder with releases it is written at the next one: the old file belongs to what was written before.
        """
        assert self.folder is not None
        try_page(self.folder)
        if self.is_written and not self.folder.report.exists():  # the process was killed before its last file
            write_page(self.folder)
        self._settings_to_write = written
        if num_released and self.folder.settings.exists():
            found, ours = self.folder.read_settings()["fixed"], written["fixed"]
            differing = [name for name in {**ours, **found} if found.get(name, ...) != ours.get(name, ...)]
            if differing:
                listed = "; ".join(
                    f"{name}: {_short(ours, name)} here, {_short(found, name)} there" for name in differing
                )
                raise Refused(
                    f"{WHERE}: run_folder={str(self.folder.path)!r} has {num_released} releases of a training with "
                    f"other settings ({listed}). Resume it with the settings it began with, or name another folder."
                )
        else:
            self._write_settings()

    def before_release(self, *, is_new: bool) -> None:
        """Makes the folder one of an unfinished training again."""
        if not is_new:
            return
        if self.is_written and self.folder is not None:
            self.folder.results.unlink(missing_ok=True)
        self.is_written = False
        self._write_settings()

    def _write_settings(self) -> None:
        if self.folder is not None and self._settings_to_write is not None:
            self.folder.write_json(self.folder.settings, dict(self._settings_to_write))
            self._settings_to_write = None

    # The losses

    def begin_step(self, size: int = 0) -> None:
        """Forgets the losses of a step that was not made."""
        self.losses.begin_step()

    def after_batch(self, share: Share, losses: Tensor, summation: Summation) -> None:
        """Takes the losses of a (micro)batch, unless it is a stand-in."""
        if share.counts:
            self.losses.add(losses)

    def after_step(self, training: Any) -> None:
        """Counts the losses of the step that was made; adds the epoch's row if it is due."""
        self.losses.end_step()
        if self.losses.log.is_due(training.step_count):
            self._end_epoch(training)

    def _end_epoch(self, training: Any) -> None:
        """Adds the row on every rank, so that all know when the next is due; the first one has its numbers."""
        step = training.step_count
        self.losses.sum_ranks()
        self._ranks.first_does("computes epsilon", lambda: self.end_epoch(step, training.profile_at_step))
        if not self._ranks.is_first:
            self.losses.log.end_epoch(step)

    # The end

    def end_epoch(self, step: int, profile: Callable[[], privacy.Profile]) -> None:
        """Adds a row with the losses since the last one and the epsilon so far, on the first rank.

        Where epsilon takes long (thousands of different steps), most rows have none, so that it takes a twentieth of
        the time of the training at most; the last one has it.
        """
        start = time.monotonic()
        is_cheap = self._seconds < FREE_SECONDS + SHARE_OF_TIME * (start - self._start)
        self.losses.log.end_epoch(step, *(self._epsilon(profile()) if is_cheap else ()))
        self._seconds += time.monotonic() - start

    def rows(self, step: int, profile: privacy.Profile) -> list[Metrics]:
        """Returns the rows so far, with one that ends at this step and has its epsilon."""
        rows, epsilon = list(self.losses.log.rows), self._epsilon(profile)
        if not rows or rows[-1].step < step:
            return [*rows, self.losses.log.row(step, *epsilon)]
        return [*rows[:-1], replace(rows[-1], epsilon_low=epsilon[0], epsilon_high=epsilon[1])]

    def _epsilon(self, profile: privacy.Profile) -> tuple[float, float]:
        """Returns the certified interval at the delta of the run folder."""
        low, high = profile.epsilon(self.delta)
        return float(low), float(high)

    def data(self, dataset: Dataset) -> dict[str, Any]:
        """Returns the fingerprint of the data under the folder's key."""
        assert self.folder is not None
        if self._data is None:
            self._data = fingerprint_in(self.folder, dataset, self._settings)
        return self._data

    def write(
        self,
        step: int,
        weights: bytes,
        statement: Callable[[], Mapping[str, Any]],
        releases: Releases,
        profile: privacy.Profile,
        model: nn.Module,
        scores: Scores,
    ) -> None:
        """Writes everything but settings and ledger, on the first rank."""
        folder = self.folder
        assert folder is not None

        def results() -> dict[str, Any]:
            return {
                "model": name_of(model),
                **size_of(self._settings, self._ranks),
                **scores.as_json(),
                "num_steps": self._settings.num_steps,
                "num_steps_made": step,
                "diverged": has_diverged(model, *scores.private.values()),
                "privacy": summarize(releases, self.delta).as_json(),
            }

        folder.results.unlink(missing_ok=True)  # the files belong together: until all are there, the run is unfinished
        self.is_written = False
        self._write_settings()
        write_run(folder, weights, lambda: self.rows(step, profile), statement, results)
        self.is_written = True


def open_files(run_folder: Path | str | RunFolder | None) -> Path | None:
    """Returns the folder to write files to; refuses one that holds another kind of run, or other files in their place.

    None for a `RunFolder`: whoever made it writes its files, and the training has the ledger in it.
    """
    if run_folder is None or isinstance(run_folder, RunFolder):
        return None
    folder = RunFolder(Path(run_folder))
    if folder.path.exists() and not folder.path.is_dir():
        raise ValueError(f"{WHERE}: run_folder={str(run_folder)!r} is not a folder. Name a new one for this training.")
    is_own = False
    if folder.settings.is_file():
        with suppress(ValueError):
            is_own = "fixed" in folder.read_settings()
    if not is_own and folder.settings.exists():
        raise Refused(
            f"{WHERE}: run_folder={str(run_folder)!r} has a settings.json that no training in a loop of your own has "
            f"written: it is that of torch-privacy train or reproduce, of another program, or damaged. {OTHER_FILES}"
        )
    if not folder.ledger.exists():
        ours = (folder.metrics, folder.model, folder.privacy, folder.results, folder.report)
        if there := [path.name for path in ours if path.exists()]:
            raise Refused(
                f"{WHERE}: run_folder={str(run_folder)!r} has no ledger, but {', '.join(there)}, which would be "
                f"overwritten. {OTHER_FILES}"
            )
    return folder.path


def checked_scores(name: str, scores: Mapping[str, Any] | None) -> dict[str, float]:
    """Returns scores as plain numbers by name.

    Raises:
        ValueError: something else was given.
    """
    found = {}
    for key, value in (scores or {}).items():
        value = plain_number(value)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_named = isinstance(key, str) and 0 < len(key) <= LONGEST_NAME
        if not (is_named and is_number) or LARGEST_SCORE < abs(value) < math.inf:
            raise ValueError(
                f"{WHERE}.write_run: {name} has {key!r:.100}: {value!r:.100}; must be numbers by name, such as "
                '{"accuracy": 0.84}.'
            )
        found[key] = float(value)
    return found


def _delta_for(num_examples: int) -> float:
    """Returns the delta to report at if none was given: 1/(10 n), with two digits, rounded down."""
    delta = 1 / (10 * num_examples)
    scale = 10.0 ** (1 - math.floor(math.log10(delta)))
    return min(float(f"{math.floor(delta * scale) / scale:.2g}"), delta)


def _short(settings: Mapping[str, Any], name: str) -> str:
    return f"{settings[name]!r:.200}" if name in settings else "nothing"
