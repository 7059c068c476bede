# SPDX-License-Identifier: Apache-2.0
"""Turns the clipped sums of a step into a private gradient: the one place that sees sums and noise together."""

from __future__ import annotations

from datetime import UTC, datetime

import torch
from torch import Tensor

from ..mechanisms.base import noise_factors
from ..support.random_state import SeededRandomNumbers
from ..support.validate import Refused
from ..support.warning import warn
from .callbacks import Listener
from .machine import NotRepeated
from .meeting import Meeting
from .own_noise import check_law
from .resuming import Resuming
from .state import Setup, State, StepSums


class Releaser:
    """Adds noise to the sums of a step, records the release, and updates the weights.

    Args:
        setup, state: of the training.
        meeting: with the other ranks.
        listener: follows the steps.
        resuming: takes new keys where a step does not repeat.
    """

    def __init__(self, setup: Setup, state: State, meeting: Meeting, listener: Listener, resuming: Resuming):
        self._setup, self._state, self._meeting = setup, state, meeting
        self._listener, self._resuming = listener, resuming
        self._finite = FiniteRows()
        self._ways = {name: str(way) for name, way in setup.settings.ways().items()}

    def release(self, total: StepSums) -> bool:
        """Makes the release of a step, and gives the private gradient to the optimizer.

        Returns False if the step could not be repeated: nothing was released, and new keys are in place.
        """
        setup, state = self._setup, self._state
        step, releases = state.step, state.releases
        try:
            if setup.account.is_settled:
                raise Refused(
                    "PrivateTraining: the stop was declared, so that the budget of the data has the rest of this "
                    "training's reservation back. Begin a new training."
                )
            self._check_unchanged()
            self._check_finite(total)
            release, places = self._meeting.take(self._listener.completed(total.sums, state))
            noise = setup.settings.noise_at(step)
            stddevs = setup.mechanism.stddevs(release, noise * noise_factors(state.num_trained, noise)["made"])
            state.guard.look(state.tensors.trained, step)
            self._note_moved()  # before the release that depends on it, as this process may be killed after that
            self._listener.before_release(is_new=releases.number(step) >= len(setup.ledger))
            releases.release(step, release, stddevs, places)
        except NotRepeated:
            self._resuming.take_new_keys()
            return False
        except Exception as error:
            self._meeting.tell(f"releases step {step}", error)
            raise
        self._listener.after_release(release, stddevs, state)
        state.num_non_finite += total.left_out
        state.stop_reason = None  # training goes on
        state.step += 1  # before the release is used: if the update is interrupted, its noise is spent
        state.date = datetime.now(UTC)
        total.sums.clear()
        self._update(release)
        return True

    def _update(self, release: dict[str, Tensor]) -> None:
        """Gives the private gradient to the optimizer, and steps it."""
        setup, state, parameters = self._setup, self._state, self._state.tensors.trained
        for group in setup.optimizer.param_groups:
            for p in group["params"]:
                p.grad = None
        gradients = self._meeting.gradients(setup.mechanism.gradient(release))
        size = setup.settings.size_at(state.step - 1)  # the mechanism divides by the mean of all batches
        used: dict[str, Tensor] = {}
        for name, p in parameters.items():
            p.grad = used[name] = gradients.pop(name) if size == 1 else gradients.pop(name) / size
        for name, row in state.reached.padding.items():  # the gradient of padding is noise alone
            if name in used:
                setup.placement.clear_row(used[name], row)
        self._listener.before_update(setup.optimizer.param_groups, used)
        del release, gradients, used
        place = f"updates the weights after step {state.step - 1}"
        try:
            moved = state.guard.update(parameters, state.step, self._change_weights)
        except Exception as error:
            self._meeting.tell(place, error)
            raise
        has_moved = self._meeting.updated(place, moved=moved)
        self._note_moved()  # on another rank
        if not has_moved:
            raise Refused(
                f"PrivateTraining: {type(setup.optimizer).__name__}.step() changed no weight, as wrappers "
                "do that accumulate gradients or skip steps. The release of this step is spent. Pass the "
                "optimizer itself; for larger batches raise expected_batch_size and set "
                "Performance(microbatch_size=...)."
            )
        for p in parameters.values():
            p.grad = None
        if setup.scheduler is not None:
            setup.scheduler.step()

    def _note_moved(self) -> None:
        """Writes into the ledger that other code has moved the weights, once it is seen."""
        if self._state.guard.seen_otherwise:
            self._setup.ledger.note_warning()

    @torch.no_grad()
    def _change_weights(self) -> None:
        """Calls ``after_update``; what it draws at random repeats, and is the same on all ranks."""
        change, state = self._setup.after_update, self._state
        if change is None:
            return
        numbers = SeededRandomNumbers(state.releases.draws.secret(b"after update", state.step - 1))
        try:
            change(self._setup.given)
        finally:
            numbers.close()

    def _check_unchanged(self) -> None:
        """Refuses settings that have changed since the start: the release must be the one that the ledger records."""
        ours, mechanism, step = self._setup.settings, self._setup.mechanism, self._state.step
        actual, planned = mechanism.settings(), self._setup.plan.at(step)
        event = ours.event(mechanism, ours.noise_at(step), step)
        changed = [name for name, way in self._ways.items() if actual.get(name, str(None)) != way]
        if event != planned or changed:
            raise Refused(
                f"PrivateTraining: noise, sampling or clipping={ours.clipping!r} have changed since the start: this "
                f"step would be {event!r}, but the ledger would record {planned!r}. Make a new PrivateTraining, with "
                "the releases so far as prior_releases."
            )
        if ours.own_noise is not None:  # its price may hold for few numbers alone
            check_law(ours.own_noise, mechanism.sensitivity, self._state.num_trained, ours.sampling_probability)

    def _check_finite(self, total: StepSums) -> None:
        """Refuses a batch without a finite gradient in the first steps; warns of one that has lost half of them."""
        state = self._state
        try:
            self._finite.check(state.step, total.left_out, len(state.releases.draws.records(state.step)))
        except Refused as error:
            state.check_diverged(error)
            raise


FEWEST = 4  # examples without a finite gradient that cannot be chance
FIRST_STEPS = 8
CAUSES = (
    "Look for NaN or infinity in the data, log(0) or a division by 0 in the loss, and overflow in half precision. An "
    "example with such a gradient is left out of every sum."
)


class FiniteRows:
    """Counts the examples with a gradient that is not finite.

    What it says depends on the data, and no epsilon covers it: it is for whoever runs the training.
    """

    def __init__(self) -> None:
        self._lost, self._drawn = 0, 0  # examples so far
        self._in_vain = 0  # examples of the latest batches without a finite gradient
        self._has_warned = False

    def check(self, step: int, num_lost: int, num_drawn: int) -> None:
        """Takes the counts of a batch before its release; warns once if half of the examples or more are lost.

        Small batches count together: half of the batch, or of all batches so far, and at least 4 examples.

        Raises:
            Refused: in one of the first steps, 4 or more examples in a row of batches have no finite gradient.
        """
        in_vain = self._in_vain + num_drawn if num_lost >= num_drawn else 0
        if step < FIRST_STEPS and in_vain >= FEWEST:
            raise Refused(
                f"PrivateTraining: none of the examples drawn last, up to step {step}, has a finite gradient. The step "
                f"would spend epsilon on noise alone, and nothing was released for it. {CAUSES}"
            )
        self._in_vain = in_vain
        self._lost, self._drawn = self._lost + num_lost, self._drawn + num_drawn
        counts = (num_lost, num_drawn), (self._lost, self._drawn)
        if self._lost and not self._has_warned and any(lost >= FEWEST and 2 * lost >= drawn for lost, drawn in counts):
            self._has_warned = True
            warn(
                f"PrivateTraining: half of the examples of step {step}, or more, have a gradient that is not finite, "
                f"so that the step is mostly noise. {CAUSES} training.num_non_finite counts them."
            )
