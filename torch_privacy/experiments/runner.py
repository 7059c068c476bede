# SPDX-License-Identifier: Apache-2.0
"""Runs one training end to end: private training, non-private baseline, run folder, and resuming after a stop.

In a process group of several ranks every rank makes the same calls. The network is wrapped in
``DistributedDataParallel``; rank 0 alone reads and writes files, and the others get from it what they need.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.experiments import baseline, opening
from torch_privacy.experiments.fitting import (
    check_priced,
    length,
    losses_and_scores,
    new_average,
    new_training,
    releases_of,
    test_score,
)
from torch_privacy.experiments.task import Settings, Task, check_settings, num_units
from torch_privacy.privacy.summary import Summary, finite_or_none, summarize
from torch_privacy.runs.folder import RunFolder, published
from torch_privacy.runs.metrics import Log, Progress
from torch_privacy.support.ranks import Ranks
from torch_privacy.training.machine import number_of_threads
from torch_privacy.training.run_writer import fingerprint_in, size_of, try_page, write_run
from torch_privacy.training.saved_model import weights_of, without_wrapper
from torch_privacy.training.secret_file import check_parts, load_parts
from torch_privacy.training.weights import has_diverged


@dataclass
class Run:
    """One run of an experiment in its folder, which is locked while the run is open.

    Iterate over ``steps()`` to the end, then call ``finish()``. Between two steps you may call ``checkpoint()`` and
    leave the run with ``close()``: ``Run.resume`` continues from there, with the same batches and ledger as without a
    stop.

    Guarantees:
        - The run starts with a checkpoint, renews it at the end of every epoch, and deletes it when it is complete.
        - Only its owner can read the checkpoint: it determines all noise, past and future.
        - Of several ranks, rank 0 alone uses the folder. What it refuses or fails at is an error on all ranks.
    """

    ranks: Ranks
    folder: RunFolder
    experiment: str
    settings: Settings
    task: Task
    training: tp.PrivateTraining
    average: tp.MovingAverage | None
    private: Log
    baseline: Log

    @classmethod
    def start(cls, path: Path, experiment: str, **chosen: Any) -> Run:
        """Starts a run in a new folder; the ``chosen`` settings replace the experiment's (see `Study.settings`).

        Raises:
            ValueError: If the experiment is unknown, a setting is invalid, or the folder is not empty or in use.
        """
        ranks, folder = Ranks.here(), RunFolder(path)
        with ranks.together("prepares a run"):
            if ranks.is_first:
                folder.check_new()
            study, settings = opening.study_and_settings(experiment, chosen)
        with opening.leaving_its_price(folder):
            task = opening.task(ranks, study, settings, new_ledger=partial(opening.new_ledger, folder))
            with ranks.together("checks the settings"):
                check_settings(settings, num_units(task))
            check_priced(ranks, settings, task)
            ranks.first_does("creates the folder", partial(opening.create, folder))
            run = cls._build(ranks, folder, experiment, settings, task)
        written = {"experiment": experiment, **asdict(settings)}
        ranks.first_does("writes the settings", lambda: folder.write_settings(written, folder.write_json))
        run.checkpoint()
        # After the checkpoint, so that what was learnt privately is never learnt twice.
        ranks.first_does("writes the schema", run._write_schema)
        return run

    @classmethod
    def resume(cls, path: Path) -> Run:
        """Continues the run in ``path`` from its last checkpoint.

        Raises:
            ValueError: If the folder holds no unfinished run, is in use, or its settings or checkpoint were changed.
        """
        ranks, folder = Ranks.here(), RunFolder(path)
        ranks.first_does("locks the folder", partial(opening.lock, folder))
        state: dict[str, Any] = {}  # empty but on rank 0
        ranks.first_does("reads the checkpoint", lambda: state.update(opening.state_in(folder)))
        keys = state.pop("training", {})
        state = ranks.from_first(state)
        with ranks.together("prepares the run"):
            study, settings = opening.study_and_settings(state["experiment"], state["settings"])
        released = [state["released"]] if state["released"] else []
        run = cls._build(ranks, folder, state["experiment"], settings, opening.task(ranks, study, settings, *released))
        try:
            run._restore(keys, state)
            ranks.first_does("writes the schema", run._write_schema)
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def _build(cls, ranks: Ranks, folder: RunFolder, experiment: str, settings: Settings, task: Task) -> Run:
        ranks.first_does("tries to draw", lambda: try_page(folder))
        torch.manual_seed(settings.seed)  # for dropout and the like; never for the batches or the noise
        training = new_training(settings, task, folder)
        average = new_average(task, without_wrapper(training.model), training.optimizer)
        score = {"measure": task.score.measure, "finish": task.score.of_mean}
        log = partial(Log, num_steps=training.settings.num_steps, epochs=settings.epochs, **score)
        logs = log(training="private"), log(training="non-private")
        return cls(ranks, folder, experiment, settings, task, training, average, *logs)

    @property
    def model(self) -> nn.Module:
        """Returns the network that is trained privately, without a wrapper."""
        return without_wrapper(self.training.model)

    @property
    def released_model(self) -> nn.Module:
        """Returns the network that is scored and saved: the trained one, or its moving average if the task has one."""
        return self.model if self.average is None else self.average.model

    def steps(self) -> Iterator[Progress]:
        """Trains to the end, privately and then, if ``baseline`` is set, without privacy; yields after every step."""
        with number_of_threads(self.task.num_threads):
            yield from self.private.timed(self._private_steps())
            if self.settings.baseline:
                yield from self.baseline.timed(self._baseline_steps())

    def checkpoint(self) -> None:
        """Saves the state of private training in a secret file; a resumed baseline starts over.

        Every rank calls it, and none goes on before rank 0 has written the file.
        """
        sums = self.private.summed(self.ranks)
        self.ranks.first_does("saves a checkpoint", lambda: self._save(sums))

    def agreed(self, signal: int | None) -> int | None:
        """Returns the signal that this or another rank has received: the same on all ranks, which call it together."""
        sent = self.ranks.exchange("goes on", payload=bytes([signal or 0]))
        return max(message[0] for message in sent) or None

    def _save(self, sums: dict[str, Any]) -> None:
        state = self._state()
        state["log"] |= sums
        self.training.ledger.sync()
        self.folder.write_checkpoint(state)

    def _write_schema(self) -> None:
        if self.task.schema is not None:
            self.folder.write_schema(self.task.schema)

    def _state(self) -> dict[str, Any]:
        """Returns the content of a checkpoint."""
        with number_of_threads(self.task.num_threads):  # the state says with how many threads to repeat the next steps
            training = self.training.state_dict()
        return {
            "experiment": self.experiment,
            "settings": asdict(self.settings),  # to detect a settings.json that was changed during the run
            "released": dict(self.task.released),
            "parts": {name: part.state_dict() for name, part in self._parts().items()},
            "training": training,
            "log": self.private.state_dict(),
            "random_state": torch.get_rng_state(),
        }

    def _parts(self) -> dict[str, Any]:
        """Returns what the training changes, by the names in a checkpoint."""
        found = {
            "model": self.model,
            "optimizer": self.training.optimizer,
            "scheduler": self.training.scheduler,
            "average": self.average,
        }
        return {name: part for name, part in found.items() if part is not None}

    def finish(self) -> dict[str, Any]:
        """Writes model, privacy statement, results and report; deletes the checkpoint; returns the results.

        The model is written first, so that the trained weights are on disk even if a later file cannot be written. Of
        several ranks, rank 0 does so, and the others return nothing.
        """
        results: dict[str, Any] = {}
        self.ranks.first_does("writes the results", lambda: results.update(self._written_results()))
        self.close()
        return results

    def _written_results(self) -> dict[str, Any]:
        found: list[dict[str, Any]] = []

        def results() -> dict[str, Any]:
            found.append(self._results())
            self._write_schema()
            self.training.ledger.sync()
            return found[0]

        weights = weights_of(self.released_model, Ranks())
        write_run(self.folder, weights, lambda: self.private.rows + self.baseline.rows, self._statement, results)
        self.training.ledger.close()
        self.folder.delete_checkpoint()
        return found[0]

    def close(self) -> None:
        """Unlocks the folder, so that the run can be resumed; this object cannot be used afterwards."""
        self.training.ledger.close()
        self.folder.unlock()

    def epsilon_high(self, num_releases: int) -> float:
        """Returns the certified epsilon of this many releases of a step: never below the true one, and increasing."""
        return privacy.compose(releases_of(self.training, num_releases)).epsilon_high(self.settings.delta)

    def summary(self) -> Summary:
        """Returns the privacy of everything released so far, in the numbers to report."""
        return summarize(self.training.ledger.events, self.settings.delta)

    def _restore(self, keys: dict[str, Any], state: dict[str, Any]) -> None:
        """Goes on from a checkpoint; rank 0 has the state of the training with its keys, the others pass anything."""
        path, parts = self.folder.checkpoint, self._parts()
        with self.ranks.together("compares the checkpoint"):
            check_parts(path, state["parts"], parts)
        self.training.load_state_dict(keys)
        load_parts(path, state["parts"], parts)
        self.private.load_state_dict(state["log"])
        if not self.ranks.is_first:
            self.private.forget()  # rank 0 has the sums of all ranks
        torch.set_rng_state(state["random_state"])

    def _private_steps(self) -> Iterator[Progress]:
        num_lost = self.training.num_lost
        for batch in self.training:
            losses, scores = losses_and_scores(self.task, self.training.model, batch, self.task.views)
            made = self.training.step(losses)
            if self.training.num_lost != num_lost:  # new keys: to be saved before they are used
                num_lost = self.training.num_lost
                self.checkpoint()
            if not self.training.rehearsing and not self.training.stands_in:
                self.private.add(losses.flatten(), scores)
            if made:  # False between the microbatches of a step
                yield self._private_progress()
        rows = self.private.rows
        if not (rows and rows[-1].step == self.training.step_count):
            yield self._private_progress(is_last=True)  # empty batches, which the loop never sees, or too few steps

    def _private_progress(self, *, is_last: bool = False) -> Progress:
        """Returns the progress; at the end of an epoch or of the training also writes metrics and a checkpoint."""
        step = self.training.step_count
        if not is_last and not self.private.is_due(step):
            return replace(self.private.progress(step), num_lost=self.training.num_lost)
        epsilon: list[float] = []  # none but on rank 0
        delta = self.settings.delta
        self.ranks.first_does(
            "computes epsilon", lambda: epsilon.extend(map(float, self.training.profile_at_step().epsilon(delta)))
        )
        progress = self._end_epoch(self.private, step, self.released_model, *epsilon)
        self.ranks.first_does("writes the metrics", lambda: self.folder.write_metrics(self.private.rows))
        self.checkpoint()
        return replace(progress, num_lost=self.training.num_lost)

    def _end_epoch(self, log: Log, step: int, model: nn.Module, *epsilon: float) -> Progress:
        """Adds a row with the losses and scores of all ranks, and the model's test score."""
        score = test_score(self.task, model)
        log.take(log.summed(self.ranks))
        return log.end_epoch(step, *epsilon, test_score=score)

    def _baseline_steps(self) -> Iterator[Progress]:
        """Trains the same network for as many steps without privacy; also writes metrics at the end of an epoch."""
        for step, scored in baseline.steps(self.task, self.settings, self.ranks, self.baseline):
            if scored is None:
                yield self.baseline.progress(step)
                continue
            progress = self._end_epoch(self.baseline, step, scored)
            rows = self.private.rows + self.baseline.rows
            self.ranks.first_does("writes the metrics", lambda rows=rows: self.folder.write_metrics(rows))
            yield progress

    def _statement(self) -> dict[str, Any]:
        """Returns the training's privacy statement with the run's settings, data files and versions."""
        statement = self.training.statement()
        statement["not_covered"] += self.task.not_covered
        if self.task.unit is not None:
            statement["unit"] = self.task.unit
        if self.task.rows is not None:
            statement["data"] = fingerprint_in(self.folder, self.task.rows, self.training.settings)
        if self.settings.baseline:
            statement["not_covered"].append("the non-private baseline that was trained to compare")
        run = {
            "experiment": self.experiment,
            "settings": published(asdict(self.settings)),
            "data_files_sha256": dict(self.task.data_files),
            "versions": {"scipy": version("scipy")},
        }
        return statement | {"run": run}

    def _results(self) -> dict[str, Any]:
        """Returns the content of ``results.json``."""
        last, more = self.private.rows[-1], self.task.more_scores
        return {
            "experiment": self.experiment,
            **size_of(self.training.settings, self.ranks),
            "num_test_examples": length(self.task.test),
            "score": asdict(self.task.score.measure),
            "test_score": finite_or_none(last.test_score),
            "baseline_test_score": finite_or_none(self.baseline.rows[-1].test_score) if self.baseline.rows else None,
            **({} if more is None else more(self.released_model)),
            **({"declared": [dict(one) for one in self.task.declared]} if self.task.declared else {}),
            "diverged": [
                *(["private"] if has_diverged(self.released_model, last.test_score) else []),
                *(["non-private"] if self.baseline.has_diverged() else []),
            ],
            "privacy": self.summary().as_json(),
            "seconds": {"private": self.private.seconds, "non_private": self.baseline.seconds},
        }


def begin(path: Path, experiment: str | None, chosen: dict[str, Any]) -> Run:
    """Starts a run, or resumes the one in the folder if ``experiment`` is None."""
    return Run.resume(path) if experiment is None else Run.start(path, experiment, **chosen)
