# SPDX-License-Identifier: Apache-2.0
"""One experiment, run end to end: private training, the baseline, the run folder, and going on after a stop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import torch_privacy as tp
from torch_privacy import report
from torch_privacy._batches import Batches, split
from torch_privacy.experiments import load_experiment
from torch_privacy.experiments._protocol import Task, check_numbers, check_settings, number_of_steps
from torch_privacy.experiments.folder import RunFolder
from torch_privacy.experiments.log import Log, Progress
from torch_privacy.summary import Summary, compose_steps, summarize

TEST_BATCH_SIZE = 4096
CHECKPOINT_KEYS = {"experiment", "settings", "model", "optimizer", "training", "log", "random_state"}


@dataclass
class Run:
    """One run of an experiment in its folder.

    Iterate over ``steps()`` to the end, then call ``finish()``. Between two steps ``checkpoint()`` may be called and
    the run abandoned with ``close()``: ``Run.resume`` goes on from there, with the same batches and ledger as without
    a stop. The folder is locked for as long as the run is open.

    Guarantees:
        - The run starts with a checkpoint, renews it at the end of every epoch, and deletes it when it is complete.
        - The checkpoint can be read by its owner only: it holds the past and the future of the noise.
    """

    folder: RunFolder
    experiment: str
    settings: Any
    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    training: tp.PrivateTraining
    private: Log
    baseline: Log

    @classmethod
    def start(cls, path: Path, experiment: str, **chosen: Any) -> Run:
        """A new run in a new folder; the ``chosen`` settings replace the experiment's own, a target its noise.

        Raises:
            ValueError: If the experiment is unknown, a setting cannot be run, or the folder is not empty or in use.
        """
        folder = RunFolder(path)
        folder.check_new()
        module = load_experiment(experiment)
        if "target_epsilon" in chosen:
            chosen = {"noise_multiplier": None, **chosen}
        settings = module.Settings(**chosen)
        check_numbers(settings)
        task = module.build_task(settings)
        check_settings(settings, _length(task.train))
        _check_priced(settings, _length(task.train))
        folder.create()
        run = cls._build(folder, experiment, settings, task)
        folder.write_json(folder.settings, run._all_settings())
        run.checkpoint()
        return run

    @classmethod
    def resume(cls, path: Path) -> Run:
        """The run in ``path``, as its last checkpoint left it.

        Raises:
            ValueError: If the folder holds no unfinished run, is in use, or its settings or checkpoint were changed.
        """
        folder = RunFolder(path)
        folder.check_resumable()
        folder.lock()
        folder.check_resumable()  # once more: the process that had the lock may have ended the run
        state = folder.read_checkpoint(lambda file: torch.load(file, weights_only=True), CHECKPOINT_KEYS)
        folder.check_settings({"experiment": state["experiment"], **state["settings"]})
        module = load_experiment(state["experiment"])
        settings = module.Settings(**state["settings"])
        run = cls._build(folder, state["experiment"], settings, module.build_task(settings))
        run._restore(state)
        return run

    @classmethod
    def _build(cls, folder: RunFolder, experiment: str, settings: Any, task: Task) -> Run:
        torch.manual_seed(settings.seed)  # what the network draws, such as dropout; never the batches, never the noise
        model = task.new_model()
        optimizer = task.new_optimizer(model)
        num_steps = number_of_steps(settings, _length(task.train))
        training = tp.PrivateTraining(
            model,
            optimizer,
            task.train,
            expected_batch_size=settings.expected_batch_size,
            num_steps=num_steps,
            clipping=tp.Flat(clip_norm=settings.clip_norm),
            noise_multiplier=settings.noise_multiplier,
            target_epsilon=settings.target_epsilon,
            delta=settings.delta,
            run_folder=folder.path,
        )
        logs = Log("private", num_steps, settings.epochs), Log("non-private", num_steps, settings.epochs)
        return cls(folder, experiment, settings, task, model, optimizer, training, *logs)

    def steps(self) -> Iterator[Progress]:
        """Train to the end, privately and then, unless switched off, without privacy; yields after every step."""
        with number_of_threads(self.task.num_threads):
            yield from self.private.timed(self._private_steps())
            if self.settings.baseline:
                yield from self.baseline.timed(self._baseline_steps())

    def checkpoint(self) -> None:
        """Save what is needed to go on; the baseline, which takes seconds, starts over. The file is secret."""
        state = {
            "experiment": self.experiment,
            "settings": asdict(self.settings),  # settings.json must not change under a run
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "training": self.training.state_dict(),
            "log": self.private.state_dict(),
            "random_state": torch.get_rng_state(),
        }
        content = BytesIO()
        torch.save(state, content)
        self.training.ledger.sync()
        self.folder.write_checkpoint(lambda file: file.write(content.getbuffer()))

    def finish(self) -> dict[str, Any]:
        """Write model, privacy statement, results and report; delete the checkpoint; return the results.

        The model comes first: whatever fails behind it, the trained weights are on disk.
        """
        weights = {name: value.detach().clone().contiguous() for name, value in self.model.state_dict().items()}
        self.folder.write_model(safetensors.torch.save(weights))
        results = self._results()
        self.folder.write_json(self.folder.privacy, self._statement())
        self.folder.write_json(self.folder.results, results)
        self.folder.write_report(report.render(self.folder))
        self.training.ledger.close()
        self.folder.checkpoint.unlink()
        self.close()
        return results

    def close(self) -> None:
        """Give the folder back, so that the run can be resumed; this object is of no further use."""
        self.training.ledger.close()
        self.folder.unlock()

    def epsilon_high(self, num_steps: int) -> float:
        """Certified epsilon of ``num_steps`` steps, never below the true one; grows with the number of steps."""
        profile = compose_steps(self.training.noise_multiplier, self.training.sampling_probability, num_steps)
        return float(profile.epsilon(self.settings.delta).high)

    def summary(self) -> Summary:
        """The privacy of what has been released so far, in the numbers that one reports."""
        training = self.training
        return summarize(
            training.noise_multiplier, training.sampling_probability, training.step_count, self.settings.delta
        )

    def _all_settings(self) -> dict[str, Any]:
        """What ``settings.json`` holds."""
        return {"experiment": self.experiment, **asdict(self.settings)}

    def _restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.training.load_state_dict(state["training"])
        self.private = Log.from_state_dict(state["log"])
        torch.set_rng_state(state["random_state"])

    def _private_steps(self) -> Iterator[Progress]:
        for inputs, targets in self.training:
            outputs = self.model(inputs)
            losses = self.task.losses(outputs, targets)
            self.training.step(losses)
            self.private.add(losses, self.task.correct(outputs, targets))
            yield self._private_progress()
        if not self.private.is_complete():  # the last steps drew nobody: the loop above never saw them
            yield self._private_progress()

    def _private_progress(self) -> Progress:
        """Where private training stands; at the end of an epoch its metrics and a checkpoint are written, too."""
        step = self.training.step_count
        if not self.private.is_epoch_over(step):
            return self.private.progress(step)
        epsilon = map(float, self.training.spent().epsilon)
        progress = self.private.end_epoch(step, accuracy(self.task, self.model), *epsilon)
        self.folder.write_metrics(self.private.rows)
        self.checkpoint()
        return progress

    def _baseline_steps(self) -> Iterator[Progress]:
        """The same network, settings and number of steps with shuffled batches, no clipping and no noise."""
        model = self.task.new_model()
        optimizer = self.task.new_optimizer(model)
        for step, (inputs, targets) in zip(
            range(1, self.baseline.num_steps + 1), self._shuffled_batches(), strict=False
        ):
            outputs = model(inputs)
            losses = self.task.losses(outputs, targets)
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
            self.baseline.add(losses, self.task.correct(outputs, targets))
            if not self.baseline.is_epoch_over(step):
                yield self.baseline.progress(step)
                continue
            progress = self.baseline.end_epoch(step, accuracy(self.task, model))
            self.folder.write_metrics(self.private.rows + self.baseline.rows)
            yield progress

    def _shuffled_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Ordinary batches, epoch after epoch without end."""
        order, batches = np.random.default_rng(self.settings.seed), Batches(self.task.train, None, 0)
        n = _length(self.task.train)
        while True:
            yield from batches(iter(split(order.permutation(n), self.settings.expected_batch_size)))

    def _statement(self) -> dict[str, Any]:
        """What determines the guarantee, the seeds that may be public, and what the guarantee is not about."""
        statement = self.training.statement()
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
        """The numbers of the closing table."""
        last = self.private.rows[-1]
        return {
            "experiment": self.experiment,
            "num_examples": _length(self.task.train),
            "num_test_examples": _length(self.task.test),
            "test_accuracy": last.test_accuracy,
            "baseline_test_accuracy": self.baseline.rows[-1].test_accuracy if self.baseline.rows else None,
            "diverged": [log.training for log in (self.private, self.baseline) if log.has_diverged()],
            "privacy": self.summary().as_json(),
            "seconds": {"private": self.private.seconds, "non_private": self.baseline.seconds},
        }


def _check_priced(settings: Any, num_examples: int) -> None:
    """Raise a ``ValueError`` if no epsilon can be told for these settings, before hours are spent on training."""
    if settings.noise_multiplier is None:
        return  # calibration tells
    num_steps, probability = number_of_steps(settings, num_examples), settings.expected_batch_size / num_examples
    try:
        for steps in (max(1, round(num_steps / max(1, settings.epochs))), num_steps):
            summarize(settings.noise_multiplier, probability, steps, settings.delta)
    except (ArithmeticError, ValueError) as error:
        raise ValueError(
            f"train: no epsilon can be computed for noise_multiplier={settings.noise_multiplier!r} with batches of "
            f"{settings.expected_batch_size} examples ({str(error).rstrip('.')}). Use another noise multiplier."
        ) from None


@contextmanager
def number_of_threads(number: int | None) -> Iterator[None]:
    """Let torch compute on so many threads within the ``with`` block; None leaves it as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def accuracy(task: Task, model: nn.Module) -> float:
    """Share of the test examples that the model gets right, in [0, 1]."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        numbers = split(np.arange(_length(task.test)), TEST_BATCH_SIZE)
        correct = [task.correct(model(x), y) for x, y in Batches(task.test, None, 0)(iter(numbers))]
    model.train(was_training)
    return float(torch.cat(correct).mean())


def _length(dataset: Dataset[Any]) -> int:
    return len(dataset)  # pyright: ignore[reportArgumentType]  # map-style data sets have a length
