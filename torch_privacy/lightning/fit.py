# SPDX-License-Identifier: Apache-2.0
"""Provides ``PrivateFit``, a callback by which Lightning's ``Trainer`` makes the steps of a ``PrivateTraining``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.trainer import call
    from lightning.pytorch.utilities import rank_zero_info
except ImportError as error:
    raise ImportError("PrivateFit needs Lightning. Install it with: pip install 'torch-privacy[lightning]'") from error

from ..privacy.rounding import in_float32
from ..support.ranks import Ranks
from ..support.validate import Refused
from ..support.warning import warn
from ..training import PrivateTraining
from ..training.old_spelling import hint_for, refuse_moved
from ..training.secret_file import SecretFolder, load_secret, release_before
from .checks import WHERE, check_trainer, steering_metrics, validates_on
from .stand_ins import (
    KeptLogs,
    LoaderStandIn,
    PrivateOptimization,
    check_logs_of_training,
    keep_exact_logs_here,
    let_steps_pass,
)

SETTINGS = ("expected_batch_size", "noise_multiplier", "target_epsilon", "delta", "num_steps")  # that loggers get
LONGEST = 200  # characters of a clipping rule in words
TAKEN = ("model", "optimizer", "dataset", "num_steps", "epochs", "scheduler", "collate_fn", "num_workers")


class PrivateFit(Callback):
    """Trains a ``LightningModule`` privately: ``Trainer(callbacks=[PrivateFit(...)]).fit(module, data)``.

    Automatic optimization stays as it is, but one step of the Trainer is one release of a `PrivateTraining`:
    ``training_step`` returns losses (n,), one per example, or a dictionary with them as ``"loss"``.
    ``trainer.global_step``, schedulers, validation, checkpoints and other callbacks go on with releases only, those of
    empty batches included. An epoch has ``ceil(n / expected_batch_size)`` steps.

    Data set, ``collate_fn`` and ``num_workers`` of the train ``DataLoader`` are taken; its batches are replaced by
    Poisson batches. A map-style data set can be given instead of a loader, or ``tp.Examples(dataset, ...)``, which also
    says what is protected: examples in several views, or their owners.

    Args:
        privacy: keywords of `PrivateTraining`, such as ``expected_batch_size=256, clipping=tp.Flat(1.0),
            target_epsilon=8.0, delta=1e-6``; the number of steps comes from ``max_epochs`` and ``max_steps``. With
            ``run_folder``, ``fit(ckpt_path=...)`` goes on with the same batches and noise: the keys that belong to a
            checkpoint are in ``run_folder/secret/step-K.safetensors``, with mode 0600, and are deleted after the last
            step. ``start.ckpt`` beside them is for a training that was stopped before its first checkpoint. The files
            of the run are written at the end, with validation metrics as scores.

    Attributes:
        training: the `PrivateTraining`, from the start of the training on; None before.

    Guarantees:
        - The weights are those of the plain loop over `PrivateTraining`, bit for bit.
        - In ``fit``, no other step of an optimizer is made: what would make one is refused.
        - Rehearsals are invisible to callbacks, loggers, progress bar and ``self.log``.
        - No key enters a checkpoint of Lightning.
        - The loggers get ``"epsilon"`` so far every ``log_every_n_steps``; it is ``"not_private/epsilon"`` if it does
          not hold, as with a ``test_seed``. They get the settings, too, as ``privacy/delta`` and others.
        - What is logged in training is exact, and reaches ``CSVLogger`` and ``TensorBoardLogger`` alone, which write
          on this machine: not Weights & Biases, MLflow or any other logger. All get the scores of validation, unless
          that holds examples of the training data.

    Raises:
        Refused: scalar losses, manual optimization, gradient clipping or accumulation, float16, a strategy other than
            one device or DDP, a callback that steers by numbers of the training data, ...; the message names the
            culprit and the cure. Nothing was released.
        ValueError: an unknown keyword, or one that comes from the Trainer.

    Example: see docs/lightning.md.
    """

    def __init__(self, **privacy: Any):
        known = set(inspect.signature(PrivateTraining).parameters) - {*TAKEN, "old"}
        refuse_moved(WHERE, [name for name in privacy if name not in TAKEN], "the train DataLoader")
        for name in privacy:
            if name in TAKEN:
                raise ValueError(f"{WHERE}: leave out {name}=, which comes from Trainer, module and train DataLoader.")
            if name not in known:
                raise ValueError(
                    f"{WHERE}: {name}= must be a keyword of PrivateTraining{hint_for(name, known)}: "
                    f"{', '.join(sorted(known))}."
                )
        if "expected_batch_size" not in privacy:
            raise ValueError(f"{WHERE}: expected_batch_size= is missing, the mean size of the Poisson batches.")
        self._privacy, self._folder = privacy, privacy.get("run_folder")
        self._keys = None if self._folder is None else SecretFolder(self._folder, "step", "start.ckpt")
        self.training: PrivateTraining | None = None
        self._steps: Generator[Iterator[Any], None, None] | None = None
        self._steering: set[str] = set()
        self._logged: set[str] = set()  # names of what is logged in training, which is not private
        self._scores_are_exact = False  # those of a validation on examples of the training data
        self._checkpoint_is_private, self._checkpoint_release = False, ""
        self._undo: Callable[[], Any] = lambda: None

    # What Lightning calls

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        # First of all: from here on the Trainer cannot make an ordinary step, even if what follows fails.
        trainer.fit_loop.epoch_loop.automatic_optimization = PrivateOptimization(trainer, self._step)
        if self.training is not None:
            raise Refused(
                f"{WHERE}: fit was called before: a second training on the same data is a further release. Make a new "
                "Trainer with a new PrivateFit, and go on with fit(ckpt_path=...), or begin a new training with the "
                "releases so far as prior_releases=."
            )
        check_trainer(trainer, pl_module)
        trainer.fit_loop._data_source = LoaderStandIn(
            trainer.fit_loop._data_source, self._privacy["expected_batch_size"]
        )
        undo = (
            let_steps_pass(pl_module),
            keep_exact_logs_here(trainer, lambda: trainer.training or self._scores_are_exact),
            check_logs_of_training(trainer, self._check_log),
        )
        self._undo = lambda: [one() for one in undo]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        source, num_steps = trainer.fit_loop._data_source, trainer.estimated_stepping_batches
        assert isinstance(source, LoaderStandIn)
        if not isinstance(num_steps, int):
            raise Refused(f"{WHERE}: the number of steps must be known at the start. Set max_epochs or max_steps.")
        self._steering = steering_metrics(trainer)
        self._scores_are_exact = validates_on(trainer, source.examples.dataset, self._steering)
        training = PrivateTraining(
            trainer.strategy.model,  # type: ignore[arg-type]
            trainer.optimizers[0],
            source.examples,
            num_steps=num_steps,
            **self._privacy,
        )
        self._resume(training, trainer.global_step)
        self.training, self._steps = training, training.steps()
        if self._keys is not None and len(training.ledger) == len(training.settings.prior_releases):
            self._keys.make()
            trainer.save_checkpoint(self._keys.start)
        for logger in trainer.loggers:
            logger.log_hyperparams({f"privacy/{name}": value for name, value in _settings_of(training).items()})
        if getattr(trainer, "fast_dev_run", False) and "target_epsilon" in self._privacy:
            warn(
                f"{WHERE}: fast_dev_run may spend all of target_epsilon in {num_steps} step{'s' * (num_steps > 1)}. "
                "What it releases of this data counts like any other training. To try the code, take other data."
            )
        rank_zero_info(
            f"{WHERE}: {num_steps} steps with Poisson batches of {training.settings.expected_batch_size:g} examples "
            f"expected, out of {training.settings.num_examples}. Batches of the train DataLoader are not used."
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns after which release this callback made the checkpoint. Keys are elsewhere: checkpoints are shared."""
        training = self.training
        return {"private": training is not None, "release": "" if training is None else release_before(training)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._checkpoint_is_private = bool(state_dict.get("private"))
        self._checkpoint_release = str(state_dict.get("release"))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._keys is None or self.training is None:
            return
        if self.training.step_count != trainer.global_step:
            return  # an error ended an update: a training goes on from what was saved before, and not from here
        for folder in {str(getattr(saver, "dirpath", None) or "") for saver in trainer.checkpoint_callbacks} - {""}:
            if self._keys.path.resolve().is_relative_to(Path(folder).resolve()):
                raise Refused(
                    f"{WHERE}: run_folder={str(self._folder)!r} must lie outside of {folder!r}, where "
                    "checkpoints are: it keeps the keys."
                )
        self._keys.save(self.training, self.training.step_count)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()
        if self._folder is not None and self.training is not None and self.training.step_count:
            found = {} if self._scores_are_exact else trainer.callback_metrics
            metrics = {name: float(value) for name, value in found.items()}
            self.training.write_run(scores={k: v for k, v in metrics.items() if k not in self._logged and isfinite(v)})
            self._end_keys(trainer)

    def _end_keys(self, trainer: Trainer) -> None:
        """Deletes the keys of a run that is over; else warns that they are kept."""
        if self._keys is not None and self.training is not None:
            allowed = self.training._setup.account.steps_allowed
            is_over = self.training.step_count >= allowed or _stopped_early(trainer)
            self._keys.end() if is_over else self._keys.warn_kept(WHERE)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.training is not None or self._keys is None or not self._checkpoint_is_private:
            return
        # The checkpoint is that of the last step, so that Lightning began no training. A run that was stopped right
        # after it still has its keys.
        if Ranks.here().from_first(self._keys.at(trainer.global_step).is_file()):
            self.on_train_start(trainer, pl_module)
            assert self._steps is not None
            next(self._steps, None)  # to the loop's end, which writes the run folder unless it is written
            self._close()
            self._end_keys(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        """Leaves the training's loop, if it is running."""
        if self._steps is not None:
            self._steps.close()
        self._steps = None
        self._undo()

    def _resume(self, training: PrivateTraining, step: int) -> None:
        """Loads the state that belongs to a checkpoint after this many steps, or refuses."""
        keys = self._keys
        if not step and len(training.ledger) == len(training.settings.prior_releases):
            return
        if not step and not self._checkpoint_is_private:
            start = "" if keys is None else f"; {str(keys.start)!r} is its start, if it has no other checkpoint"
            raise Refused(
                f"{WHERE}: run_folder={str(self._folder)!r} holds the ledger of an earlier run. Pass fit(ckpt_path=...)"
                f" to continue it{start}. In another run_folder its releases count, too: pass "
                "prior_releases=privacy.Ledger.load(PATH).releases."
            )
        found = load_secret(training, keys.at(step)) if keys is not None and self._checkpoint_is_private else None
        fits = found == training.step_count == step and release_before(training) == self._checkpoint_release
        if not fits:
            why = "no run_folder= was given"
            if keys is not None:
                known = ", ".join(map(str, keys.steps())) or "none"
                why = f"{str(keys.at(step))!r} is missing or does not fit it (steps with keys there: {known})"
            raise Refused(
                f"{WHERE}: the training cannot go on from a checkpoint of step {step}: {why}, which keeps the keys of "
                "noise and batches. Nothing was released. Pass the run_folder of the run that saved it, with as many "
                "devices. To train a saved model further, load its weights and begin a new training; epsilon is then "
                "the sum of both."
            )

    # The steps

    def _step(self, trainer: Trainer, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Makes one step of the training; returns its outputs, or None if there is none left."""
        training = self.training
        if training is None or self._steps is None:
            raise Refused(f"{WHERE}: a step was asked for outside of the private training. No weight was moved.")
        batches = next(self._steps, None)
        if batches is None:
            return None
        outputs: dict[str, Any] = {}
        losses: list[Tensor] = []
        for batch in batches:
            answer = self._answer(trainer, training, kwargs, batch)
            if answer is not None:
                outputs = answer
                losses.append(answer["loss"].flatten())
        if losses:
            outputs["loss"] = torch.cat(losses).mean()
        if training.step_count == training._setup.account.steps_allowed:
            next(self._steps, None)  # to the end of the training's loop
            trainer.should_stop |= training.step_count < training.settings.num_steps  # the budget is spent
        self._log_epsilon(trainer, training)
        return outputs

    def _answer(
        self, trainer: Trainer, training: PrivateTraining, kwargs: dict[str, Any], batch: Any
    ) -> dict[str, Any] | None:
        """Answers one (micro)batch and returns its outputs; None for a rehearsal, and for a stand-in."""
        module = trainer.lightning_module
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
        logs = KeptLogs(module, self._check_log)
        with logs.keeping():
            output = call._call_strategy_hook(trainer, "training_step", *{**kwargs, "batch": batch}.values())
        outputs = dict(output) if isinstance(output, Mapping) else {"loss": output}
        losses = outputs.get("loss")
        if not isinstance(losses, Tensor) or losses.ndim == 0:
            raise Refused(
                f"{WHERE}: {type(module).__name__}.training_step returned "
                + ("a scalar" if isinstance(losses, Tensor) else f"{type(losses).__name__} as its loss")
                + ": must be one loss per example, a tensor (n,), or a dictionary with it as 'loss'. Pass "
                "reduction='none' to the loss function; log losses.mean()."
            )
        training.step(losses)
        if training.rehearsing:
            return None
        logs.make(trainer._results, batch, synced_only=training.stands_in)
        if training.stands_in:
            return None
        kwargs["batch"].batch = batch
        return outputs | {"loss": losses.detach()}

    def _check_log(self, name: str) -> None:
        names = {name, f"{name}_step", f"{name}_epoch"}
        self._logged |= names
        if steers := self._steering & names:
            raise Refused(
                f"{WHERE}: {name!r} is logged in training, and a callback or scheduler monitors {sorted(steers)[0]!r} "
                "to steer the training or to choose a checkpoint, or has it in the name of one. It is an exact number "
                "of private data, which epsilon does not cover. Take a metric of validation_step, on data that are not "
                "private."
            )

    def _log_epsilon(self, trainer: Trainer, training: PrivateTraining) -> None:
        delta = training.settings.delta
        if delta is None or training.step_count % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        holds = training._setup.account.warning(training._progress()) is None
        high = in_float32(training.profile_at_step().epsilon_high(delta))  # TensorBoard keeps no more
        epsilon = {"epsilon" if holds else "not_private/epsilon": high}
        for logger in trainer.loggers:
            logger.log_metrics(epsilon, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def _settings_of(training: PrivateTraining) -> dict[str, Any]:
    """Returns the settings that loggers get: those of the guarantee, and no seed, key or path."""
    settings = training.settings
    given = {name: getattr(settings, name) for name in SETTINGS}
    clipping = repr(settings.clipping)[:LONGEST]
    return {name: value for name, value in given.items() if value is not None} | {"clipping": clipping}


def _stopped_early(trainer: Trainer) -> bool:
    """True if early stopping has ended the training, so that it will not go on."""
    return any(one.wait_count >= one.patience for one in trainer.early_stopping_callbacks)
