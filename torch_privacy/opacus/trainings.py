# SPDX-License-Identifier: Apache-2.0
"""Keeps the trainings of one run: the present one, and what those before it have released."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .. import privacy
from ..sampling.examples import Examples
from ..support.validate import Refused
from ..training import PrivateTraining
from .catcher import CatcherHooks


class Trainings:
    """The trainings of one model, each of which takes the place of the one before it.

    Args:
        model: the user's model.
        optimizer: the user's optimizer.
        examples: the data.
        settings: arguments of `PrivateTraining`.
        max_grad_norm: bound on the gradient of an example, before a schedule changes it.
        hooks: registered anew for each training.

    Attributes:
        present: the training that makes the next step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        examples: Examples,
        settings: Mapping[str, Any],
        max_grad_norm: float,
        hooks: CatcherHooks,
    ):
        self.model, self.optimizer, self.examples = model, optimizer, examples
        self._settings, self._max_grad_norm, self._hooks = dict(settings), max_grad_norm, hooks
        self._earlier: list[tuple[privacy.Event, int]] = []  # released by trainings that were left behind
        self.present = self._new_training()

    def _new_training(self) -> PrivateTraining:
        training = PrivateTraining(self.model, self.optimizer, self.examples, **self._settings)
        self._hooks.register(self.model)
        return training

    def change(self, **settings: Any) -> None:
        """Goes on with other settings: in the same training if it has begun, with the same ledger and keys."""
        before, state = self._settings, None
        if self.present.step_count:
            state = self.present.state_dict()
        self._settings = before | settings
        try:
            training = self._new_training()
        except BaseException:
            self._settings = before
            raise
        if state is not None:
            training.load_state_dict(state)
        self.present = training

    def restart(self, releases: list[privacy.Release]) -> None:
        """Goes on from weights that were loaded, in a new training that counts ``releases`` first.

        Steps of the same noise and sampling among them count as steps of the plan, if there is a target epsilon.
        """
        earlier, plan = self.own_events(), self.present.settings
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
                if not isinstance(self.examples.budget, privacy.DataBudget):  # which has all steps reserved
                    self.examples = replace(self.examples, budget=privacy.Budget(plan.target_epsilon, plan.delta))
        self._settings = settings
        self.present, self._earlier = self._new_training(), earlier

    def own_events(self) -> list[tuple[privacy.Event, int]]:
        """Returns what this run has released, without the releases that it was given."""
        left = len(self.present.settings.prior_releases)
        own: list[tuple[privacy.Event, int]] = []
        for event, count in self.present.ledger.events:
            skipped = min(left, count)
            left -= skipped
            if count > skipped:
                own.append((event, count - skipped))
        return self._earlier + own

    def noise_at(self, step: int | None = None) -> float | None:
        """Returns the noise multiplier of a step, by default the next; None if no more are planned."""
        settings, step = self.present.settings, self.present.step_count if step is None else step
        return settings.noise_at(step) if step < settings.num_steps else None

    def clip_norm_at(self, step: int | None = None) -> float | None:
        """Returns the clip norm of a step, by default the next; None if no more are planned."""
        settings, step = self.present.settings, self.present.step_count if step is None else step
        if step >= settings.num_steps:
            return None
        return self._max_grad_norm * (1.0 if settings.clip_schedule is None else settings.clip_schedule[step])


def _noise_of(event: privacy.Event, noise_multiplier: float, sampling_probability: float) -> float | None:
    """Returns the noise multiplier of a step with this noise and sampling, up to rounding; None for another one."""
    if not isinstance(event, privacy.SubsampledGaussian):
        return None
    given = (event.noise_multiplier, noise_multiplier), (event.sampling_probability, sampling_probability)
    return event.noise_multiplier if all(math.isclose(*pair, rel_tol=1e-9) for pair in given) else None
