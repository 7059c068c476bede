# SPDX-License-Identifier: Apache-2.0
"""Says what a ``PrivateTrainer`` logs, writes and chooses by scores, and what of it epsilon does not cover."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer
from transformers import EarlyStoppingCallback, Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import SaveStrategy

from ..privacy.rounding import short
from ..sampling.shared_examples import share_examples
from ..support.validate import Refused
from ..support.write_file import PUBLIC, write_whole
from ..training import PrivateTraining
from .checkpoints import Secrets, note_release, saved_step
from .publishing import EXACT, TAG, add_to_card, public_logs, sends_away, without_exact_numbers

WHERE = "PrivateTrainer"
STATEMENT = "privacy.json"
EXACT_SCORE = "_not_private"  # end of the names of what is computed on training data
LOSS = f"train_loss{EXACT_SCORE}"
OF_TRAINER = ("epoch", "epsilon", "learning_rate", "not_private/epsilon", "step", "train_runtime")
OF_TRAINER += ("train_samples_per_second", "train_steps_per_second", *EXACT)  # what a Trainer itself logs in training
CHOICE = (
    "the choice among checkpoints or the number of steps by scores on eval_dataset, unless eval_dataset holds none of "
    "the private examples"
)


def _is_score(name: str, value: Any) -> bool:
    times = ("runtime", "per_second", "preparation_time")
    return isinstance(value, int | float) and not name.endswith((*times, EXACT_SCORE))


@contextmanager
def _as_new(optimizer: Optimizer) -> Iterator[None]:
    """Empties the state of an optimizer that had none: to save or load it under FSDP2, torch makes a step of zeros."""
    is_new = not optimizer.state
    yield
    if is_new:
        optimizer.state.clear()


class TrainerReporting(Trainer):
    """The part of a ``PrivateTrainer`` that reports: logs, checkpoints, the run folder and the privacy statement."""

    training: PrivateTraining | None
    _privacy: dict[str, Any]
    _secrets: Secrets
    _scores: dict[str, float]  # of the latest evaluation
    _is_evaluating = False
    _compared: dict[Any, tuple[Any, bool]]  # data sets of evaluations, and whether they hold training data

    def privacy_statement(self) -> dict[str, Any]:
        """Returns ``training.statement()``, with what choices by evaluation leave uncovered."""
        statement = self._begun().statement()
        if self._chooses():
            statement["not_covered"] = [*statement["not_covered"], CHOICE]
        return statement

    def _begun(self) -> PrivateTraining:
        if self.training is None:
            raise Refused(f"{WHERE}: there is no training yet. Call train() first.")
        return self.training

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs; the exact loss on the training data says that it is not private, and epsilon stands beside it.

        So does whatever else is logged in training, as by ``losses`` or a ``log`` of one's own: it may be exact, too.
        Integrations of transformers (Weights & Biases, MLflow, ...) get epsilon and no exact statistics. An epsilon
        that does not hold, as with weights that a callback has moved, is called ``not_private/epsilon``. It is rounded
        up to four digits, which is what transformers prints.
        """
        for name in ("loss", "train_loss"):
            if name in logs:
                logs[LOSS] = logs.pop(name)
                if self.training is not None and (delta := self.training.settings.delta) is not None:
                    holds = self.training._setup.account.warning(self.training._progress()) is None
                    epsilon = self.training.profile_at_step().epsilon_high(delta)
                    epsilon = float(short(epsilon, digits=4))  # transformers prints four, rounded to the nearest
                    logs["epsilon" if holds else "not_private/epsilon"] = epsilon
        if (self.is_in_train or "train_runtime" in logs) and not self._is_evaluating:
            for name in [name for name in logs if name not in OF_TRAINER and not name.endswith(EXACT_SCORE)]:
                logs[f"{name}{EXACT_SCORE}"] = logs.pop(name)
        handler = self.callback_handler
        everyone = handler.callbacks
        handler.callbacks = [one for one in everyone if not sends_away(one)]
        try:
            super().log(logs, start_time)
            handler.callbacks = [one for one in everyone if sends_away(one)]
            self.control = handler.on_log(self.args, self.state, self.control, public_logs(logs))
        finally:
            handler.callbacks = everyone

    def evaluate(self, *args: Any, **named: Any) -> dict[str, float]:
        """Evaluates as ``Trainer`` does; the run folder gets the scores after training."""
        self._is_evaluating = True
        try:
            metrics = super().evaluate(*args, **named)
        finally:
            self._is_evaluating = False
        found = {name: x for name, x in metrics.items() if name.startswith("eval_") and _is_score(name, x)}
        self._scores = {name.removeprefix("eval_"): x for name, x in found.items()}  # a report says "test accuracy"
        if not self.is_in_train:
            self._write_run(self._scores)
        return metrics

    def evaluation_loop(self, dataloader: Any, *args: Any, **named: Any) -> Any:
        """Evaluates as ``Trainer`` does; scores on examples of the training data say that they are not private."""
        output = super().evaluation_loop(dataloader, *args, **named)
        if not self._is_of_training(dataloader.dataset):
            return output
        metrics = {
            name if name.endswith("model_preparation_time") else f"{name}{EXACT_SCORE}": x
            for name, x in (output.metrics or {}).items()
        }
        return output._replace(metrics=metrics)

    def _is_of_training(self, evaluated: Any) -> bool:
        """True if a data set shares examples with that of the training; compared once."""
        trained: Any = self.train_dataset
        key = getattr(evaluated, "_fingerprint", id(evaluated)), id(trained)
        if key not in self._compared:
            shares = trained is not None and share_examples(evaluated, trained)
            self._compared[key] = evaluated, shares
        return self._compared[key][1]

    def _write_run(self, scores: Mapping[str, float]) -> None:
        if self.training is not None and self._privacy.get("run_folder") is not None and self.training.step_count:
            self.training.write_run(scores)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.store_flos()
        if self.training is not None:
            note_release(self.state, self.training)
        with without_exact_numbers(self.state):
            super()._save_checkpoint(model, trial)
        if self.training is not None and not self.args.save_only_model:
            self._secrets.save(self.training, self.state.global_step)

    def save_state(self) -> None:
        """Saves the Trainer's state in ``output_dir``, without exact statistics of the training data."""
        with without_exact_numbers(self.state):
            super().save_state()

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Saves metrics in ``output_dir``, without exact statistics of the training data."""
        super().save_metrics(split, public_logs(metrics), combined)

    def _save_start(self) -> None:
        """Saves what a training needs to go on that is stopped before its first checkpoint; before its first release.

        It is in the run folder and no checkpoint of the user's: neither counted, nor uploaded.
        """
        start = self._secrets.start
        if start is None or self.args.save_only_model or self._begun().step_count:
            return
        self._secrets.make()
        self.save_model(str(start), _internal_call=True)
        with _as_new(self._inner_optimizer()):
            self._save_optimizer_and_scheduler(str(start))
        self._save_scaler(str(start))
        self._save_rng_state(str(start))
        if self.args.should_save:
            self.state.save_to_json(str(start / TRAINER_STATE_NAME))
        self._secrets.save(self._begun(), 0)  # last: it says that the checkpoint is complete

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        is_start = checkpoint is not None and not saved_step(Path(checkpoint))
        with _as_new(self._inner_optimizer()) if is_start else nullcontext():
            super()._load_optimizer_and_scheduler(checkpoint)
        optimizer = self._inner_optimizer()
        lacking = sorted({name for group in optimizer.param_groups for name in optimizer.defaults if name not in group})
        if checkpoint is not None and lacking:
            raise Refused(
                f"{WHERE}: {checkpoint!r} has the state of another optimizer, without {', '.join(lacking)} of "
                f"{type(optimizer).__name__}. Resume the training with the optimizer (optim=) that it began with."
            )

    def _inner_optimizer(self) -> Optimizer:
        """Returns the optimizer without Accelerate's wrapper, which may skip steps."""
        optimizer: Any = self.optimizer
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        return optimizer

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self.training is not None and self.args.should_save:
            content = json.dumps(self.privacy_statement(), indent=2, allow_nan=False).encode()
            folder = Path(output_dir or str(self.args.output_dir))
            write_whole(folder / STATEMENT, lambda file: file.write(content), PUBLIC)
            add_to_card(folder, self.privacy_statement())  # PEFT writes one with its adapters

    def create_model_card(
        self, language: str | None = None, license: str | None = None, tags: Any = None, *others: Any, **named: Any
    ) -> None:
        """Writes the model card as ``Trainer`` does, with the guarantee of the training; `push_to_hub` uploads it."""
        statement = None if self.training is None else self.privacy_statement()
        if statement is not None and statement["private"]:
            tags = [*([tags] if isinstance(tags, str) else tags or ()), TAG]
        super().create_model_card(language, license, tags, *others, **named)
        if statement is not None and self.is_world_process_zero():
            add_to_card(Path(str(self.args.output_dir)), statement)

    def _load_best_model(self) -> None:
        with self._begun().loading_released_weights():
            super()._load_best_model()

    def hyperparameter_search(self, *args: Any, **named: Any) -> Any:
        """Refuses: trials on private data are releases of their own."""
        raise Refused(
            f"{WHERE}.hyperparameter_search: each trial is a training on the private data, and the choice by their "
            "scores is a release, too: epsilon of one training would be wrong. Use tp.search_privately, which prices "
            "the search, or search on public data with Trainer."
        )

    def _chooses(self) -> bool:
        """True if scores on ``eval_dataset`` choose a checkpoint, a learning rate or the number of steps."""
        stops = any(isinstance(callback, EarlyStoppingCallback) for callback in self.callback_handler.callbacks)
        plateau = hasattr(self.lr_scheduler, "best") or "reduce" in str(self.args.lr_scheduler_type)
        return bool(
            self.args.load_best_model_at_end or self.args.save_strategy == SaveStrategy.BEST or stops or plateau
        )

    def _stopped_early(self) -> bool:
        """True if early stopping has ended the training, so that it will not go on."""
        found = [one for one in self.callback_handler.callbacks if isinstance(one, EarlyStoppingCallback)]
        return any(one.early_stopping_patience_counter >= one.early_stopping_patience for one in found)

    def _check_choice(self) -> None:
        if not self._chooses() or self.train_dataset is None:
            return
        evaluated: Any = self.eval_dataset
        trained: Any = self.train_dataset
        for dataset in evaluated.values() if isinstance(evaluated, dict) else [evaluated]:
            if dataset is not None and share_examples(dataset, trained):
                raise Refused(
                    f"{WHERE}: eval_dataset holds examples of train_dataset, and load_best_model_at_end, "
                    "save_strategy='best', early stopping or a plateau schedule choose by its scores: a release "
                    "without noise. Evaluate on other data, or leave the choice out."
                )
