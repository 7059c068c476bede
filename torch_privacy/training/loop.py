# SPDX-License-Identifier: Apache-2.0
"""Provides ``PrivateTraining``, which joins recording, clipping, noise, sampling and ledger into a training loop."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from .. import privacy
from ..clipping import ClippingRule
from ..estimated_norms import Sketched
from ..gep import BGEP, GEP
from ..jacobian.comparison import written_into
from ..jacobian.compiled.actions import ActionTape, Unfit
from ..jacobian.compiled.recording import CompiledRecording
from ..jacobian.randomness import RandomNumbers, without_random_numbers
from ..jacobian.reach import check_losses
from ..jacobian.row_answers import RowAnswers
from ..jacobian.tape import MEMORY_BUDGET, Tape
from ..jacobian.turns import Answers, Turn
from ..mechanism import PRICED_ROUNDING, ClippedSum, Recording, Summation
from ..model_check.requirements import TensorsOf, check_model, check_no_gradient_hooks
from ..noise import generators
from ..sampling.batches import Batches, BatchRequest, Collate, DatasetExamples
from ..sampling.canaries import WithCanaries
from ..support.model_state import AttributeTensors, ModelTensors, MutationGuard
from ..support.replay import SeededRandomNumbers, random_position
from ..support.torch_modes import uncompiled
from ..support.validate import Refused, whole
from .canaries import Observation, Take
from .compiled import CompiledBatches, unwrapped
from .hooks import ForwardHooks, Pending
from .rehearsals import Part, Rehearsals
from .release import Releases
from .repetition import Machine, NotRepeated, number_of_threads
from .settings import TrainingSettings, check_delta, check_scheduler, check_single_process, check_state, open_ledger
from .statement import Account, Progress, Spent
from .weights import WeightGuard, padding_rows


class _Latest(threading.local):
    """Holds a reference to the training that handed out a batch last in this thread."""

    training: Any = staticmethod(lambda: None)


_LATEST = _Latest()
_END = object()  # of a loop
DIVERGED = 1e6  # a weight beyond which a failed check is blamed on its size


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
        expected_batch_size: q·n, the mean size of the Poisson batches and the divisor of every step.
        num_steps: total number of steps (releases).
        clipping: rule that bounds each per-example gradient, such as ``Flat(clip_norm=1.0)``; omit it with
            ``perturbation``, which has bounds of its own.
        noise_multiplier: noise standard deviation divided by sensitivity; or give ``target_epsilon``.
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
        run_folder: folder for the ledger (``ledger.jsonl``). Every release is written to the operating system before it
            is used, so that it survives ``kill -9``; it reaches the disk itself within about a second.
        assume_independent: a reason, in words, why examples do not depend on each other. No batch is rehearsed then,
            and the privacy statement prints the reason. Use it for a forward or a loop that cannot be repeated.
        compile: True, or arguments of ``torch.compile`` such as ``{"mode": "max-autotune"}``: batches that are not
            rehearsed run as compiled graphs, from which norms and clipped sums come, too. Each graph is compared with
            the ordinary computation before it is used, and so is one batch in 64; what does not fit runs uncompiled,
            and a warning says why (docs/compile.md). It changes releases by rounding only, and holds inputs and
            gradients of all layers at once, so that it may need a larger ``memory_budget``.
        test_seed: fixes noise and batches, for tests only; every statement then says NOT PRIVATE.

    Guarantees:
        - The optimizer receives a function of noisy sums only, each recorded in the ledger before it is used.
        - One example changes the sum before the noise by at most ``clipping.sensitivity``, up to a rounding of 2e-5,
          relative. The noise is larger by 2.1e-5 than ``noise_multiplier * sensitivity``, so that epsilon covers it.
        - The divisor is the expected batch size, independent of the actual size of the batch.
        - An empty batch makes a step of noise alone; the loop does not see it.
        - Before the first releases, the engine checks itself on the user's own batches: the sum of all rows with random
          weights equals the native gradient of the losses with these weights.
        - Steps 0, 1, 2, 4, 8, 16, ... and one in 64 are rehearsed (one microbatch of each), and so is every batch that
          runs code of the model that no rehearsal has seen: losses, norms and directions of the gradients, and clip
          factors of the kept examples stay the same (in steps 0, 1 and 2 the losses of the other examples, too). The
          secret key determines the one in 64, the microbatch and the examples. docs/pitfalls.md lists what a rehearsal
          cannot show.
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
        the batch size.

        An optimizer that skips its step is refused after the release was recorded; that release is spent.

    Raises:
        Refused: BatchNorm in training mode, parameters of the optimizer that are not the model's, a loader instead of
            a dataset, several processes of ``torch.distributed``, ...; the message names the culprit and the cure.
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
        epsilon in [1.984, 1.985] at delta = 1e-05 (add/remove one example, Poisson sampling)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Dataset,
        *,
        expected_batch_size: float,
        num_steps: int,
        clipping: ClippingRule | None = None,
        noise_multiplier: float | None = None,
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
        run_folder: Path | str | None = None,
        assume_independent: str | None = None,
        compile: bool | Mapping[str, Any] = False,
        test_seed: int | None = None,
    ):
        check_single_process()
        whole("PrivateTraining", num_workers=num_workers)
        canaries = dataset if isinstance(dataset, WithCanaries) else None
        items = dataset if canaries is None else canaries.items
        self._batches = Batches(items, collate_fn, num_workers, None if canaries is None else canaries.fetchable)
        settings = TrainingSettings(
            num_examples=len(dataset),  # type: ignore[arg-type]
            num_canaries=0 if canaries is None else canaries.num_canaries,
            expected_batch_size=expected_batch_size,
            num_steps=num_steps,
            clipping=clipping,
            noise_multiplier=noise_multiplier,
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
            test_seed=test_seed,
        )
        model = unwrapped(model) if compile else model
        check_model(model, optimizer)
        check_scheduler(scheduler)
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self._tensors_of = TensorsOf(model, optimizer, AttributeTensors(model))
        self._tensors = self._find_tensors()
        self._mechanism = settings.new_mechanism(self._tensors.trained, items)
        self.settings = settings.with_noise(self._mechanism)
        self.event = self.settings.event(self._mechanism)
        self.ledger = open_ledger(run_folder, self.settings)
        self._account = Account(self.settings, self.event, self.ledger)
        self._weight_guard = WeightGuard(_while_alive(self, lambda training: training._tensors.trained, {}))
        self._step_count = 0
        self._num_non_finite = 0
        self._stop_reason: str | None = None
        self._reached: set[str] = set()  # parameters that some batch's losses reached; later losses may miss them
        self._padding = padding_rows(model, self._tensors.trained)
        self._canaries = canaries
        self._observation = None
        if canaries is not None:
            self._observation = Observation(canaries, self.settings, self._mechanism, self._batches)
            canaries.check_only_one(self)
        self._releases = Releases(self.settings, self.event, self.ledger, canaries=canaries)
        self._rehearsals = Rehearsals(model, self._releases, assumed=assume_independent is not None)
        self._part: Part | None = None  # the (micro)batch in progress
        self._turn: Turn | None = None  # the next one to hand out
        self._is_rehearsal = False
        self._pending: Pending | None = None  # handed out and not yet answered
        self._optimizer_settings: list[dict[str, Any]] | None = None  # when the part began
        self._start: Any = None  # position at which the part's random numbers begin, if it is rehearsed
        self._sums: dict[str, Tensor] = {}  # of the step's microbatches so far; secret
        self._left_out = 0  # examples left out of them
        self._machine: Machine | None = None  # on which the steps after the state that was loaded were made
        self._repetition = ExitStack()  # while they are repeated
        self._loops = 0  # iterations begun; only the latest may go on
        self._in_use = threading.RLock()  # not held while the user's loop runs
        self._compiled = CompiledBatches.of(model, compile, self.settings, self._mechanism) if compile else None
        self._hooks = ForwardHooks(_while_alive(self, lambda training: training._pending, None))
        self._hooks.register(model)
        self._is_made = True

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
        """Yields what the loop gets."""
        check_single_process()
        self._loops += 1
        loop = self._loops
        self._forget_batch()
        self._tensors = self._find_tensors()
        self._weight_guard.activate()
        releases, batches = None, iter(())
        try:
            while self.step_count < self._account.steps_allowed:
                if self._releases is not releases:  # at first, and when the steps cannot be repeated
                    releases = self._releases
                    batches = self._batches(self._requests(self.step_count, self._account.steps_allowed))
                self._match_threads()
                self._sums, self._left_out = {}, 0
                parts = self._releases.parts(self.step_count)
                self._tensors = self._find_tensors()
                self._mechanism.begin(self.model, self._tensors, self._releases.noise.key, self.step_count)
                if self._observation is not None:
                    for part in self._observation.before_step(self._releases, self._tensors, self.step_count):
                        yield from self._answered(part, loop)
                for number in range(len(parts)):
                    yield from self._answered(self._part_of(next(batches), number, len(parts)), loop)
                if not parts:
                    self._release()
            if self._observation is not None:
                for part in self._observation.after_training(self._releases, self.step_count):
                    yield from self._answered(part, loop)
        finally:
            if self._loops == loop:
                self._forget_batch()
                self._weight_guard.deactivate()
                self._repetition.close()

    @property
    def rehearsing(self) -> bool:
        """True if the batch that was handed out last is a rehearsal, of which nothing is released.

        To leave rehearsals out of a log, read it after ``step``: a batch that turns out to run new code counts as a
        rehearsal from then on, and is handed out again later.
        """
        return self._is_rehearsal

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
        finally:
            torch.set_grad_enabled(enabled)  # an interrupt within torch.no_grad's own exit leaves gradients off

    def _step(self, losses: Tensor) -> bool:
        pending, part = self._pending, self._part
        if pending is None or part is None:
            raise Refused(
                "training.step was called without a batch. Call it once for every batch of `for ... in training`."
            )
        self._hooks.unwind()
        if pending.turn.take is not None:
            self._observe(pending, losses, pending.turn.take)
            return False
        try:
            sums, summation, answers = self._answers(pending, part, losses)
            pending.close()
            if pending.tape is not None and self._rehearsals.is_new(part, pending.tape.code):
                self._rehearsals.restart(part, self._units(part.examples.count))
                self._turn, self._pending, self._is_rehearsal = next(part.script), None, True
                return False
            try:
                self._turn = part.script.send(answers)
            except StopIteration:
                self._turn = None
        except Unfit:  # the turn is handed out again, for the tape
            assert self._compiled is not None
            pending.close()
            self._compiled.leave_to_tape(pending.turn)
            self._pending, self._is_rehearsal = None, True
            return False
        except BaseException as error:
            pending.close()
            part.script.close()
            if isinstance(error, Refused):
                self._check_diverged(error)
            raise
        self._pending = None
        if self._turn is not None:
            self._is_rehearsal = True
            return False
        assert pending.turn.is_batch, "the batch itself comes last"
        assert pending.tape is not None
        self._rehearsals.note_passed(part, pending.tape.code)
        self._left_out += summation.num_left_out
        for name, tensor in sums.items():
            self._sums[name] = self._sums[name].add_(tensor) if name in self._sums else tensor
        if not part.is_last:
            return False
        self._is_rehearsal = not self._release()
        return not self._is_rehearsal

    def _check_diverged(self, error: Refused) -> None:
        """Refuses weights so large that sums overflow, which rehearsals and self-checks cannot tell from mistakes."""
        largest = max((float(p.detach().abs().max()) for p in self._tensors.trained.values() if p.numel()), default=0.0)
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
            _check_user_code(pending, losses)
            with _refusing_used_graphs():
                take(pending.tape, losses)
        finally:
            self._forget_batch()
        self._is_rehearsal = True

    def record(self) -> AbstractContextManager[Any]:
        """Returns a context that records as the model's own forward does, for parameters used outside of it.

        It belongs to the batch just handed out: open a new one for every batch, before ``step``.
        """
        if self._pending is None:
            raise Refused("training.record() needs a batch. Use it inside `for ... in training`, before training.step.")
        return nullcontext() if self._pending.tape is None else self._pending.tape

    def spent(self, delta: float | None = None) -> Spent:
        """Returns the privacy spent at ``delta`` (by default the one given at the start).

        ``epsilon`` is that of the releases so far, and ``planned`` that of all planned steps, or of those that the
        budget allows. Report ``planned`` if training stopped early because of anything that it released.

        Raises:
            ValueError: no delta was given, or it is 1/n or more.
        """
        if delta is not None:
            check_delta(self.settings.num_examples, delta, stacklevel=3)
        elif self.settings.delta is not None:
            delta = self.settings.delta
        else:
            raise ValueError("PrivateTraining.spent: delta=None; pass one below 1/n here or to PrivateTraining.")
        return self._account.spent(self._progress(), delta)

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

    def statement(self) -> dict[str, Any]:
        """Returns everything that determines the guarantee, as plain data for a machine-readable privacy statement."""
        return self._account.statement(self._progress(), self._mechanism)

    def state_dict(self) -> dict[str, Any]:
        """Returns what is needed to go on after a stop: keys of noise and sampler, step, settings and ledger.

        THIS STATE IS SECRET. From the key anyone can compute the noise of every step, past and future, and subtract it.
        Keep it readable by the training process alone, and delete it when the run is over. Model, optimizer and
        scheduler have state dicts of their own. Random numbers need none: inside the loop those of torch, numpy and
        Python follow from the key and the step, so that a resumed run repeats dropout and augmentation bit for bit. A
        declared stop is not part of the state.
        """
        return {
            "format": 1,
            "machine": Machine.here(self._tensors.trained.values()).state(),
            "num_lost": self.num_lost,
            "settings": self._resume_settings(),
            "step_count": self.step_count,
            "num_non_finite": self.num_non_finite,
            "moved_otherwise": self._weight_guard.moved_otherwise(self.step_count),
            "noise_key": self._releases.noise.key.hex(),
            "sampler_key": self._releases.sampler.key.hex(),
            "stop_reason": self._stop_reason,
            "ledger": self.ledger.state_dict(),
            **self._mechanism.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where the state was taken: same keys, same next batches, same noise. The state is secret.

        If the ledger has more steps than the state (the run was killed after its last checkpoint), these are repeated
        with the same batch, dropout, augmentation, noise and number of threads: the same release, recorded once. That
        requires the same weights, optimizer and losses, and arithmetic that repeats bit for bit. Where a step differs,
        as on another processor, training goes on with new keys, and a warning says so. `num_lost` is the number of
        releases that are then made again; the ledger has them besides the new ones, and a target epsilon or a budget
        still holds, with fewer steps. In the process that made these releases, a step that differs is refused.

        Raises:
            Refused: the state has other settings, or the ledger on disk does not belong to it.
        """
        settings = self.settings
        check_state(state, settings, self._mechanism)
        # These were not settings in the first states.
        defaults = {"memory_budget": settings.memory_budget, "jacobian": repr(None), "prior_releases": [], "views": 1}
        saved, ours = defaults | state["settings"], self._resume_settings()
        differing = {key: (value, saved.get(key)) for key, value in ours.items() if saved.get(key) != value}
        if differing:
            listed = ", ".join(
                f"{key}={here!r} (the state has {there!r:.200})" for key, (here, there) in differing.items()
            )
            raise Refused(f"PrivateTraining.load_state_dict: {listed}. Resume a run with the settings it began with.")
        self.ledger.load_state_dict(state["ledger"])
        keys = bytes.fromhex(state["noise_key"]), bytes.fromhex(state["sampler_key"])
        num_lost = state.get("num_lost", 0)
        self._releases = self._rehearsals.releases = Releases(
            settings, self.event, self.ledger, keys, num_lost, self._canaries
        )
        self._machine = Machine.from_state(state.get("machine"))
        self._account.count_lost(num_lost)
        self._step_count, self._num_non_finite = state["step_count"], state["num_non_finite"]
        self._mechanism.load_state(state)
        self._loops += 1
        self._forget_batch()
        self._weight_guard.reset(state.get("moved_otherwise", ""))
        self._stop_reason = state.get("stop_reason")

    # Turns: a batch, or a rehearsal of it

    def _answered(self, part: Part, loop: int) -> Iterator[Any]:
        """Yields the turns of a part to the loop, and checks that each is answered."""
        self._part = part
        self._optimizer_settings = self._start = None
        self._turn = next(part.script)
        while self._turn is not None:
            yield self._hand_out(self._turn)
            if self._loops != loop:
                raise Refused("a newer loop over the training has begun since this one. Go on with the newer one.")
            if self._pending is not None:
                raise Refused(
                    "the loop went on without training.step(losses) for its batch. Call it once for every batch."
                )

    def _requests(self, step: int, end: int) -> Iterator[BatchRequest]:
        """Yields a request for every (micro)batch from this step to the end."""
        for later in range(step, end):
            parts = self._releases.parts(later)
            for number, part in enumerate(parts):
                rehearsed, _ = self._rehearsals.are_due(later, number, len(parts))
                seed = self._releases.secret(b"data", later, number)
                yield BatchRequest(part, self.settings.views, seed, rehearsed)

    def _part_of(self, examples: DatasetExamples, number: int, count: int) -> Part:
        """Returns (micro)batch ``number`` of ``count`` of this step."""
        return self._rehearsals.begin(examples, self.step_count, number, count, self._units(examples.count))

    def _units(self, count: int) -> Any:
        """Returns the row that each example belongs to; None if each has a row of its own."""
        return self._mechanism.units(self._releases.sampler, self.step_count, count)

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
        self._check_optimizer_settings()
        self._tensors, step = self._find_tensors(), self.step_count
        size, tape, compiled = turn.count * self.settings.views, None, self._compiled
        if turn.take is not None and turn.rows:
            tape = self._mechanism.exact_recorder(self._tensors, size)
        elif turn.rows or turn.is_batch:
            tape = self._mechanism.recorder(self._tensors, self._releases.noise.key, step, part.number, size)
        contexts = ExitStack()
        contexts.enter_context(uncompiled())
        if compiled is not None and turn.take is None and tape is not None:
            groups, chance = self._mechanism.groups(list(tape.parameters)), self._releases.secret
            tape = self._mechanism.exact_recorder(self._tensors, size, ActionTape)
            tape = contexts.enter_context(
                compiled.recording(tape, turn, part, groups, chance(b"compiled", step, part.number))
            )
        seed = self._releases.secret(b"random numbers", step, part.number)
        numbers = SeededRandomNumbers(seed)
        if part.rehearsed and self._start is None:
            self._start = random_position()  # the same before every turn
            numbers.begin(seed)
        if turn.random is not RandomNumbers.AS_DRAWN:
            contexts.enter_context(without_random_numbers(self.model, turn.random))
        if turn.trace is not None:
            contexts.enter_context(turn.trace.recording(size))
        self._is_rehearsal, _LATEST.training = not turn.is_batch, weakref.ref(self)
        self._pending = Pending(turn, tape, MutationGuard(self.model, self._tensors_of.tree), numbers, contexts)
        return turn.batch

    def _check_optimizer_settings(self) -> None:
        """Refuses a loop that changes learning rate, weight decay, ... between the turns of one batch."""
        groups = self.optimizer.param_groups
        now = [{key: _plain(value) for key, value in group.items() if key != "params"} for group in groups]
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
        changed_buffers = _check_user_code(pending, losses)
        changes = {} if turn.state is None else turn.state.changes()
        summation = self._mechanism.summation(self._releases.sampler, self.step_count, turn.count)
        rows: RowAnswers | None = None
        sums: dict[str, Tensor] = {}
        if tape is not None:
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
            shapes=0 if tape is None else tape.code.shapes,
        )
        return sums, summation, answers

    def _clipped_sums(
        self, tape: Recording, losses: Tensor, summation: Summation, rows: RowAnswers | None, *, is_batch: bool
    ) -> dict[str, Tensor]:
        """Returns the clipped sums of a batch, or none for a rehearsal; either way ``rows`` takes what is compared."""
        with _refusing_used_graphs():
            sums = tape.clipped_sum(
                losses,
                self._mechanism.groups(list(tape.parameters)),
                summation if is_batch else None,
                merging=summation.merging,
                may_miss=self._reached if is_batch else tape.parameters,
                memory_budget=self.settings.memory_budget,
                observe=None if rows is None else rows.take,
            )
        summation.check_bound()
        otherwise_used = tape.used_otherwise if isinstance(tape, Tape | CompiledRecording) else self._padding.keys()
        self._padding = {name: row for name, row in self._padding.items() if name not in otherwise_used}
        self._reached.update(tape.reached)  # layers that are skipped at random are reached when they are not
        return sums

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
        self._pending = self._part = self._turn = None
        self._hooks.unwind()

    # The release

    def _release(self) -> bool:
        """Adds noise to the sums, records the release, and gives the private gradient to the optimizer.

        Returns False if the step could not be repeated: nothing was released, and new keys are in place.
        """
        self._check_unchanged()
        parameters, step = self._tensors.trained, self.step_count
        if self._observation is not None:
            self._sums = self._observation.with_gradient_canaries(self._sums, self._releases, self._tensors, step)
        release = self._mechanism.complete(self._sums, parameters)
        for name, p in parameters.items():
            assert release.get(name, p).shape == p.shape, f"the sum of {name!r} has the shape of its parameter"
        assert self.settings.noise_multiplier is not None
        stddevs = self._mechanism.stddevs(release, self.settings.noise_multiplier * PRICED_ROUNDING)
        try:
            self._releases.release(step, release, stddevs)
        except NotRepeated:
            self._take_new_keys()
            return False
        if self._observation is not None:
            self._observation.after_release(release, stddevs, self._releases, step)
        self._num_non_finite += self._left_out
        self._sums, self._left_out = {}, 0
        self._stop_reason = None  # training goes on
        self._step_count += 1  # before the release is used: if the update is interrupted, its noise is spent
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = None
        gradient = self._mechanism.gradient(release)
        for name, p in parameters.items():
            p.grad = gradient[name].to(p)
            if name in self._padding:  # the gradient of padding is noise alone
                p.grad[self._padding[name]] = 0
        del release, gradient
        self._weight_guard.update(self.optimizer, parameters, self.step_count)
        for p in parameters.values():
            p.grad = None
        if self.scheduler is not None:
            self.scheduler.step()
        return True

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
        self._releases = self._rehearsals.releases = Releases(
            self.settings, self.event, self.ledger, num_lost=num_lost, canaries=self._canaries
        )
        self._account.count_lost(num_lost)
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
        assert ours.noise_multiplier is not None
        event, none = self._mechanism.event(ours.noise_multiplier, ours.sampling_probability), repr(None)
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
            frozenset(self._rehearsals.not_compared),
            generators(self._tensors.trained.values()),
        )

    def _find_tensors(self) -> ModelTensors:
        """Returns the present tensors of the model; refuses gradient hooks on trained parameters."""
        tensors = self._tensors_of()
        check_no_gradient_hooks(tensors.trained)
        return tensors


def _check_user_code(pending: Pending, losses: Tensor) -> list[str]:
    """Refuses code that seeded torch, scaled the losses or wrote into a parameter; returns the changed buffers."""
    if pending.numbers.was_seeded:
        raise Refused(
            "PrivateTraining: torch.manual_seed was called inside of the loop. Then anyone can compute the dropout "
            "masks, which depend on an example's place in the batch. Leave it out: inside the loop all random "
            "numbers come from the training's secret key, and a resumed run repeats them."
        )
    _check_unscaled(losses)
    written, changed_buffers = pending.guard.changed()
    if written:
        raise Refused(written_into(written))
    return changed_buffers


def _plain(value: Any) -> Any:
    """Returns a value that equals a later one of the same content: itself, or its text."""
    return value if type(value) in (int, float, bool, str, type(None)) else repr(value)


def _check_unscaled(losses: Tensor) -> None:
    """Refuses losses that a GradScaler scaled, that is, multiplied by a tensor with a large power of two."""
    node = losses.grad_fn
    if node is None or not node.name().startswith("MulBackward"):
        return
    for factor in (getattr(node, "_saved_other", None), getattr(node, "_saved_self", None)):
        if isinstance(factor, Tensor) and factor.ndim == 0 and factor.dtype == torch.float32:
            if factor >= 2**10 and float(factor).hex().startswith("0x1.0000000000000p"):
                raise Refused(
                    f"PrivateTraining: the losses were multiplied by {float(factor):g}, as GradScaler does. Leave the "
                    "scaler out: norms and sums are computed in float32, also under autocast with float16."
                )


def _while_alive(training: PrivateTraining, read: Callable[[PrivateTraining], Any], default: Any) -> Callable[[], Any]:
    """Returns a function that reads from the training while it exists, and does not keep it alive."""
    reference = weakref.ref(training)

    def read_if_alive() -> Any:
        alive = reference()
        return default if alive is None else read(alive)

    return read_if_alive


@contextmanager
def _refusing_used_graphs() -> Iterator[None]:
    """Turns torch's error about a graph that was used before into a refusal."""
    try:
        yield
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise Refused(
            "PrivateTraining: the graph of the losses was used up before training.step. Leave out losses.backward(): "
            "step computes the gradient and makes the update."
        ) from None
