# SPDX-License-Identifier: Apache-2.0
"""Provides ``PrivateTraining``, which joins recording, clipping, noise, sampling and ledger into a training loop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Never

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from .. import privacy
from ..mechanisms.scheduled import Schedule, Scheduled, factors_of
from ..runs.folder import RunFolder
from ..sampling.examples import Examples, examples_of
from ..sampling.variants import variants_of
from ..support.validate import Refused, whole
from ..support.warning import warn
from .callbacks import Callback, Callbacks, together
from .canaries import Observation
from .correlation import Banded, check_correlated
from .loop_checks import check_not_for_accelerate, closed_at_exit, name_of
from .making import Own, agree, make_rehearsals, make_setup
from .meeting import Meeting
from .old_spelling import refuse_unknown
from .own_noise import OwnNoise, check_setting, stated
from .placement import placement_of
from .releaser import Releaser
from .reporting import Reporting
from .resuming import Resuming
from .run_files import Scores
from .sampling import POISSON, Sampling, number_of_steps, sampling_of
from .settings import USUAL, Clipping, Performance, TrainingSettings
from .state import StepSums, make_state, while_alive
from .step_run import Run, StepRun

_END = object()  # of a loop
_EMPTY = object()  # handed out after a step with an empty batch, of which only `PrivateTraining.steps` takes note

ALL_STEPS_MADE = (
    "PrivateTraining: all {} steps are made, so this loop gets no batch. One pass over a training makes the steps of "
    "all epochs. To do something after each epoch, count steps: `for step, batches in enumerate(training.steps(), "
    "1):`, inside it `for x, y in batches:`, and then `if step % steps_per_epoch == 0:`."
)


class PrivateTraining(Reporting):
    """Trains a model with differential privacy: random batches, per-example clipping, Gaussian noise, a ledger.

    One step is ``grad = (Σᵢ cᵢ gᵢ + noise_multiplier·sensitivity·z) / expected_batch_size`` over the examples i of a
    random batch, with gᵢ the gradient of example i's own loss, cᵢ the clipping rule's factor and z standard normal;
    then ``optimizer.step()``. Model, optimizer and schedulers are the user's own and stay as they are.

    Some batches are rehearsed: before the batch itself, the loop gets variants of it, with some examples replaced or
    left out. This shows that no example's loss or gradient depends on another example. ``step`` returns False for a
    rehearsal, and nothing is released. Advance schedulers only if ``step`` returned True, and log only if `rehearsing`
    is false.

    Args:
        model: any module; its trained parameters must be used by ops with exact rows (others are refused by name).
        optimizer: any torch optimizer over parameters of the model; those it holds that require a gradient are trained.
        dataset: map-style; one item is one example, the unit of protection. Its size is treated as public. Or
            `Examples` of a data set, which say how it is fetched, whether examples come in several views, whether their
            owners are protected, which budget may be spent on them, and whether rehearsals are left out.
        expected_batch_size: q·n, the mean size of the batches and the divisor of every step; it counts owners where
            these are protected, as n does.
        num_steps: total number of steps (releases); or give ``epochs``.
        epochs: passes over the data (over the owners, where these are protected): ``num_steps`` is
            ``epochs · n / expected_batch_size``, rounded up.
        sampling: how examples are drawn: `Poisson`, `BallsAndBins` (each is in exactly one batch of every epoch),
            `Truncated`, or `Varying`, with batches that grow or shrink. By default `BallsAndBins` for a whole number of
            ``epochs``, as it costs less epsilon; the mean batch size is then moved to n over a whole number. `Poisson`
            for ``num_steps``, and where `BallsAndBins` has no price (`Sketched`, ``noise_schedule``) or would move the
            batch size by more than 5 %.
        clipping: bounds each per-example gradient: a rule such as ``Flat(clip_norm=1.0)``, a rule with bounds that
            change, ``Flat(1.0).scheduled(factors)``, `Sketched` for models that the tape refuses (norms estimated by
            random projections, which costs epsilon), or `GEP` or `BGEP` (separate noise for the gradients' coordinates
            in a public subspace and for the residual).
        noise_multiplier: noise standard deviation divided by sensitivity; or give ``target_epsilon``; or noise of one's
            own, an `OwnNoise`, with the price that its author states.
        noise_schedule: factor on the noise multiplier in every step: a function of the step, from 0 on, or a number for
            each. Every step is priced with its own noise. With ``target_epsilon`` the whole schedule is scaled. It is
            computed before the first batch, so that it cannot follow the data.
        correlation: `Banded`, noise that takes back part of the noise of earlier steps; it draws the batches itself.
        target_epsilon: calibrates the noise multiplier so that all ``num_steps`` spend at most this at ``delta``.
        delta: for ``target_epsilon`` and ``spent()``; must be below 1/n, and a warning asks for 1/(10 n) or less.
        performance: `Performance`, what a step takes of memory and time, such as
            ``Performance(microbatch_size=256)``. It changes no release but by rounding.
        prior_releases: earlier releases of the same data that are used here, such as ``[pca.release_]`` of a
            `PrivatePCA` in front of the model: first in the ledger, and part of every epsilon.
        scheduler: learning-rate scheduler to advance after every step, including steps with empty batches. The user's
            loop may advance one instead, if ``step`` returned True, but does not see empty batches. A scheduler that
            needs a loss (``ReduceLROnPlateau``) is refused.
        run_folder: folder for the files of the run (docs/run-folder.md): settings and ledger from the start; privacy
            statement, metrics, model, results and report after the last step, or by `write_run`. Every release is
            written to the ledger before it is used, so that it survives ``kill -9``; it reaches the disk itself within
            about a second.
        callbacks: `Callback` objects that are called after every step, such as ``LoggingCallback()``: loss, share of
            clipped examples, norms (not private) and epsilon so far. They change no release.
        after_update: a function of the model, called with gradients off after every optimizer step, those of empty
            batches included: to clamp weights (WGAN), bound their norms, or shrink them towards zero (proximal L1). It
            may read the weights alone, so that it costs no privacy. That it reads no data is its author's promise,
            which the statement names. What it draws at random comes from the secret key, and repeats in a resumed run.
            With shards (``fully_shard``) the model has distributed tensors then.
        test_seed: fixes noise and batches, for tests only; every statement then says NOT PRIVATE.

    Guarantees:
        - The optimizer receives a function of noisy sums only, each recorded in the ledger before it is used.
        - One example changes the sum before the noise by at most ``clipping.sensitivity``, up to a rounding of 2e-5,
          relative. The noise is larger by 2.1e-5 than ``noise_multiplier * sensitivity``, so that epsilon covers it.
        - Epsilon is for zeroing out one example, or owner: it is replaced with nothing, and their number n is public,
          because it determines the sampling probability ``expected_batch_size / n``.
        - The divisor is the expected batch size, independent of the actual size of the batch.
        - An empty batch makes a step of noise alone; the loop does not see it.
        - Before the first releases, the engine checks itself on the user's own batches: the sum of all rows with random
          weights equals the native gradient of the losses with these weights.
        - Steps 0, 1, 2, 4, 8, 16, ..., the first of an epoch (at most one in 64), one in 256 and the last are rehearsed
          (one microbatch of each in turn, all of the last), and so is every batch that runs code of the model or the
          loop that no rehearsal has seen, or with a number of a new kind, such as a factor that was 0: losses, norms
          and directions of the gradients, and clip factors of the kept examples stay the same (in steps 0, 1 and 2 the
          losses of the other examples, too). The secret key determines the one in 256, the first microbatch and the
          examples. docs/pitfalls.md lists what a rehearsal cannot show.
        - If a rehearsal finds a dependence, ``spent()`` says NOT PRIVATE from the last one that passed.
        - With ``clipping``, no clipped row exceeds the rule's bound in any step, up to rounding.
        - From the start of the loop to its end, no other optimizer step moves a trained parameter. ``spent()`` and the
          statement say NOT PRIVATE if trained parameters were moved in another way.
        - Inside the loop, the random numbers of torch, numpy and Python are a function of the secret key, the step and
          the microbatch; ``step`` restores the user's own random state.
        - The settings are frozen from the start: ``training.settings`` holds them (`TrainingSettings`).
        - The row of an embedding's ``padding_idx`` stays unchanged, without noise, as in ordinary training, unless the
          table is used in another way, too, in every batch; in some batches alone is refused. With `Sketched`, which
          does not see such a use, the row has noise.
        - Whatever the guarantee does not cover raises ``Refused`` before anything is released.

    Edge cases:
        An example with a gradient that is not finite is left out of the sum, and so are all examples of a micro-batch
        with a mean that is not finite; with groups of parameters, out of the affected groups only. ``num_non_finite``
        is the number of examples left out so far, of any group. It is an exact count of private data, and as secret as
        the batch size. Where half of a batch or more is left out, and at least 4, a warning says so once; where the
        first batches have no finite gradient at all (4 examples or more), the step is refused and nothing is released.
        Warning and refusal depend on the data, and no epsilon covers them: they are for whoever runs the training.

        All epochs are in one pass of the loop. A second pass over a finished training has no batch, and warns.

        An optimizer that skips its step is refused after the release was recorded; that release is spent.

    Raises:
        Refused: BatchNorm in training mode, parameters of the optimizer that are not the model's, a loader instead of
            a dataset, a model that several processes of ``torch.distributed`` would each train for themselves, ...; the
            message names the culprit and the cure.
        ValueError: a number is out of range.
        AttributeError: a setting was assigned after the start.

    Source: Abadi et al. (2016), Algorithm 1; Poisson sampling and step counts as the accountant prices them.

    Example:
        >>> import torch
        >>> import torch_privacy as tp
        >>> data = torch.utils.data.TensorDataset(torch.randn(1000, 5), torch.randint(2, (1000,)))
        >>> model = nn.Linear(5, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> training = tp.PrivateTraining(model, optimizer, data, expected_batch_size=50, num_steps=20,
        ...                               clipping=tp.Flat(clip_norm=1.0), noise_multiplier=1.0, delta=1e-5)
        >>> for x, y in training:
        ...     losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        ...     released = training.step(losses)
        >>> print(training.spent())
        epsilon in [1.984, 1.985] at delta = 1e-05 (zero out one example, Poisson sampling)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Dataset | Examples,
        *,
        expected_batch_size: float,
        num_steps: int | None = None,
        epochs: float | None = None,
        sampling: Sampling | None = None,
        clipping: Clipping | None = None,
        noise_multiplier: float | OwnNoise | None = None,
        noise_schedule: Schedule | None = None,
        correlation: Banded | None = None,
        target_epsilon: float | None = None,
        delta: float | None = None,
        performance: Performance = USUAL,
        prior_releases: Sequence[privacy.Release] = (),
        scheduler: LRScheduler | None = None,
        run_folder: Path | str | RunFolder | None = None,
        callbacks: Sequence[Callback] = (),
        after_update: Callable[[Any], Any] | None = None,
        test_seed: int | None = None,
        **old: Never,  # former keywords, which are refused with their new spelling
    ):
        refuse_unknown(PrivateTraining.__init__, "PrivateTraining", old)
        placement = placement_of(model)
        with placement.ranks.together("begins a training"):
            called, examples = Callbacks(callbacks, placement.ranks), examples_of(dataset)
            canaries, num_units = examples.canaries, examples.num_units
            law = noise_multiplier if isinstance(noise_multiplier, OwnNoise) else None
            if law is not None:
                sampling = sampling or POISSON
                check_setting(law, clipping, sampling, correlation, noise_schedule, target_epsilon)
            if correlation is None:
                sampling, expected_batch_size = sampling_of(
                    sampling, epochs, expected_batch_size, num_units, clipping, noise_schedule
                )
            else:
                check_correlated(correlation, sampling, clipping, noise_schedule)
                sampling = POISSON  # until the number of steps is known
            num_steps = number_of_steps(num_steps, epochs, num_units, expected_batch_size)
            whole("PrivateTraining", num_steps=num_steps, at_least=1)
            settings = TrainingSettings(
                num_examples=examples.num_examples,
                num_canaries=0 if canaries is None else canaries.num_canaries,
                expected_batch_size=expected_batch_size,
                num_steps=num_steps,
                sampling=sampling.for_steps(num_steps, num_units, expected_batch_size, clipping),
                clipping=clipping.for_steps(num_steps) if isinstance(clipping, Scheduled) else clipping,
                noise_multiplier=None if isinstance(noise_multiplier, OwnNoise) else noise_multiplier,
                noise_schedule=factors_of("PrivateTraining", "noise_schedule", noise_schedule, num_steps),
                target_epsilon=target_epsilon,
                delta=delta,
                budget=examples.budget,
                performance=performance,
                views=examples.views,
                prior_releases=tuple(prior_releases),
                assume_independent=examples.assume_independent,
                after_update=None if after_update is None else name_of(after_update),
                test_seed=test_seed,
                owners=examples.known_owners,
            )
            if correlation is not None:
                settings = settings.correlated(correlation, shows=placement.ranks.is_first)
            if law is not None:
                noise = stated(law, settings.sampling_probability, settings.unit)
                settings = replace(settings, own_noise=noise, noise_multiplier=noise.stddev / law.sensitivity)
            own = Own(model, optimizer, scheduler, after_update)
            setup, files = make_setup(placement, own, examples, settings, tuple(called.names), run_folder)
            self._setup, self._state = setup, make_state(setup)
            observation = None
            if canaries is not None:
                observation = Observation(canaries, setup.settings, setup.mechanism, setup.batches)
                canaries.check_only_one(self)
        self.model, self.optimizer, self.scheduler = setup.given, setup.optimizer, setup.scheduler
        self.settings, self.ledger = setup.settings, setup.ledger
        self._resuming = Resuming(setup, self._state)
        self._resuming.files = agree(setup, self._state, files, self._resuming)
        self._state.releases = self._resuming.new_releases()
        self._state.rehearsals = make_rehearsals(setup, self._state, self)
        listener, meeting = together(observation, self._resuming.files, called), Meeting.of(setup, self._state)
        why_not_private = while_alive(self, lambda alive: alive._setup.account.why_not_private(alive._progress()), "")
        self.ledger.reason.ask = why_not_private
        self.ledger.note_warning()
        self._runs = StepRun(setup, self._state, meeting, listener)
        self._releaser = Releaser(setup, self._state, meeting, listener, self._resuming)
        self._loop: object = None  # the latest iteration, the only one that may go on

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and "_loop" in self.__dict__:
            raise AttributeError(
                f"PrivateTraining.{name} cannot be set: the releases and their price depend on the settings given at "
                "the start. Make a new PrivateTraining, with the releases so far as prior_releases."
            )
        super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        raise Refused(
            "PrivateTraining cannot be copied or pickled: two copies would release different sums with the same noise. "
            "Save training.state_dict() and load it into a new PrivateTraining."
        )

    @property
    def step_count(self) -> int:
        """Returns the number of steps made so far; it does not change during rehearsals."""
        return self._state.step

    def __len__(self) -> int:
        """Returns the number of steps in all."""
        return self.settings.num_steps

    def __iter__(self) -> Iterator[Any]:
        """Yields (micro)batches from the next step to the last; each must be answered by ``step(losses)``.

        Some come several times, first with some examples replaced or left out: `rehearsing` is then true, and ``step``
        compares, releases nothing and returns False. The batch itself comes last.

        After ``break`` or an exception, a new iteration begins with the first microbatch of the unfinished step.
        """
        handed_out = self._handed_out()
        try:
            for batch in handed_out:
                if batch is not _EMPTY:
                    yield batch
        finally:
            handed_out.close()

    def steps(self) -> Generator[Iterator[Any], None, None]:
        """Yields an iterator over the (micro)batches of each step, empty for an empty batch, for loops that count.

        When such an iterator has ended, exactly one more step is made, so that schedulers, logs and evaluations can
        follow it, after empty batches, too::

            for batches in training.steps():
                for x, y in batches:
                    training.step(cross_entropy(model(x), y, reduction="none"))
                scheduler.step()

        Raises:
            Refused: the loop went on to the next step before this one was made.
        """
        handed_out = self._handed_out()
        try:
            while self.step_count < self._setup.account.steps_allowed:
                step = self.step_count
                yield self._batches_of_step(handed_out, step)
                if self.step_count == step < self._setup.account.steps_allowed:  # new keys may leave fewer steps
                    raise Refused(
                        f"PrivateTraining.steps: step {step} was not made. Call training.step(losses) for every batch "
                        "of the inner loop, to its end, before the outer loop goes on."
                    )
            for _ in handed_out:
                raise Refused("PrivateTraining.steps: an audit observes batches after the last step. Iterate over it.")
        finally:
            handed_out.close()

    def _batches_of_step(self, handed_out: Iterator[Any], step: int) -> Iterator[Any]:
        while self.step_count == step:
            batch = next(handed_out, _END)
            if batch is _END:
                return
            if batch is not _EMPTY:
                yield batch

    def _handed_out(self) -> Generator[Any, None, None]:
        """Yields what `__iter__` does, and _EMPTY after each step with an empty batch."""
        turns = self._turns()
        with closed_at_exit(turns):
            while True:
                with self._runs.one_thread():
                    batch = next(turns, _END)
                if batch is _END:
                    return
                yield batch

    def _turns(self) -> Generator[Any, None, None]:
        """Yields what the loop gets, and _EMPTY after each step with an empty batch; at the end writes the folder."""
        setup, state, runs = self._setup, self._state, self._runs
        self._loop = loop = object()
        self._runs.leave_step()
        with self._runs.meeting.looping():
            state.tensors = setup.tensors()
            state.guard.activate()
            if state.has_ended and state.step >= setup.account.steps_allowed:
                warn(ALL_STEPS_MADE.format(state.step))
            if state.step < setup.account.steps_allowed:
                self._draw(setup.account.begin)
            state.rehearsals.watch.begin_loop()
            releases, fetched = None, iter(())
            try:
                while state.step < setup.account.steps_allowed:
                    if state.releases is not releases:  # at first, and when the steps cannot be repeated
                        releases = state.releases
                        fetched = variants_of(setup.batches, runs.requests(setup.account.steps_allowed))
                    if self._resuming.machine is not None:
                        self._resuming.match_threads()
                    total = yield from self._handed_out_by(runs.step(fetched), loop)
                    if total is not None:
                        self._release(total)
                        yield _EMPTY
                state.has_ended = True
                self._runs.meeting.end_loop()
                yield from self._handed_out_by(runs.observed(self._runs.listener.batches_at_end(state)), loop)
                try:
                    state.rehearsals.watch.suspects.judge(at_end=True)
                    self._runs.listener.at_end(self)
                except Exception:
                    self._write_at_end()
                    raise
            finally:
                if self._loop is loop:
                    self._runs.leave_step()
                    state.guard.deactivate()
                    state.rehearsals.watch.end_loop()
                    self._resuming.end_loop()
            try:
                self._draw(setup.account.settle)
            finally:  # also where the budget cannot be written: the model is there then
                self._write_at_end()

    def _handed_out_by(self, run: Run, loop: object) -> Generator[Any, None, StepSums | None]:
        """Yields the batches of a run; returns its sums if it ended without one, and else None: `step` has released."""
        self._runs.run = run
        while self._runs.run is run:
            try:
                pending = next(run)
            except StopIteration as end:
                self._runs.run = None
                return end.value
            assert pending is not None
            with self._runs.recorded(pending):
                yield pending.turn.batch
            if self._loop is not loop:
                raise Refused("a newer loop over the training has begun since this one. Go on with the newer one.")
            if pending.waits:
                raise Refused(
                    "the loop went on without training.step(losses) for its batch, or after an error in it. Call it "
                    "once for every batch; after an error, iterate over the training anew."
                )
        return None

    def _draw(self, act: Callable[[], None]) -> None:
        """Lets rank 0 write into the budget of the data, if there is one."""
        if self._setup.account.draws:
            self._setup.placement.ranks.first_does("draws from the budget", act)

    def _write_at_end(self) -> None:
        """Writes the run folder after the last step, unless it is written."""
        ranks, files = self._setup.placement.ranks, self._resuming.files
        if files is not None and not ranks.from_first(files.is_written) and self.step_count:
            self._write_run(Scores(), None)

    @property
    def rehearsing(self) -> bool:
        """True if the batch that was handed out last is a rehearsal, of which nothing is released.

        To leave rehearsals out of a log, read it after ``step``: a batch that turns out to run new code counts as a
        rehearsal from then on, and is handed out again later. After ``step`` it is the same on all ranks, so that the
        loop may communicate where it is false.
        """
        return self._runs.is_rehearsal

    @property
    def num_in_batch(self) -> int:
        """Returns the number of losses that `step` awaits for the batch handed out; 0 if it awaits none. Secret."""
        pending = self._runs.pending
        return 0 if pending is None else pending.turn.count * self.settings.views

    @property
    def stands_in(self) -> bool:
        """True if the batch that was handed out last is a stand-in, because this rank has no example of the batch.

        It is in no sum. Leave its losses out of a log; other ranks have the examples.
        """
        return self._runs.part is not None and not self._runs.part.share.counts

    def step(self, losses: Tensor) -> bool:
        """Clips and sums the batch's per-example gradients; after the last microbatch adds noise, records and updates.

        Args:
            losses: (n,) one loss per example of the batch just handed out (``reduction="none"``), or (n, views).

        Returns:
            True if the model was updated; False for rehearsals, and for all but the last microbatch of a step.

        Raises:
            Refused: a scalar, the losses of another batch, an op without an exact rule, examples that depend on each
                other, code that does not repeat, ...; nothing was released, and the step can be tried again by
                iterating anew.
        """
        enabled = torch.is_grad_enabled()
        try:
            with self._runs.one_thread():
                return self._answer(losses)
        except Refused as error:
            if self._state.rehearsals.note_refused(error, self.step_count):
                self.ledger.note_warning()
            raise
        finally:
            torch.set_grad_enabled(enabled)  # an interrupt within torch.no_grad's own exit leaves gradients off

    def _answer(self, losses: Tensor) -> bool:
        """Gives the losses to the run, and makes the release if they are the last of the step."""
        pending, run = self._runs.pending, self._runs.run
        if pending is None or run is None:
            raise Refused(
                "training.step was called without a batch. Call it once for every batch of `for ... in training`."
            )
        self._runs.hooks.unwind()
        pending.stop()
        total, released = _sums_after(run, losses), False
        if total is not None:
            self._runs.run = None
            released = self._release(total)
            self._runs.is_rehearsal = not released
        pending.waits = False
        return released

    def _release(self, total: StepSums) -> bool:
        """Makes the release of a step; returns False if it has to be made again under new keys."""
        released = self._releaser.release(total)
        if released:
            self._runs.listener.after_step(self)
        return released

    def record(self) -> AbstractContextManager[Any]:
        """Returns the recording of the batch just handed out, as a context.

        Whatever the loop calls between the batch and ``step`` is recorded anyway, so that no loop needs the context. In
        another thread it records there.
        """
        pending = self._runs.pending
        if pending is None:
            raise Refused("training.record() needs a batch. Use it inside `for ... in training`, before training.step.")
        return nullcontext() if pending.tape is None else pending.tape

    def state_dict(self) -> dict[str, Any]:
        """Returns what is needed to go on after a stop: keys of noise and sampler, step, settings and ledger.

        THIS STATE IS SECRET. From the key anyone can compute the noise of every step, past and future, and subtract it.
        Keep it readable by the training process alone, and delete it when the run is over. Model, optimizer and
        scheduler have state dicts of their own. Random numbers need none: inside the loop those of torch, numpy and
        Python follow from the key and the step, so that a resumed run repeats dropout and augmentation bit for bit. A
        declared stop is not part of the state. Of several ranks only rank 0 returns the keys. A fingerprint of the data
        is, under a key of its own, which is secret, too.
        """
        check_not_for_accelerate(sys._getframe(1))
        return self._resuming.state_dict(is_between_steps=self._runs.pending is None)

    def load_state_dict(self, state: dict[str, Any], replay: Literal["exact", "skip"] | None = None) -> None:
        """Continues where the state was taken: same keys, same next batches, same noise. The state is secret.

        The ledger may have more steps than the state: the run was killed after its last checkpoint. Then:

        - ``replay="exact"`` repeats these steps with the same batch, dropout, augmentation, noise and number of
          threads: the same release, recorded once. That requires the same weights, optimizer and losses, and arithmetic
          that repeats bit for bit. Where a step differs, as on another processor, training goes on with new keys, and a
          warning says so. `num_lost` is the number of releases that are then made again; the ledger has them besides
          the new ones, and a target epsilon or a budget still holds, with fewer steps. In the process that made these
          releases, a step that differs is refused.
        - ``replay="skip"`` goes on with the first step that was not released. The skipped steps stay paid, and their
          updates are lost. Nothing has to repeat, so that the training may go on with other ranks. If the ledger is
          not on disk, or was lost, it is unknown which steps were released after the state was saved; they would be
          missing from epsilon. The training then goes on with new keys, so that no noise is used twice. So it does
          where other keys may have begun the epoch of balls and bins since, and pays for another epoch.

        Without a ``run_folder``, what another process released after it had saved the state is unknown. Steps that are
        then made otherwise, such as with another learning rate, have the noise of theirs under "exact", and epsilon
        counts one: a warning and the statement's ``not_covered`` say so.

        By default "exact", and "skip" if the weights are placed otherwise (another number of ranks, another mesh): sums
        over other parts of a batch are rounded otherwise.

        With several ranks every rank calls it, and the state of rank 0 is taken.

        Raises:
            Refused: the state has other settings or is that of other data, or the ledger on disk does not belong to it.
        """
        self._resuming.load(state, replay)
        self._loop = None
        self._runs.leave_step()

    @contextmanager
    def loading_released_weights(self) -> Iterator[None]:
        """Lets the ``with`` block load weights that this training has released before, such as its best checkpoint's.

        They are functions of earlier releases, and cost nothing more. Other weights make the statement wrong.
        """
        known = self._state.guard.moved_otherwise(self.step_count)
        try:
            yield
        finally:
            self._state.guard.accept(known)


def _sums_after(run: Run, losses: Tensor) -> StepSums | None:
    """Returns the sums of the step if these losses were its last, else None."""
    try:
        run.send(losses)
    except StopIteration as end:
        return end.value
    return None
