# SPDX-License-Identifier: Apache-2.0
"""Provides ``PrivateTrainer``, a ``Trainer`` of transformers with the steps of a ``PrivateTraining``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Trainer, TrainingArguments

from ..sampling.datasets import check_map_style
from ..sampling.examples import Examples
from ..support.validate import Refused
from ..training import PrivateTraining
from .arguments import check_parts, checked_arguments, checked_examples, checked_privacy, sampled, steps_of
from .checkpoints import Secrets, saved_step
from .losses import per_example_loss
from .misuse import refuse_misplaced, refuse_trl, warn_if_swamped
from .publishing import check_trackers, without_exact_loss
from .reporting import LOSS, WHERE, TrainerReporting

if not hasattr(Trainer, "_run_epoch"):
    raise ImportError("PrivateTrainer needs a later transformers: pip install -U 'torch-privacy[huggingface]'")


class TrainerBatches:
    """Stands in for the Trainer's loader, which neither prepares nor shards it: batches come from the training."""

    def __init__(self, dataset: Any, number: int):
        self.dataset, self._number = dataset, number

    def __len__(self) -> int:
        return self._number


class PrivateTrainer(TrainerReporting):
    """Trains a model of transformers with differential privacy: a `Trainer` with the keywords of `PrivateTraining`.

    All arguments of `Trainer` keep their meaning, except where they concern batches and gradients. One step of the
    Trainer is one release. Rehearsals are invisible: callbacks, logs, schedules and ``state.global_step`` go on with
    releases only, those of empty batches included.

    Args:
        args: ``TrainingArguments``. ``per_device_train_batch_size`` is the ``microbatch_size``, which bounds memory
            and changes no release. ``max_steps``, or else ``ceil(num_train_epochs * n / expected_batch_size)``, is
            ``num_steps``. A whole number of epochs has batches as ``epochs`` of `PrivateTraining` has them.
        privacy: keywords of `PrivateTraining`, such as ``dict(clipping=tp.Flat(1.0), target_epsilon=8.0, delta=1e-6)``.
            ``expected_batch_size`` is by default per_device_train_batch_size * gradient_accumulation_steps * number of
            ranks. With ``run_folder`` (outside of ``output_dir``) training can be resumed.
        others: as in ``Trainer``. One item of ``train_dataset``, which must be map-style, is the unit of privacy;
            ``train_dataset=tp.Examples(dataset, owners="author", per_owner=5)`` protects the owners that a column has.

    Attributes:
        training: the `PrivateTraining`, from the start of ``train``; None before.

    Guarantees:
        - The weights are those of the plain loop over `PrivateTraining` with `per_example_loss`, bit for bit.
        - No key enters ``output_dir``, or what is pushed to the Hub. A checkpoint's keys are in
          ``run_folder/secret/checkpoint-K.safetensors``, with mode 0600, and are deleted after the last step. A
          training that is stopped before it keeps them, to go on: delete the folder ``secret`` if it never will.
        - ``train(resume_from_checkpoint=...)`` goes on with the same batches and noise, or refuses.
        - The loss on training data is exact, and logged as ``train_loss_not_private``, next to ``epsilon``, which is
          called ``not_private/epsilon`` if it does not hold. No exact
          statistic of the training data reaches an integration of transformers (Weights & Biases, MLflow, ...), a
          checkpoint or the files of ``save_metrics``, which may be uploaded. ``train()`` returns it under
          that name alone. Scores on examples of ``train_dataset`` have names that end in ``_not_private``, too.
        - The model card says what the privacy statement says.

    Raises:
        Refused: an argument makes the loss of an example depend on others or changes releases (label smoothing,
            gradient norm clipping, packing, float16, ...); the message names it and the cure.

    Example: see docs/huggingface.md.
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *others: Any,
        privacy: Mapping[str, Any],
        **named: Any,
    ):
        refuse_trl(type(self), args)
        refuse_misplaced(named)
        args = checked_arguments(TrainingArguments(output_dir="tmp_trainer") if args is None else args)
        self._privacy = checked_privacy(privacy, args)
        self._secrets = Secrets(self._privacy.get("run_folder"), str(args.output_dir))
        self.training: PrivateTraining | None = None
        self._steps: Generator[Iterator[Any], None, None] | None = None
        self._hooks: list[RemovableHandle] = []
        self._scores: dict[str, float] = {}  # of the latest evaluation
        self._compared: dict[Any, tuple[Any, bool]] = {}
        given = inspect.signature(Trainer.__init__).bind_partial(self, model, args, *others, **named)
        examples = given.arguments.get("train_dataset")
        self._examples = checked_examples(examples) if isinstance(examples, Examples) else None
        if self._examples is not None:
            given.arguments["train_dataset"] = self._examples.dataset
        super().__init__(*given.args[1:], **given.kwargs)
        check_parts(
            type(self), PrivateTrainer, self.data_collator, self.train_dataset, self.compute_loss_func, self.model
        )

    def losses(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Returns the loss of each example of a batch, (n,); override it for models that `per_example_loss` refuses.

        With ``views`` it returns (n * views,), in the order of the batch.
        """
        return per_example_loss(model, inputs)

    # What the Trainer asks for

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None) -> Any:
        """Trains as ``Trainer.train`` does; a second call goes on from a checkpoint or is refused.

        Returns:
            the ``TrainOutput`` of ``Trainer``, with NaN as ``training_loss``: the mean loss on the training data is
            exact, and is in ``metrics`` as ``train_loss_not_private`` alone.
        """
        if trial is not None:
            self.hyperparameter_search()
        if self.training is not None and self.training.step_count and not resume_from_checkpoint:
            raise Refused(
                f"{WHERE}: train() was called before: a second training on the same data is a further release, and its "
                "epsilon adds to that of the first. To go on, pass resume_from_checkpoint; to train anew, make a new "
                "PrivateTrainer, with the releases so far as privacy=dict(prior_releases=...)."
            )
        self._check_choice()
        if resume_from_checkpoint:
            checkpoint = self._secrets.latest() if resume_from_checkpoint is True else Path(resume_from_checkpoint)
            if lacking := self._secrets.lacking(checkpoint):
                self._secrets.refuse(checkpoint, lacking)
            resume_from_checkpoint = str(checkpoint)
        try:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        finally:
            self._close()

    def get_train_dataloader(self) -> Any:
        """Returns a stand-in: batches are drawn by the training, and not by a loader."""
        if self.train_dataset is None:
            raise ValueError(f"{WHERE}: training needs a train_dataset.")
        dataset: Any = self.train_dataset
        check_map_style(dataset, f"{WHERE}: train_dataset")
        return TrainerBatches(dataset, steps_of(self._sampled(), self.args, self._given_examples().num_units)[1])

    def _given_examples(self) -> Examples:
        """Returns the train data as they were given, with all columns; other data than these have the same budget."""
        dataset: Any = self.train_dataset
        given = self._examples
        if given is not None and given.dataset is dataset:
            return given
        return Examples(dataset, budget=None if given is None else given.budget)

    def _sampled(self) -> dict[str, Any]:
        """Returns the keywords of the training, with the way in which batches are drawn."""
        return sampled(self._privacy, self.args, self._given_examples().num_units)

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> Any:
        """Returns the numbers of epochs, steps and examples of a training that draws its batches at random."""
        n, batch_size = len(dataloader.dataset), self._sampled()["expected_batch_size"]
        max_steps, of_epoch = steps_of(self._sampled(), args, self._given_examples().num_units)
        epochs = math.ceil(max_steps / of_epoch)
        return epochs, of_epoch, n, max_steps * batch_size, math.ceil(batch_size), of_epoch, max_steps

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Returns the expected batch size, rounded up."""
        return math.ceil(self._sampled()["expected_batch_size"])

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self._close()
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self.training = training = self._new_training(prepared[0], max_steps)
        if resume_from_checkpoint is not None:
            self._secrets.load(training, Path(resume_from_checkpoint), saved_step(Path(resume_from_checkpoint)))
        elif len(training.ledger) > len(training.settings.prior_releases):
            raise Refused(
                f"{WHERE}: run_folder={str(self._privacy['run_folder'])!r} holds the ledger of an earlier run. Pass "
                "train(resume_from_checkpoint=True) to continue it. In another run_folder its releases count, too: "
                "pass privacy=dict(prior_releases=privacy.Ledger.load(PATH).releases)."
            )
        check_trackers(self.callback_handler.callbacks)
        warn_if_swamped(training)
        self._steps = training.steps()
        self._hooks = [
            training.optimizer.register_step_pre_hook(lambda *_: self._call("on_pre_optimizer_step")),
            training.optimizer.register_step_post_hook(lambda *_: self._call("on_optimizer_step")),
        ]
        # A scheduler of Accelerate's wrapper waits for a step of the wrapper, but the training steps what is inside.
        wrapper: Any = self.optimizer
        wrapper._opt_called = True
        return prepared

    def _call(self, event: str) -> None:
        """Calls an event of the callbacks; with the private gradient in place, before and after the weights move."""
        self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control)

    def _new_training(self, model: nn.Module, num_steps: int) -> PrivateTraining:
        dataset: Any = self.train_dataset
        collator, optimizer = self.data_collator, self._inner_optimizer()
        given: dict[str, Any] = self._sampled() | {"num_steps": num_steps}
        examples = self._given_examples()
        known, owners = examples.known_owners, {}
        if known is not None:  # their column may be among those that are removed
            owners = {"owners": known.numbers, "owner_name": known.name}
        if hasattr(dataset, "remove_columns") and hasattr(dataset, "column_names"):  # of the library datasets
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collator = self._get_collator_with_removed_columns(collator, description="training")
        return PrivateTraining(
            model,
            optimizer,
            replace(
                examples, dataset=dataset, collate_fn=collator, num_workers=self.args.dataloader_num_workers, **owners
            ),
            **given,
        )

    # The loop

    def _run_epoch(  # type: ignore[override]  # called by keywords
        self, model: nn.Module, epoch: int, steps_in_epoch: int, start_time: float, **others: Any
    ) -> None:
        """Makes the steps of an epoch; each is one release."""
        training, steps, handler = self._begun(), self._steps, self.callback_handler
        assert steps is not None
        evaluated = others["trial"], epoch, others["ignore_keys_for_eval"], start_time
        resumed, learning_rate = others["resume_from_checkpoint"], None
        if resumed is not None and epoch == others["epochs_trained"]:
            self._load_rng_state(resumed)
        elif resumed is None and not self.state.global_step:
            self._save_start()
        for step in range(self.state.global_step - epoch * steps_in_epoch, steps_in_epoch):
            if training.step_count != self.state.global_step:
                raise Refused(f"{WHERE}: state.global_step was changed: only releases may count as steps.")
            batches = next(steps, None)
            if batches is None:  # the budget is spent
                self.control.should_training_stop = True
                break
            self.control = handler.on_step_begin(self.args, self.state, self.control)
            self._make_step(model, batches)
            learning_rate = self._get_learning_rate()
            scheduler: Any = self.lr_scheduler
            if not hasattr(scheduler, "best"):  # of a plateau, which moves at evaluations
                scheduler.step()
            self.state.global_step += 1
            self.state.epoch = epoch + (step + 1) / steps_in_epoch
            self.control = handler.on_step_end(self.args, self.state, self.control)
            self._maybe_log_save_evaluate(self._tr_loss, None, model, *evaluated, learning_rate=learning_rate)
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
        self.control = handler.on_epoch_end(self.args, self.state, self.control)
        self._maybe_log_save_evaluate(self._tr_loss, None, model, *evaluated, learning_rate=learning_rate)

    def _make_step(self, model: nn.Module, batches: Iterator[dict[str, Any]]) -> None:
        """Answers all batches of a step and their rehearsals, and adds its mean loss to what is logged."""
        training, step, losses = self._begun(), self.state.global_step, []
        model.train()  # an evaluation may have come before
        if callable(train := getattr(self.optimizer, "train", None)):
            train()
        for inputs in batches:
            of_batch = self.training_step(model, inputs)
            if training.rehearsing:
                continue
            if training.stands_in:
                inputs = {name: x[:0] if isinstance(x, Tensor) else x for name, x in inputs.items()}
            else:
                losses.append(of_batch)
            self.current_flos += float(self.floating_point_ops(inputs))
            self._track_num_input_tokens(inputs)
            if training.step_count == step:
                self.control = self.callback_handler.on_substep_end(self.args, self.state, self.control)
        loss = torch.cat(losses).mean() if losses else None
        if loss is None or (self.args.logging_nan_inf_filter and not loss.isfinite()):
            loss = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)  # as the Trainer does
        self._tr_loss += loss.to(self._tr_loss)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Answers one (micro)batch, or a rehearsal of it; returns its losses."""
        training = self._begun()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            losses = self.losses(model, inputs)
        if training.settings.views > 1 and isinstance(losses, Tensor) and losses.ndim == 1:
            losses = losses.view(-1, training.settings.views)
        training.step(losses)
        return losses.detach().flatten()

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        assert self._steps is not None
        if is_complete := self._begun().step_count >= self._begun()._setup.account.steps_allowed:
            next(self._steps, None)  # to the end of the training's loop, which writes the run folder
        self._close()
        output = super()._finalize_training(trial, num_train_samples, start_time)
        if self._scores or not is_complete:
            self._write_run({} if self.args.load_best_model_at_end else self._scores)
        self._secrets.end(is_complete or self._stopped_early())
        return without_exact_loss(output, LOSS)

    def _close(self) -> None:
        """Leaves the training's loop, if it is running."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
