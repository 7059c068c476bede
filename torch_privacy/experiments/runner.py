# SPDX-License-Identifier: Apache-2.0
"""Runs one training end to end: private training, non-private baseline, run folder, and resuming after a stop."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.experiments import load_trainable
from torch_privacy.experiments.study import Study
from torch_privacy.experiments.task import Settings, Task, check_names, check_numbers, check_settings, number_of_steps
from torch_privacy.privacy.summary import Releases, Summary, summarize
from torch_privacy.report import render as report
from torch_privacy.runs import schemas
from torch_privacy.runs.checkpoint import Checkpoint, CheckpointError, differences, listed
from torch_privacy.runs.folder import RunFolder
from torch_privacy.runs.metrics import Log, Progress
from torch_privacy.runs.schemas import LOG
from torch_privacy.sampling.batches import Batches, split
from torch_privacy.support.schema import violation
from torch_privacy.training.repetition import number_of_threads

TEST_BATCH_SIZE = 4096
SPARE_STORAGE = 2**26  # bytes of tensors in a checkpoint beyond those of the run's own state
CHECKPOINT = schemas.record(  # every entry but these is compared with the run's own state
    {
        "experiment": schemas.NAME,
        "settings": {"type": "object", "additionalProperties": schemas.SETTING},
        "released": {"type": "object"},
        "model": {"type": "object"},
        "optimizer": {"type": "object"},
        "scheduler": {"type": ["object", "null"]},
        "training": {"type": "object"},
        "average": {"type": ["object", "null"]},
        "log": {"type": "object"},
        "random_state": {},
    },
    closed=True,
)


@dataclass
class Run:
    """One run of an experiment in its folder, which is locked while the run is open.

    Iterate over ``steps()`` to the end, then call ``finish()``. Between two steps you may call ``checkpoint()`` and
    leave the run with ``close()``: ``Run.resume`` continues from there, with the same batches and ledger as without a
    stop.

    Guarantees:
        - The run starts with a checkpoint, renews it at the end of every epoch, and deletes it when it is complete.
        - Only its owner can read the checkpoint: it determines all noise, past and future.
    """

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
        folder = RunFolder(path)
        folder.check_new()
        study = load_trainable(experiment)
        check_names(experiment, study.settings(), chosen)
        settings = study.settings(**chosen)
        check_numbers(settings)
        task = study.task(settings)
        check_settings(settings, _length(task.train))
        _check_priced(settings, task)
        folder.create()
        run = cls._build(folder, experiment, settings, task)
        folder.write_json(folder.settings, run._all_settings())
        run.checkpoint()
        return run

    @classmethod
    def resume(cls, path: Path) -> Run:
        """Continues the run in ``path`` from its last checkpoint.

        Raises:
            ValueError: If the folder holds no unfinished run, is in use, or its settings or checkpoint were changed.
        """
        folder = RunFolder(path)
        folder.check_resumable()
        folder.lock()
        folder.check_resumable()  # again: the process that had the lock may have finished the run
        with folder.opened_checkpoint() as checkpoint:
            outline = checkpoint.outline
            if wrong := violation(CHECKPOINT, outline):
                raise CheckpointError(wrong)
            folder.check_settings({"experiment": outline["experiment"], **outline["settings"]})
            study, settings = _study_and_settings(outline["experiment"], outline["settings"])
            released = (checkpoint.load()["released"],) if outline["released"] else ()
            run = cls._build(folder, outline["experiment"], settings, study.task(settings, *released))
            try:
                run._check(checkpoint)
                run._restore(checkpoint.load())
            except BaseException:
                run.close()
                raise
        return run

    @classmethod
    def _build(cls, folder: RunFolder, experiment: str, settings: Settings, task: Task) -> Run:
        torch.manual_seed(settings.seed)  # for dropout and the like; never for the batches or the noise
        training = new_training(settings, task, folder.path)
        average = new_average(task, training.model, training.optimizer)
        score = {"measure": task.score.measure, "finish": task.score.of_mean}
        log = partial(Log, num_steps=training.settings.num_steps, epochs=settings.epochs, **score)
        return cls(folder, experiment, settings, task, training, average, log("private"), log("non-private"))

    @property
    def model(self) -> nn.Module:
        """Returns the network that is trained privately."""
        return self.training.model

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
        """Saves the state of private training in a secret file; a resumed baseline starts over."""
        state = self._state()
        content = BytesIO()
        torch.save(state, content)
        self.training.ledger.sync()
        self.folder.write_checkpoint(lambda file: file.write(content.getbuffer()))

    def _state(self) -> dict[str, Any]:
        """Returns the content of a checkpoint."""
        with number_of_threads(self.task.num_threads):  # the state says with how many threads to repeat the next steps
            training = self.training.state_dict()
        return {
            "experiment": self.experiment,
            "settings": asdict(self.settings),  # to detect a settings.json that was changed during the run
            "released": dict(self.task.released),
            "model": self.model.state_dict(),
            "optimizer": self.training.optimizer.state_dict(),
            "scheduler": None if self.training.scheduler is None else self.training.scheduler.state_dict(),
            "training": training,
            "average": None if self.average is None else self.average.state_dict(),
            "log": self.private.state_dict(),
            "random_state": torch.get_rng_state(),
        }

    def finish(self) -> dict[str, Any]:
        """Writes model, privacy statement, results and report; deletes the checkpoint; returns the results.

        The model is written first, so that the trained weights are on disk even if a later file cannot be written.
        """
        state = self.released_model.state_dict()
        weights = {name: value.detach().clone().contiguous() for name, value in state.items()}
        self.folder.write_model(safetensors.torch.save(weights))
        results = self._results()
        self.folder.write_json(self.folder.privacy, self._statement())
        self.training.ledger.sync()
        folder = self.folder
        folder.write_checked(
            folder.results, results, folder.settings, folder.ledger, folder.metrics, folder.model, folder.privacy
        )
        self.folder.write_report(report.render([self.folder]))
        self.training.ledger.close()
        self.folder.delete_checkpoint()
        self.close()
        return results

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

    def _check(self, checkpoint: Checkpoint) -> None:
        """Raises a `CheckpointError` that lists where a checkpoint differs from this run in its structure."""
        expected = self._state()
        found = {name: checkpoint.outline[name] for name in expected}
        stepped = _optimizer_state_after_a_step(self.task, self.training.settings.num_steps)
        if isinstance(found["optimizer"], dict) and found["optimizer"].get("state"):
            expected["optimizer"] = stepped
        log = violation(LOG, found["log"], "log")
        for name in ("log", "training", "settings", "experiment", "released"):  # they are checked otherwise
            del expected[name], found[name]
        differing = ([log] if log else []) + differences(found, expected)
        if differing:
            raise CheckpointError(f"it differs from this run: {listed(differing)}")
        largest = SPARE_STORAGE + 4 * _bytes(expected) + _bytes(dict(self.task.released))
        if checkpoint.size > largest:
            raise CheckpointError(
                f"it has {checkpoint.size} bytes of tensors, and this run needs no more than {largest}"
            )
        rows = checkpoint.outline["log"]["rows"]
        if len(rows) > math.ceil(self.settings.epochs) or any(row["training"] != "private" for row in rows):
            raise CheckpointError(f"log has {len(rows)} epochs of {self.settings.epochs:g}")

    def _restore(self, state: dict[str, Any]) -> None:
        self.training.load_state_dict(state["training"])  # first, because it alone can refuse what is in the checkpoint
        self.model.load_state_dict(state["model"])
        self.training.optimizer.load_state_dict(state["optimizer"])
        if self.training.scheduler is not None:
            self.training.scheduler.load_state_dict(state["scheduler"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.private.load_state_dict(state["log"])
        torch.set_rng_state(state["random_state"])

    def _private_steps(self) -> Iterator[Progress]:
        num_lost = self.training.num_lost
        for batch in self.training:
            losses, scores = losses_and_scores(self.task, self.model, batch, self.task.views)
            made = self.training.step(losses)
            if self.training.num_lost != num_lost:  # new keys: to be saved before they are used
                num_lost = self.training.num_lost
                self.checkpoint()
            if not self.training.rehearsing:
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
        epsilon = map(float, self.training.spent().epsilon)
        progress = self.private.end_epoch(step, test_score(self.task, self.released_model), *epsilon)
        self.folder.write_metrics(self.private.rows)
        self.checkpoint()
        return replace(progress, num_lost=self.training.num_lost)

    def _baseline_steps(self) -> Iterator[Progress]:
        """Trains the same network for as many steps on shuffled batches, without clipping and noise."""
        task = replace(self.task, new_optimizer=self.task.new_baseline_optimizer or self.task.new_optimizer)
        model, optimizer, scheduler = _new_parts(task, self.baseline.num_steps)
        average = new_average(self.task, model, optimizer)
        for step, batch in zip(range(1, self.baseline.num_steps + 1), self._shuffled_batches(), strict=False):
            losses, scores = losses_and_scores(self.task, model, batch)
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            self.baseline.add(losses, scores)
            if not self.baseline.is_epoch_over(step):
                yield self.baseline.progress(step)
                continue
            score = test_score(self.task, model if average is None else average.model)
            progress = self.baseline.end_epoch(step, score)
            self.folder.write_metrics(self.private.rows + self.baseline.rows)
            yield progress

    def _shuffled_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields shuffled batches, epoch after epoch, without end."""
        order, batches = np.random.default_rng(self.settings.seed), Batches(self.task.train, None, 0)
        n = _length(self.task.train)
        while True:
            yield from batches.plain(split(order.permutation(n), self.settings.expected_batch_size))

    def _statement(self) -> dict[str, Any]:
        """Returns the training's privacy statement with the run's settings, data files and versions."""
        statement = self.training.statement()
        statement["not_covered"] += self.task.not_covered
        if self.settings.baseline:
            statement["not_covered"].append("the non-private baseline that was trained to compare")
        run = {
            "experiment": self.experiment,
            "settings": asdict(self.settings),
            "data_files_sha256": dict(self.task.data_files),
            "versions": {"scipy": version("scipy")},
        }
        return statement | {"run": run}

    def _results(self) -> dict[str, Any]:
        """Returns the content of ``results.json``."""
        last = self.private.rows[-1]
        return {
            "experiment": self.experiment,
            "num_examples": _length(self.task.train),
            "num_test_examples": _length(self.task.test),
            "score": asdict(self.task.score.measure),
            "test_score": _finite(last.test_score),
            "baseline_test_score": _finite(self.baseline.rows[-1].test_score) if self.baseline.rows else None,
            "diverged": [log.training for log in (self.private, self.baseline) if log.has_diverged()],
            "privacy": self.summary().as_json(),
            "seconds": {"private": self.private.seconds, "non_private": self.baseline.seconds},
        }


def _study_and_settings(experiment: str, chosen: dict[str, Any]) -> tuple[Study, Settings]:
    """Returns the study and the settings of a checkpoint; raises a ``ValueError`` unless they are valid."""
    study = load_trainable(experiment)
    check_names(experiment, study.settings(), chosen)
    settings = study.settings(**chosen)
    check_numbers(settings)
    return study, settings


def _optimizer_state_after_a_step(task: Task, num_steps: int) -> dict[str, Any]:
    """Returns the state that a new optimizer has after a step with gradients of zero."""
    model, optimizer, _ = _new_parts(task, num_steps)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


def _bytes(tree: Any) -> int:
    """Returns the size of all tensors in nested containers."""
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return sum(map(_bytes, parts))


def _new_parts(task: Task, num_steps: int) -> tuple[nn.Module, Optimizer, LRScheduler | None]:
    """Returns a new network, its optimizer and its learning-rate scheduler."""
    model = task.new_model().to(task.device)
    optimizer = task.new_optimizer(model)
    return model, optimizer, None if task.new_scheduler is None else task.new_scheduler(optimizer, num_steps)


def new_training(settings: Settings, task: Task, run_folder: Path | None, **more: Any) -> tp.PrivateTraining:
    """Returns the private training of a task; ``more`` arguments override those of the task."""
    num_steps = number_of_steps(settings, _length(task.train))
    model, optimizer, scheduler = _new_parts(task, num_steps)
    arguments: dict[str, Any] = {"clipping": tp.Flat(clip_norm=settings.clip_norm), **task.private(model), **more}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="delta=")  # the papers' delta is close to 1/n for some data
        return tp.PrivateTraining(
            model,
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


def _check_priced(settings: Settings, task: Task) -> None:
    """Raises a ``ValueError`` before training if no epsilon can be computed for these settings."""
    training = new_training(settings, task, None)
    try:
        for steps in (
            max(1, round(training.settings.num_steps / max(1, settings.epochs))),
            training.settings.num_steps,
        ):
            summarize(_releases(training, steps), settings.delta)
    except (ArithmeticError, ValueError) as error:
        raise ValueError(
            f"train: no epsilon can be computed for noise_multiplier={settings.noise_multiplier!r} with batches of "
            f"{settings.expected_batch_size} examples ({str(error).rstrip('.')}). Use another noise multiplier."
        ) from None


def _finite(score: float) -> float | None:
    """Returns the score, or None for that of a model that has diverged: JSON has no number for it."""
    return score if math.isfinite(score) else None


def test_score(task: Task, model: nn.Module) -> float:
    """Returns the score over all test examples."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        batches = Batches(task.test, None, 0).plain(split(np.arange(_length(task.test)), TEST_BATCH_SIZE))
        scores = [task.score.of_each(model(x), y) for x, y in (_moved(batch, task.device) for batch in batches)]
    model.train(was_training)
    return task.score.of_mean(float(torch.cat(scores).mean()))


def _moved(batch: Any, device: str) -> tuple[Tensor, Tensor]:
    inputs, targets = batch
    return inputs.to(device), targets.to(device)


def _length(dataset: Dataset[Any]) -> int:
    return len(dataset)  # pyright: ignore[reportArgumentType]  # map-style data sets have a length
