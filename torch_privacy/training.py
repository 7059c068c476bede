# SPDX-License-Identifier: Apache-2.0
"""Private training: the only place that joins tape, clipping, noise, sampling and ledger; so they cannot disagree."""

from __future__ import annotations

import hashlib
import math
import platform
import secrets
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from . import __version__, privacy
from ._batches import Batches, Collate, split
from ._check import Refused, positive, strictly_between, whole
from ._divisor import Divisors
from ._graph import Graph
from ._layout import Layouts, Merging
from ._model import Seal, check_model, take_census
from ._tape import MEMORY_BUDGET, Tape, check_losses
from .clipping import Adaptive, ClippingRule, MicroBatches
from .noise import Noise, key_from_test_seed
from .sampling import Poisson
from .sketched import Directions, Sketch, Sketched, Sketching, check_price, check_rule

NOT_PRIVATE = "NOT PRIVATE (test_seed fixes noise and batches, so anyone can take the noise off)"
NOT_FOR_RELEASE = "NOT PRIVATE (made with not_for_release=True, on data that need no protection)"


@dataclass(frozen=True)
class Spent:
    """Privacy spent so far; prints as one line.

    ``epsilon`` is a certified bracket (low, high) at ``delta``; ``epsilon.high`` is the one to report.
    """

    epsilon: privacy.Bracket
    delta: float
    text: str

    def __str__(self) -> str:
        return self.text


COUNT = "the count of examples within the clip norm"  # beside the parameters' names, which have no spaces


@dataclass
class _Pending:
    """The (micro)batch that was handed out and whose losses are awaited."""

    size: int
    last: bool
    tape: Tape | Sketch
    seal: Seal


class PrivateTraining:
    """Trains a model with differential privacy: Poisson batches, per-example clipping, Gaussian noise, a ledger.

    One step is ``grad = (Σᵢ cᵢ gᵢ + noise_multiplier·sensitivity·z) / expected_batch_size`` over the examples i of a
    Poisson batch, with gᵢ the gradient of example i's own loss, cᵢ the clipping rule's factor and z standard normal;
    then ``optimizer.step()``. Model, optimizer and schedulers are the user's own and stay as they are.

    Args:
        model: any module whose trained parameters meet ops with an exact rule (else refused by name).
        optimizer: any torch optimizer over parameters of the model; those it holds that require a gradient are trained.
        dataset: map-style; one item is one example, the unit that is protected. Its size counts as public.
        expected_batch_size: q·n, the mean size of the Poisson batches and the divisor of every step.
        num_steps: number of steps (releases) in all.
        clipping: rule that bounds each per-example gradient, such as ``Flat(clip_norm=1.0)``.
        noise_multiplier: noise standard deviation over sensitivity; or give ``target_epsilon``.
        target_epsilon: calibrates the noise multiplier so that all ``num_steps`` spend at most this at ``delta``.
        delta: for ``target_epsilon`` and ``spent()``; must be below 1/n.
        budget: ``privacy.Budget(epsilon, delta)`` at which training stops by itself: before the step that would exceed
            it, should that come before ``num_steps``.
        memory_budget: peak memory that a step may take, in units of what non-private training needs (up to 100) or in
            bytes: what is kept for the clipped sum is chosen accordingly.
        microbatch_size: largest number of examples handed out at once (memory); the noise stays the same bit for bit,
            the clipped sum the same up to rounding.
        jacobian: ``Sketched(num_projections)`` for models that the tape refuses: norms are estimated by random
            projections, which costs epsilon. By default norms are exact.
        prior_releases: what was released of the same data before and is used here, such as ``[pca.release_]`` of a
            `PrivatePCA` in front of the model: first in the ledger, and part of every epsilon.
        not_for_release: lets ``Sketched`` have fewer than 16 projections; every statement then says NOT PRIVATE.
        collate_fn: as of ``torch.utils.data.DataLoader``; must not mix examples.
        num_workers: processes that fetch examples, as of ``DataLoader``.
        scheduler: learning-rate scheduler to advance after every step, empty batches included. One that the user's
            loop advances works as well, but sees no empty batches.
        run_folder: folder for the ledger (``ledger.jsonl``). Every release has reached the operating system before it
            is used, so that it survives ``kill -9``; it reaches the disk itself within a second or so.
        test_seed: fixes noise and batches, for tests only; every statement then says NOT PRIVATE.

    Guarantees:
        - What reaches the optimizer is a function of noisy sums only, each recorded in the ledger before it is used.
        - One example changes the sum before the noise by at most ``clipping.sensitivity``.
        - The divisor is the expected batch size, whatever the size of the batch.
        - An empty batch makes a step of noise alone; the loop does not see it.
        - Before the first releases the engine proves itself on the user's own batches: the sum of all rows equals the
          native gradient, two random rows equal backwards of their own, no example's loss depends on another's.
        - Anything outside of what can be guaranteed raises ``Refused`` before anything is released.

    Edge cases:
        An example whose gradient is not finite is left out of the sum, and so is every example of a micro-batch whose
        mean is not finite; with groups of parameters, out of the groups concerned. ``num_non_finite`` is the number of
        examples left out so far, of any group. It is an exact count of private data: secret, as is the batch size.

        The model is handed floating-point inputs that require a gradient, so that couplings show. What torch refuses
        for such tensors, as ``x.numpy()``, a forward asks of ``x.detach()``.

    Raises:
        Refused: BatchNorm in training mode, parameters of the optimizer that are not the model's, a loader in place
            of a dataset, ...; the message names the culprit and the cure.
        ValueError: a number out of range.

    Source: Abadi et al. (2016), Algorithm 1; Poisson sampling and step counts as the accountant prices them.

    Example:
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
        clipping: ClippingRule,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        delta: float | None = None,
        budget: privacy.Budget | None = None,
        microbatch_size: int | None = None,
        memory_budget: float = MEMORY_BUDGET,
        jacobian: Sketched | None = None,
        prior_releases: Sequence[privacy.Release] = (),
        not_for_release: bool = False,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        scheduler: LRScheduler | None = None,
        run_folder: Path | str | None = None,
        test_seed: int | None = None,
    ):
        where = "PrivateTraining"
        self._batches = Batches(dataset, collate_fn, num_workers)
        self.num_examples = len(dataset)  # type: ignore[arg-type]
        positive(where, expected_batch_size=expected_batch_size)
        whole(where, num_steps=num_steps, at_least=1)
        whole(where, num_workers=num_workers)
        if microbatch_size is not None:
            whole(where, microbatch_size=microbatch_size, at_least=1)
        if expected_batch_size > self.num_examples:
            raise ValueError(
                f"{where}: expected_batch_size={expected_batch_size!r} must be at most {self.num_examples} examples."
            )
        if delta is not None:
            hint = f"It must be below 1/n for the {self.num_examples} examples; 1 / (10 n) or less is usual."
            strictly_between(where, 0, 1 / self.num_examples, delta=delta, hint=hint)
        if not isinstance(clipping, ClippingRule):
            raise ValueError(f"{where}: clipping={clipping!r} must be a clipping rule such as Flat(clip_norm=1.0).")
        positive(where, memory_budget=memory_budget)
        if jacobian is not None:
            check_rule(clipping)
        if isinstance(clipping, MicroBatches) and microbatch_size is not None:
            raise ValueError(
                f"{where}: microbatch_size={microbatch_size!r} would cut through the groups of {clipping!r}. Leave it "
                "out."
            )
        check_model(model, optimizer)
        self._census = take_census(model, optimizer)
        self.model, self.optimizer, self.delta = model, optimizer, delta
        self.clipping = clipping.bind(list(self._census.trained))  # the rule of the next step
        self._planned_clipping = self.clipping
        self.memory_budget = memory_budget
        self.jacobian, self.not_for_release = jacobian, not_for_release
        self.prior_releases = tuple(prior_releases)
        if strangers := [release for release in self.prior_releases if not isinstance(release, privacy.Release)]:
            raise ValueError(
                f"{where}: prior_releases holds {strangers!r}; it takes privacy.Release, as pca.release_ is."
            )
        self._sketching = None if jacobian is None else Sketching(jacobian)
        self.expected_batch_size, self.num_steps = expected_batch_size, num_steps
        self.microbatch_size = microbatch_size
        self.scheduler = scheduler
        self.step_count = 0
        self.num_non_finite = 0  # secret: examples left out so far
        self.test_seed = test_seed
        keys = {} if test_seed is None else {p: key_from_test_seed(test_seed, p) for p in ("noise", "sampling")}
        self.sampling_probability = expected_batch_size / self.num_examples
        self._set_keys(keys.get("noise"), keys.get("sampling"))
        self.noise_multiplier = self._choose_noise(noise_multiplier, target_epsilon)
        self.target_epsilon = target_epsilon
        self.event = self._event(self.noise_multiplier)
        self._noise_stddev()  # refuses noise that an adaptive rule cannot split
        privacy.compose([*self._prior(), (self.event, self.num_steps)])  # refuses what cannot be priced together
        self.ledger = _open_ledger(run_folder)
        for step, release in enumerate(self.prior_releases):
            self.ledger.record(release.event, step, release.fingerprint)
        self.budget = budget
        if not self._num_steps_allowed():
            raise Refused(f"{where}: {budget!r} does not allow one step of {self.event!r}. Raise noise or budget.")
        self._layouts = Layouts()
        self._divisors = Divisors()
        self._seen: set[str] = set()  # parameters that some batch's losses reached: later ones may miss them
        self._pending: _Pending | None = None
        self._clipped_sum: dict[str, Tensor] = {}
        self._loops = 0  # iterations begun; only the latest may go on
        self._switch = _Switch(self)
        # First of the hooks before the forward and last of those behind, so that the model's own hooks are seen, too.
        model.register_forward_pre_hook(self._switch.before, with_kwargs=True, prepend=True)
        model.register_forward_hook(self._switch.after, always_call=True)

    def __len__(self) -> int:
        """Number of steps in all."""
        return self.num_steps

    def __iter__(self) -> Iterator[Any]:
        """(Micro)batches from the next step to the last; each must be answered by ``step(losses)``.

        After ``break`` or an exception, iterating anew begins with the first microbatch of the step that was not done.
        """
        self._loops += 1
        loop = self._loops
        self._forget_batch()
        num_steps = self._num_steps_allowed()
        batches = self._batches(self._parts_between(self.step_count, num_steps))
        while self.step_count < num_steps:
            self._clipped_sum = {}
            parts = self._parts(self.step_count)
            for i, part in enumerate(parts):
                batch = next(batches)
                self._census = take_census(self.model, self.optimizer)
                tape = self._tape(i, len(part))
                seal = Seal(self._census, content=not (self._sketching or self._layouts).settled)
                self._pending = _Pending(len(part), i == len(parts) - 1, tape, seal)
                yield batch
                if self._loops != loop:
                    raise Refused(
                        "this loop over the training was left behind by a newer loop. Go on with the newer one."
                    )
                if self._pending is not None:
                    raise Refused("the loop went on without training.step(losses) for its batch. Call it once a batch.")
            if not parts:
                self._census = take_census(self.model, self.optimizer)
                self._release()

    def step(self, losses: Tensor) -> bool:
        """Clip and sum the batch's per-example gradients; after the last microbatch add noise, record, and update.

        Args:
            losses: (n,) one loss per example of the batch just handed out (``reduction="none"``).

        Returns:
            Whether the model was updated (False after all but the last microbatch of a step).

        Raises:
            Refused: a scalar, the losses of another batch, an op without an exact rule, examples that depend on each
                other, ...; nothing was released, and the step can be tried again by iterating anew.
        """
        pending = self._pending
        if pending is None:
            raise Refused("training.step was called without a batch. Call it once per batch of `for ... in training`.")
        self._switch.unwind()
        check_losses(losses)
        if len(losses) != pending.size:
            raise Refused(
                f"losses of shape {tuple(losses.shape)} given for a batch of {pending.size} examples: must be "
                f"({pending.size},), one loss per example."
            )
        pending.seal.check(take_census(self.model, self.optimizer))
        graph = Graph(losses)
        self._divisors.check(pending.size, pending.tape.nodes_before_calls(graph))
        clipped, merging = _Clipped(self.clipping), self._merging(pending.size)
        part = pending.tape.clipped_sum(
            losses,
            self.clipping.groups(list(pending.tape.parameters)),
            clipped,
            merging=merging,
            may_miss=self._seen,
            memory_budget=self.memory_budget,
            graph=graph,
        )
        self._seen |= set(pending.tape.parameters)
        self.num_non_finite += clipped.num_left_out(merging)
        part |= clipped.count
        for name, tensor in part.items():
            self._clipped_sum[name] = self._clipped_sum[name].add_(tensor) if name in self._clipped_sum else tensor
        self._pending = None
        if pending.last:
            self._release()
        return pending.last

    def _tape(self, part: int, size: int) -> Tape | Sketch:
        """What watches the forward on the next microbatch."""
        if self._sketching is None:
            return Tape(self._census.trained, self._census.others.values(), self._layouts, size)
        directions = Directions(self._noise.key, self.step_count, part)
        return Sketch(self._sketching, self._census.trained, directions)

    def record(self) -> Tape | Sketch:
        """Context that records like the model's own forward, for parameters used outside of ``model(...)``."""
        if self._pending is None:
            raise Refused("training.record() needs a batch. Use it inside `for ... in training`, before training.step.")
        return self._pending.tape

    def spent(self, delta: float | None = None) -> Spent:
        """Privacy spent by the releases so far, at ``delta`` (by default the one given at the start)."""
        delta = self.delta if delta is None else delta
        if delta is None:
            raise ValueError("PrivateTraining.spent: delta=None; pass one below 1/n here or to PrivateTraining.")
        profile = self.profile()
        text = profile.statement(delta)
        return Spent(profile.epsilon(delta), delta, text if self._warning is None else f"{self._warning}: {text}")

    def explain(self) -> str:
        """How norms are found: by which kind of projections, and why not by faster ones; or exactly."""
        return "exact norms by the tape" if self._sketching is None else self._sketching.explain()

    @property
    def _warning(self) -> str | None:
        """Why there is no privacy, if there is none."""
        if self.test_seed is not None:
            return NOT_PRIVATE
        if self.not_for_release:
            return NOT_FOR_RELEASE
        return next((release.warning for release in self.prior_releases if release.warning), None)

    def profile(self) -> privacy.Profile:
        """Privacy profile of the releases so far."""
        return self.ledger.profile()

    def statement(self) -> dict[str, Any]:
        """Everything that determines the guarantee, as plain data for a machine-readable privacy statement."""
        return {
            "format": 1,
            "private": self._warning is None,
            **({} if self._warning is None else {"warning": self._warning}),
            "neighboring_relation": self.event.neighboring_relation.value,
            "sampler": self._sampler.name,
            "unit": "one item of the dataset",
            "num_examples": self.num_examples,
            "expected_batch_size": self.expected_batch_size,
            "sampling_probability": self.sampling_probability,
            "num_steps_planned": self.num_steps,
            "clipping": self.clipping.statement(),
            "sensitivity": self.clipping.sensitivity(self.event.neighboring_relation),
            "noise_multiplier": self.noise_multiplier,
            "noise": "Gaussian, float32, AES-256-CTR keyed by the operating system, Box-Muller",
            "target_epsilon": self.target_epsilon,
            "budget": None if self.budget is None else {"epsilon": self.budget.epsilon, "delta": self.budget.delta},
            "delta": self.delta,
            "epsilon": self._epsilon_as_json(),
            "releases": [
                {"event": privacy.event_to_dict(event), "count": count} for event, count in self.ledger.events
            ],
            "treated_as_public": ["num_examples", "model architecture", "hyper-parameters", "number of steps"],
            "not_covered": [
                "losses, accuracies and counts computed on the training data and shown or logged without noise",
                "the choice of hyper-parameters by looking at this data",
                "the test data, on which accuracy is measured",
            ],
            "versions": {
                "torch_privacy": __version__,
                "torch": torch.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
        }

    def _epsilon_as_json(self) -> dict[str, float | None] | None:
        """The bracket at the given delta; null stands for infinity."""
        if self.delta is None:
            return None
        bracket = self.profile().epsilon(self.delta)._asdict()
        return {side: value if math.isfinite(value) else None for side, value in bracket.items()}

    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on after a stop: keys of noise and sampler, step, settings and ledger.

        THIS STATE IS SECRET. From the key anyone can compute the noise of every step, past and future, and take it off.
        Keep it readable by the training process alone, and delete it when the run is over. Model, optimizer and
        scheduler have state dicts of their own.
        """
        return {
            "format": 1,
            "settings": self._settings(),
            "step_count": self.step_count,
            "num_non_finite": self.num_non_finite,
            "clipping": self.clipping.statement(),
            "projections": None if self._sketching is None else self._sketching.way,
            "noise_key": self._noise.key.hex(),
            "sampler_key": self._sampler.key.hex(),
            "ledger": self.ledger.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken: same keys, same next batches, same noise. The state is secret.

        Steps that the ledger has beyond the state (the run was killed after its last checkpoint) are made again with
        the same batch and the same noise: the same release, recorded once. That takes the same weights, optimizer and
        losses, and arithmetic that repeats bit for bit; a step that comes out otherwise is refused when it is made.

        Raises:
            Refused: the state is of other settings; the ledger on disk is not the state's.
        """
        # states from before these were settings
        early = {"memory_budget": self.memory_budget, "jacobian": repr(None), "prior_releases": []}
        saved = early | state["settings"]
        differing = {key: (value, saved.get(key)) for key, value in self._settings().items() if saved.get(key) != value}
        if differing:
            listed = ", ".join(f"{key}={here!r} (the state has {there!r})" for key, (here, there) in differing.items())
            raise Refused(f"PrivateTraining.load_state_dict: {listed}. A run can only go on with its own settings.")
        self.ledger.load_state_dict(state["ledger"])
        self._set_keys(bytes.fromhex(state["noise_key"]), bytes.fromhex(state["sampler_key"]))
        self.step_count, self.num_non_finite = state["step_count"], state["num_non_finite"]
        if isinstance(self.clipping, Adaptive):
            self.clipping = replace(self.clipping, clip_norm=state["clipping"]["clip_norm"])
        if self._sketching is not None:
            self._sketching.way = state["projections"]
        self._loops += 1
        self._forget_batch()

    def _forget_batch(self) -> None:
        self._pending = None
        self._switch.unwind()

    def _release(self) -> None:
        """Noise onto the clipped sum, the release into the ledger, the private gradient to the optimizer."""
        parameters = self._census.trained
        stddev, count_stddev = self._noise_stddev()
        private_sum = {name: self._sum_of(name, p) for name, p in parameters.items()}
        if isinstance(self.clipping, Adaptive):  # on the scale at which the same noise fits it
            private_sum[COUNT] = self._clipped_sum.get(COUNT, torch.zeros(1)) * (stddev / count_stddev)
        self._noise.add_to(self.step_count, private_sum, stddev)
        self._clipped_sum = {}
        number = len(self.prior_releases) + self.step_count
        self.ledger.record(self.event, number, self._fingerprint(private_sum))
        self.step_count += 1  # before the release is used: should the update be interrupted, its noise is spent
        self.optimizer.zero_grad(set_to_none=True)
        for name, p in parameters.items():
            p.grad = private_sum[name].div_(self.clipping.divisor(self.expected_batch_size)).to(p.dtype)
        if isinstance(self.clipping, Adaptive):
            count = float(private_sum[COUNT]) * count_stddev / stddev
            self.clipping = self.clipping.updated(count, self.expected_batch_size)
        self.optimizer.step()
        for p in parameters.values():
            p.grad = None
        if self.scheduler is not None:
            self.scheduler.step()

    def _noise_stddev(self) -> tuple[float, float]:
        """Standard deviations of the noise of the clipped sum, and of an adaptive rule's count."""
        relation = self.event.neighboring_relation
        if isinstance(self.clipping, Adaptive):
            split = self.clipping.split(self.noise_multiplier, self.expected_batch_size, relation)
            return split.gradient_noise_multiplier * self.clipping.sensitivity(relation), split.count_noise_stddev
        return self.noise_multiplier * self.clipping.sensitivity(relation), 0.0

    def _merging(self, size: int) -> Merging | None:
        """Which group of a micro-batch rule each example of the step joins: drawn by the sampler's key, data unseen."""
        if not isinstance(self.clipping, MicroBatches):
            return None
        count = self.clipping.num_groups(self.expected_batch_size)
        return Merging(torch.from_numpy(self._sampler.groups(self.step_count, size, count)), count)

    def _sum_of(self, name: str, p: Tensor) -> Tensor:
        """The clipped sum in a parameter; zero after an empty batch."""
        if name in self._clipped_sum:
            return self._clipped_sum[name].contiguous()
        return torch.zeros(p.shape, dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)

    def _set_keys(self, noise_key: bytes | None, sampler_key: bytes | None) -> None:
        """The generators, from the keys given or from the operating system's."""
        self._noise = Noise(noise_key)
        self._sampler = Poisson(self.num_examples, self.sampling_probability, sampler_key or secrets.token_bytes(32))
        self._indices = lru_cache(maxsize=64)(self._sampler.indices)  # asked for by loader, loop and fingerprint

    def _fingerprint(self, private_sum: Mapping[str, Tensor]) -> str:
        """Tells the step's release from any other without giving it away: keyed digest of step, batch and some entries.

        A replay after a crash has the same fingerprint. The same step with other weights, learning rates or losses
        before it has not, and must not be released: it would have the same noise.
        """
        digest = hashlib.blake2b(
            self._sampler.key + self.step_count.to_bytes(8, "big"), key=self._noise.key, digest_size=8
        )
        digest.update(self._indices(self.step_count).tobytes())
        for total in private_sum.values():
            some = total.view(-1)[:: max(1, total.numel() // 256)]
            digest.update(some.cpu().numpy().tobytes())
        return digest.hexdigest()

    def _parts(self, step: int) -> list[np.ndarray]:
        return list(split(self._indices(step), self.microbatch_size))

    def _parts_between(self, step: int, end: int) -> Iterator[np.ndarray]:
        for later in range(step, end):
            yield from self._parts(later)

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
            "noise_multiplier": self.noise_multiplier,
            "clipping": repr(self._planned_clipping),
            "memory_budget": self.memory_budget,  # chooses the methods, which differ in the last bits
            "jacobian": repr(self.jacobian),
            "prior_releases": [release.fingerprint for release in self.prior_releases],
            "parameters": {name: list(p.shape) for name, p in self._census.trained.items()},
        }

    def _event(self, noise_multiplier: float) -> privacy.SubsampledGaussian | privacy.SubsampledJL:
        """What one step releases."""
        if self.jacobian is None:
            return privacy.SubsampledGaussian(noise_multiplier, self.sampling_probability)
        return self.jacobian.event(noise_multiplier, self.sampling_probability)

    def _choose_noise(self, noise_multiplier: float | None, target_epsilon: float | None) -> float:
        if (noise_multiplier is None) == (target_epsilon is None):
            raise ValueError(
                f"PrivateTraining: noise_multiplier={noise_multiplier!r} and target_epsilon={target_epsilon!r}: "
                "give exactly one of the two."
            )
        if noise_multiplier is not None:
            positive("PrivateTraining", noise_multiplier=noise_multiplier)
            self._check_price(noise_multiplier)
            return noise_multiplier
        if self.delta is None:
            raise ValueError("PrivateTraining: target_epsilon needs delta, a number below 1/n such as 1e-5.")
        assert target_epsilon is not None
        exact = privacy.calibrate(
            target_epsilon, self.delta, sampling_probability=self.sampling_probability, num_steps=self.num_steps
        )
        self._check_price(exact)
        if self.jacobian is None and not self.prior_releases:
            return exact
        prior = privacy.compose(self._prior()).epsilon_high(self.delta)
        if prior >= target_epsilon:
            raise ValueError(
                f"PrivateTraining: target_epsilon={target_epsilon!r} is spent by prior_releases, which cost "
                f"{prior:.4g}. Ask for more, or put more noise into those."
            )
        return privacy.calibrate_schedule(
            lambda noise: [*self._prior(), (self._event(noise), self.num_steps)],
            target_epsilon,
            self.delta,
            start=exact,
        )

    def _prior(self) -> list[tuple[privacy.Event, int]]:
        """The prior releases, as the accountant takes them."""
        return [(release.event, 1) for release in self.prior_releases]

    def _check_price(self, noise_multiplier: float) -> None:
        if self.jacobian is not None and not self.not_for_release:
            event = self.jacobian.event(noise_multiplier, self.sampling_probability)
            check_price(event, self.num_steps, self.delta or 1 / (10 * self.num_examples))


class _Clipped:
    """Clips one group of parameters after the other, and counts what the rule and the training must know."""

    def __init__(self, rule: ClippingRule):
        self._rule = rule
        self._non_finite: set[int] = set()
        self.count: dict[str, Tensor] = {}

    def num_left_out(self, merging: Merging | None) -> int:
        """Examples whose row, or that of their micro-batch, was left out of any group of parameters: not finite."""
        if merging is None:
            return len(self._non_finite)
        return int(torch.isin(merging.assignment, torch.tensor(sorted(self._non_finite))).sum())

    @torch.no_grad()
    def __call__(self, jacobian: Any, group: str) -> dict[str, Tensor]:
        norms = jacobian.squared_norms().sqrt()
        if isinstance(self._rule, Adaptive):
            self.count[COUNT] = self._rule.count(norms).reshape(1).cpu()
        finite = norms.isfinite()
        if not finite.all():
            self._non_finite.update((~finite).nonzero().flatten().tolist())
            kept = finite.nonzero().flatten()
            jacobian, norms = jacobian.select(kept), norms[kept]
        return jacobian.weighted_sum(self._rule.factors(norms, group))


class _Switch:
    """Turns the tape on while the model's forward runs on a batch that was handed out, and off again.

    It holds the training weakly and is empty in copies of the model, so that a copied or pickled model is an ordinary
    one, and evaluation between steps runs untouched.
    """

    def __init__(self, training: PrivateTraining | None = None):
        self._training = weakref.ref(training) if training is not None else lambda: None
        self._active: list[Tape | Sketch | None] = []  # one for every forward under way; None where it runs untouched

    def __deepcopy__(self, memo: dict) -> _Switch:
        return _Switch()

    def __reduce__(self) -> tuple:
        return _Switch, ()

    def before(self, model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        training = self._training()
        if training is None or training._pending is None or not torch.is_grad_enabled():
            self._active.append(None)
            return None
        tape = training._pending.tape
        probed = tape.probe(args), tape.probe(kwargs)  # on every batch: a resumed run must see the same graph
        self._active.append(tape)
        if isinstance(tape, Sketch):
            tape.begin(model, *probed)
        else:
            tape.__enter__()
        return probed

    def after(self, model: nn.Module, args: tuple, output: Any) -> None:
        tape = self._active.pop() if self._active else None
        if isinstance(tape, Sketch):
            tape.end(output)
        elif tape is not None:
            tape.__exit__(None, None, None)

    def unwind(self) -> None:
        """Turn off what a forward left on that never came to its end, as after Ctrl-C."""
        while self._active:
            self.after(nn.Identity(), (), None)


def _open_ledger(run_folder: Path | str | None) -> privacy.Ledger:
    if run_folder is None:
        return privacy.Ledger()
    path = Path(run_folder) / "ledger.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    return privacy.Ledger.load(path) if path.exists() else privacy.Ledger(path)
