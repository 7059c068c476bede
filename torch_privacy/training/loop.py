# SPDX-License-Identifier: Apache-2.0
"""Private training: the only place that joins tape, clipping, noise, sampling and ledger; so they cannot disagree."""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from .. import privacy
from .._model import Attributes, Census, Seal, check_model, check_no_hooks, padding_rows, take_census
from .._replay import OwnRandomNumbers, next_numbers
from .._torch_modes import uncompiled
from .._validate import Refused
from ..batches import Batches, Collate, Draw, Drawn, split
from ..clipping import ClippingRule
from ..estimated_norms.settings import Sketched
from ..gep.settings import BGEP, GEP
from ..jacobian.code_path import RehearsedCode
from ..jacobian.independence import (
    AS_IT_IS,
    Answers,
    Rehearsal,
    RowAnswers,
    Turn,
    few,
    halves,
    inner,
    without_random_numbers,
    written_into,
)
from ..jacobian.tape import MEMORY_BUDGET, Tape, check_losses
from ..mechanism import ClippedSum, Summing
from ..noise import Noise, key_from_test_seed
from ..sampling import Poisson
from .hooks import Pending, Switch
from .settings import check_alone, check_numbers, check_scheduler, choose_noise, new_mechanism, open_ledger
from .statement import Spent, check_delta, spent, statement
from .weights import OptimizerGuard, WeightMarks

THOROUGH = 2  # up to this step every batch is rehearsed in full: both halves replaced, one left out
RARELY = 64  # from then on steps 4, 8, 16, ... are rehearsed, and one in so many, by the secret key


class _HandedOut(threading.local):
    """The training that handed out a batch last, in this thread."""

    training: Any = staticmethod(lambda: None)


_HANDED_OUT = _HandedOut()
_RELEASED: dict[bytes, dict[int, str]] = {}  # by this process: noise key -> step -> fingerprint of the release


class PrivateTraining:
    """Trains a model with differential privacy: Poisson batches, per-example clipping, Gaussian noise, a ledger.

    One step is ``grad = (Σᵢ cᵢ gᵢ + noise_multiplier·sensitivity·z) / expected_batch_size`` over the examples i of a
    Poisson batch, with gᵢ the gradient of example i's own loss, cᵢ the clipping rule's factor and z standard normal;
    then ``optimizer.step()``. Model, optimizer and schedulers are the user's own and stay as they are.

    Some batches are rehearsed: the loop gets them again with other examples in some places, or without some, before it
    gets the batch itself. So it is shown that no example's loss or gradient depends on another example. ``step``
    returns False for a rehearsal, and nothing is released. Advance schedulers where ``step`` returns True, and log
    where `rehearsing` is false.

    Args:
        model: any module whose trained parameters meet ops with an exact rule (else refused by name).
        optimizer: any torch optimizer over parameters of the model; those it holds that require a gradient are trained.
        dataset: map-style; one item is one example, the unit that is protected. Its size counts as public.
        expected_batch_size: q·n, the mean size of the Poisson batches and the divisor of every step.
        num_steps: number of steps (releases) in all.
        clipping: rule that bounds each per-example gradient, such as ``Flat(clip_norm=1.0)``; left out with
            ``perturbation``, which has bounds of its own.
        noise_multiplier: noise standard deviation over sensitivity; or give ``target_epsilon``.
        target_epsilon: calibrates the noise multiplier so that all ``num_steps`` spend at most this at ``delta``.
        delta: for ``target_epsilon`` and ``spent()``; must be below 1/n, and a warning asks for 1/(10 n) or less.
        budget: ``privacy.Budget(epsilon, delta)`` at which training stops by itself: before the step that would exceed
            it, should that come before ``num_steps``.
        memory_budget: peak memory that a step may take, in units of what non-private training needs (up to 100) or in
            bytes: what is kept for the clipped sum is chosen accordingly.
        microbatch_size: largest number of examples handed out at once (memory); the noise stays the same bit for bit,
            the clipped sum the same up to rounding.
        views: how often each example of a batch is fetched, one behind the other, as for random augmentations: batches
            have ``views`` times as many items, and ``step`` takes losses (n, views). The gradient of their mean is an
            example's one row: more views cost no privacy.
        jacobian: ``Sketched(num_projections)`` for models that the tape refuses: norms are estimated by random
            projections, which costs epsilon. By default norms are exact.
        perturbation: ``GEP(...)`` or ``BGEP(...)``: noise for the gradients' coordinates in a public subspace and,
            apart from these, for what is left over.
        prior_releases: what was released of the same data before and is used here, such as ``[pca.release_]`` of a
            `PrivatePCA` in front of the model: first in the ledger, and part of every epsilon.
        not_for_release: lets ``Sketched`` have fewer than 16 projections; every statement then says NOT PRIVATE.
        collate_fn: as of ``torch.utils.data.DataLoader``; must not mix examples, which rehearsals check, too.
        num_workers: processes that fetch examples, as of ``DataLoader``.
        scheduler: learning-rate scheduler to advance after every step, empty batches included. The user's loop may
            advance one instead, where ``step`` returns True, but sees no empty batches. A scheduler that asks for a
            loss (``ReduceLROnPlateau``) is refused.
        run_folder: folder for the ledger (``ledger.jsonl``). Every release has reached the operating system before it
            is used, so that it survives ``kill -9``; it reaches the disk itself within a second or so.
        assume_independent: a reason, in words, why examples do not depend on each other. No batch is rehearsed then,
            and the privacy statement prints the reason. For a forward or a loop that cannot repeat.
        test_seed: fixes noise and batches, for tests only; every statement then says NOT PRIVATE.

    Guarantees:
        - What reaches the optimizer is a function of noisy sums only, each recorded in the ledger before it is used.
        - One example changes the sum before the noise by at most ``clipping.sensitivity``.
        - The divisor is the expected batch size, whatever the size of the batch.
        - An empty batch makes a step of noise alone; the loop does not see it.
        - Before the first releases the engine proves itself on the user's own batches: the sum of all rows equals the
          native gradient, and two random rows equal backwards of their own.
        - Steps 0, 1, 2, 4, 8, 16, ... and one in 64 are rehearsed (one microbatch of each), and so is every batch that
          runs code of the model that no rehearsal has seen: losses, norms and directions of the gradients, and clip
          factors of the examples that are kept stay the same. The secret key draws the one in 64, the microbatch and
          the examples. docs/pitfalls.md lists what a rehearsal cannot show.
        - With ``clipping``, each clipped row of every step is at most as long as the rule says, up to rounding.
        - From the start of the loop to its end no other step of an optimizer moves a trained parameter. ``spent()`` and
          the statement say NOT PRIVATE if trained parameters moved in another way.
        - Inside the loop the random numbers of torch, numpy and Python are a function of the secret key, the step and
          the microbatch; ``step`` puts the user's own random state back.
        - The settings cannot be changed after the start.
        - Anything outside of what can be guaranteed raises ``Refused`` before anything is released.

    Edge cases:
        An example whose gradient is not finite is left out of the sum, and so is every example of a micro-batch whose
        mean is not finite; with groups of parameters, out of the groups concerned. ``num_non_finite`` is the number of
        examples left out so far, of any group. It is an exact count of private data: secret, as is the batch size.

        An optimizer that skips its step is refused after the release was recorded: that release is spent.

    Raises:
        Refused: BatchNorm in training mode, parameters of the optimizer that are not the model's, a loader in place
            of a dataset, several processes of ``torch.distributed``, ...; the message names the culprit and the cure.
        ValueError: a number out of range.
        AttributeError: a setting was assigned to after the start.

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
        test_seed: int | None = None,
    ):
        check_alone()
        self._batches = Batches(dataset, collate_fn, num_workers)
        self.num_examples = len(dataset)  # type: ignore[arg-type]
        self.expected_batch_size, self.num_steps, self.microbatch_size = expected_batch_size, num_steps, microbatch_size
        self.views = views
        self.delta, self.target_epsilon, self.budget = delta, target_epsilon, budget
        self.memory_budget, self.prior_releases = memory_budget, tuple(prior_releases)
        self.jacobian, self.perturbation, self.not_for_release = jacobian, perturbation, not_for_release
        self.test_seed, self.assume_independent = test_seed, assume_independent
        check_numbers(self, num_workers)
        check_model(model, optimizer)
        check_scheduler(scheduler)
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self._attributes = Attributes(model)
        self._census = self._take_census()
        self._mechanism = new_mechanism(self, clipping, self._census.trained)
        self.sampling_probability = expected_batch_size / self.num_examples
        self.noise_multiplier = choose_noise(self, noise_multiplier)
        self.event = self._mechanism.event(self.noise_multiplier, self.sampling_probability)
        self._mechanism.stddevs([], self.noise_multiplier)  # refuses noise that an adaptive rule cannot split
        prior = [(release.event, 1) for release in self.prior_releases]
        privacy.compose([*prior, (self.event, num_steps)])  # refuses what cannot be priced together
        self.ledger = open_ledger(run_folder, self.prior_releases)
        self._num_planned = self._num_steps_allowed()
        if not self._num_planned:
            raise Refused(
                f"PrivateTraining: {budget!r} does not allow one step of {self.event!r}. Raise noise or budget."
            )
        keys = {} if test_seed is None else {p: key_from_test_seed(test_seed, p) for p in ("noise", "sampling")}
        self._set_keys(keys.get("noise"), keys.get("sampling"))
        self._step_count = 0
        self._num_non_finite = 0
        self._stop_reason: str | None = None
        self._planned: tuple[Any, privacy.Profile] | None = None
        self._weights: WeightMarks | None = None  # behind the last step, or at the start of the loop
        self._moved_otherwise = ""  # when the weights were first seen to have moved in another way
        self._guard: OptimizerGuard | None = None  # while a loop is under way
        self._rehearsed = RehearsedCode()
        self._moving: set[str] = set()  # frozen parameters that the loop changes, as those of a teacher
        self._overwritten: set[str] = set()  # attributes that take in data, and are written before they are read
        self._not_compared: set[str] = set()  # by rehearsals, in words
        self._seen: set[str] = set()  # parameters that some batch's losses reached: later ones may miss them
        self._padding = padding_rows(model, self._census.trained)
        self._part: Any = None  # the (micro)batch under way
        self._turn: Turn | None = None  # to be handed out next
        self._is_rehearsal = False
        self._pending: Pending | None = None  # handed out, and not answered yet
        self._sums: dict[str, Tensor] = {}  # of the step's microbatches so far; secret
        self._loops = 0  # iterations begun; only the latest may go on
        self._switch = Switch(self)
        self._switch.watch(model)
        self._is_made = True

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and "_is_made" in self.__dict__:
            raise AttributeError(
                f"PrivateTraining.{name} cannot be set: what was released, and its price, follow from the settings as "
                "they were at the start. Make a new PrivateTraining, with the releases so far as prior_releases."
            )
        super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        raise Refused(
            "PrivateTraining cannot be copied or pickled: two copies would release different sums with the same noise. "
            "Save training.state_dict() and load it into a new PrivateTraining."
        )

    @property
    def step_count(self) -> int:
        """Steps made so far; it stands still during rehearsals."""
        return self._step_count

    @property
    def num_non_finite(self) -> int:
        """Examples left out so far, since their gradients were not finite. Secret: an exact count of private data."""
        return self._num_non_finite

    @property
    def clipping(self) -> ClippingRule | None:
        """The rule of the next step."""
        return self._mechanism.rule if isinstance(self._mechanism, ClippedSum) else None

    def __len__(self) -> int:
        """Number of steps in all."""
        return self.num_steps

    def __iter__(self) -> Iterator[Any]:
        """(Micro)batches from the next step to the last; each must be answered by ``step(losses)``.

        Some are handed out again with other examples in some places, or without some: `rehearsing` is then true, and
        ``step`` compares, releases nothing and returns False. The batch itself comes last.

        After ``break`` or an exception, iterating anew begins with the first microbatch of the step that was not done.
        """
        check_alone()
        self._loops += 1
        loop = self._loops
        self._forget_batch()
        self._begin_guard()
        num_steps = self._num_planned
        drawn = self._batches(self._draws(self.step_count, num_steps))
        try:
            while self.step_count < num_steps:
                self._sums = {}
                parts = self._parts(self.step_count)
                self._mechanism.begin(self.model, self._take_census(), self._noise.key, self.step_count)
                for number in range(len(parts)):
                    self._begin_part(next(drawn), number, len(parts))
                    while self._turn is not None:
                        yield self._hand_out(self._turn)
                        if self._loops != loop:
                            raise Refused(
                                "this loop over the training was left behind by a newer loop. Go on with the newer one."
                            )
                        if self._pending is not None:
                            raise Refused(
                                "the loop went on without training.step(losses) for its batch. Call it once a batch."
                            )
                if not parts:
                    self._census = self._take_census()
                    self._release()
        finally:
            if self._loops == loop:
                self._forget_batch()
                self._end_guard()

    @property
    def rehearsing(self) -> bool:
        """True if the batch that was handed out last is a rehearsal, of which nothing is released.

        To leave rehearsals out of a log, ask after ``step``: a batch that turns out to run new code counts as a
        rehearsal from then on, and is handed out again later.
        """
        return self._is_rehearsal

    def step(self, losses: Tensor) -> bool:
        """Clip and sum the batch's per-example gradients; after the last microbatch add noise, record, and update.

        Args:
            losses: (n,) one loss per example of the batch just handed out (``reduction="none"``), or (n, views).

        Returns:
            True if the model was updated; False for rehearsals, and for all but the last microbatch of a step.

        Raises:
            Refused: a scalar, the losses of another batch, an op without an exact rule, examples that depend on each
                other, code that does not repeat, ...; nothing was released, and the step can be tried again by
                iterating anew.
        """
        pending = self._pending
        if pending is None:
            raise Refused("training.step was called without a batch. Call it once per batch of `for ... in training`.")
        self._switch.unwind()
        try:
            part, summing, answers = self._answers(pending, losses)
            pending.close()
            if not self._part.thorough and self._is_new(pending):
                self._part.script.close()
                self._part.script = self._rehearsal(thorough=True)
                self._part.rehearsed = self._part.thorough = True
                self._turn, self._pending, self._is_rehearsal = next(self._part.script), None, True
                return False
            try:
                self._turn = self._part.script.send(answers)
            except StopIteration:
                self._turn = None
        except BaseException:
            pending.close()
            self._part.script.close()
            raise
        self._pending = None
        if self._turn is not None:
            self._is_rehearsal = True
            return False
        assert pending.turn.is_batch, "the batch itself comes last"
        assert pending.tape is not None
        if self._part.rehearsed:
            self._rehearsed.add(pending.tape.code, self._part.drawn.count)
        self._num_non_finite += summing.num_left_out
        for name, tensor in part.items():
            self._sums[name] = self._sums[name].add_(tensor) if name in self._sums else tensor
        if self._part.is_last:
            self._release()
        return self._part.is_last

    def _begin_part(self, drawn: Drawn, number: int, count: int) -> None:
        """A (micro)batch of this step begins: its first turn."""
        self._part = _Part(drawn, number, number == count - 1)
        rehearsed, thorough = self._rehearsal_is_due(self.step_count, number, count)
        script = self._rehearsal(thorough) if rehearsed else _alone(drawn)
        self._part.script, self._part.rehearsed, self._part.thorough = script, rehearsed, rehearsed and thorough
        self._turn = next(script)

    def _rehearsal_is_due(self, step: int, number: int, count: int) -> tuple[bool, bool]:
        """Whether this microbatch of a step is to be rehearsed, and whether thoroughly."""
        early = step <= THOROUGH
        chance = int.from_bytes(self._secret(b"rehearsal", step)[:8], "little")
        if self.assume_independent is not None or number != chance // 64 % count:
            return False, False
        return early or step & (step - 1) == 0 or chance % RARELY == 0, early

    def _rehearsal(self, thorough: bool) -> Generator[Turn, Answers, None]:
        drawn, step = self._part.drawn, self.step_count
        if thorough:
            self._overwritten.clear()  # to be shown again
            if not drawn.repeats():
                self._not_compared.add(
                    "The data set gives other items when it is asked again, so whether they depend on items that were "
                    "fetched before was not shown. It is harmless where random numbers of its own are the reason."
                )
        units = self._mechanism.units(self._sampler, step, drawn.count)
        kept = halves(drawn.count, drawn.generator, units)
        alone = [few(drawn.count, drawn.generator), *(map(inner, kept) if thorough else ())]
        return Rehearsal(
            self.model,
            drawn,
            kept if thorough else kept[:1],
            alone=alone,
            rows_alone=thorough,
            units=units,
            moving=self._moving,
            overwritten=self._overwritten,
            notes=self._not_compared,
            keep_weights=thorough,
        ).turns()

    def _hand_out(self, turn: Turn) -> Any:
        """What must be set while the user's code runs; then the batch."""
        other = _HANDED_OUT.training()
        if other is not None and other is not self and other._pending is not None:
            raise Refused(
                "PrivateTraining: a batch of another training waits for its step, and random numbers and recordings "
                "are set for that one. Answer it first: run the two loops one after the other, not in a zip."
            )
        turn.prepare()
        self._check_learning_rates()
        self._census, step, number = self._take_census(), self.step_count, self._part.number
        size, tape = turn.count * self.views, None
        if turn.rows or turn.is_batch:
            tape = self._mechanism.watch(self._census, self._noise.key, step, number, size)
        contexts = ExitStack()
        contexts.enter_context(uncompiled())
        seed = self._secret(b"random numbers", step, number)
        numbers = OwnRandomNumbers(seed)
        if self._part.rehearsed and self._part.start is None:
            self._part.start = next_numbers()  # the same before every turn
            numbers.begin(seed)
        if turn.random != AS_IT_IS:
            contexts.enter_context(without_random_numbers(self.model, turn.random))
        if turn.trace is not None:
            contexts.enter_context(turn.trace.watching(size))
        self._is_rehearsal, _HANDED_OUT.training = not turn.is_batch, weakref.ref(self)
        self._pending = Pending(turn, tape, Seal(self.model), numbers, contexts)
        return turn.batch

    def _check_learning_rates(self) -> None:
        """Refuse a loop that advances its scheduler on rehearsals, too."""
        rates = [
            {key: repr(value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        if self._part.rates is None:
            self._part.rates = rates
        elif rates != self._part.rates:
            pairs = zip(rates, self._part.rates, strict=False)
            changed = sorted({key for now, was in pairs for key in now if now[key] != was.get(key)}) or ["params"]
            raise Refused(
                f"PrivateTraining: {', '.join(changed)} of the optimizer changed before the step was made, at a "
                "rehearsal of its batch. Advance a scheduler where training.step(losses) returns True, or pass it as "
                "scheduler=; and let no setting depend on the batch."
            )

    def _answers(self, pending: Pending, losses: Tensor) -> tuple[dict[str, Tensor], Summing, Answers]:
        """The sums of a turn, which are secret, and what is compared."""
        turn, tape = pending.turn, pending.tape
        losses = self._of_views(losses, turn.count)
        if pending.numbers.was_seeded:
            raise Refused(
                "PrivateTraining: torch.manual_seed was called inside of the loop. Then anyone can compute the dropout "
                "masks, which depend on an example's place in the batch. Leave it out: inside the loop all random "
                "numbers come from the training's secret key, and a resumed run repeats them."
            )
        _check_unscaled(losses)
        written, changed = pending.seal.changed()
        if written:
            raise Refused(written_into(written))
        changes = {} if turn.state is None else turn.state.changes()
        summing = self._mechanism.summing(self._sampler, self.step_count, turn.count)
        weigh = None if turn.is_batch else summing.weigh
        rows = RowAnswers(weigh) if tape is not None and self._part.rehearsed else None
        part: dict[str, Tensor] = {}
        if tape is not None:
            tape.code.note(("changed", name) for name in changed)
            with _unused_graph():
                part = tape.clipped_sum(
                    losses,
                    self._mechanism.groups(list(tape.parameters)),
                    summing if turn.is_batch else None,
                    merging=summing.merging,
                    may_miss=self._seen if turn.is_batch else tape.parameters,
                    memory_budget=self.memory_budget,
                    observe=None if rows is None else rows.take,
                )
            summing.check_bound()
            otherwise = tape.used_otherwise if isinstance(tape, Tape) else self._padding.keys()
            self._padding = {name: row for name, row in self._padding.items() if name not in otherwise}
            self._seen |= tape.reached  # layers that are left out at random are reached when they are not
        if rows is not None:
            rows.factors = {name: factors.double().cpu() for name, factors in summing.factors.items()}
        end = next_numbers() if self._part.rehearsed else None
        answers = Answers(
            losses=losses.detach().view(turn.count, self.views),
            rows=rows,
            changes=changes,
            later={} if turn.state is None else turn.state.changes(),
            settled=tape is not None and not tape.measured,
            random=end,
            drew=end is not None and self._part.start != end,
            shapes=0 if tape is None else tape.code.shapes,
        )
        return part, summing, answers

    def _is_new(self, pending: Pending) -> bool:
        """Whether the batch took a path through the code that no rehearsal has seen."""
        if self.assume_independent is not None or pending.tape is None:
            return False
        return not self._rehearsed.has(pending.tape.code, self._part.drawn.count)

    def _secret(self, purpose: bytes, *numbers: int) -> bytes:
        """32 bytes that are a function of the secret key and of these numbers."""
        return hashlib.blake2b(purpose + repr(numbers).encode(), key=self._sampler.key, digest_size=32).digest()

    def record(self) -> AbstractContextManager[Any]:
        """Returns a context that records as the model's own forward does, for parameters used outside of it.

        It belongs to the batch just handed out: open it anew for every batch, before ``step``.
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
            return spent(self, check_delta(self, delta))
        if self.delta is None:
            raise ValueError("PrivateTraining.spent: delta=None; pass one below 1/n here or to PrivateTraining.")
        return spent(self, self.delta)

    def declare_stop(self, reason: str) -> None:
        """Declares that training stops for a reason that has nothing to do with the data, such as a time limit.

        The statement then carries the epsilon of the steps made, and prints the reason. Without a declaration it
        carries the epsilon of all planned steps: less does not cover a stop that depends on what was released, such as
        early stopping.

        Raises:
            ValueError: the reason is empty.
        """
        if not str(reason).strip():
            raise ValueError(f"PrivateTraining.declare_stop: reason={reason!r} must say why, in words.")
        self._stop_reason = str(reason)

    def explain(self) -> str:
        """How the step is computed: exact norms, or by which kind of projections; in which subspace."""
        return self._mechanism.explain()

    def profile(self) -> privacy.Profile:
        """Privacy profile of the releases so far."""
        return self.ledger.profile()

    def _planned_profile(self) -> privacy.Profile:
        """Of the releases so far, and of the steps that are still planned."""
        left = self._num_planned - self.step_count
        made = self.ledger.events
        key = repr(made), left
        if self._planned is None or self._planned[0] != key:
            self._planned = key, privacy.compose([*made, (self.event, left)]) if left > 0 else self.profile()
        return self._planned[1]

    def statement(self) -> dict[str, Any]:
        """Everything that determines the guarantee, as plain data for a machine-readable privacy statement."""
        return statement(self)

    def state_dict(self) -> dict[str, Any]:
        """Returns what is needed to go on after a stop: keys of noise and sampler, step, settings and ledger.

        THIS STATE IS SECRET. From the key anyone can compute the noise of every step, past and future, and take it off.
        Keep it readable by the training process alone, and delete it when the run is over. Model, optimizer and
        scheduler have state dicts of their own. Random numbers need none: inside the loop those of torch, numpy and
        Python follow from the key and the step, so that a resumed run repeats dropout and augmentation bit for bit. A
        declared stop is not part of the state.
        """
        return {
            "format": 1,
            "settings": self._settings(),
            "step_count": self.step_count,
            "num_non_finite": self.num_non_finite,
            "moved_otherwise": self._weights_moved_otherwise(),
            "noise_key": self._noise.key.hex(),
            "sampler_key": self._sampler.key.hex(),
            "stop_reason": self._stop_reason,
            "ledger": self.ledger.state_dict(),
            **self._mechanism.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where the state was taken: same keys, same next batches, same noise. The state is secret.

        Steps that the ledger has beyond the state (the run was killed after its last checkpoint) are made again with
        the same batch, dropout, augmentation and noise: the same release, recorded once. That takes the same weights,
        optimizer and losses, and arithmetic that repeats bit for bit; a step that comes out otherwise is refused
        when it is made.

        Raises:
            Refused: the state is of other settings; the ledger on disk is not the state's.
        """
        # states from before these were settings
        early = {"memory_budget": self.memory_budget, "jacobian": repr(None), "prior_releases": [], "views": 1}
        saved = early | state["settings"]
        differing = {key: (value, saved.get(key)) for key, value in self._settings().items() if saved.get(key) != value}
        if differing:
            listed = ", ".join(f"{key}={here!r} (the state has {there!r})" for key, (here, there) in differing.items())
            raise Refused(f"PrivateTraining.load_state_dict: {listed}. A run can only go on with its own settings.")
        self.ledger.load_state_dict(state["ledger"])
        self._set_keys(bytes.fromhex(state["noise_key"]), bytes.fromhex(state["sampler_key"]))
        self._step_count, self._num_non_finite = state["step_count"], state["num_non_finite"]
        self._mechanism.load_state(state)
        self._loops += 1
        self._forget_batch()
        self._weights, self._moved_otherwise = None, state.get("moved_otherwise", "")
        self._stop_reason = state.get("stop_reason")

    def _of_views(self, losses: Tensor, size: int) -> Tensor:
        """The losses (n,), or (n, views), of n examples, checked, as (n · views,)."""
        shape = (size,) if self.views == 1 else (size, self.views)
        of_views = losses.flatten() if self.views > 1 and isinstance(losses, Tensor) and losses.ndim == 2 else losses
        check_losses(of_views)
        if losses.shape != shape:
            words = "one loss per example" if self.views == 1 else "a loss for every view of each example"
            raise Refused(
                f"losses of shape {tuple(losses.shape)} given for a batch of {size} examples: must be {shape}, {words}."
            )
        return of_views

    def _take_census(self) -> Census:
        census = take_census(self.model, self.optimizer, self._attributes)
        check_no_hooks(census.trained)
        return census

    def _forget_batch(self) -> None:
        """Leave the batch that was handed out, if any: nothing of it stays in the model or the random state."""
        if self._pending is not None:
            self._pending.close()
        if self._part is not None:
            self._part.script.close()
        self._pending = self._part = self._turn = None
        self._switch.unwind()

    def _release(self) -> None:
        """Noise onto the sums, the release into the ledger, the private gradient to the optimizer."""
        self._check_unchanged()
        parameters, step = self._census.trained, self.step_count
        release = self._mechanism.complete(self._sums, parameters)
        for name, p in parameters.items():
            assert release.get(name, p).shape == p.shape, f"the sum of {name!r} has the shape of its parameter"
        self._noise.add_to(step, release, self._mechanism.stddevs(release, self.noise_multiplier))
        self._sums = {}
        fingerprint = self._fingerprint(release)
        self._check_noise(step, fingerprint)
        self.ledger.record(self.event, len(self.prior_releases) + step, fingerprint)
        _RELEASED.setdefault(self._noise.key, {})[step] = fingerprint
        self._stop_reason = None  # it was no stop
        self._step_count += 1  # before the release is used: should the update be interrupted, its noise is spent
        self.optimizer.zero_grad(set_to_none=True)
        gradient = self._mechanism.gradient(release)
        for name, p in parameters.items():
            p.grad = gradient[name].to(p.dtype)
            if name in self._padding:  # it has no gradient but noise, with which padding would count
                p.grad[self._padding[name]] = 0
        del release, gradient
        self._update(parameters)
        for p in parameters.values():
            p.grad = None
        if self.scheduler is not None:
            self.scheduler.step()

    def _update(self, parameters: Mapping[str, Tensor]) -> None:
        """The optimizer's step, which must move the weights."""
        self._weights_moved_otherwise()
        if self._weights is None or not self._weights.holds(parameters):
            self._weights = WeightMarks(parameters)
        else:
            self._weights.renew()
        assert self._guard is not None
        self._guard.step(self.optimizer)
        rates = [float(group.get("lr", 1.0)) for group in self.optimizer.param_groups]
        if self._weights.untouched() and any(rates):
            raise Refused(
                f"PrivateTraining: {type(self.optimizer).__name__}.step() made no update, as a wrapper does that "
                "accumulates gradients or skips steps. The release of this step is spent for nothing. Pass the "
                "optimizer itself; for larger batches raise expected_batch_size and set microbatch_size."
            )
        self._weights.renew()

    def _weights_moved_otherwise(self) -> str:
        """When the trained weights were moved other than by the training's own updates; empty if they were not."""
        if self._weights is not None and not self._moved_otherwise:
            moved = self._weights.moved()
            if moved:
                self._moved_otherwise = f"first seen after step {self.step_count}, in {moved[0]!r}"
        return self._moved_otherwise

    def _begin_guard(self) -> None:
        """From now on no step of another's may move the weights."""
        self._end_guard()
        self._guard = OptimizerGuard(weakly(self))
        if self._weights is None:
            self._weights = WeightMarks(self._take_census().trained)

    def _end_guard(self) -> None:
        if self._guard is not None:
            self._guard.close()
        self._guard = None

    def _check_noise(self, step: int, fingerprint: str) -> None:
        """Refuse a release with noise that another has: of a copy of the training, or of a process forked from it."""
        if os.getpid() != self._process:
            raise Refused(
                "PrivateTraining: this process was forked from the one that began the training, which may release the "
                "same steps with the same noise. Make the training, or load its state, in the process that trains."
            )
        before = _RELEASED.get(self._noise.key, {}).get(step, fingerprint)
        if before != fingerprint and self.test_seed is None:
            raise Refused(
                f"PrivateTraining: step {step} was released before with the same noise and other sums, by a copy of "
                "this training or from the same state: the difference of the two would have no noise. Go on with that "
                "one, or begin a new training, with the releases so far as prior_releases."
            )

    def _check_unchanged(self) -> None:
        """Refuse settings that were changed since the start: what is released must be what the ledger will say."""
        event = self._mechanism.event(self.noise_multiplier, self.sampling_probability)
        settings, none = self._mechanism.settings(), repr(None)
        jacobian, perturbation = settings.get("jacobian", none), settings.get("perturbation", none)
        if event != self.event or (jacobian, perturbation) != (repr(self.jacobian), repr(self.perturbation)):
            raise Refused(
                f"PrivateTraining: noise, sampling, jacobian={self.jacobian!r} or perturbation={self.perturbation!r} "
                f"were changed since the start: this step would be {event!r} with jacobian={jacobian}, perturbation="
                f"{perturbation}, and the ledger would say {self.event!r}. Make a new PrivateTraining, with the "
                "releases so far as prior_releases."
            )

    def _set_keys(self, noise_key: bytes | None, sampler_key: bytes | None) -> None:
        """The generators, from the keys given or from the operating system's."""
        self._noise, self._process = Noise(noise_key), os.getpid()
        self._sampler = Poisson(self.num_examples, self.sampling_probability, sampler_key or secrets.token_bytes(32))
        self._indices = lru_cache(maxsize=64)(self._sampler.indices)  # asked for by loader, loop and fingerprint

    def _fingerprint(self, release: Mapping[str, Tensor]) -> str:
        """Tells the step's release from any other without giving it away: keyed digest of step, batch and some entries.

        A replay after a crash has the same fingerprint. The same step with other weights, learning rates or losses
        before it has not, and must not be released: it would have the same noise.
        """
        digest = hashlib.blake2b(
            self._sampler.key + self.step_count.to_bytes(8, "big"), key=self._noise.key, digest_size=8
        )
        digest.update(self._indices(self.step_count).tobytes())
        for total in release.values():
            some = total.view(-1)[:: max(1, total.numel() // 256)]
            digest.update(some.cpu().numpy().tobytes())
        return digest.hexdigest()

    def _parts(self, step: int) -> list[np.ndarray]:
        return list(split(self._indices(step), self.microbatch_size))

    def _draws(self, step: int, end: int) -> Iterator[Draw]:
        for later in range(step, end):
            parts = self._parts(later)
            for number, part in enumerate(parts):
                rehearsed, _ = self._rehearsal_is_due(later, number, len(parts))
                yield Draw(part, self.views, self._secret(b"data", later, number), rehearsed)

    def _num_steps_allowed(self) -> int:
        """Steps in all: as many as planned, or as the budget allows."""
        if self.budget is None:
            return self.num_steps
        released = self.ledger.events
        made = sum(count for _, count in released) - len(self.prior_releases)
        return min(self.num_steps, made + self.budget.remaining(self.event, after=released, most=self.num_steps))

    def _settings(self) -> dict[str, Any]:
        return {
            "num_examples": self.num_examples,
            "expected_batch_size": self.expected_batch_size,
            "num_steps": self.num_steps,
            "views": self.views,
            "noise_multiplier": self.noise_multiplier,
            **self._mechanism.settings(),
            "memory_budget": self.memory_budget,  # chooses the methods, which differ in the last bits
            "prior_releases": [release.fingerprint for release in self.prior_releases],
            "parameters": {name: list(p.shape) for name, p in self._census.trained.items()},
        }


@dataclass
class _Part:
    """A (micro)batch under way."""

    drawn: Drawn
    number: int  # of the microbatch in its step
    is_last: bool
    script: Generator[Turn, Answers, None] = field(default_factory=lambda: _nothing())
    rehearsed: bool = False
    thorough: bool = False  # whether it is rehearsed in full
    rates: list[Any] | None = None  # learning rates when it began
    start: Any = None  # where its random numbers begin, if it is rehearsed


def _check_unscaled(losses: Tensor) -> None:
    """Refuse losses that a GradScaler scaled: by a tensor that holds a large power of two."""
    node = losses.grad_fn
    if node is None or not node.name().startswith("MulBackward"):
        return
    for factor in (getattr(node, "_saved_other", None), getattr(node, "_saved_self", None)):
        if isinstance(factor, Tensor) and factor.ndim == 0 and factor.dtype == torch.float32:
            if factor >= 2**10 and float(factor).hex().startswith("0x1.0000000000000p"):
                raise Refused(
                    f"PrivateTraining: the losses were multiplied by {float(factor):g}, as GradScaler does. Leave the "
                    "scaler out: norms and sums are computed in float32 also under autocast with float16."
                )


def weakly(training: PrivateTraining) -> Any:
    """Gives the trained parameters for as long as the training is there."""
    alive = weakref.ref(training)
    return lambda: {} if alive() is None else alive()._census.trained  # type: ignore[union-attr]


def _nothing() -> Generator[Turn, Answers, None]:
    yield from ()


def _alone(drawn: Drawn) -> Generator[Turn, Answers, None]:
    """A batch that is not rehearsed."""
    yield Turn(drawn.batch, drawn.count, is_batch=True)


@contextmanager
def _unused_graph() -> Iterator[None]:
    """Say what happened where the losses' graph was used up before."""
    try:
        yield
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise Refused(
            "PrivateTraining: the graph of the losses was used up before training.step. Leave out losses.backward(): "
            "step makes the gradient and the update."
        ) from None
