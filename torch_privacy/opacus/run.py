# SPDX-License-Identifier: Apache-2.0
"""Joins the objects that `PrivacyEngine.make_private` returns to one `PrivateTraining`."""

from __future__ import annotations

import math
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import privacy
from ..sampling.examples import Examples
from ..support.validate import Refused
from ..training import PrivateTraining
from .catcher import CatcherHooks, LossCatcher
from .optimizers import DPOptimizer
from .schedulers import SchedulerState, schedulers_of

MOST_EPOCHS = 10_000  # of a training without a given length


class OpacusRun:
    """Trains one model: hands out batches, and makes a private step where the loop calls ``optimizer.step()``.

    Args:
        model: the user's model.
        optimizer: the user's optimizer.
        settings: arguments of `PrivateTraining`.
        examples: the data.
        steps_per_epoch: number of steps in a pass of the loader.
        max_grad_norm: bound on the gradient of an example.
        loss_reduction: "mean" or "sum".
        batch_first: whether positions lie behind the batch where a criterion gets both in one dimension.
        open_ended: True if the number of steps was not given.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        examples: Examples,
        settings: Mapping[str, Any],
        *,
        steps_per_epoch: int,
        max_grad_norm: float,
        loss_reduction: str,
        batch_first: bool,
        open_ended: bool,
    ):
        self.model, self.optimizer, self.examples = model, optimizer, examples
        self.steps_per_epoch, self.max_grad_norm, self.loss_reduction = steps_per_epoch, max_grad_norm, loss_reduction
        self._settings, self._batch_first, self.is_open_ended = dict(settings), batch_first, open_ended
        self._catcher = LossCatcher(loss_reduction)
        self._hooks = CatcherHooks(self._catcher)
        self._is_open = False  # a batch waits for its step
        self._passes, self._is_active = 0, False  # over the loader; only the latest may go on
        self._schedulers: list[Any] = []
        self._references: list[int] = []  # to the optimizers, when schedulers were looked for
        self._progress: tuple[int, SchedulerState] | None = None
        self.name = uuid.uuid4().hex  # in checkpoints
        self._earlier: list[tuple[privacy.Event, int]] = []  # released by trainings that this run has left behind
        self.private_optimizer = DPOptimizer(optimizer, self)
        self.training = self._new_training()
        self._microbatch_size = self.training.settings.performance.microbatch_size  # where a loader has no limit
        if loss_reduction == "sum":
            optimizer.register_step_pre_hook(self._undo_division)

    def _new_training(self) -> PrivateTraining:
        training = PrivateTraining(self.model, self.optimizer, self.examples, **self._settings)
        self._hooks.register(self.model)
        return training

    def _undo_division(self, *_: Any) -> None:
        """Multiplies the private gradient by the divisor, as the loss is a sum."""
        if not self._is_active:  # the user goes on without privacy
            return
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(self.training.settings.expected_batch_size)

    def change(self, **settings: Any) -> None:
        """Goes on with other settings: in the same training if it has begun, with the same ledger and keys."""
        before, state = self._settings, None
        if self.training.step_count:
            state = self.training.state_dict()
        self._settings = before | settings
        try:
            training = self._new_training()
        except BaseException:
            self._settings = before
            raise
        if state is not None:
            training.load_state_dict(state)
        self.training = training

    def restart(self, releases: list[privacy.Release]) -> None:
        """Goes on from weights that were loaded, in a new training that counts ``releases`` first.

        Steps of the same noise and sampling among them count as steps of the plan, if there is a target epsilon.
        """
        earlier, plan = self.own_events(), self.training.settings
        if releases and (plan.noise_schedule is not None or plan.clip_schedule is not None):
            raise Refused(
                "load_checkpoint: noise_schedule and clip_schedule begin with step 0, and steps were made before. Load "
                "the checkpoint into a new engine first, then call make_private with the factors of the steps to come."
            )
        settings: dict[str, Any] = dict(self._settings) | {"prior_releases": tuple(releases)}
        if plan.target_epsilon is not None and plan.delta is not None and plan.noise_multiplier is not None:
            q = plan.sampling_probability
            made = [noise for r in releases if (noise := _noise_of(r.event, plan.noise_multiplier, q)) is not None]
            if len(made) >= plan.num_steps:
                raise Refused(
                    f"load_checkpoint: all {plan.num_steps} steps planned for target_epsilon={plan.target_epsilon!r} "
                    "are made in the history. Plan more epochs, or a larger target_epsilon."
                )
            if made:
                del settings["target_epsilon"]
                settings["noise_multiplier"] = made[-1]
                settings["num_steps"] = plan.num_steps - len(made)
                self.examples = replace(self.examples, budget=privacy.Budget(plan.target_epsilon, plan.delta))
        self._settings = settings
        self.training, self._earlier = self._new_training(), earlier

    def own_events(self) -> list[tuple[privacy.Event, int]]:
        """Returns what this run has released, without the releases that it was given."""
        left = len(self.training.settings.prior_releases)
        own: list[tuple[privacy.Event, int]] = []
        for event, count in self.training.ledger.events:
            skipped = min(left, count)
            left -= skipped
            if count > skipped:
                own.append((event, count - skipped))
        return self._earlier + own

    def batches(self, microbatch_size: int | None) -> Iterator[Any]:
        """Yields the (micro)batches of one pass: ``steps_per_epoch`` steps, with their rehearsals."""
        self._passes += 1
        this_pass, self._is_open, self._progress = self._passes, False, None
        self._catcher.close()
        performance = self.training.settings.performance
        size = self._microbatch_size if microbatch_size is None else microbatch_size
        if size != performance.microbatch_size:
            self.change(performance=replace(performance, microbatch_size=size))
        training, made = self.training, 0
        self._find_schedulers()
        steps = training.steps()
        try:
            self._is_active = True
            for batches in steps:
                for batch in batches:
                    self._begin()
                    try:
                        yield batch
                    finally:
                        if self._passes == this_pass:
                            self._catcher.close()
                    if self._passes != this_pass:
                        raise Refused("PrivacyEngine: a newer pass over the private loader has begun since this one.")
                    self._check_answered("the loop went on to the next batch")
                    self._end()
                made += 1
                if made == self.steps_per_epoch:
                    return
        finally:
            if self._passes == this_pass:
                self._is_open = self._is_active = False
                self._catcher.forget()
            steps.close()
        if not made:
            raise Refused(
                f"PrivacyEngine: all {training.step_count} steps are made that the privacy budget was planned for; "
                "another pass over the loader would exceed it. Give make_private more epochs. To evaluate on the "
                "training data, make a DataLoader of loader.dataset."
            )

    def _find_schedulers(self) -> None:
        """Looks for schedulers where there may be new ones, as it takes milliseconds: all know an initial rate."""
        if not any("initial_lr" in group for group in self.optimizer.param_groups):
            return
        optimizers = [self.optimizer, self.private_optimizer]
        references = [sys.getrefcount(optimizer) for optimizer in optimizers]
        if references != self._references:
            self._schedulers = schedulers_of(optimizers)
            self._references = references

    def _begin(self) -> None:
        self._is_open = True
        step = self.training.step_count
        if self._schedulers and (self._progress is None or self._progress[0] != step):
            self._progress = step, SchedulerState(self.optimizer, self._schedulers)
        self._catcher.open()

    def _end(self) -> None:
        """Puts schedulers back after a rehearsal, and after all but the last microbatch of a step."""
        if self._progress is not None and self._progress[0] == self.training.step_count:
            self._progress[1].restore()

    def _check_answered(self, what: str) -> None:
        if self._is_open:
            raise Refused(
                f"PrivacyEngine: {what} without optimizer.step(). Every batch of the private loader needs "
                "loss.backward() and optimizer.step(): gradients are not accumulated over batches (raise the loader's "
                "batch_size, and use BatchMemoryManager). To evaluate on the training data, make a DataLoader of "
                "loader.dataset."
            )

    def step(self) -> None:
        """Makes the step of the batch on which the loop has called ``loss.backward()``, or compares a rehearsal."""
        loss = self._catcher.backward_loss
        if loss is None or not self._is_open:
            raise Refused(
                "DPOptimizer.step() was called without loss.backward() on a batch of the private loader. Call the two "
                "once for every batch that the loader returned by make_private yields."
            )
        self._catcher.close()
        n, verified = self.training.num_in_batch, self.examples.assume_independent is None
        with torch.enable_grad():
            losses = loss.of_examples(n, batch_first=self._batch_first, verified=verified)
            self._catcher.forget()
            self.training.step(losses)
        self._is_open = False

    def noise_at(self, step: int | None = None) -> float | None:
        """Returns the noise multiplier of a step, by default the next; None if no more are planned."""
        settings, step = self.training.settings, self.training.step_count if step is None else step
        return settings.noise_at(step) if step < settings.num_steps else None

    def clip_norm_at(self, step: int | None = None) -> float | None:
        """Returns the clip norm of a step, by default the next; None if no more are planned."""
        settings, step = self.training.settings, self.training.step_count if step is None else step
        if step >= settings.num_steps:
            return None
        return self.max_grad_norm * (1.0 if settings.clip_schedule is None else settings.clip_schedule[step])


def _noise_of(event: privacy.Event, noise_multiplier: float, sampling_probability: float) -> float | None:
    """Returns the noise multiplier of a step with this noise and sampling, up to rounding; None for another one."""
    if not isinstance(event, privacy.SubsampledGaussian):
        return None
    given = (event.noise_multiplier, noise_multiplier), (event.sampling_probability, sampling_probability)
    return event.noise_multiplier if all(math.isclose(*pair, rel_tol=1e-9) for pair in given) else None


class PrivateLoader:
    """Yields the batches of a private training, and their rehearsals; a pass makes ``len(loader)`` steps.

    Takes the place of Opacus' ``DPDataLoader``. Batches are Poisson samples, so their sizes differ. Empty ones are made
    without the loop. The first steps, and few later ones, come with rehearsals: further batches for which
    ``optimizer.step()`` compares and releases nothing.

    Args:
        run: makes the steps.
        data_loader: the user's loader, of which ``dataset``, ``collate_fn`` and the number of workers are kept.
        microbatch_size: largest number of examples in a batch; None for no limit.
    """

    def __init__(self, run: OpacusRun, data_loader: Any, microbatch_size: int | None = None):
        self.run, self.data_loader, self.microbatch_size = run, data_loader, microbatch_size
        self.dataset, self.collate_fn = data_loader.dataset, data_loader.collate_fn
        self.num_workers, self.batch_size = data_loader.num_workers, data_loader.batch_size
        self.sample_rate = run.training.settings.sampling_probability

    def __len__(self) -> int:
        """Returns the number of steps in a pass; with a limit, the number of batches to expect."""
        steps = self.run.steps_per_epoch
        if self.microbatch_size is None:
            return steps
        return max(steps, math.ceil(steps * self.run.training.settings.expected_batch_size / self.microbatch_size))

    def __iter__(self) -> Iterator[Any]:
        return self.run.batches(self.microbatch_size)
