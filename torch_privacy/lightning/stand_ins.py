# SPDX-License-Identifier: Apache-2.0
"""Stands in for Lightning's train loader and optimization, so that one of its steps is one private step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from torch import Tensor

from .checks import examples_in


class Step:
    """Stands for the data of one step, in hooks that get a batch.

    Attributes:
        batch: the last (micro)batch of the step; None before the step, or if the batch was empty.
    """

    batch: Any = None


class EpochBatches:
    """Stands for the train loader: the steps of an epoch."""

    def __init__(self, count: int):
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Step]:
        return (Step() for _ in range(self._count))

    def state_dict(self) -> dict[str, Any]:  # so that Lightning accepts a checkpoint within an epoch
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class LoaderStandIn(_DataLoaderSource):
    """Gives a stand-in for the train loader, and keeps what is taken from the loader."""

    def __init__(self, source: _DataLoaderSource, expected_batch_size: float):
        super().__init__(source.instance, source.name)
        self._expected_batch_size = expected_batch_size

    def dataloader(self) -> Any:
        self.examples = examples_in(super().dataloader())
        return EpochBatches(ceil(self.examples.num_units / self._expected_batch_size))


class PrivateOptimization(_AutomaticOptimization):
    """Makes a private step where Lightning would make a step of the optimizer.

    Args:
        step: makes a step from the arguments of ``training_step``; returns its outputs, or None if there is none left.
    """

    def __init__(self, trainer: Trainer, step: Callable[[Trainer, dict[str, Any]], dict[str, Any] | None]):
        super().__init__(trainer)
        self._step = step

    def run(self, optimizer: Any, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        outputs = self._step(self.trainer, kwargs)
        if outputs is None:
            raise StopIteration  # ends the epoch
        self.optim_progress.optimizer.step.increment_ready()
        self.optim_progress.optimizer.step.increment_completed()
        return outputs


def let_steps_pass(module: LightningModule) -> Callable[[], None]:
    """Keeps a `Step` away from the module's hooks that transfer batches; returns a function that undoes it."""
    before, transfer = module._on_before_batch_transfer, module._apply_batch_transfer_handler

    def on_before(batch: Any, *arguments: Any, **named: Any) -> Any:
        return batch if isinstance(batch, Step) else before(batch, *arguments, **named)

    def on_transfer(batch: Any, *arguments: Any, **named: Any) -> Any:
        return batch if isinstance(batch, Step) else transfer(batch, *arguments, **named)

    def undo() -> None:
        for name in own:
            vars(module).pop(name, None)

    own = {"_on_before_batch_transfer": on_before, "_apply_batch_transfer_handler": on_transfer}
    vars(module).update(own)
    return undo


def sends_away(logger: Any) -> bool:
    """True unless a logger is known to write files on this machine alone, which those of CSV and TensorBoard do."""
    return not isinstance(logger, CSVLogger | TensorBoardLogger) or "://" in str(logger.save_dir)


def check_logs_of_training(trainer: Trainer, check: Callable[[str], None]) -> Callable[[], None]:
    """Checks the name of all that hooks and callbacks log in training; returns a function that undoes it."""
    results: Any = trainer.fit_loop.epoch_loop._results
    log = results.log

    def checked(hook: str, name: str, *arguments: Any, **named: Any) -> None:
        check(name)
        log(hook, name, *arguments, **named)

    vars(results)["log"] = checked
    return lambda: vars(results).pop("log", None)


def keep_exact_logs_here(trainer: Trainer, are_exact: Callable[[], bool]) -> Callable[[], None]:
    """Keeps logs, while they are exact numbers, away from loggers that send them; returns a function that undoes it.

    Other scores of validation reach all loggers.
    """
    connector = trainer._logger_connector
    log_metrics = connector.log_metrics

    def log_here(metrics: Any, step: int | None = None) -> None:
        everyone = trainer.loggers
        if are_exact():
            trainer.loggers = [logger for logger in everyone if not sends_away(logger)]
        try:
            log_metrics(metrics, step)
        finally:
            trainer.loggers = everyone

    vars(connector)["log_metrics"] = log_here
    return lambda: vars(connector).pop("log_metrics", None)


class KeptLogs:
    """Keeps the calls of ``self.log`` within a ``with`` block, until it is known that they are of no rehearsal.

    Args:
        module: the module.
        check: refuses names of metrics that ``training_step`` must not log.
    """

    def __init__(self, module: LightningModule, check: Callable[[str], None]):
        self._module, self._check = module, check
        self._log = module.log
        self._calls: list[tuple[str, Any, tuple, dict[str, Any]]] = []

    @contextmanager
    def keeping(self) -> Iterator[None]:
        vars(self._module)["log"] = self._keep
        try:
            yield
        finally:
            del vars(self._module)["log"]

    def _keep(self, name: str, value: Any, *arguments: Any, **named: Any) -> None:
        self._check(name)
        self._calls.append((name, value.detach().clone() if isinstance(value, Tensor) else value, arguments, named))

    def make(self, results: Any, batch: Any, *, synced_only: bool) -> None:
        """Makes the calls, as from ``training_step``; on a rank without examples only those that all ranks wait for."""
        results.batch, module = batch, self._module
        before, module._current_fx_name = module._current_fx_name, "training_step"
        try:
            for name, value, arguments, named in self._calls:
                if not synced_only or named.get("sync_dist"):
                    self._log(name, value, *arguments, **named)
        finally:
            module._current_fx_name = before
