# SPDX-License-Identifier: Apache-2.0
"""Validates PrivateTraining's arguments and builds its mechanism, noise and ledger."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from .. import privacy
from ..jacobian.tape import MEMORY_BUDGET
from ..mechanisms.base import Mechanism
from ..mechanisms.clipping import ClippingRule, Flat
from ..mechanisms.estimated_norms import Sketched
from ..mechanisms.gep import BGEP, GEP
from ..mechanisms.scheduled import Scheduled, unscheduled
from ..privacy.budget_file import new_run
from ..privacy.events.base import WITHOUT_NOISE
from ..privacy.rounding import round_up
from ..sampling.owners import Owners
from ..support.units import ONE_EXAMPLE, plural
from ..support.validate import Refused, plain_numbers, positive, strictly_between, whole
from ..support.warning import warn
from .correlation import Banded, resolved
from .own_noise import StatedNoise
from .sampling import POISSON, WHERE, Sampling, StepPlan, under


@plain_numbers
@dataclass(frozen=True, kw_only=True)
class Performance:
    """Memory and time of a `PrivateTraining`: these settings change no release but by rounding.

    Args:
        microbatch_size: largest number of examples handed out at once, to limit memory; the noise stays the same bit
            for bit, the clipped sum the same up to rounding (with `Sketched` its directions are those of the
            microbatch, of the same law). None hands out whole batches.
        memory_budget: peak memory that a step may take, as a multiple of that of non-private training (up to 100) or in
            bytes; it determines what is kept for the clipped sum.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> Performance(microbatch_size=256, memory_budget=1.5)
        Performance(microbatch_size=256, memory_budget=1.5)
    """

    microbatch_size: int | None = None
    memory_budget: float = MEMORY_BUDGET

    def __post_init__(self) -> None:
        positive("Performance", memory_budget=self.memory_budget)
        if self.microbatch_size is not None:
            whole("Performance", microbatch_size=self.microbatch_size, at_least=1)


USUAL = Performance()  # of a training that gives none


Clipping = ClippingRule | Sketched | GEP | BGEP | Scheduled


@plain_numbers
@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Holds the arguments of a `PrivateTraining` that determine its releases and their price; see there for each.

    ``clipping`` is the rule of the first step; an adaptive rule changes later. ``noise_multiplier`` is None until it is
    calibrated; with an `OwnNoise` it is the standard deviation over the sensitivity. ``views``, ``owners``,
    ``budget`` and ``assume_independent`` are those of `Examples`.

    Raises:
        ValueError: a number is out of range.
    """

    num_examples: int
    expected_batch_size: float
    num_steps: int
    clipping: Clipping | None = None
    noise_multiplier: float | None = None
    own_noise: StatedNoise | None = None
    noise_schedule: tuple[float, ...] | None = None
    target_epsilon: float | None = None
    delta: float | None = None
    budget: privacy.Budget | None = None
    performance: Performance = USUAL
    views: int = 1
    prior_releases: tuple[privacy.Release, ...] = ()
    assume_independent: str | None = None
    after_update: str | None = None  # name of the function that changes the weights after every update
    test_seed: int | None = None
    num_canaries: int = 0  # of an audit; part of ``num_examples``
    owners: Owners | None = None
    sampling: Sampling = POISSON
    correlation: Banded | None = None

    def __post_init__(self) -> None:
        n = self.num_units
        positive(WHERE, expected_batch_size=self.expected_batch_size)
        whole(WHERE, num_steps=self.num_steps, at_least=1)
        if not isinstance(self.performance, Performance):
            raise ValueError(
                f"{WHERE}: performance={self.performance!r} must be a Performance, such as "
                "tp.Performance(microbatch_size=256)."
            )
        if self.expected_batch_size > n:
            units = "examples" if self.owners is None else "owners, which it counts"
            raise ValueError(f"{WHERE}: expected_batch_size={self.expected_batch_size!r} must be at most {n} {units}.")
        if self.sampling.sizes is not None and self.num_canaries:
            raise Refused(f"{WHERE}: sampling=Varying(...) has no audit. Audit a training with tp.Poisson().")
        if self.delta is not None:
            check_delta(n, self.delta, self.unit)
        not_releases = [release for release in self.prior_releases if not isinstance(release, privacy.Release)]
        if not_releases:
            raise ValueError(
                f"{WHERE}: prior_releases holds {not_releases!r}: must be of privacy.Release, as pca.release_ is."
            )
        others = [release.event for release in self.prior_releases if release.event.unit != self.unit]
        if others:
            raise Refused(
                f"{WHERE}: prior_releases holds {others[0]!r}, which protects one {others[0].unit}, and this training "
                f"protects one {self.unit}: their epsilons do not add up. Make that release for every {self.unit} as a "
                f"whole, with the event's unit={self.unit!r}, or leave it out."
            )

    @property
    def unit(self) -> str:
        """Returns the unit of privacy, such as "example" or "customer"."""
        return ONE_EXAMPLE if self.owners is None else self.owners.name

    @property
    def num_units(self) -> int:
        """Returns the number of examples or, with ``owners``, of owners."""
        return self.num_examples if self.owners is None else self.owners.count

    def public_size(self) -> dict[str, int]:
        """Returns the size of the data, for results; with owners their number, as that of examples is private."""
        owners = self.owners
        of_owners = {} if owners is None else {"num_owners": owners.count, "examples_per_owner": owners.per_owner}
        return {"num_examples": self.num_units, **of_owners}

    @property
    def shares_rows(self) -> bool:
        """True if several examples of an owner may share a row."""
        return self.owners is not None and self.owners.per_owner > 1

    @property
    def sampling_probability(self) -> float:
        """Returns q, the probability with which an example, or an owner, joins a batch."""
        return self.expected_batch_size / self.num_units

    @property
    def neighboring_relation(self) -> privacy.NeighboringRelation:
        """Returns zero-out, because q is the batch size divided by the number of units, which is the same for both."""
        return privacy.NeighboringRelation.REPLACE_SPECIAL

    def event(self, mechanism: Mechanism, noise_multiplier: float, step: int) -> privacy.Event:
        """Returns the event of a step with this noise, under the training's neighboring relation."""
        return self.sampling.event(self._of_poisson(mechanism, noise_multiplier), step, self.num_units)

    def _of_poisson(self, mechanism: Mechanism, noise_multiplier: float) -> privacy.Event:
        """Returns the event of a step as if examples were drawn by Poisson sampling."""
        if self.own_noise is not None:
            return self.own_noise.event
        return under(self.neighboring_relation, mechanism.event(noise_multiplier, self.sampling_probability))

    @property
    def prior_events(self) -> list[tuple[privacy.Event, int]]:
        """Returns the events of the prior releases, equal neighbors as one entry."""
        return StepPlan((release.event, 1) for release in self.prior_releases).releases

    @property
    def clip_schedule(self) -> tuple[float, ...] | None:
        """Returns the factor on the bounds of ``clipping`` in every step; None if they stay."""
        return tuple(self.clipping.factors) if isinstance(self.clipping, Scheduled) else None  # type: ignore[arg-type]

    @property
    def unscheduled(self) -> ClippingRule | Sketched | GEP | BGEP | None:
        """Returns the clipping without its schedule."""
        return unscheduled(self.clipping)

    @property
    def not_for_release(self) -> bool:
        """True if the data need no protection, so that epsilon may be large."""
        return isinstance(self.unscheduled, Sketched) and self.unscheduled.not_for_release

    def correlated(self, correlation: Banded, *, shows: bool) -> TrainingSettings:
        """Returns the settings with banded noise, and the batches that it needs."""
        target, prior = (self.target_epsilon, self.delta), self.prior_events
        found, sampling = resolved(correlation, self.sampling_probability, self.num_steps, target, prior, shows=shows)
        return replace(self, correlation=found, sampling=sampling)

    def with_noise(self, mechanism: Mechanism) -> TrainingSettings:
        """Returns the settings with the noise multiplier given, or the smallest that meets the target.

        With the target, all steps and prior releases together spend at most ``target_epsilon`` at ``delta``.
        """
        given, target, delta = self.noise_multiplier, self.target_epsilon, self.delta
        q, steps = self.sampling_probability, self.num_steps
        if (given is None) == (target is None):
            raise ValueError(
                f"{WHERE}: noise_multiplier={given!r} and target_epsilon={target!r}: give exactly one of the two."
            )
        if given is not None:
            positive(WHERE, noise_multiplier=given, hint=WITHOUT_NOISE)
            mechanism.check_price(given, q, steps, delta or 1 / (10 * self.num_units))
            return self
        assert target is not None
        if delta is None:
            raise ValueError(f"{WHERE}: target_epsilon needs delta, a number below 1/n such as 1e-5.")
        exact = privacy.calibrate(target, delta, sampling_probability=q, num_steps=steps)
        mechanism.check_price(exact, q, steps, delta)
        is_plain = not self.prior_releases and self.noise_schedule is None and self.sampling.sizes is None
        if is_plain and isinstance(self.event(mechanism, exact, 0), privacy.SubsampledGaussian):
            return replace(self, noise_multiplier=exact)
        spent = privacy.compose(self.prior_events).epsilon_high(delta)
        if spent >= target:
            raise ValueError(
                f"{WHERE}: target_epsilon={target!r} is spent by prior_releases, which cost {round_up(spent)}. Raise "
                "the target, or add more noise to those."
            )
        noise = privacy.calibrate_schedule(
            lambda noise: [*self.prior_events, *self._plan(mechanism, noise).releases], target, delta, start=exact
        )
        return replace(self, noise_multiplier=noise)

    def noise_at(self, step: int) -> float:
        """Returns the noise multiplier of a step."""
        assert self.noise_multiplier is not None
        return self.noise_multiplier * (1.0 if self.noise_schedule is None else self.noise_schedule[step])

    def size_at(self, step: int) -> float:
        """Returns the mean size of a step's batch over that of all batches."""
        return 1.0 if self.sampling.sizes is None else self.sampling.sizes[step]

    @property
    def largest_noise(self) -> float:
        """Returns the largest noise multiplier of all steps."""
        assert self.noise_multiplier is not None
        return self.noise_multiplier * (1.0 if self.noise_schedule is None else max(self.noise_schedule))

    def plan(self, mechanism: Mechanism) -> StepPlan:
        """Returns the events of all steps; refuses noise that the mechanism cannot use, and events without a price."""
        assert self.noise_multiplier is not None
        plan = self._plan(mechanism, self.noise_multiplier)
        for factor in {1.0} if self.noise_schedule is None else {*self.noise_schedule}:
            mechanism.stddevs([], self.noise_multiplier * factor)  # refuses noise that an adaptive rule cannot split
        privacy.compose([*self.prior_events, *plan.releases])  # refuses events that cannot be priced together
        return plan

    def _plan(self, mechanism: Mechanism, noise_multiplier: float) -> StepPlan:
        if self.noise_schedule is None:
            of_step = self._of_poisson(mechanism, noise_multiplier)
            return StepPlan(self.sampling.releases(of_step, self.num_steps, self.num_units))
        self.sampling.check_schedule(self.noise_schedule, round(1 / self.sampling_probability))
        noise = (noise_multiplier * factor for factor in self.noise_schedule)
        return StepPlan((self.event(mechanism, of_step, step), 1) for step, of_step in enumerate(noise))

    def _schedules(self) -> dict[str, tuple[float, ...]]:
        """Returns the schedules that were given, by name."""
        both = {"noise_schedule": self.noise_schedule, "clip_schedule": self.clip_schedule}
        return {name: factors for name, factors in both.items() if factors is not None}

    def for_resuming(self, mechanism: Mechanism, trained: Mapping[str, Tensor]) -> dict[str, Any]:
        """Returns the settings that a resumed run, and every rank, must share with its state, as plain data."""
        return {
            "num_examples": self.num_examples,
            **({"num_canaries": self.num_canaries} if self.num_canaries else {}),
            "owners": None if self.owners is None else self.owners.fingerprint,
            "expected_batch_size": self.expected_batch_size,
            "num_steps": self.num_steps,
            "views": self.views,
            "sampling": repr(self.sampling),
            "correlation": self._coefficients(),
            "noise_multiplier": self.noise_multiplier,
            "own_noise": None if self.own_noise is None else self.own_noise.name,
            **mechanism.settings(),
            **{name: _digest(factors) for name, factors in self._schedules().items()},
            "memory_budget": self.performance.memory_budget,  # determines the methods, which differ in the last bits
            "prior_releases": [release.fingerprint for release in self.prior_releases],
            "after_update": self.after_update,
            "parameters": shapes_of(trained),
        }

    def _coefficients(self) -> list[float] | None:
        if self.correlation is None:
            return None
        return list(self.correlation.coefficients(self.num_steps, self.sampling_probability))

    def ways(self) -> dict[str, Any]:
        """Returns the settings of estimated norms and of embedded gradients, by the names that run folders have."""
        way = self.unscheduled
        sketched = way.projections.in_states if isinstance(way, Sketched) else None
        return {"jacobian": sketched, "perturbation": way if isinstance(way, (GEP, BGEP)) else None}

    def recorded(self) -> dict[str, Any]:
        """Returns all settings by the names that run folders have had from the start."""
        way = self.unscheduled
        rule = Flat(way.clip_norm) if isinstance(way, Sketched) else None if isinstance(way, (GEP, BGEP)) else way
        return {
            "num_examples": self.num_examples,
            "expected_batch_size": self.expected_batch_size,
            "num_steps": self.num_steps,
            "sampling": self.sampling,
            "correlation": self.correlation,
            "clipping": rule,
            "noise_multiplier": self.noise_multiplier,
            **({} if self.own_noise is None else {"own_noise": self.own_noise.name}),
            "noise_schedule": self.noise_schedule,
            "clip_schedule": self.clip_schedule,
            "target_epsilon": self.target_epsilon,
            "delta": self.delta,
            "budget": None if self.budget is None else privacy.Budget(self.budget.epsilon, self.budget.delta),
            "microbatch_size": self.performance.microbatch_size,
            "views": self.views,
            "memory_budget": self.performance.memory_budget,
            **self.ways(),
            "prior_releases": self.prior_releases,
            "not_for_release": self.not_for_release,
            "assume_independent": self.assume_independent,
            "after_update": self.after_update,
            "test_seed": self.test_seed,
            "num_canaries": self.num_canaries,
            "owners": self.owners,
        }


def shapes_of(trained: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Returns the shapes of trained parameters by name, as plain data."""
    return {name: list(p.shape) for name, p in trained.items()}


def _digest(factors: tuple[float, ...]) -> str:
    return hashlib.sha256(np.array(factors, dtype="<f8").tobytes()).hexdigest()


def check_delta(num_units: int, delta: float, unit: str = ONE_EXAMPLE) -> float:
    """Returns ``delta`` if it is below 1/n; warns if it is above 1/(10 n). n counts examples, or owners."""
    n = num_units
    hint = f"It must be below 1/n for the {n} {plural(unit)}; 1 / (10 n) or less is usual."
    strictly_between("PrivateTraining", 0, 1 / n, delta=delta, hint=hint)
    if delta > 1 / (10 * n) * (1 + 1e-9):
        warn(
            f"delta={delta!r} is close to 1/n for the {n} {plural(unit)}: with that probability everything about some "
            f"{unit} may be revealed. Take 1 / (10 n) = {1 / (10 * n):.2g} or less."
        )
    return delta


def open_ledger(run_folder: Path | str | None, settings: TrainingSettings) -> privacy.Ledger:
    """Returns the run's ledger, loaded from its folder or new, with the prior releases first."""
    purpose = "audit" if settings.num_canaries else ""
    path = None if run_folder is None else Path(run_folder) / "ledger.jsonl"
    run = new_run() if isinstance(settings.budget, privacy.DataBudget) else ""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    ledger = privacy.Ledger.load(path) if path is not None and path.exists() else privacy.Ledger(path, purpose, run)
    if ledger.purpose != purpose:
        raise Refused(
            f"{WHERE}: the ledger {str(path)!r} is that of an {ledger.purpose or 'ordinary training'}, and this is an "
            f"{purpose or 'ordinary training'}. Give each a run folder of its own."
        )
    for step, release in enumerate(settings.prior_releases):
        ledger.record(release.event, step, release.fingerprint)
    return ledger


def check_scheduler(scheduler: Any) -> None:
    """Refuses a scheduler that needs a loss at every step."""
    if scheduler is None:
        return
    needed = [
        name
        for name, parameter in inspect.signature(scheduler.step).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise Refused(
            f"{WHERE}: scheduler={type(scheduler).__name__} needs {', '.join(needed)} at every step. A loss or an "
            "accuracy on the training data is private, and no noise is added to it. Use a schedule that depends on the "
            "step alone, such as CosineAnnealingLR; or call the scheduler yourself, with a score on public data."
        )
