# SPDX-License-Identifier: Apache-2.0
"""Reports on a training: its price, its privacy statement, its run folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from .. import privacy
from ..mechanisms.base import ClippedSum
from ..mechanisms.clipping import ClippingRule
from ..support.notebook import html_table
from ..support.validate import Refused, whole
from .resuming import Resuming
from .run_files import LOSSES_NOT_COVERED, Scores, checked_scores
from .saved_model import check_alike, unreleased, weights_of
from .settings import check_delta
from .state import Setup, State
from .statement import Spent, TrainingProgress
from .step_run import StepRun


class Reporting:
    """Prices and describes a training; the base of `PrivateTraining`."""

    _setup: Setup
    _state: State
    _runs: StepRun
    _resuming: Resuming

    def __repr__(self) -> str:
        return f"PrivateTraining({', '.join(f'{name}: {text}' for name, text in self._described())})"

    def _repr_html_(self) -> str:
        """Returns a table for a notebook: model, steps, settings, and epsilon so far if there is a delta."""
        rows = self._described()
        if self._setup.settings.delta is not None:
            rows.append(("spent", str(self.spent())))
        return html_table("PrivateTraining", rows)

    def _described(self) -> list[tuple[str, str]]:
        """Returns what the training is, in words, at no cost."""
        settings, unit = self._setup.settings, self._setup.settings.unit
        return [
            ("model", type(self._setup.given).__name__),
            ("steps", f"{self._state.step} of {settings.num_steps}"),
            ("batches", f"{settings.expected_batch_size:g} of {settings.num_units:,} {unit}s on average"),
            ("clipping", str(settings.clipping)),
            ("noise multiplier", f"{settings.noise_at(self._state.step):.6g}"),
        ]

    @property
    def event(self) -> privacy.Event:
        """Returns the event of the next step, as the accountant prices it; after the last step, that of the last."""
        return self._state.releases.plan.at(self._state.step)

    @property
    def clipping(self) -> ClippingRule | None:
        """Returns the clipping rule of the next step."""
        mechanism = self._setup.mechanism
        return mechanism.rule if isinstance(mechanism, ClippedSum) else None

    @property
    def num_non_finite(self) -> int:
        """Returns how many examples were left out because of gradients that are not finite. Secret: an exact count."""
        return self._state.num_non_finite

    @property
    def num_lost(self) -> int:
        """Returns how many releases a resumed training could not repeat; the ledger counts them besides its steps."""
        return self._state.releases.num_lost

    def spent(self, delta: float | None = None, *, examples_per_person: int | None = None) -> Spent:
        """Returns the privacy spent at ``delta`` (by default the one given at the start).

        ``epsilon`` is that of the releases so far, and ``planned`` that of all planned steps, or of those that the
        budget allows. Report ``planned`` if training stopped early because of anything that it released.

        Args:
            delta: below 1/n, with n the number of examples or, with ``owners``, of owners.
            examples_per_person: prices a training on examples for a person who has up to this number of them, by
                `privacy.SubsampledGroup`. It must be a cap that is enforced (`torch_privacy.at_most`). With ``owners``
                epsilon is that of an owner anyway.

        Raises:
            ValueError: no delta was given, or it is 1/n or more; the steps have no price for several examples.
        """
        if examples_per_person is not None and self._setup.settings.owners is not None:
            raise ValueError(
                f"PrivateTraining.spent: examples_per_person={examples_per_person!r} is for trainings without owners. "
                f"This one protects one {self._setup.settings.unit} with all of its examples: leave it out."
            )
        if delta is not None:
            check_delta(self._setup.settings.num_units, delta, self._setup.settings.unit)
        elif self._setup.settings.delta is not None:
            delta = self._setup.settings.delta
        else:
            raise ValueError(
                "PrivateTraining.spent: no delta was given. Pass delta, below 1/n, here or to PrivateTraining."
            )
        found = self._setup.account.spent(self._progress(), self._setup.mechanism, delta, examples_per_person)
        return replace(found, not_covered=(*found.not_covered, *self._files_not_covered()))

    def declare_stop(self, reason: str) -> None:
        """Declares that training stops for a reason that is independent of the data, such as a time limit.

        The statement then shows the epsilon of the steps made, and prints the reason. Without a declaration it shows
        the epsilon of all planned steps: less does not cover a stop that depends on what was released, such as early
        stopping. With a budget of the data, the steps not made are given back to it, and no further step is made.

        Raises:
            ValueError: the reason is empty.
        """
        if not str(reason).strip():
            raise ValueError(f"PrivateTraining.declare_stop: reason={reason!r} must say why, in words.")
        self._state.stop_reason = str(reason)
        self._setup.account.settle(self._state.stop_reason)

    def explain(self) -> str:
        """Returns how the step is computed: by exact or estimated norms, in which subspace, with which noise."""
        norms, plan = self._setup.mechanism.explain(), self._setup.settings
        correlation = plan.correlation
        if correlation is None:
            return norms
        return f"{norms}; {correlation.explain(plan.num_steps, plan.sampling_probability)}"

    def profile(self) -> privacy.Profile:
        """Returns the privacy profile of the releases so far."""
        return self._setup.account.profile()

    def profile_at_step(self) -> privacy.Profile:
        """Returns the privacy profile of the releases up to the step that was made last.

        It is `profile`, but in a resumed training without the steps that the ledger has and that are yet to be
        repeated: the numbers of one step are the same before and after a resume.
        """
        return self._setup.ledger.profile(first=self._state.releases.number(self._state.step))

    def statement(self) -> dict[str, Any]:
        """Returns everything that determines the guarantee, as plain data for a machine-readable privacy statement.

        With a run folder it has a fingerprint of the data, too, under a secret key in the folder, except between a
        batch and its ``step``.
        """
        statement = self._setup.account.statement(self._progress(), self._setup.mechanism)
        statement["not_covered"] += self._files_not_covered()
        files = self._resuming.files
        if files is not None and files.folder is not None and self._runs.pending is None:
            statement["data"] = files.data(self._setup.batches.dataset)
        return statement

    def _files_not_covered(self) -> list[str]:
        """Returns what epsilon does not cover in the files of the model and of the run."""
        losses = [] if self._resuming.files is None else [LOSSES_NOT_COVERED]
        return [*unreleased(self._setup.given, self._state.tensors.trained), *losses]

    def write_run(
        self,
        scores: Mapping[str, float] | None = None,
        *,
        model: nn.Module | None = None,
        baseline: Mapping[str, float] | None = None,
        num_test_examples: int | None = None,
    ) -> None:
        """Writes privacy statement, metrics, model, results and report into the run folder.

        The loop does so after its last step. Call it to add test scores, or to write what there is after ``break``, at
        any time between two steps. Each call writes all of these files anew, with the scores and the model given in
        this call. Training may go on afterwards; the folder is that of an unfinished training from the next step on.

        With several ranks every rank calls it, and the first one writes.

        Args:
            scores: on test data, by name, such as ``{"accuracy": 0.84, "loss": 0.41}``. Epsilon does not cover the test
                data.
            model: to be saved in place of the trained one: its moving average, ``average.model``.
            baseline: scores of the same model trained without privacy, to compare.
            num_test_examples: number of test examples.

        Raises:
            ValueError: the training has no run folder or made no step; a score is not a number; another model.
            Refused: a batch waits for its step; another training has the folder by now.
            OSError: a file cannot be written. The model comes first. Call it again when there is room.
        """
        if self._resuming.files is None:
            raise ValueError(
                "PrivateTraining.write_run: the training has no run folder. Pass run_folder= to PrivateTraining."
            )
        with self._runs.one_thread():
            found = checked_scores("scores", scores), checked_scores("baseline", baseline)
            if num_test_examples is not None:
                whole("PrivateTraining.write_run", num_test_examples=num_test_examples)
            self._write_run(Scores(*found, num_test_examples), model)

    def _write_run(self, scores: Scores, model: nn.Module | None) -> None:
        setup, state, files, ranks = self._setup, self._state, self._resuming.files, self._setup.placement.ranks
        assert files is not None
        with ranks.together("writes the run folder"):
            if self._runs.pending is not None or self._runs.is_within_step:
                raise Refused("PrivateTraining.write_run: a step is in progress. Call it between two steps.")
            if not state.step:
                raise ValueError("PrivateTraining.write_run: no step was made yet, so there is nothing to report.")
            if model is not None:
                check_alike(model, state.tensors.trained)
            setup.ledger.sync()  # refuses if another training has the folder
        files.losses.sum_ranks()
        with ranks.communicating():
            weights = weights_of(setup.model if model is None else model, ranks)

        def write() -> None:
            releases = setup.account.covering_releases(self._progress())
            files.write(state.step, weights, self.statement, releases, self.profile_at_step(), setup.model, scores)

        ranks.first_does("writes the run folder", write)

    def _progress(self) -> TrainingProgress:
        return self._state.progress(self._setup.callbacks)
