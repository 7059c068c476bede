# SPDX-License-Identifier: Apache-2.0
"""Provides ``PrivateTraining``, which joins recording, clipping, noise, sampling and ledger into a training loop."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from .. import privacy
from ..clipping import ClippingRule
from ..estimated_norms import Sketched
from ..gep import BGEP, GEP
from ..jacobian.code_path import CodePath
from ..jacobian.reach import check_losses
from ..jacobian.row_answers import RowAnswers
from ..jacobian.tape import MEMORY_BUDGET, Tape
from ..jacobian.tensor_parallel import whole_losses
from ..jacobian.turns import Answers, Turn
from ..mechanism import ClippedSum, Recording, Summation, noise_factors
from ..model_check.requirements import TensorsOf, check_model, check_no_gradient_hooks
from ..noise import generators
from ..runs.folder import RunFolder
from ..sampling.batches import Batches, BatchRequest, Collate, DatasetExamples
from ..sampling.canaries import WithCanaries
from ..sampling.fingerprint import check_data_of_state, fingerprint_for_state
from ..sampling.item_check import item_check
from ..sampling.owners import owners_of
from ..sampling.poisson import Poisson
from ..support.fixed_draws import drawing_in
from ..support.model_state import AttributeTensors, ModelTensors, MutationGuard
from ..support.normalization import SmallGroups
from ..support.replay import SeededRandomNumbers, random_position
from ..support.torch_modes import uncompiled
from ..support.validate import Refused, whole
from .agreement import (
    check_equal_tensors,
    check_equal_turns,
    check_equal_weights,
    check_ranks,
    check_same_names,
    check_same_updates,
    check_still,
    kind_of_turn,
    names_tag,
)
from .bystanders import OtherOptimizers, OutsideForwards
from .callbacks import Callback, Callbacks
from .canaries import Observation, Take
from .finite import FiniteRows
from .hooks import ForwardHooks, Pending
from .loop_watch import LoopWatch
from .placement import Ranked, Whole, local_of, placement_of
from .prepared import check_not_for_accelerate, without_accelerate
from .reached import Reached
from .rehearsals import RARELY, FirstRun, Part, Rehearsals, idle_turn
from .release import Keys, Releases, Share, new_keys
from .repetition import Machine, NotRepeated, number_of_threads
from .run_files import (
    LOSSES_NOT_COVERED,
    RunFiles,
    Scores,
    check_alike,
    checked_scores,
    open_files,
    settings_of,
    unreleased,
    weights_of,
)
from .schedule import Schedule, factors_of, number_of_steps
from .settings import TrainingSettings, check_delta, check_scheduler, check_state, open_ledger
from .statement import Account, Progress, Spent
from .user_code import check_user_code, name_of, plain, refusing_used_graphs
from .weights import WeightGuard, padding_rows


class _Latest(threading.local):
    """Holds a reference to the training that handed out a batch last in this thread."""

    training: Any = staticmethod(lambda: None)


_LATEST = _Latest()
_END = object()  # of a loop
_EMPTY = object()  # handed out after a step with an empty batch, of which only `PrivateTraining.steps` takes note
DIVERGED = 1e6  # a weight beyond which a failed check is blamed on its size

ALL_STEPS_MADE = (
    "PrivateTraining: all {} steps are made, so this loop gets no batch. One pass over a training makes the steps of "
    "all epochs. To do something after each epoch, count steps: `for step, batches in enumerate(training.steps(), "
    "1):`, inside it `for x, y in batches:`, and then `if step % steps_per_epoch == 0:`."
)


class PrivateTraining:
    """Trains a model with differential privacy: Poisson batches, per-example clipping, Gaussian noise, a ledger.

    One step is ``grad = (Σᵢ cᵢ gᵢ + noise_multiplier·sensitivity·z) / expected_batch_size`` over the examples i of a
    Poisson batch, with gᵢ the gradient of example i's own loss, cᵢ the clipping rule's factor and z standard normal;
    then ``optimizer.step()``. Model, optimizer and schedulers are the user's own and stay as they are.

    Some batches are rehearsed: before the batch itself, the loop gets variants of it, with some examples replaced or
    left out. This shows that no example's loss or gradient depends on another example. ``step`` returns False for a
    rehearsal, and nothing is released. Advance schedulers only if ``step`` returned True, and log only if `rehearsing`
    is false.

    Args:
        model: any module; its trained parameters must be used by ops with exact rows (others are refused by name).
        optimizer: any torch optimizer over parameters of the model; those it holds that require a gradient are trained.
        dataset: map-style; one item is one example, the unit of protection. Its size is treated as public.
        expected_batch_size: q·n, the mean size of the Poisson batches and the divisor of every step; with ``owners``
            it counts owners, as n does.
        num_steps: total number of steps (releases); or give ``epochs``.
        epochs: passes over the data (over the owners, if given), on average: ``num_steps`` is
            ``epochs · n / expected_batch_size``, rounded up.
        clipping: rule that bounds each per-example gradient, such as ``Flat(clip_norm=1.0)``; omit it with
            ``perturbation``, which has bounds of its own.
        noise_multiplier: noise standard deviation divided by sensitivity; or give ``target_epsilon``.
        noise_schedule: factor on the noise multiplier in every step: a function of the step, from 0 on, or a number for
            each. Every step is priced with its own noise. With ``target_epsilon`` the whole schedule is scaled. It is
            computed before the first batch, so that it cannot follow the data.
        clip_schedule: factor on the bounds of ``clipping`` in every step, given likewise. The noise shrinks and grows
            with it, so that it changes no epsilon.
        target_epsilon: calibrates the noise multiplier so that all ``num_steps`` spend at most this at ``delta``.
        delta: for ``target_epsilon`` and ``spent()``; must be below 1/n, and a warning asks for 1/(10 n) or less.
        budget: ``privacy.Budget(epsilon, delta)``; training stops by itself before the step that would exceed it, if
            that step comes before ``num_steps``.
        memory_budget: peak memory that a step may take, as a multiple of that of non-private training (up to 100) or in
            bytes; it determines what is kept for the clipped sum.
        microbatch_size: largest number of examples handed out at once, to limit memory; the noise stays the same bit
            for bit, the clipped sum the same up to rounding.
        views: number of consecutive copies of each example in a batch, fetched separately (random augmentations):
            batches have ``views`` times as many items, and ``step`` takes losses (n, views). The gradient of their mean
            is the example's one row, so more views cost no privacy.
        jacobian: ``Sketched(num_projections)`` for models that the tape refuses: norms are estimated by random
            projections, which costs epsilon. By default norms are exact.
        perturbation: ``GEP(...)`` or ``BGEP(...)``: separate noise for the gradients' coordinates in a public subspace
            and for the residual.
        prior_releases: earlier releases of the same data that are used here, such as ``[pca.release_]`` of a
            `PrivatePCA` in front of the model: first in the ledger, and part of every epsilon.
        not_for_release: allows ``Sketched`` with fewer than 16 projections; every statement then says NOT PRIVATE.
        collate_fn: as in ``torch.utils.data.DataLoader``; must not mix examples, which rehearsals check, too.
        num_workers: number of processes that fetch examples, as in ``DataLoader``.
        scheduler: learning-rate scheduler to advance after every step, including steps with empty batches. The user's
            loop may advance one instead, if ``step`` returned True, but does not see empty batches. A scheduler that
            needs a loss (``ReduceLROnPlateau``) is refused.
        run_folder: folder for the files of the run (docs/run-folder.md): settings and ledger from the start; privacy
            statement, metrics, model, results and report after the last step, or by `write_run`. Every release is
            written to the ledger before it is used, so that it survives ``kill -9``; it reaches the disk itself within
            about a second.
        owners: (n,) the owner of each example, as integers or texts, or the name of the data set's column that has
            them. Then owners are protected with all of their examples, not single examples: an owner joins a step with
            probability q, up to ``per_owner`` of its examples are drawn by the secret key, and the mean of their
            gradients is one row, which is clipped once. ``delta`` must be below one over the number of owners, which is
            treated as public. An example joins with a probability that depends on the number of its owner's examples.
        per_owner: largest number of an owner's examples in a step, at least 1.
        owner_name: the word for an owner in every statement, such as "customer"; by default the column's name, or
            "owner".
        assume_independent: a reason, in words, why examples do not depend on each other. No batch is rehearsed then,
            and the privacy statement prints the reason. Use it for a forward or a loop that cannot be repeated.
        callbacks: `Callback` objects that are told of every step, such as ``LoggingCallback()``: loss, share of clipped
            examples, norms (not private) and epsilon so far. They change no release.
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
        - Steps 0, 1, 2, 4, 8, 16, ..., the first of an epoch (at most one in 64), one in 128 and the last are rehearsed
          (one microbatch of each in turn, all of the last), and so is every batch that runs code of the model or the
          loop that no rehearsal has seen, or with a number of a new kind, such as a factor that was 0: losses, norms
          and directions of the gradients, and clip factors of the kept examples stay the same (in steps 0, 1 and 2 the
          losses of the other examples, too). The secret key determines the one in 128, the first microbatch and the
          examples. docs/pitfalls.md lists what a rehearsal cannot show.
        - If a rehearsal finds a dependence, ``spent()`` says NOT PRIVATE from the last one that passed.
        - With ``clipping``, no clipped row exceeds the rule's bound in any step, up to rounding.
        - From the start of the loop to its end, no other optimizer step moves a trained parameter. ``spent()`` and the
          statement say NOT PRIVATE if trained parameters were moved in another way.
        - Inside the loop, the random numbers of torch, numpy and Python are a function of the secret key, the step and
          the microbatch; ``step`` restores the user's own random state.
        - The settings are frozen from the start: ``training.settings`` holds them (`TrainingSettings`).
        - The row of an embedding's ``padding_idx`` stays unchanged, without noise, as in ordinary training.
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
        dataset: Dataset,
        *,
        expected_batch_size: float,
        num_steps: int | None = None,
        epochs: float | None = None,
        clipping: ClippingRule | None = None,
        noise_multiplier: float | None = None,
        noise_schedule: Schedule | None = None,
        clip_schedule: Schedule | None = None,
        target_epsilon: float | None = None,
        delta: float | None = None,
        budget: privacy.Budget | None = None,
        microbatch_size: int | None = None,
        views: int = 1,
        memory_budget: float = MEMORY_BUDGET,
        jacobian: Sketched | None = None,
        perturbation: GEP | BGEP | None = None,
        prior_releases: Sequence[privacy.Release] = (),
        not_for_release: bool = False,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        scheduler: LRScheduler | None = None,
        run_folder: Path | str | RunFolder | None = None,
        owners: Any = None,
        per_owner: int | None = None,
        owner_name: str | None = None,
        assume_independent: str | None = None,
        callbacks: Sequence[Callback] = (),
        after_update: Callable[[Any], Any] | None = None,
        test_seed: int | None = None,
    ):
        self._placement, self._after_update = placement_of(model), after_update
        self._ranks = self._placement.ranks
        with self._ranks.together("begins a training"):
            whole("PrivateTraining", num_workers=num_workers)
            self._callbacks = Callbacks(callbacks, self._ranks)
            canaries = dataset if isinstance(dataset, WithCanaries) else None
            items = dataset if canaries is None else canaries.items
            fetchable = None if canaries is None else canaries.fetchable
            of_examples = dataset if canaries is None else canaries.examples
            known = owners_of("PrivateTraining", owners, of_examples, per_owner, owner_name)
            if known is not None and canaries is not None:
                known = known.with_more(canaries.num_canaries)
            numbers = None if known is None else known.numbers
            self._batches = Batches(items, collate_fn, num_workers, fetchable, numbers)
            num_units = len(dataset) if known is None else known.count  # type: ignore[arg-type]
            num_steps = number_of_steps(num_steps, epochs, num_units, expected_batch_size)
            whole("PrivateTraining", num_steps=num_steps, at_least=1)
            self._begin(
                model,
                optimizer,
                items,
                scheduler,
                run_folder,
                canaries,
                TrainingSettings(
                    num_examples=len(dataset),  # type: ignore[arg-type]
                    num_canaries=0 if canaries is None else canaries.num_canaries,
                    expected_batch_size=expected_batch_size,
                    num_steps=num_steps,
                    clipping=clipping,
                    noise_multiplier=noise_multiplier,
                    noise_schedule=factors_of("noise_schedule", noise_schedule, num_steps),
                    clip_schedule=factors_of("clip_schedule", clip_schedule, num_steps),
                    target_epsilon=target_epsilon,
                    delta=delta,
                    budget=budget,
                    microbatch_size=microbatch_size,
                    views=views,
                    memory_budget=memory_budget,
                    jacobian=jacobian,
                    perturbation=perturbation,
                    prior_releases=tuple(prior_releases),
                    not_for_release=not_for_release,
                    assume_independent=assume_independent,
                    after_update=None if after_update is None else name_of(after_update),
                    test_seed=test_seed,
                    owners=known,
                ),
            )
        self._agree()
        if self._ranks.from_first(self._files is not None) and self._files is None:
            self._files = RunFiles(None, self.settings, self._ranks)
        self._releases = self._new_releases()
        assumed = assume_independent is not None
        items = None if assumed else item_check(self._batches.dataset, numbers)
        steps, epoch = self._account.steps_allowed, 1 / self.settings.sampling_probability
        watch = LoopWatch(
            self._model,
            _while_alive(self, lambda training: training._not_of_loop(), []),
            self.optimizer,
            OtherOptimizers(self.optimizer, _while_alive(self, lambda training: training._present_turn(), None)),
        )
        self._rehearsals = Rehearsals(self._model, self._releases, assumed, steps, epoch, watch, items)
        self._outside = OutsideForwards(self._batches)
        self._hooks = ForwardHooks(
            _while_alive(self, lambda training: training._pending, None),
            _while_alive(self, lambda training: training._note_outside, None),
        )
        self._hooks.register(self._model)
        self._is_made = True

    def _begin(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        items: Dataset,
        scheduler: LRScheduler | None,
        run_folder: Path | str | RunFolder | None,
        canaries: WithCanaries | None,
        settings: TrainingSettings,
    ) -> None:
        """Checks the arguments and makes the parts of the training, before the ranks agree."""
        optimizer, scheduler = without_accelerate(optimizer, scheduler)
        if self._ranks.size > 1 and canaries is not None:
            raise Refused(
                f"PrivateTraining: an audit works in one process, and there are {self._ranks.size}. Leave it out."
            )
        self._model = inner = self._placement.model
        check_model(inner, optimizer)
        check_scheduler(scheduler)
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        of_optimizer = self._placement.of_optimizer
        self._tensors_of = TensorsOf(inner, optimizer, AttributeTensors(inner), of_optimizer)
        self._tensors = self._find_tensors()
        self._placement.check(settings)
        self._mechanism = settings.new_mechanism(self._tensors.trained, items)
        self.settings = settings.with_noise(self._mechanism)
        self._plan = self.settings.plan(self._mechanism)
        self.ledger, self._files = self._opened(run_folder if self._ranks.is_first else None)
        self._account = Account(self.settings, self._plan, self.ledger, self._ranks.size)
        self._weight_guard = WeightGuard(_while_alive(self, lambda training: training._optimized(), {}))
        self._step_count = 0
        self._num_non_finite = 0
        self._data: dict[str, Any] | None = None  # fingerprint of the data, once a state was saved
        self._finite = FiniteRows()
        self._has_ended = False  # True once a loop made the last step
        self._stop_reason: str | None = None
        self._reached = Reached(padding_rows(inner, self._tensors.trained), self._mechanism)
        self._canaries = canaries
        self._observation = None
        if canaries is not None:
            self._observation = Observation(canaries, self.settings, self._mechanism, self._batches)
            canaries.check_only_one(self)
        self._part: Part | None = None  # the (micro)batch in progress
        self._turn: Turn | None = None  # the next one to hand out
        self._turns_made = 0  # of the part
        self._answered_batch: tuple[dict[str, Tensor], Summation, CodePath, Tensor] | None = None  # secret
        self._is_rehearsal = False
        self._pending: Pending | None = None  # handed out and not yet answered
        self._optimizer_settings: list[dict[str, Any]] | None = None  # when the part began
        self._start: Any = None  # position at which the part's random numbers begin, if it is rehearsed
        self._sums: dict[str, Tensor] = {}  # of the step's microbatches so far; secret
        self._left_out = 0  # examples left out of them
        self._machine: Machine | None = None  # on which the steps after the state that was loaded were made
        self._repetition = ExitStack()  # while they are repeated
        self._is_within_step = False  # between its microbatches
        self._date: str | None = None  # of the last step in this process
        self._loops = 0  # iterations begun; only the latest may go on
        self._in_use = threading.RLock()  # not held while the user's loop runs

    def _opened(self, run_folder: Path | str | RunFolder | None) -> tuple[privacy.Ledger, RunFiles | None]:
        """Returns the ledger and the other files of the run; no files if whoever made a `RunFolder` writes them."""
        path = open_files(run_folder)
        ledger = open_ledger(run_folder.path if isinstance(run_folder, RunFolder) else run_folder, self.settings)
        if path is None:
            return ledger, None
        files = RunFiles(path, self.settings, self._ranks)
        parts = self.model, self.optimizer, self.scheduler, self._batches.dataset, self._tensors.trained
        try:
            written = settings_of(*parts, self.settings, self._resume_settings())
            files.begin(written, len(ledger) - len(self.settings.prior_releases))
        except BaseException:
            ledger.close()
            raise
        return ledger, files

    def _agree(self) -> None:
        """Refuses ranks that differ in settings, weights or data, and copies the ledger of rank 0 to the others."""
        if self._ranks.size == 1 or not isinstance(self._placement, Ranked):
            return
        check_ranks(self._ranks, self._placement, self.optimizer, self._batches, self._shared_settings())
        self._copy_ledger()

    def _copy_ledger(self) -> None:
        state = self._ranks.from_first(self.ledger.state_dict())
        if not self._ranks.is_first:
            self.ledger.load_state_dict(state)

    def _shared_settings(self) -> dict[str, Any]:
        """Returns what must be equal on all ranks, by name."""
        settings = self.settings
        names = ("test_seed", "target_epsilon", "delta", "budget", "microbatch_size", "assume_independent")
        machine = Machine.here(self._tensors.trained.values()).state()
        own = {name: getattr(settings, name) for name in names} | {"callbacks": self._callbacks.names}
        return own | machine | self._resume_settings()

    def _new_releases(self, keys: Keys | None = None, *, resumed: bool = False, num_lost: int = 0) -> Releases:
        """Returns the releases under these keys, or under new ones of rank 0."""
        return Releases(
            self.settings,
            self._plan,
            self.ledger,
            self._ranks.from_first(keys or new_keys(self.settings.test_seed, num_lost)),
            resumed=resumed,
            num_lost=num_lost,
            canaries=self._canaries,
            ranks=self._ranks,
            placement=self._placement,
        )

    def _optimized(self) -> Mapping[str, Tensor]:
        """Returns the trained parameters as the optimizer holds them: shards, if the model is sharded."""
        of_optimizer, trained = self._placement.of_optimizer(), self._tensors.trained
        return trained if of_optimizer is None else {name: of_optimizer[name] for name in trained}

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and "_is_made" in self.__dict__:
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
        return self._step_count

    @property
    def num_non_finite(self) -> int:
        """Returns how many examples were left out because of gradients that are not finite. Secret: an exact count."""
        return self._num_non_finite

    @property
    def num_lost(self) -> int:
        """Returns how many releases a resumed training could not repeat; the ledger counts them besides its steps."""
        return self._releases.num_lost

    @property
    def event(self) -> privacy.Event:
        """Returns the event of the next step, as the accountant prices it; after the last step, that of the last."""
        return self._plan.at(self.step_count)

    @property
    def clipping(self) -> ClippingRule | None:
        """Returns the clipping rule of the next step."""
        return self._mechanism.rule if isinstance(self._mechanism, ClippedSum) else None

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
            while self.step_count < self._account.steps_allowed:
                step = self.step_count
                yield self._batches_of_step(handed_out, step)
                if self.step_count == step:
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
        try:
            while True:
                with self._one_thread():
                    batch = next(turns, _END)
                if batch is _END:
                    return
                yield batch
        finally:
            turns.close()

    @contextmanager
    def _one_thread(self) -> Iterator[None]:
        """Refuses a second thread inside of the ``with`` block."""
        if not self._in_use.acquire(blocking=False):
            raise Refused(
                "PrivateTraining: two threads use one training at the same time, so that a batch could enter its sum "
                "twice. Nothing was released for the second call. Take the batches and call step in one thread."
            )
        try:
            yield
        finally:
            self._in_use.release()

    def _turns(self) -> Generator[Any, None, None]:
        """Yields what the loop gets; a rank that fails on the way, or leaves the loop, tells the others."""
        try:
            yield from self._turns_of_steps()
        except GeneratorExit:
            self._ranks.leave(f"leaves the loop in step {self.step_count}")
            raise
        except Exception as error:
            self._ranks.tell("goes through the loop", error)
            raise

    def _turns_of_steps(self) -> Generator[Any, None, None]:
        check_still(self._ranks)
        self._loops += 1
        loop = self._loops
        self._forget_batch()
        self._ranks.begin("begins a loop")
        self._tensors = self._find_tensors()
        self._weight_guard.activate()
        if self._has_ended and self.step_count >= self._account.steps_allowed:
            warnings.warn(ALL_STEPS_MADE.format(self.step_count), stacklevel=4)
        self._rehearsals.watch.begin_loop()
        releases, batches = None, iter(())
        try:
            while self.step_count < self._account.steps_allowed:
                if self._releases is not releases:  # at first, and when the steps cannot be repeated
                    releases = self._releases
                    batches = self._batches(self._requests(self.step_count, self._account.steps_allowed))
                self._match_threads()
                self._sums, self._left_out = {}, 0
                self._callbacks.begin_step(len(self._releases.records(self.step_count)))
                if self._files is not None:
                    self._files.begin_step()
                parts = self._shares(self.step_count)
                self._weight_guard.check_not_lent()
                self._begin_together()
                with self._ranks.communicating():
                    self._placement.hold()
                self._tensors = self._find_tensors()
                self._mechanism.begin(self._model, self._tensors, self._releases.noise.key, self.step_count)
                if self._ranks.size > 1 and (tensors := self._mechanism.equal_tensors()):
                    check_equal_tensors(self._ranks, self.step_count, self._releases.tag(self.step_count, tensors))
                if self._observation is not None:
                    for part in self._observation.before_step(self._releases, self._tensors, self.step_count):
                        yield from self._answered(part, loop)
                for number, share in enumerate(parts):
                    yield from self._answered(self._part_of(next(batches), share, number, len(parts)), loop)
                if not parts:
                    if self._release():
                        self._callbacks.after_step(self)
                    yield _EMPTY
            self._has_ended = True
            if self._ranks.size > 1:
                seen = bool(self._weight_guard.moved_otherwise(self.step_count))
                told = self._ranks.exchange("ends the loop", payload=bytes([seen]))
                self._weight_guard.hear(self.step_count, [message[0] for message in told])
            if self._observation is not None:
                for part in self._observation.after_training(self._releases, self.step_count):
                    yield from self._answered(part, loop)
            try:
                self._rehearsals.watch.judge(at_end=True)
                self._callbacks.at_end(self)
            except Exception:
                self._write_at_end()
                raise
        finally:
            if self._loops == loop:
                self._forget_batch()
                self._weight_guard.deactivate()
                self._rehearsals.watch.end_loop()
                self._repetition.close()
        self._write_at_end()

    def _write_at_end(self) -> None:
        """Writes the run folder after the last step, unless it is written."""
        if self._files is not None and not self._ranks.from_first(self._files.is_written) and self.step_count:
            self._write_run(Scores(), None)

    def _begin_together(self) -> None:
        """Waits until all ranks begin the step; refuses those that train other parameters."""
        if self._ranks.size == 1:
            return
        self._placement.let_go()  # an evaluation leaves some weights gathered
        self._tensors = self._find_tensors()
        tags = names_tag(self._tensors.trained) + names_tag(map(repr, self._settings_of_optimizer()))
        told = self._ranks.exchange(f"begins step {self.step_count}", payload=tags)
        check_same_names(self._ranks, self._tensors.trained, [message[:4] for message in told])
        check_same_updates(self.step_count, [message[4:] for message in told])

    @property
    def rehearsing(self) -> bool:
        """True if the batch that was handed out last is a rehearsal, of which nothing is released.

        To leave rehearsals out of a log, read it after ``step``: a batch that turns out to run new code counts as a
        rehearsal from then on, and is handed out again later. After ``step`` it is the same on all ranks, so that the
        loop may communicate where it is false.
        """
        return self._is_rehearsal

    @property
    def num_in_batch(self) -> int:
        """Returns the number of losses that `step` awaits for the batch handed out; 0 if it awaits none. Secret."""
        return 0 if self._pending is None else self._pending.turn.count * self.settings.views

    @property
    def stands_in(self) -> bool:
        """True if the batch that was handed out last is a stand-in, because this rank has no example of the batch.

        It is in no sum. Leave its losses out of a log; other ranks have the examples.
        """
        return self._part is not None and not self._part.share.counts

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
            with self._one_thread():
                return self._step(losses)
        except Refused as error:
            self._note_refused(error)
            raise
        finally:
            torch.set_grad_enabled(enabled)  # an interrupt within torch.no_grad's own exit leaves gradients off

    def _note_refused(self, error: Refused) -> None:
        """Notes, in the run folder too, which releases may leak if the refusal shows that examples depend."""
        rehearsals = self._rehearsals
        if rehearsals.coupled is None:
            rehearsals.note_refused(error, self.step_count)
            if rehearsals.coupled is not None and self._files is not None:
                self._files.note_coupled(asdict(rehearsals.coupled))

    def _step(self, losses: Tensor) -> bool:
        pending, part = self._pending, self._part
        if pending is None or part is None:
            raise Refused(
                "training.step was called without a batch. Call it once for every batch of `for ... in training`."
            )
        self._hooks.unwind()
        pending.stop()
        if pending.turn.take is not None:
            self._observe(pending, losses, pending.turn.take)
            return False
        self._turns_made += 1
        place = f"answers turn {self._turns_made} of part {part.number + 1} of step {self.step_count}"
        try:
            self._answer(pending, part, losses)
            state = self._state_after_turn()
        except Exception as error:
            self._ranks.tell(place, error)
            raise
        told = self._ranks.exchange(place, payload=state)
        if any(message[0] for message in told):
            if self._turn is None:
                self._turn = idle_turn(self._model, part.examples)
            self._is_rehearsal = True
            return False
        self._left_out += sum(int.from_bytes(message[6:14], "big") for message in told)
        if self._ranks.size > 1:
            check_same_names(self._ranks, self._tensors.trained, [message[2:6] for message in told])
            self._reached.share(self._ranks, [*self._tensors.trained], changed=any(message[1] for message in told))
        return self._end_part(part)

    def _state_after_turn(self) -> bytes:
        """Returns what the other ranks must know: if there are more turns, what was learned, and is trained now."""
        if self._turn is None:
            self._tensors = self._find_tensors()  # the user's code may have frozen some
        state = bytes([self._turn is not None, self._reached.has_changed])
        return state + names_tag(self._tensors.trained) + self._newly_left_out().to_bytes(8, "big")

    def _newly_left_out(self) -> int:
        """Returns how many examples of this rank's part were left out."""
        if self._answered_batch is None or not self._placement.counts:
            return 0
        return self._answered_batch[1].num_left_out

    def _answer(self, pending: Pending, part: Part, losses: Tensor) -> None:
        """Takes the losses of a turn: sums the batch, or compares; then ``_turn`` is the next one, or None."""
        if pending.turn.is_idle:
            self._meet()
            pending.close()
            assert pending.turn.state is not None
            pending.turn.state.restore()
            self._turn, self._pending = None, None
            return
        if self._rehearsals.has_switched(part):
            self._meet()
            pending.close()
            self._rehearsals.restart(part, None)
            self._turn, self._pending = next(part.script), None
            return
        try:
            self._check_still_trained(pending)
            sums, summation, answers = self._answers(pending, part, losses)
            pending.close()
            if pending.turn.state is not None:
                self._rehearsals.keeps_state = bool(self._rehearsals.keeps_state or answers.changes)
            is_batch = pending.turn.is_batch  # other examples or random numbers may take a path that it never takes
            if is_batch and pending.tape is not None and self._rehearsals.is_new(part, pending.tape.code):
                self._rehearsals.restart(part, FirstRun.of(pending.tape.code, answers.losses, sums))
                self._turn, self._pending = next(part.script), None
                return
            try:
                self._turn = part.script.send(answers)
            except StopIteration:
                self._turn = None
                if part.first is not None and pending.tape is not None:
                    part.first.check_repeated(FirstRun.of(pending.tape.code, answers.losses, sums))
        except BaseException as error:
            pending.close()
            part.script.close()
            if isinstance(error, Refused):
                self._check_diverged(error)
            raise
        self._pending = None
        if self._turn is None:
            assert pending.turn.is_batch, "the batch itself comes last"
            assert pending.tape is not None
            self._answered_batch = sums, summation, pending.tape.code, answers.losses

    def _check_still_trained(self, pending: Pending) -> None:
        """Refuses a loop that freezes or unfreezes parameters in every turn of a batch."""
        tape = pending.tape
        frozen = [] if tape is None else [name for name, p in tape.parameters.items() if not p.requires_grad]
        if frozen:
            raise Refused(
                f"PrivateTraining: the loop switches requires_grad of {', '.join(map(repr, frozen))} in every turn of "
                "a batch, so that its rehearsals train other parameters than the batch. Let it depend on "
                "training.step_count, which is the same in all turns, or switch where training.step returned True."
            )

    def _end_part(self, part: Part) -> bool:
        """Adds the sums of a part, after the last turn of all ranks; makes the release after the last part."""
        assert self._answered_batch is not None
        (sums, summation, code, losses), self._answered_batch = self._answered_batch, None
        if self._callbacks and self._placement.counts:
            self._callbacks.note(part.share.positions, losses, summation, part.share.units)
        if self._files is not None and self._placement.counts and part.share.counts:
            self._files.note(losses.mean(1))
        self._rehearsals.note_passed(part, code, self.step_count)
        if isinstance(self._placement, Ranked):
            with self._ranks.communicating():
                with self._ranks.summing():
                    self._placement.collect(sums, self._mechanism, self._optimized())
        else:
            for name, tensor in sums.items():
                self._sums[name] = self._sums[name].add_(tensor) if name in self._sums else tensor
        self._is_rehearsal = False  # also on a rank whose last turn was an idle one
        if not part.is_last:
            self._is_within_step = True
            return False
        self._is_rehearsal = not self._release()
        if not self._is_rehearsal:
            self._callbacks.after_step(self)
        return not self._is_rehearsal

    def _check_finite(self, step: int) -> None:
        """Refuses a batch without a finite gradient in the first steps; warns of one that has lost half of them."""
        try:
            self._finite.check(step, self._left_out, len(self._releases.records(step)))
        except Refused as error:
            self._check_diverged(error)
            raise

    def _check_diverged(self, error: Refused) -> None:
        """Refuses weights so large that sums overflow, which rehearsals and self-checks cannot tell from mistakes."""
        local = [local_of(p).detach() for p in self._tensors.trained.values()]
        largest = max((float(p.abs().max()) for p in local if p.numel()), default=0.0)
        if not largest < DIVERGED:  # NaN, too
            raise Refused(
                f"PrivateTraining: training has diverged: after step {self.step_count} the largest weight is "
                f"{largest:.3g}, so that gradients overflow and checks fail ({error}) Lower the clip norm or the "
                "learning rate: noise and gradients of one step are as large as their product."
            ) from error

    def _observe(self, pending: Pending, losses: Tensor, take: Take) -> None:
        """Gives recording and losses of a batch, of which nothing is released, to the audit."""
        try:
            losses = self._flat_losses(losses, pending.turn.count)
            check_user_code(pending, losses)
            with refusing_used_graphs():
                take(pending.tape, losses)
        finally:
            self._forget_batch()
        self._is_rehearsal = True

    def record(self) -> AbstractContextManager[Any]:
        """Returns the recording of the batch just handed out, as a context.

        Whatever the loop calls between the batch and ``step`` is recorded anyway, so that no loop needs the context. In
        another thread it records there.
        """
        if self._pending is None:
            raise Refused("training.record() needs a batch. Use it inside `for ... in training`, before training.step.")
        return nullcontext() if self._pending.tape is None else self._pending.tape

    def spent(self, delta: float | None = None, *, examples_per_person: int | None = None) -> Spent:
        """Returns the privacy spent at ``delta`` (by default the one given at the start).

        ``epsilon`` is that of the releases so far, and ``planned`` that of all planned steps, or of those that the
        budget allows. Report ``planned`` if training stopped early because of anything that it released.

        Args:
            delta: below 1/n, with n the number of examples or, with ``owners``, of owners.
            examples_per_person: prices a training on examples for a person who has up to so many of them, by
                `privacy.SubsampledGroup`. It must be a cap that is enforced (`torch_privacy.at_most`). With ``owners``
                epsilon is that of an owner anyway.

        Raises:
            ValueError: no delta was given, or it is 1/n or more; the steps have no price for several examples.
        """
        if examples_per_person is not None and self.settings.owners is not None:
            raise ValueError(
                f"PrivateTraining.spent: examples_per_person={examples_per_person!r} is for trainings without owners=. "
                f"This one protects one {self.settings.unit} with all of its examples: leave it out."
            )
        if delta is not None:
            check_delta(self.settings.num_units, delta, self.settings.unit, stacklevel=3)
        elif self.settings.delta is not None:
            delta = self.settings.delta
        else:
            raise ValueError("PrivateTraining.spent: delta=None; pass one below 1/n here or to PrivateTraining.")
        return self._account.spent(self._progress(), delta, examples_per_person)

    def declare_stop(self, reason: str) -> None:
        """Declares that training stops for a reason that is independent of the data, such as a time limit.

        The statement then shows the epsilon of the steps made, and prints the reason. Without a declaration it shows
        the epsilon of all planned steps: less does not cover a stop that depends on what was released, such as early
        stopping.

        Raises:
            ValueError: the reason is empty.
        """
        if not str(reason).strip():
            raise ValueError(f"PrivateTraining.declare_stop: reason={reason!r} must say why, in words.")
        self._stop_reason = str(reason)

    def explain(self) -> str:
        """Returns how the step is computed: by exact or estimated norms, and in which subspace."""
        return self._mechanism.explain()

    def profile(self) -> privacy.Profile:
        """Returns the privacy profile of the releases so far."""
        return self._account.profile()

    def profile_at_step(self) -> privacy.Profile:
        """Returns the privacy profile of the releases up to the step that was made last.

        It is `profile`, but in a resumed training without the steps that the ledger has and that are yet to be
        repeated: the numbers of one step are the same before and after a resume.
        """
        return self.ledger.profile(first=self._releases.number(self.step_count))

    def statement(self) -> dict[str, Any]:
        """Returns everything that determines the guarantee, as plain data for a machine-readable privacy statement.

        With a run folder it has a fingerprint of the data, too, under a secret key in the folder, except between a
        batch and its ``step``.
        """
        statement = self._account.statement(self._progress(), self._mechanism)
        statement["not_covered"] += unreleased(self.model, self._tensors.trained)
        if self._files is not None:
            statement["not_covered"].append(LOSSES_NOT_COVERED)
            if self._files.folder is not None and self._pending is None:
                statement["data"] = self._files.data(self._batches.dataset)
        return statement

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
        if self._files is None:
            raise ValueError(
                "PrivateTraining.write_run: the training has no run folder. Pass run_folder= to PrivateTraining."
            )
        with self._one_thread():
            found = checked_scores("scores", scores), checked_scores("baseline", baseline)
            if num_test_examples is not None:
                whole("PrivateTraining.write_run", num_test_examples=num_test_examples)
            self._write_run(Scores(*found, num_test_examples), model)

    def _write_run(self, scores: Scores, model: nn.Module | None) -> None:
        files = self._files
        assert files is not None
        with self._ranks.together("writes the run folder"):
            if self._pending is not None or self._is_within_step:
                raise Refused("PrivateTraining.write_run: a step is in progress. Call it between two steps.")
            if not self.step_count:
                raise ValueError("PrivateTraining.write_run: no step was made yet, so there is nothing to report.")
            if model is not None:
                check_alike(model, self._tensors.trained)
            self.ledger.sync()  # refuses if another training has the folder
        files.sum_ranks()
        with self._ranks.communicating():
            weights = weights_of(self._model if model is None else model, self._ranks)

        def write() -> int:
            releases = self._account.covering_releases(self._progress())
            files.write(self.step_count, weights, self.statement, releases, self.profile_at_step(), self._model, scores)
            return 0

        self._ranks.first_does("writes the run folder", write)

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
        if not self._ranks.is_first:
            return {"format": 1, "kept_by": "rank 0"}
        if self._data is None and self._pending is None:
            self._data = fingerprint_for_state(self._batches.dataset, self._releases.noise.key)
        return {
            "format": 1,
            "placement": self._placement.in_words,
            "machine": Machine.here(self._tensors.trained.values()).state(),
            "num_lost": self.num_lost,
            "settings": self._resume_settings(),
            "step_count": self.step_count,
            "num_non_finite": self.num_non_finite,
            "moved_otherwise": self._weight_guard.moved_otherwise(self.step_count),
            "last_rehearsed": self._rehearsals.last_passed,
            "coupled": None if self._rehearsals.coupled is None else asdict(self._rehearsals.coupled),
            "noise_key": self._releases.noise.key.hex(),
            "sampler_key": self._releases.sampler.key.hex(),
            "stop_reason": self._stop_reason,
            "ledger": self.ledger.state_dict(),
            **({} if self._data is None else {"data": self._data}),
            **({} if self._files is None else {"losses": self._files.read_losses().state_dict()}),
            **self._mechanism.state(),
        }

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
          not on disk, or was lost, nobody knows which steps were released after the state was saved; they would be
          missing from epsilon. The training then goes on with new keys, so that no noise is used twice.

        By default "exact", and "skip" if the weights are placed otherwise (another number of ranks, another mesh): sums
        over other parts of a batch are rounded otherwise.

        With several ranks every rank calls it, and the state of rank 0 is taken.

        Raises:
            Refused: the state has other settings or is that of other data, or the ledger on disk does not belong to it.
        """
        if replay not in (None, "exact", "skip"):
            raise ValueError(f'PrivateTraining.load_state_dict: replay={replay!r} must be "exact" or "skip".')
        state, settings = self._ranks.from_first(state), self.settings
        known = self._ranks.from_first(len(self.ledger))  # to the ledger on disk
        with self._ranks.together("loads a state"):
            check_state(state, settings, self._mechanism)
            # These were not settings in the first states.
            defaults = {
                "memory_budget": settings.memory_budget,
                "jacobian": repr(None),
                "prior_releases": [],
                "views": 1,
                "owners": None,
                "after_update": None,
            }
            saved, ours = defaults | state["settings"], self._resume_settings()
            differing = {key: (value, saved.get(key)) for key, value in ours.items() if saved.get(key) != value}
            if differing:
                listed = ", ".join(
                    f"{key}={here!r} (the state has {there!r:.200})" for key, (here, there) in differing.items()
                )
                raise Refused(
                    f"PrivateTraining.load_state_dict: {listed}. Resume a run with the settings it began with."
                )
            check_data_of_state("PrivateTraining.load_state_dict", state.get("data"), self._batches.dataset)
            self.ledger.load_state_dict(state["ledger"])
        self._data = state.get("data")
        self._copy_ledger()
        keys = bytes.fromhex(state["noise_key"]), bytes.fromhex(state["sampler_key"])
        num_lost = state.get("num_lost", 0)
        self._releases = self._rehearsals.releases = self._new_releases(keys, resumed=True, num_lost=num_lost)
        self._machine = Machine.from_state(state.get("machine"))
        self._account.count_lost(num_lost)
        self._rehearsals.num_steps = self._account.steps_allowed
        self._step_count, self._num_non_finite = state["step_count"], state["num_non_finite"]
        self._mechanism.load_state(state)
        if self._files is not None:
            self._files.load(state.get("losses"))
        self._rehearsals.load(state, self._ranks.from_first(self._files and self._files.coupled()))
        self._loops += 1
        self._forget_batch()
        self._weight_guard.reset(state.get("moved_otherwise", ""))
        self._stop_reason = state.get("stop_reason")
        if replay is None:
            replay = "exact" if state.get("placement", Whole.in_words) == self._placement.in_words else "skip"
        if replay == "skip":
            self._skip_released()
            if known < len(state["ledger"]["releases"]):
                self._releases = self._rehearsals.releases = self._new_releases(num_lost=num_lost)

    def _skip_released(self) -> None:
        """Goes on after the last step in the ledger; warns if updates are lost."""
        released = min(len(self.ledger) - self._releases.number(0), self.settings.num_steps)
        skipped = released - self._step_count
        if skipped > 0:
            warnings.warn(
                f"PrivateTraining: steps {self._step_count} to {released - 1} were released after the state was saved. "
                f"They are not repeated: the {skipped} updates are lost and stay paid. Training goes on with step "
                f"{released} of {self.settings.num_steps}.",
                stacklevel=3,
            )
            self._step_count = released

    @contextmanager
    def loading_released_weights(self) -> Iterator[None]:
        """Lets the ``with`` block load weights that this training has released before, such as its best checkpoint's.

        They are functions of earlier releases, and cost nothing more. Other weights make the statement wrong.
        """
        known = self._weight_guard.moved_otherwise(self.step_count)
        try:
            yield
        finally:
            self._weight_guard.accept(known)

    # Turns: a batch, or a rehearsal of it

    def _answered(self, part: Part, loop: int) -> Iterator[Any]:
        """Yields the turns of a part to the loop, and checks that each is answered."""
        self._part, self._turns_made, self._answered_batch = part, 0, None
        self._optimizer_settings = self._start = None
        self._turn = next(part.script)
        while self._turn is not None:
            batch = self._hand_out(self._turn)
            place = f"begins turn {self._turns_made + 1} of part {part.number + 1} of step {self.step_count}"
            check_equal_turns(self.step_count, self._placement.meet(place, kind_of_turn(self._turn, self._placement)))
            with self._recorded(part):
                yield batch
            if self._loops != loop:
                raise Refused("a newer loop over the training has begun since this one. Go on with the newer one.")
            if self._pending is not None:
                raise Refused(
                    "the loop went on without training.step(losses) for its batch. Call it once for every batch."
                )

    @contextmanager
    def _recorded(self, part: Part) -> Iterator[None]:
        """Records the user's code in this thread, also if another one answers the batch."""
        pending, is_first = self._pending, self.step_count + part.number + self._turns_made == 0
        if pending is None:
            yield
            return
        pending.start()
        try:
            with SmallGroups(self._model, _warn_of_forward) if is_first else nullcontext():
                yield
        finally:
            pending.stop()

    def _requests(self, step: int, end: int) -> Iterator[BatchRequest]:
        """Yields a request for every (micro)batch from this step to the end."""
        for later in range(step, end):
            parts = self._shares(later)
            for number, part in enumerate(parts):
                rehearsed, _ = self._rehearsals.are_due(later, number, len(parts))
                seed = self._releases.own_secret(b"data", later, number)
                yield BatchRequest(part.indices, self.settings.views, seed, rehearsed)

    def _shares(self, step: int) -> Sequence[Share]:
        """Returns this rank's share of each (micro)batch of a step."""
        sampler = self._releases.sampler
        if not isinstance(sampler, Poisson):  # rows are owners
            return self._releases.parts(step)
        units = self._mechanism.units(sampler, step, len(self._releases.records(step)))
        return self._releases.parts(step, units, self._mechanism.num_rows)

    def _part_of(self, examples: DatasetExamples, share: Share, number: int, count: int) -> Part:
        """Returns (micro)batch ``number`` of ``count`` of this step."""
        return self._rehearsals.begin(examples, share, self.step_count, number, count)

    def _hand_out(self, turn: Turn) -> Any:
        """Sets up recording and random numbers for the user's code, and returns the batch."""
        other, part = _LATEST.training(), self._part
        assert part is not None
        if other is not None and other is not self and other._pending is not None:
            raise Refused(
                "PrivateTraining: a batch of another training waits for its step, and random numbers and recording are "
                "set up for that one. Call its step first: run the two loops one after the other, not in a zip."
            )
        turn.prepare()
        if turn.is_batch:
            turn.batch = part.examples.batch  # an earlier turn may have written into the one that it was given
        self._check_optimizer_settings()
        self._tensors, step = self._find_tensors(), self.step_count
        size, tape = turn.count * self.settings.views, None
        if turn.take is not None and turn.rows:
            tape = self._mechanism.exact_recorder(self._tensors, size)
        elif turn.rows or turn.is_batch:
            tape = self._mechanism.recorder(self._tensors, self._releases.noise.key, step, part.number, size)
        contexts = ExitStack()
        contexts.enter_context(uncompiled())
        contexts.enter_context(self._placement.running())
        seed = self._releases.own_secret(b"random numbers", step, part.number)
        numbers = SeededRandomNumbers(seed)
        if part.rehearsed and self._start is None:
            self._start = random_position()  # the same before every turn
            numbers.begin(seed)
        turn.drawn = contexts.enter_context(drawing_in(self._model, turn.draws, turn.count * self.settings.views))
        if turn.trace is not None:
            contexts.enter_context(turn.trace.recording(size))
        if turn.around is not None:
            contexts.enter_context(turn.around())
        self._is_rehearsal, _LATEST.training = not turn.is_batch, weakref.ref(self)
        self._pending = Pending(turn, tape, MutationGuard(self._model, self._tensors_of.tree), numbers, contexts)
        return turn.batch

    def _settings_of_optimizer(self) -> list[dict[str, Any]]:
        """Returns learning rate, weight decay, ... of each group of parameters."""
        groups = self.optimizer.param_groups
        return [{key: plain(value) for key, value in group.items() if key != "params"} for group in groups]

    def _check_optimizer_settings(self) -> None:
        """Refuses a loop that changes learning rate, weight decay, ... between the turns of one batch."""
        now = self._settings_of_optimizer()
        before = self._optimizer_settings
        if before is None:
            self._optimizer_settings = now
        elif now != before:
            pairs = zip(now, before, strict=False)
            changed = sorted({key for new, old in pairs for key in new if new[key] != old.get(key)}) or ["params"]
            raise Refused(
                f"PrivateTraining: {', '.join(changed)} of the optimizer changed before the step was made, at a "
                "rehearsal of its batch. Advance a scheduler only where training.step(losses) returns True, or pass it "
                "as scheduler=. No setting may depend on the batch."
            )

    def _answers(self, pending: Pending, part: Part, losses: Tensor) -> tuple[dict[str, Tensor], Summation, Answers]:
        """Returns the sums of a turn, which are secret, and what is compared."""
        turn, tape = pending.turn, pending.tape
        losses = self._flat_losses(losses, turn.count)
        changed_buffers = check_user_code(pending, losses)
        changes = {} if turn.state is None else turn.state.changes()
        self._meet()
        losses = whole_losses(losses)
        summation = self._mechanism.summation(part.share.units_of(turn.keep), turn.count)
        summation.defers = isinstance(self._placement, Ranked) and self._placement.reduces_in_buckets
        rows: RowAnswers | None = None
        sums: dict[str, Tensor] = {}
        if tape is not None and part.share.counts:
            if part.rehearsed:
                rows = RowAnswers(None if turn.is_batch else summation.compute_factors)
            tape.code.note(("changed", name) for name in changed_buffers)
            sums = self._clipped_sums(tape, losses, summation, rows, is_batch=turn.is_batch)
        if rows is not None:
            rows.factors = {name: factors.double().cpu() for name, factors in summation.factors.items()}
        end = random_position() if part.rehearsed else None
        answers = Answers(
            losses=losses.detach().view(turn.count, self.settings.views),
            rows=rows,
            changes=changes,
            later={} if turn.state is None else turn.state.changes(),
            settled=tape is not None and not tape.measured,
            random=end,
            drew=end is not None and self._start != end,
            rounding=max(torch.finfo(p.dtype).eps for p in self._tensors.trained.values()),
            shapes=0 if tape is None else tape.code.shapes,
        )
        self._reached.drew |= answers.drew
        return sums, summation, answers

    def _clipped_sums(
        self, tape: Recording, losses: Tensor, summation: Summation, rows: RowAnswers | None, *, is_batch: bool
    ) -> dict[str, Tensor]:
        """Returns the clipped sums of a batch, or none for a rehearsal; either way ``rows`` takes what is compared."""
        is_alone = is_batch and self._ranks.size == 1
        may_miss = self._reached.may_miss(tape.parameters) if is_alone else tape.parameters
        with refusing_used_graphs():
            sums = tape.clipped_sum(
                losses,
                self._mechanism.groups(list(tape.parameters)),
                summation if is_batch else None,
                merging=summation.merging,
                may_miss=may_miss,
                memory_budget=self.settings.memory_budget,
                observe=None if rows is None else rows.take,
            )
        summation.check_bound()
        known = isinstance(tape, Tape)
        self._reached.note(tape.reached, tape.used_otherwise if known else self._reached.padding.keys())
        if is_alone:
            self._reached.warn_of_missing(tape.parameters)
        return sums

    def _meet(self) -> None:
        """Waits for ranks without which this one cannot compute rows; none of them waits for one that has failed."""
        self._placement.meet(f"has the losses of turn {self._turns_made} of step {self.step_count}")

    def _flat_losses(self, losses: Tensor, size: int) -> Tensor:
        """Returns the checked losses (n,) or (n, views) of n examples as (n · views,)."""
        views = self.settings.views
        shape = (size,) if views == 1 else (size, views)
        flat = losses.flatten() if views > 1 and isinstance(losses, Tensor) and losses.ndim == 2 else losses
        check_losses(flat)
        if losses.shape != shape:
            meaning = "one loss per example" if views == 1 else "a loss for every view of each example"
            raise Refused(
                f"losses of shape {tuple(losses.shape)} given for a batch of {size} examples: must be {shape}, "
                f"{meaning}."
            )
        return flat

    def _forget_batch(self) -> None:
        """Drops the pending batch, if any, and restores the model and the random state."""
        if self._pending is not None:
            self._pending.close()
        if self._part is not None:
            self._part.script.close()
        self._pending = self._part = self._turn = self._answered_batch = None
        self._is_within_step = False
        self._hooks.unwind()
        self._placement.let_go()
        if isinstance(self._placement, Ranked):
            self._placement.forget()

    # The release

    def _release(self) -> bool:
        """Adds noise to the sums, records the release, and gives the private gradient to the optimizer.

        Returns False if the step could not be repeated: nothing was released, and new keys are in place.
        """
        step = self.step_count
        try:
            self._check_unchanged()
            self._check_finite(step)
            release, places = self._taken_sums(step)
            noise = self.settings.noise_at(step)
            stddevs = self._mechanism.stddevs(release, noise * noise_factors(self._num_trained, noise)["made"])
            if self._files is not None and self._releases.number(step) >= len(self.ledger):
                self._files.before_new_release()
            self._releases.release(step, release, stddevs, places)
        except NotRepeated:
            self._take_new_keys()
            return False
        except Exception as error:
            self._ranks.tell(f"releases step {step}", error)
            raise
        if self._observation is not None:
            self._observation.after_release(release, stddevs, self._releases, step)
        self._num_non_finite += self._left_out
        self._sums, self._left_out = {}, 0
        self._stop_reason = None  # training goes on
        self._step_count += 1  # before the release is used: if the update is interrupted, its noise is spent
        self._date = _now()
        self._update(release)
        self._is_within_step = False
        if self._files is not None and self._files.after_step(self.step_count):
            self._end_epoch(self._files)
        return True

    def _end_epoch(self, files: RunFiles) -> None:
        """Adds the epoch's row on every rank, so that all know when the next is due; the first one has its numbers."""

        def add() -> int:
            files.end_epoch(self.step_count, self.profile_at_step)
            return 0

        files.sum_ranks()
        self._ranks.first_does("computes epsilon", add)
        if not self._ranks.is_first:
            files.log.end_epoch(self.step_count)

    def _taken_sums(self, step: int) -> tuple[dict[str, Tensor], dict[str, int] | None]:
        """Returns the sums of the step that this rank gives noise, and their places if they are slices of all."""
        if isinstance(self._placement, Ranked):
            with self._ranks.summing():
                taken = self._placement.take(self._mechanism, self._optimized())
            self._placement.let_go()
            self._tensors = self._find_tensors()
            return taken
        parameters = self._tensors.trained
        if self._observation is not None:
            self._sums = self._observation.with_gradient_canaries(self._sums, self._releases, self._tensors, step)
        sums = self._mechanism.complete(self._sums, parameters)
        for name, p in parameters.items():
            assert sums.get(name, p).shape == p.shape, f"the sum of {name!r} has the shape of its parameter"
        return sums, None

    def _update(self, release: dict[str, Tensor]) -> None:
        """Gives the private gradient to the optimizer, and steps it."""
        parameters = self._tensors.trained
        self._callbacks.note_settings(self.optimizer.param_groups)
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = None
        with self._ranks.communicating():
            gradients = self._placement.gradients(self._mechanism.gradient(release), parameters)
        for name, p in parameters.items():
            p.grad = gradients.pop(name)
            if name in self._reached.padding:  # the gradient of padding is noise alone
                self._placement.clear_row(p.grad, self._reached.padding[name])
        del release, gradients
        place = f"updates the weights after step {self.step_count - 1}"
        try:
            moved = self._weight_guard.update(self.optimizer, parameters, self.step_count, self._change_weights)
        except Exception as error:
            self._ranks.tell(place, error)
            raise
        seen = bool(self._weight_guard.seen_otherwise)
        told = self._ranks.exchange(place, payload=bytes([moved, seen]) + self._placement_and_weights())
        check_equal_weights(self.step_count, [message[2:12] for message in told])
        check_equal_weights(self.step_count, [message[12:] for message in told])
        self._weight_guard.hear(self.step_count, [message[1] for message in told])
        if not any(message[0] for message in told):
            raise Refused(
                f"PrivateTraining: {type(self.optimizer).__name__}.step() made no update, like a wrapper that "
                "accumulates gradients or skips steps. The release of this step was spent without use. Pass the "
                "optimizer itself; for larger batches raise expected_batch_size and set microbatch_size."
            )
        for p in parameters.values():
            p.grad = None
        if self.scheduler is not None:
            self.scheduler.step()

    @torch.no_grad()
    def _change_weights(self) -> None:
        """Calls ``after_update``; what it draws at random repeats, and is the same on all ranks."""
        if self._after_update is None:
            return
        numbers = SeededRandomNumbers(self._releases.secret(b"after update", self.step_count - 1))
        try:
            self._after_update(self.model)
        finally:
            numbers.close()

    def _placement_and_weights(self) -> bytes:
        """Returns the number of this rank's shard and, now and then, a digest of its weights; the same of its part.

        Ranks with the same part of a batch have some weights in common even if their shards differ.
        """
        step, place, guard = self.step_count - 1, self._placement, self._weight_guard
        is_due = self._ranks.size > 1 and (step & (step - 1) == 0 or step % RARELY == 0)
        digests = [guard.digest(), guard.digest(place.in_common())] if is_due else [bytes(8)] * 2
        return b"".join(n.to_bytes(2, "big") + d for n, d in zip((place.shard, place.part), digests, strict=True))

    def _match_threads(self) -> None:
        """Sets torch's number of threads to the recorded one while steps are repeated, and back afterwards."""
        self._repetition.close()
        if self._machine is not None and self._releases.number(self.step_count) < len(self.ledger):
            self._repetition.enter_context(number_of_threads(self._machine.threads))

    def _take_new_keys(self) -> None:
        """Goes on with new keys, as the old ones made other releases of the steps from here on, and counts those, too.

        The batches must be new as well: the price of two releases holds for two independent samples.
        """
        self._repetition.close()
        step, num_steps = self.step_count, self.settings.num_steps
        num_lost = len(self.ledger) - len(self.settings.prior_releases) - step
        found = "" if self._machine is None else self._machine.differences(Machine.here(self._tensors.trained.values()))
        self._releases = self._rehearsals.releases = self._new_releases(num_lost=num_lost)
        self._account.count_lost(num_lost)
        self._rehearsals.num_steps = self._account.steps_allowed
        self._sums, self._left_out = {}, 0
        allowed = self._account.steps_allowed
        warnings.warn(
            f"PrivateTraining: step {step} did not repeat bit for bit what was released before the training was "
            f"resumed ({found or 'the loop, the data or the machine differ'}). Training goes on from here with new "
            f"keys for noise and batches, and the ledger counts the {num_lost} steps that are made again, too: "
            + (
                f"epsilon will be that of {num_steps + num_lost} steps."
                if allowed == num_steps
                else f"{allowed} of {num_steps} steps are made, so that epsilon stays within its limit."
            ),
            stacklevel=2,
        )

    def _check_unchanged(self) -> None:
        """Refuses settings that have changed since the start: the release must be the one that the ledger records."""
        ours, actual = self.settings, self._mechanism.settings()
        noise = ours.noise_at(self.step_count)
        event, none = ours.event(self._mechanism, noise), repr(None)
        jacobian, perturbation = actual.get("jacobian", none), actual.get("perturbation", none)
        if event != self.event or (jacobian, perturbation) != (repr(ours.jacobian), repr(ours.perturbation)):
            raise Refused(
                f"PrivateTraining: noise, sampling, jacobian={ours.jacobian!r} or perturbation={ours.perturbation!r} "
                f"have changed since the start: this step would be {event!r} with jacobian={jacobian}, perturbation="
                f"{perturbation}, but the ledger would record {self.event!r}. Make a new PrivateTraining, with the "
                "releases so far as prior_releases."
            )

    def _resume_settings(self) -> dict[str, Any]:
        return self.settings.for_resuming(self._mechanism, self._tensors.trained)

    def _progress(self) -> Progress:
        return Progress(
            self.step_count,
            self._stop_reason,
            self._weight_guard.moved_otherwise(self.step_count),
            str(self._rehearsals.coupled or ""),
            frozenset(self._rehearsals.not_compared),
            (*self._rehearsals.watch.not_covered, *self._outside.not_covered),
            generators(self._tensors.trained.values()),
            self._date or _now(),
            tuple(self._callbacks.names),
            self._num_trained,
        )

    @property
    def _num_trained(self) -> int:
        """Returns the number of trained numbers, on all ranks together."""
        return sum(parameter.numel() for parameter in self._tensors.trained.values())

    def _not_of_loop(self) -> list[Any]:
        """Returns objects that the user's loop may name, and that are looked at elsewhere."""
        return [self, self.model, self.optimizer, self.scheduler, self._batches.dataset, self._canaries]

    def _present_turn(self) -> Any:
        """Returns what identifies the turn that waits for its losses, or None."""
        part = self._part
        return None if self._pending is None or part is None else (self.step_count, part.number, self._turns_made)

    def _note_outside(self, inputs: Any) -> None:
        self._outside.note(inputs, self.step_count)

    def _find_tensors(self) -> ModelTensors:
        """Returns the present tensors of the model; refuses gradient hooks on trained parameters."""
        tensors = self._tensors_of()
        check_no_gradient_hooks(tensors.trained)
        return tensors


def _warn_of_forward(text: str) -> None:
    warnings.warn(f"PrivateTraining: {text}", stacklevel=4)


def _now() -> str:
    """Returns the time in UTC, by ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _while_alive(training: PrivateTraining, read: Callable[[PrivateTraining], Any], default: Any) -> Callable[[], Any]:
    """Returns a function that reads from the training while it exists, and does not keep it alive."""
    reference = weakref.ref(training)

    def read_if_alive() -> Any:
        alive = reference()
        return default if alive is None else read(alive)

    return read_if_alive
