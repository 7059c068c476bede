# SPDX-License-Identifier: Apache-2.0
"""Runs one training end to end: private training, non-private baseline, run folder, and resuming after a stop.

In a process group of several ranks every rank makes the same calls. The network is wrapped in
``DistributedDataParallel``; rank 0 alone reads and writes files, and the others get from it what they need.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Subset

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.data.dataset import random_split
from torch_privacy.experiments import load_trainable
from torch_privacy.experiments.study import Study
from torch_privacy.experiments.task import (
    Settings,
    Task,
    check_names,
    check_numbers,
    check_settings,
    num_units,
    number_of_steps,
)
from torch_privacy.privacy.summary import Releases, Summary, summarize
from torch_privacy.runs.folder import RunFolder, published
from torch_privacy.runs.metrics import SUMS, Log, Progress
from torch_privacy.sampling.batches import Batches, split
from torch_privacy.support.ranks import Ranks, communicating, num_processes
from torch_privacy.training.machine import number_of_threads
from torch_privacy.training.run_files import fingerprint_in, weights_of, write_results
from torch_privacy.training.secret_file import check_parts, load_parts

TEST_BATCH_SIZE = 4096
STATE = {"experiment", "settings", "released", "parts", "training", "log", "random_state"}  # in a checkpoint


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
            study = load_trainable(experiment)
            check_names(experiment, study.settings(), chosen)
            settings = study.settings(**chosen)
            check_numbers(settings)
        with _leaving_its_price(folder):
            task = _task(ranks, study, settings, new_ledger=partial(_new_ledger, folder))
            with ranks.together("checks the settings"):
                check_settings(settings, num_units(task))
            _check_priced(ranks, settings, task)
            _first(ranks, "creates the folder", partial(_create, folder))
            run = cls._build(ranks, folder, experiment, settings, task)
        written = run._all_settings()
        _first(ranks, "writes the settings", lambda: folder.write_settings(written, folder.write_json))
        run.checkpoint()
        run._keep_schema()  # after the checkpoint, so that what was learnt privately is never learnt twice
        return run

    @classmethod
    def resume(cls, path: Path) -> Run:
        """Continues the run in ``path`` from its last checkpoint.

        Raises:
            ValueError: If the folder holds no unfinished run, is in use, or its settings or checkpoint were changed.
        """
        ranks, folder = Ranks.here(), RunFolder(path)
        _first(ranks, "locks the folder", partial(_lock, folder))
        state: dict[str, Any] = {}  # empty but on rank 0
        _first(ranks, "reads the checkpoint", lambda: state.update(_state_in(folder)))
        keys = state.pop("training", {})
        state = ranks.from_first(state)
        with ranks.together("prepares the run"):
            study, settings = _study_and_settings(state["experiment"], state["settings"])
        released = [state["released"]] if state["released"] else []
        run = cls._build(ranks, folder, state["experiment"], settings, _task(ranks, study, settings, *released))
        try:
            run._restore(keys, state)
            run._keep_schema()
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def _build(cls, ranks: Ranks, folder: RunFolder, experiment: str, settings: Settings, task: Task) -> Run:
        torch.manual_seed(settings.seed)  # for dropout and the like; never for the batches or the noise
        training = new_training(settings, task, folder)
        average = new_average(task, unwrapped(training.model), training.optimizer)
        score = {"measure": task.score.measure, "finish": task.score.of_mean}
        log = partial(Log, num_steps=training.settings.num_steps, epochs=settings.epochs, **score)
        return cls(ranks, folder, experiment, settings, task, training, average, log("private"), log("non-private"))

    @property
    def model(self) -> nn.Module:
        """Returns the network that is trained privately, without a wrapper."""
        return unwrapped(self.training.model)

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
        sums = self._sums(self.private)
        self._first("saves a checkpoint", lambda: self._save(sums))

    def agreed(self, signal: int | None) -> int | None:
        """Returns the signal that this or another rank has received: the same on all ranks, which call it together."""
        told = self.ranks.exchange("goes on", payload=bytes([signal or 0]))
        return max(message[0] for message in told) or None

    def _save(self, sums: dict[str, Any]) -> None:
        state = self._state()
        state["log"] |= sums
        self.training.ledger.sync()
        self.folder.write_checkpoint(state)

    def _first(self, place: str, action: Callable[[], object]) -> None:
        _first(self.ranks, place, action)

    def _keep_schema(self) -> None:
        self._first("writes the schema", self._write_schema)

    def _write_schema(self) -> None:
        if self.task.schema is not None:
            self.folder.write_schema(self.task.schema)

    def _sums(self, log: Log) -> dict[str, Any]:
        """Returns the log's sums over the examples of all ranks."""
        if self.ranks.size == 1:
            return {name: getattr(log, name) for name in SUMS}
        sums = torch.tensor([float(getattr(log, name)) for name in SUMS], dtype=torch.float64, device="cpu")
        self.ranks.sum_in_place(sums)
        return {name: type(getattr(log, name))(value) for name, value in zip(SUMS, sums.tolist(), strict=True)}

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
        self._first("writes the results", lambda: results.update(self._written_results()))
        self.close()
        return results

    def _written_results(self) -> dict[str, Any]:
        found: list[dict[str, Any]] = []

        def results() -> dict[str, Any]:
            found.append(self._results())
            self._write_schema()
            self.training.ledger.sync()
            return found[0]

        self.folder.write_model(weights_of(self.released_model, Ranks()))
        write_results(self.folder, self._statement, results)
        self.training.ledger.close()
        self.folder.delete_checkpoint()
        return found[0]

    def close(self) -> None:
        """Unlocks the folder, so that the run can be resumed; this object cannot be used afterwards."""
        self.training.ledger.close()
        self.folder.unlock()

    def epsilon_high(self, num_releases: int) -> float:
        """Returns the certified epsilon of this many releases of a step: never below the true one, and increasing."""
        return privacy.compose(_releases(self.training, num_releases)).epsilon_high(self.settings.delta)

    def summary(self) -> Summary:
        """Returns the privacy of everything released so far, in the numbers to report."""
        return summarize(self.training.ledger.events, self.settings.delta)

    def _all_settings(self) -> dict[str, Any]:
        """Returns the content of ``settings.json``."""
        return {"experiment": self.experiment, **asdict(self.settings)}

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
        if not self.private.is_complete() and not (rows and rows[-1].step == self.training.step_count):
            yield self._private_progress(is_last=True)  # empty batches, which the loop never sees, or too few steps

    def _private_progress(self, *, is_last: bool = False) -> Progress:
        """Returns the progress; at the end of an epoch or of the training also writes metrics and a checkpoint."""
        step = self.training.step_count
        if not is_last and not self.private.is_epoch_over(step):
            return replace(self.private.progress(step), num_lost=self.training.num_lost)
        epsilon: list[float] = []  # none but on rank 0
        delta = self.settings.delta
        self._first(
            "computes epsilon", lambda: epsilon.extend(map(float, self.training.profile_at_step().epsilon(delta)))
        )
        progress = self._end_epoch(self.private, step, self.released_model, *epsilon)
        self._first("writes the metrics", lambda: self.folder.write_metrics(self.private.rows))
        self.checkpoint()
        return replace(progress, num_lost=self.training.num_lost)

    def _end_epoch(self, log: Log, step: int, model: nn.Module, *epsilon: float) -> Progress:
        """Adds a row with the losses and scores of all ranks, and the model's test score."""
        score = test_score(self.task, model)
        for name, value in self._sums(log).items():
            setattr(log, name, value)
        return log.end_epoch(step, score, *epsilon)

    def _baseline_steps(self) -> Iterator[Progress]:
        """Trains the same network for as many steps on shuffled batches, without clipping and noise.

        If the task holds out a part of the training data, no step sees it, and the test score is that of the weights
        with the best score on it so far: early stopping.
        """
        if self.ranks.rank:
            torch.manual_seed(self.settings.seed + self.ranks.rank)  # other dropout masks for other examples
        task = replace(self.task, new_optimizer=self.task.new_baseline_optimizer or self.task.new_optimizer)
        model, optimizer, scheduler = _new_parts(task, self.baseline.num_steps)
        average, wrapped = new_average(self.task, model, optimizer), wrapped_for_ranks(model)
        train, held_out = self._baseline_data()
        best = BestEpoch(replace(task, test=held_out)) if held_out is not None else None
        batches = self._shuffled_batches(train)
        for step, (batch, weight) in zip(range(1, self.baseline.num_steps + 1), batches, strict=False):
            losses, scores = losses_and_scores(self.task, wrapped, batch)
            optimizer.zero_grad()
            (losses.mean() * weight).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            self.baseline.add(losses, scores)
            if not self.baseline.is_epoch_over(step):
                yield self.baseline.progress(step)
                continue
            scored = model if average is None else average.model
            progress = self._end_epoch(self.baseline, step, scored if best is None else best.of(scored))
            rows = self.private.rows + self.baseline.rows
            self._first("writes the metrics", lambda rows=rows: self.folder.write_metrics(rows))
            yield progress

    def _baseline_data(self) -> tuple[Dataset[Any], Dataset[Any] | None]:
        """Returns what the baseline trains on, and the part of the training data that picks its best epoch, if any."""
        if not self.task.baseline_held_out:
            return self.task.train, None
        parts = random_split(
            _length(self.task.train), test_fraction=self.task.baseline_held_out, seed=self.settings.seed
        )
        train, held_out = (Subset(self.task.train, rows.tolist()) for rows in parts)
        return train, held_out

    def _shuffled_batches(self, train: Dataset[Any]) -> Iterator[tuple[Any, float]]:
        """Yields this rank's part of shuffled batches, epoch after epoch, without end, and the weight of its mean loss.

        The mean over the ranks of these means, each times its weight, is that over the batch.
        """
        order, batches = np.random.default_rng(self.settings.seed), Batches(train, None, 0)
        n, (rank, size) = _length(train), (self.ranks.rank, self.ranks.size)
        while True:
            whole = split(order.permutation(n), self.settings.expected_batch_size)
            # A batch smaller than the number of ranks is computed by all of them.
            parts = [indices[rank::size] if len(indices) >= size else indices for indices in whole]
            weights = [
                len(own) * size / len(indices) if len(indices) >= size else 1.0
                for own, indices in zip(parts, whole, strict=True)
            ]
            yield from zip(batches.plain(parts), weights, strict=True)

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

    def _num_units(self) -> dict[str, int]:
        """Returns what is public of the size of the training data: with owners, their number, and not that of rows."""
        number, owners = num_units(self.task), self.training.settings.owners
        return {
            "num_examples": number,
            **({} if owners is None else {"num_owners": number, "examples_per_owner": owners.per_owner}),
        }

    def _results(self) -> dict[str, Any]:
        """Returns the content of ``results.json``."""
        last = self.private.rows[-1]
        return {
            "experiment": self.experiment,
            **({"ranks": self.ranks.size} if self.ranks.size > 1 else {}),
            **self._num_units(),
            "num_test_examples": _length(self.task.test),
            "score": asdict(self.task.score.measure),
            "test_score": _finite(last.test_score),
            "baseline_test_score": _finite(self.baseline.rows[-1].test_score) if self.baseline.rows else None,
            "diverged": [log.training for log in (self.private, self.baseline) if log.has_diverged()],
            "privacy": self.summary().as_json(),
            "seconds": {"private": self.private.seconds, "non_private": self.baseline.seconds},
        }


@dataclass
class BestEpoch:
    """Keeps a copy of the network with the best score so far on ``task.test``, here a part of the training data."""

    task: Task
    score: float = math.nan
    model: nn.Module | None = None

    def of(self, model: nn.Module) -> nn.Module:
        """Returns the best of all networks seen, this one included; the earlier one if scores are equal."""
        score = test_score(self.task, model)
        is_better = score > self.score if self.task.score.measure.larger_is_better else score < self.score
        if self.model is None or is_better or math.isnan(self.score):
            self.score, self.model = score, deepcopy(model)
        return self.model


def begin(path: Path, experiment: str | None, chosen: dict[str, Any]) -> Run:
    """Starts a run, or resumes the one in the folder if ``experiment`` is None."""
    return Run.resume(path) if experiment is None else Run.start(path, experiment, **chosen)


def _first(ranks: Ranks, place: str, action: Callable[[], object]) -> None:
    """Lets rank 0 do something before all go on; what it fails at is an error on all ranks."""

    def act() -> int:
        action()
        return 0

    ranks.first_does(place, act)


def _create(folder: RunFolder) -> None:
    """Creates the folder, unless the ledger of what the task released is there already."""
    if not folder.is_locked:
        folder.create()


def _new_ledger(folder: RunFolder) -> privacy.Ledger:
    """Returns the ledger of a new run, for what its task releases before the training begins."""
    folder.create()
    return privacy.Ledger(folder.ledger)


@contextmanager
def _leaving_its_price(folder: RunFolder) -> Iterator[None]:
    """Unlocks the folder of a run that cannot begin, and says where the ledger is of what was released until then."""
    try:
        yield
    except BaseException as error:
        if not folder.is_locked:
            raise
        folder.abandon()
        if isinstance(error, ValueError) and folder.ledger.exists():
            raise ValueError(
                f"{str(error).rstrip('.')}. {folder.ledger} has what was released; another try costs as much again, "
                "and the epsilons add up."
            ) from None
        raise


def _lock(folder: RunFolder) -> None:
    """Locks the folder of an unfinished run."""
    folder.check_resumable()
    folder.lock()
    folder.check_resumable()  # again: the process that had the lock may have finished the run


def _state_in(folder: RunFolder) -> dict[str, Any]:
    """Returns the state in the folder's checkpoint, if ``settings.json`` has the settings in it."""
    state = folder.read_checkpoint()
    if state.keys() != STATE:
        raise ValueError(f"{folder.checkpoint}: is no checkpoint of a run of this version. Start a new run.")
    folder.check_settings({"experiment": state["experiment"], **state["settings"]})
    return state


def _task(ranks: Ranks, study: Study, settings: Settings, *released: Any, new_ledger: Any = None) -> Task:
    """Returns the task; what it releases all ranks release together, as one release, in a new ledger of rank 0."""
    with ranks.together("prepares the data"):
        task = study.task(settings, *released, new_ledger=new_ledger)
    _check_devices(ranks, task)
    return task


def _check_devices(ranks: Ranks, task: Task) -> None:
    """Refuses two ranks on one GPU."""
    own = None
    if ranks.size > 1 and task.device.startswith("cuda"):
        own = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    ranks_of: dict[str | None, list[int]] = {}
    for rank, gpu in enumerate(ranks.gather(own)):
        ranks_of.setdefault(gpu, []).append(rank)
    ranks_of.pop(None, None)
    if shared := next((found for found in ranks_of.values() if len(found) > 1), None):
        raise ValueError(
            f"train: ranks {', '.join(map(str, shared))} have the same GPU. Start one process for each GPU, as by "
            "torchrun --nproc-per-node 1 where there is one, or set CUDA_VISIBLE_DEVICES= to train on processors."
        )


def _study_and_settings(experiment: str, chosen: dict[str, Any]) -> tuple[Study, Settings]:
    """Returns the study and the settings of a checkpoint; raises a ``ValueError`` unless they are valid."""
    study = load_trainable(experiment)
    check_names(experiment, study.settings(), chosen)
    settings = study.settings(**chosen)
    check_numbers(settings)
    return study, settings


def _new_parts(task: Task, num_steps: int) -> tuple[nn.Module, Optimizer, LRScheduler | None]:
    """Returns a new network, its optimizer and its learning-rate scheduler."""
    model = task.new_model().to(task.device)
    optimizer = task.new_optimizer(model)
    return model, optimizer, None if task.new_scheduler is None else task.new_scheduler(optimizer, num_steps)


def wrapped_for_ranks(model: nn.Module) -> nn.Module:
    """Returns the network, wrapped in ``DistributedDataParallel`` if there are several processes."""
    if num_processes() == 1:
        return model
    with communicating("train"):
        return DistributedDataParallel(model)


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the network that `wrapped_for_ranks` got."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def new_training(settings: Settings, task: Task, run_folder: RunFolder | None, **more: Any) -> tp.PrivateTraining:
    """Returns the private training of a task; ``more`` arguments override those of the task.

    In several processes every rank calls it, and gets the training of a replica.
    """
    num_steps = number_of_steps(settings, num_units(task))
    model, optimizer, scheduler = _new_parts(task, num_steps)
    arguments: dict[str, Any] = {"clipping": tp.Flat(clip_norm=settings.clip_norm), **task.private(model), **more}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="delta=")  # the papers' delta is close to 1/n for some data
        return tp.PrivateTraining(
            wrapped_for_ranks(model),
            optimizer,
            task.train,
            expected_batch_size=settings.expected_batch_size,
            num_steps=num_steps,
            noise_multiplier=settings.noise_multiplier,
            target_epsilon=settings.target_epsilon,
            delta=settings.delta,
            views=task.views,
            scheduler=scheduler,
            run_folder=run_folder,
            **arguments,
        )


def new_average(task: Task, model: nn.Module, optimizer: Optimizer) -> tp.MovingAverage | None:
    """Returns the moving average of the weights, or None if the task has none."""
    return None if task.average is None else tp.MovingAverage(model, optimizer, task.average)


def losses_and_scores(task: Task, model: nn.Module, batch: Any, views: int = 1) -> tuple[Tensor, Tensor]:
    """Returns a training batch's losses, (n,) or (n, views), and the score of every view, after augmentation."""
    inputs, targets = _moved(batch, task.device)
    outputs = model(inputs if task.augment is None else task.augment(inputs))
    losses, scores = task.losses(outputs, targets), task.score.of_each(outputs.detach(), targets)
    return losses if views == 1 else losses.view(-1, views), scores


def _releases(training: tp.PrivateTraining, num_steps: int) -> Releases:
    """Returns what a training has released after ``num_steps`` steps, prior releases included."""
    return [*((release.event, 1) for release in training.settings.prior_releases), (training.event, num_steps)]


def _check_priced(ranks: Ranks, settings: Settings, task: Task) -> None:
    """Raises a ``ValueError`` before training if no epsilon can be computed for these settings."""
    training = new_training(settings, task, None)
    _first(ranks, "computes epsilon", partial(_check_prices, settings, training))


def _check_prices(settings: Settings, training: tp.PrivateTraining) -> None:
    try:
        steps_of_an_epoch = max(1, round(training.settings.num_steps / max(1, settings.epochs)))
        privacy.compose(_releases(training, steps_of_an_epoch)).epsilon(settings.delta)
        summarize(_releases(training, training.settings.num_steps), settings.delta)
    except (ArithmeticError, ValueError) as error:
        raise ValueError(
            f"train: no epsilon can be computed for the noise multiplier {settings.noise_multiplier!r} with batches of "
            f"{settings.expected_batch_size} examples ({str(error).rstrip('.')}). Use another noise multiplier."
        ) from None


def _finite(score: float | None) -> float | None:
    """Returns the score, or None for that of a model that has diverged: JSON has no number for it."""
    return score if score is not None and math.isfinite(score) else None


def test_score(task: Task, model: nn.Module) -> float:
    """Returns the score over all test examples; several ranks share them, and all get the score."""
    ranks = Ranks.here()
    was_training = model.training
    with ranks.together("computes the test score"), torch.no_grad():
        model.eval()
        parts = split(np.arange(_length(task.test)), TEST_BATCH_SIZE)[ranks.rank :: ranks.size]
        batches = (_moved(batch, task.device) for batch in Batches(task.test, None, 0).plain(parts))
        scores = [task.score.of_each(model(x), y) for x, y in batches]
        model.train(was_training)
    if ranks.size > 1:
        scores = [score for of_rank in ranks.gather([score.cpu() for score in scores]) for score in of_rank]
    return task.score.of_mean(float(torch.cat(scores).mean()))


def _moved(batch: Any, device: str) -> tuple[Any, Tensor]:
    inputs, targets = batch
    moved = tuple(part.to(device) for part in inputs) if isinstance(inputs, (tuple, list)) else inputs.to(device)
    return moved, targets.to(device)


def _length(dataset: Dataset[Any]) -> int:
    return len(dataset)  # pyright: ignore[reportArgumentType]  # map-style data sets have a length
