# SPDX-License-Identifier: Apache-2.0
"""Runs one experiment of a paper: every row in a folder of its own, the results beside the paper's numbers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch_privacy.experiments import EXPERIMENTS, load_study
from torch_privacy.experiments.study import Study
from torch_privacy.privacy import Bracket, Ledger
from torch_privacy.runs.folder import RunFolder
from torch_privacy.runs.rows import (
    EXACT,
    Computation,
    Context,
    Number,
    Numbers,
    Row,
    TrainingRow,
    folder_name,
    rows_folder,
    training_numbers,
)
from torch_privacy.support import validate as _check
from torch_privacy_papers.catalog import Experiment

if TYPE_CHECKING:
    from torch_privacy.experiments.runner import Run

OWN_DATA = "The data are {}, of your own, and not the paper's: its numbers are left out."
Beginning = tuple[Path, str | None, dict[str, Any]]  # arguments of `runner.begin`


@dataclass(frozen=True)
class RowJob:
    """One row for one seed, and its folder."""

    row: Row
    seed: int
    folder: RunFolder

    @property
    def title(self) -> str:
        """Returns the row's name, with its seed if it has one."""
        return f"{self.row.name}, seed {self.seed}" if self.row.seeded else self.row.name


@dataclass(frozen=True)
class Selection:
    """Selects the rows that match a pattern of ``only`` (if it has any) and no pattern of ``skip``.

    Patterns are as for file names: ``JL*`` or ``*epsilon 2``.
    """

    only: Sequence[str] = ()
    skip: Sequence[str] = ()

    def of(self, rows: Sequence[Row]) -> list[Row]:
        """Returns the selected rows.

        Raises:
            ValueError: If a pattern matches no row, or no row is left.
        """
        names = [row.name for row in rows]
        for pattern in (*self.only, *self.skip):
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"reproduce: {pattern!r} must match a row's name, one of {', '.join(map(repr, names))}."
                )
        found = [row for row in rows if self._has(row.name)]
        if not found:
            raise ValueError("reproduce: no row is left. Skip fewer of them.")
        return found

    def _has(self, name: str) -> bool:
        chosen = not self.only or any(fnmatchcase(name, pattern) for pattern in self.only)
        return chosen and not any(fnmatchcase(name, pattern) for pattern in self.skip)


@dataclass
class Reproduction:
    """A run of one experiment in its folder, which is locked while the run is open.

    Do every job of ``unfinished()``, a training by ``training(job)`` or as ``beginning(job)`` says, a computation by
    ``compute(job)``, then call ``finish()``. You may leave the run at any time with ``close()``: ``resume`` does the
    remaining jobs and continues trainings from their last checkpoint.
    """

    folder: RunFolder
    experiment: Experiment
    study: Study
    quick: bool
    seeds: Sequence[int]
    data: str | None
    selection: Selection = Selection()
    num_processes: int = 1  # that share each training
    made: Sequence[Path] = ()  # folders created by this run; removed again if no job was begun

    @classmethod
    def start(
        cls,
        path: Path,
        name: str,
        *,
        quick: bool = False,
        seeds: Sequence[int] = (0,),
        data: str | None = None,
        only: Sequence[str] = (),
        skip: Sequence[str] = (),
        num_processes: int = 1,
    ) -> Reproduction:
        """Starts a run in a new folder.

        Raises:
            ValueError: If the experiment is unknown, a seed is invalid, no row is selected, or the folder is not empty
                or in use.
        """
        folder = RunFolder(path)
        folder.check_new()
        study = load_study(name)
        selection = Selection(list(only), list(skip))
        selection.of(study.rows(quick))
        for seed in seeds:
            _check.whole("reproduce", seed=seed)
        made = [place for place in (path, *path.parents) if not place.exists()]
        folder.create()
        run = cls(folder, EXPERIMENTS[name], study, quick, list(seeds), data, selection, num_processes, made)
        folder.write_settings(run._request(), folder.write_checked)
        return run

    @classmethod
    def resume(cls, path: Path, *, num_processes: int = 1) -> Reproduction:
        """Continues the unfinished run in ``path``.

        Raises:
            ValueError: If the folder holds no unfinished run of an experiment, or is in use.
        """
        folder = RunFolder(path)
        request = folder.read_request()
        if request is None:
            raise ValueError(f"{path}: is no run of an experiment. Continue a training with train --resume.")
        if folder.is_complete:
            raise ValueError(f"{path}: this run is complete, nothing is left to resume. Its report is {folder.report}.")
        name, selection = request["reproduce"], Selection(request.get("only", ()), request.get("skip", ()))
        study = load_study(name)
        quick, seeds, data = request["quick"], request["seeds"], request["data"]
        run = cls(folder, EXPERIMENTS[name], study, quick, seeds, data, selection, num_processes)
        run._check_rows()
        folder.lock()
        return run

    def _settings_asked(self, seed: int, row: TrainingRow) -> dict[str, Any]:
        """Returns all settings of a row that do not depend on the data, as JSON values."""
        settings = self.study.settings(**{"seed": seed, **row.settings})
        of_data = {"data"} | ({"expected_batch_size"} if self.study.settings_of_data else set())
        asked = {name: value for name, value in asdict(settings).items() if name not in of_data - set(row.settings)}
        return json.loads(json.dumps(asked))

    def _settings_of_old(self) -> dict[str, Any]:
        """Returns what a row was trained with that has not a setting yet: the default of its class."""
        known = () if self.study.defaults is None else fields(self.study.defaults)
        return {setting.name: None if setting.default is MISSING else setting.default for setting in known}

    def rows(self) -> list[Row]:
        """Returns the selected rows."""
        return self.selection.of(self.study.rows(self.quick))

    def jobs(self) -> list[RowJob]:
        """Returns a job for every row and seed; a row that does not depend on the seed has one for the first seed."""
        inside = rows_folder(self.folder.path)
        return [
            RowJob(row, seed, RunFolder(inside / folder_name(row.name, seed if row.seeded else None)))
            for row in self.rows()
            for seed in (self.seeds if row.seeded else self.seeds[:1])
        ]

    def unfinished(self) -> list[RowJob]:
        """Returns the jobs without results."""
        return [job for job in self.jobs() if not job.folder.is_complete]

    def training(self, job: RowJob) -> Run:
        """Starts or resumes the training of a job, in one process."""
        from torch_privacy.experiments.runner import begin

        return begin(*self.beginning(job))

    def beginning(self, job: RowJob) -> Beginning:
        """Returns how the training of a job begins: folder, and experiment with settings, or None to resume it."""
        assert isinstance(job.row, TrainingRow)
        if job.folder.checkpoint.exists() or job.folder.former_checkpoint.exists():
            return job.folder.path, None, {}
        if job.folder.path.exists():
            ledger = job.folder.ledger
            if ledger.exists() and Ledger.read(ledger).events:
                raise ValueError(
                    f"{job.folder.path}: has no {job.folder.checkpoint.name}, so this training cannot continue, but "
                    "its ledger holds releases, which a new start would not count. Move the folder elsewhere, then "
                    "resume again."
                )
            shutil.rmtree(job.folder.path)  # stopped before the first step
        return job.folder.path, self.experiment.name, self._settings_of(job)

    def _settings_of(self, job: RowJob) -> dict[str, Any]:
        """Returns the settings of a job's training: seed, data folder, what depends on the data, and the row's own."""
        assert isinstance(job.row, TrainingRow)
        of_data = self.study.settings_of_data(self.data) if self.study.settings_of_data else {}
        return {"seed": job.seed, **({} if self.data is None else {"data": self.data}), **of_data, **job.row.settings}

    def _check_rows(self) -> None:
        """Raises a ``ValueError`` if a row was trained with other settings than the table will state."""
        for job in self.jobs():
            if isinstance(job.row, TrainingRow) and job.folder.settings.exists():
                found = {**self._settings_of_old(), **job.folder.read_settings()}
                asked = self._settings_asked(job.seed, job.row)
                if other := [name for name, value in asked.items() if found[name] != value]:
                    raise ValueError(
                        f"{job.folder.path}: was trained with other {', '.join(other)} than {self.folder.settings} and "
                        "this version of the experiment say. Start a new run."
                    )

    def compute(self, job: RowJob) -> None:
        """Does a job that is a computation, and writes its numbers."""
        assert isinstance(job.row, Computation)
        start = perf_counter()
        numbers = job.row.compute(Context(self.quick, job.seed, self.data, self.folder.path))
        job.folder.path.mkdir(parents=True, exist_ok=True)
        content = {"numbers": _as_json(numbers), "seconds": perf_counter() - start}
        job.folder.write_checked(job.folder.results, content)

    def finish(self) -> dict[str, Any]:
        """Draws the figures, writes report and results, and returns the results."""
        from torch_privacy.runs.report import figures as plots
        from torch_privacy.training.run_writer import write_page

        results = self._results()
        for name, figure in self._figures(results).items():
            plots.save(figure, self.folder.path / f"{name}.svg")
        self.folder.write_checked(self.folder.results, results)
        write_page(self.folder)
        self.close()
        return results

    def close(self) -> None:
        """Unlocks the folder, so that the run can be resumed; deletes the folder if no job was begun."""
        self.folder.unlock()
        if not self.folder.is_complete and not rows_folder(self.folder.path).exists():
            for place in self.made:
                if place == self.folder.path:
                    shutil.rmtree(place)
                elif not any(place.iterdir()):
                    place.rmdir()

    def _request(self) -> dict[str, Any]:
        """Returns the content of ``settings.json``."""
        request = {"reproduce": self.experiment.name, "quick": self.quick, "seeds": self.seeds, "data": self.data}
        return request | asdict(self.selection)

    def _deltas(self) -> list[float]:
        """Returns the deltas of the table's epsilons, if it has any."""
        if EXACT not in self.study.columns:
            return []
        found = {
            self.study.settings(**row.settings).delta if isinstance(row, TrainingRow) else self.study.delta
            for row in self.rows()
        }
        return sorted(delta for delta in found if delta is not None)

    def _left_out(self) -> list[str]:
        run = {row.name for row in self.rows()}
        return [row.name for row in self.study.rows(self.quick) if row.name not in run]

    def _figures(self, results: dict[str, Any]) -> Mapping[str, Any]:
        draw = self.study.figures
        return {} if draw is None or self._left_out() else draw(results, self.folder.path)

    def _results(self) -> dict[str, Any]:
        """Returns the table: columns, rows, the paper's numbers and ours for every seed."""
        runs: dict[str, list[dict[str, Any]]] = {}
        left_out = self._left_out()
        for job in self.jobs():
            content = job.folder.read_results()
            _check_result(job, content)
            numbers = _of_job(job, content)
            if isinstance(job.row, TrainingRow) and self.study.numbers_of is not None:
                numbers["numbers"] |= _as_json(self.study.numbers_of(job.folder))
            runs.setdefault(job.row.name, []).append({"seed": job.seed, **numbers})
        own = self.study.own_data(self.data) if self.study.own_data else None
        results = {
            "reproduce": self.experiment.name,
            "paper": asdict(self.experiment.paper),
            "place": self.experiment.place if own is None else f"the recipe of {self.experiment.place},",
            "shows": self.experiment.shows if own is None else f"{own}, data of your own",
            **({} if own is None else {"own_data": own}),
            "quick": self.quick,
            "seeds": self.seeds,
            "deltas": self._deltas(),
            **asdict(self.selection),
            "machine": _machine(),
            **({"ranks": self.num_processes} if self.num_processes > 1 else {}),
            "versions": {name: version(name) for name in ("torch_privacy", "torch", "numpy", "scipy")},
            "columns": {key: asdict(column) for key, column in self.study.columns.items()},
            "rows": [
                {
                    "row": row.name,
                    "seeded": row.seeded,
                    "paper": dict(row.paper) if own is None else {},
                    "runs": runs[row.name],
                }
                for row in self.rows()
            ],
            "notes": [
                *([] if own is None else [OWN_DATA.format(own)]),
                *self.study.notes,
                *_without_numbers(self.rows(), runs),
                *([f"Left out: {'; '.join(left_out)}."] if left_out else []),
            ],
        }
        find = self.study.findings
        if find is None or (left_out and self.study.findings_need_all):
            return results
        return {**results, "notes": [*results["notes"], *find(results)]}


def _check_result(job: RowJob, content: dict[str, Any]) -> None:
    """Raises a ``ValueError`` if the results are those of a row of another kind."""
    needed = ("numbers", "seconds") if isinstance(job.row, Computation) else ("privacy", "score", "seconds")
    if lacking := [key for key in needed if key not in content]:
        raise ValueError(f"{job.folder.results}: has no {', '.join(map(repr, lacking))}; the file is damaged.")


def _of_job(job: RowJob, content: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers and seconds of a job, from the files of its folder."""
    if isinstance(job.row, Computation):
        return {"numbers": content["numbers"], "seconds": content["seconds"]}
    numbers = training_numbers(content, job.folder.read_metrics())
    return {"numbers": _as_json(numbers), "seconds": content["seconds"]["private"]}


def _without_numbers(rows: Sequence[Row], runs: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Yields a sentence for each package without which some rows have no numbers."""
    lacking: dict[str, list[str]] = {}
    for row in rows:
        known = [value for run in runs[row.name] for value in run["numbers"].values() if value is not None]
        if isinstance(row, Computation) and row.needs and not known:
            lacking.setdefault(row.needs, []).append(row.name)
    for package, names in lacking.items():
        yield (
            f"Without numbers: {', '.join(names)}. They need {package}, which is not installed: pip install {package}."
        )


def _as_json(numbers: Numbers) -> dict[str, Any]:
    return {key: _plain(value) for key, value in numbers.items()}


def _plain(value: Number) -> Any:
    return value._asdict() if isinstance(value, Bracket) else value


def _machine() -> str:
    """Returns a general description of the hardware."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} CPU core{'s' * (cores != 1)}" + ", one GPU" * torch.cuda.is_available()
