# SPDX-License-Identifier: Apache-2.0
"""Provides the setting ``correlation``: noise of a step that takes back part of the noise of steps before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from .. import privacy
from ..mechanisms.clipping import Adaptive
from ..mechanisms.estimated_norms import Sketched
from ..mechanisms.gep import BGEP, GEP
from ..mechanisms.scheduled import Scheduled
from ..privacy.rounding import round_up
from ..sampling.samplers import CyclicSampler, Sampler
from ..support.validate import Refused, one_of, plain_numbers, whole
from .sampling import Sampling

WHERE = "PrivateTraining"
BEST = "best"


@plain_numbers
@dataclass(frozen=True, repr=False)
class Banded:
    """Noise that is correlated over ``bands`` steps, so that weights, which sum up steps, get less noise.

    The noise of step t is ``x_t = (z_t - Σ_j c_j x_{t-j}) / c_0``, with z_t independent and c of norm 1. Every example
    has a class, drawn once, and may join one step in ``bands``, with probability ``bands`` times q, so that sampling
    amplifies less: more bands need a larger noise multiplier, and correlate more. `table` shows what wins. It is for
    SGD: Adam divides by the noise of single steps, and lost accuracy where it was measured (docs/sampling.md).

    Args:
        bands: b, at least 1; q b is at most 1, but for ``inverse``. "best" takes the power of two with the least error
            at the target.
        order: "cyclic" draws batches at random within a class. "fixed" draws nothing: an example's batch is its place
            in the data set modulo the number of batches in an epoch, which is at least ``bands`` and whole.
        inverse: True, in fixed order, for noise ``x_t = w_0 z_t + ... + w_{b-1} z_{t-b+1}``: nothing is kept between
            steps, and each draws b numbers for a parameter.
        momentum, weight_decay, average, learning_rates: of the optimizer, for which the coefficients are chosen:
            momentum of SGD, learning rate times weight decay, the decay of an average of the weights, and the rate of
            each step (a function or a sequence; None for equal ones). They change the accuracy, and no price. Rates
            count in trainings of up to 1200 steps.
            ``average`` is a number for an exponential moving average, or a function of the step 0, 1, ...:
            ``lambda t: min(decay, (1 + t) / (10 + t))`` for `MovingAverage`, ``lambda t: t / (t + 1)`` for the mean of
            all weights, as ``torch.optim.swa_utils.AveragedModel`` makes it.

    Guarantees:
        - Steps are priced as `privacy.BandedGaussian`, wherever the training stops.
        - Momentum, schedules and averages of the optimizer are post-processing.

    Raises:
        ValueError: a number is out of range.

    Source: Choquette-Choo et al. (2023), arXiv:2306.08153; coefficients as `privacy.best_coefficients`.

    Example:
        >>> print(Banded("best").table(2.0, 1e-5, sampling_probability=0.01, num_steps=1000))
        bands  noise multiplier  error of the weights  against 1 band
            1            0.9591                 21.46           1.000
            2            1.1854                 18.87           0.879
            4            1.5288                 17.48           0.814
            8            2.0385                 17.03           0.793
           16            2.7852                 17.49           0.815
           32            3.8522                 18.92           0.882
           64            5.2693                 21.26           0.991
    """

    bands: int | str
    order: str = "cyclic"
    inverse: bool = False
    momentum: float = 0.0
    weight_decay: float = 0.0
    average: float | Callable[[int], float] = 0.0
    learning_rates: Sequence[float] | Callable[[int], float] | None = None

    def __post_init__(self) -> None:
        one_of("Banded", ("cyclic", "fixed"), order=self.order)
        if self.inverse and self.order != "fixed":
            raise Refused('Banded: inverse=True has a price in fixed order only. Pass order="fixed", too.')
        if self.inverse and self.learning_rates is not None:
            raise Refused("Banded: inverse=True counts equal learning rates only. Leave learning_rates out.")
        if self.inverse and callable(self.average):
            raise Refused("Banded: inverse=True counts an exponential moving average only. Pass average as a number.")
        if self.bands != BEST:
            whole("Banded", at_least=1, bands=self.bands)  # pyright: ignore[reportArgumentType]
        self.workload(1)

    def __repr__(self) -> str:
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Banded({', '.join(f'{name}={value!r}' for name, value in given)})"

    def workload(self, num_steps: int) -> privacy.Workload:
        """Returns what the optimizer does with the gradients of the training."""
        rates = self.learning_rates
        if callable(rates):
            rates = [rates(step) for step in range(num_steps)]
        known = None if rates is None else tuple(float(rate) for rate in rates)[:num_steps]
        if known is not None and len(known) < num_steps:
            raise ValueError(f"Banded: learning_rates has {len(known)} rates for {num_steps} steps.")
        average = tuple(map(self.average, range(num_steps))) if callable(self.average) else self.average
        return privacy.Workload(num_steps, self.momentum, self.weight_decay, known, average)

    def coefficients(self, num_steps: int, sampling_probability: float) -> tuple[float, ...]:
        """Returns c_0, ..., c_{b-1}, of norm 1; with ``inverse`` w_0, ..., w_{b-1}."""
        assert isinstance(self.bands, int)
        workload = self.workload(num_steps)
        if self.inverse:
            return privacy.inverse_coefficients(self.bands, workload, self.classes(sampling_probability))
        return privacy.best_coefficients(self.bands, workload)

    def statement(self, num_steps: int, sampling_probability: float) -> dict[str, Any]:
        """Returns what the privacy statement says of the noise."""
        coefficients = list(self.coefficients(num_steps, sampling_probability))
        inverse = {"inverse": True} if self.inverse else {}
        return {"bands": self.bands, "order": self.order, **inverse, "coefficients": coefficients}

    def explain(self, num_steps: int, sampling_probability: float) -> str:
        """Returns what the noise does to the weights, beside independent noise of the same multiplier."""
        independent = privacy.mean_error((1.0,), self.workload(num_steps))
        error = self.error(num_steps, sampling_probability) / independent
        return f"noise of {self.bands} bands, with {error:.3f} times the error of independent noise in the weights"

    def error(self, num_steps: int, sampling_probability: float) -> float:
        """Returns the root mean square error of the weights, in units of noise multiplier times sensitivity."""
        error = privacy.inverse_error if self.inverse else privacy.mean_error
        return error(self.coefficients(num_steps, sampling_probability), self.workload(num_steps))

    def table(
        self,
        target_epsilon: float,
        delta: float,
        *,
        sampling_probability: float,
        num_steps: int,
        beside: Sequence[tuple[privacy.Event, int]] = (),
    ) -> Table:
        """Returns noise multiplier and error of the weights for 1, 2, 4, ... bands at a target.

        Args:
            target_epsilon: above 0.
            delta: in (0, 1).
            sampling_probability: q, the mean batch size over the number of examples.
            num_steps: of the training.
            beside: other releases that the target covers, as pairs (event, how often).
        """
        spent = privacy.compose(beside).epsilon_high(delta) if beside else 0.0
        if spent >= target_epsilon > 0:
            raise ValueError(
                f"Banded: target_epsilon={target_epsilon!r} is spent by prior releases, which cost {round_up(spent)}. "
                "Raise the target, or add more noise to those."
            )
        rows, bands = [], 1
        while sampling_probability * bands <= 1 and bands <= num_steps:
            one = replace(self, bands=bands)
            classes = one.classes(sampling_probability)
            q, groups = min(1.0, sampling_probability * classes), -(-num_steps // classes)
            noise = privacy.calibrate(target_epsilon, delta, sampling_probability=q, num_steps=groups)
            if beside:
                noise = privacy.calibrate_schedule(
                    partial(_reduced, q, groups, beside), target_epsilon, delta, start=noise
                )
            rows.append((bands, noise, noise * one.error(num_steps, sampling_probability)))
            bands *= 2
        return Table(tuple(rows))

    def classes(self, sampling_probability: float) -> int:
        """Returns the number of classes, which take turns: the bands, or in fixed order all batches of an epoch."""
        assert isinstance(self.bands, int)
        return self.bands if self.order == "cyclic" else round(1 / sampling_probability)


def _reduced(
    sampling_probability: float, count: int, beside: Sequence[tuple[privacy.Event, int]], noise_multiplier: float
) -> list[tuple[privacy.Event, int]]:
    """Returns what the steps of a training cost, and what counts as well."""
    unit, relation = beside[0][0].unit, privacy.NeighboringRelation.REPLACE_SPECIAL
    return [(privacy.SubsampledGaussian(noise_multiplier, sampling_probability, relation, unit), count), *beside]


@dataclass(frozen=True)
class Table:
    """The error of the weights for each number of bands: rows (bands, noise multiplier, error).

    The error is the root mean square of the noise in the weights, in units of sensitivity times learning rate over
    batch size.
    """

    rows: tuple[tuple[int, float, float], ...]

    @property
    def best(self) -> int:
        """The number of bands with the least error."""
        return min(self.rows, key=lambda row: row[2])[0]

    def __str__(self) -> str:
        lines = ["bands  noise multiplier  error of the weights  against 1 band"]
        first = self.rows[0][2]
        lines += [f"{b:5}  {noise:16.4f}  {error:20.2f}  {error / first:14.3f}" for b, noise, error in self.rows]
        return "\n".join(lines)


@dataclass(frozen=True)
class Cyclic(Sampling):
    """Draws batches for banded noise: classes of examples take turns.

    Args:
        num_classes: b, the number of classes.
        run: number of the release with which the training begins in its ledger.
        in_order: True if nothing is random.
    """

    num_classes: int
    run: int = 0
    in_order: bool = False
    needs_places = True

    def sampler(self, num_units: int, sampling_probability: float, key: bytes) -> Sampler:
        return CyclicSampler(num_units, sampling_probability, self.num_classes, self.in_order, key=key)

    def event(self, of_step: privacy.Event, step: int, num_units: int) -> privacy.Event:
        noise, q = of_step.noise_multiplier, of_step.sampling_probability  # type: ignore[attr-defined]
        relation, unit = of_step.neighboring_relation, of_step.unit
        return privacy.BandedGaussian(noise, q, self.num_classes, self.run, relation, unit)

    def releases(self, of_step: privacy.Event, num_steps: int, num_units: int) -> list[tuple[privacy.Event, int]]:
        return [(self.event(of_step, 0, num_units), num_steps)]


def check_correlated(correlation: object, sampling: object, clipping: object, noise_schedule: object) -> None:
    """Refuses what has no price together with banded noise."""
    if not isinstance(correlation, Banded):
        raise ValueError(f"{WHERE}: correlation={correlation!r} must be tp.Banded(bands=...), or None.")
    if sampling is not None:
        raise Refused(
            f"{WHERE}: sampling={sampling!r} with correlation={correlation!r}, which draws batches itself: its price "
            "holds for examples that are in at most one of its bands' steps. Leave sampling out."
        )
    if noise_schedule is not None or isinstance(clipping, Scheduled | Adaptive):
        name = "noise_schedule" if noise_schedule is not None else f"clipping={type(clipping).__name__}(...)"
        raise Refused(
            f"{WHERE}: {name} with correlation={correlation!r}: noise and bounds must be the same in all steps, whose "
            "noise is one. Take a rule with fixed bounds, such as Flat, and no schedule."
        )
    if isinstance(clipping, Sketched | GEP | BGEP):
        raise Refused(
            f"{WHERE}: clipping={type(clipping).__name__}(...) has no known price with correlation={correlation!r}. "
            "Take a clipping rule with exact norms, such as Flat."
        )


def resolved(
    correlation: Banded,
    sampling_probability: float,
    num_steps: int,
    target: tuple[float | None, float | None],
    prior: Sequence[tuple[privacy.Event, int]],
    *,
    shows: bool,
) -> tuple[Banded, Cyclic]:
    """Returns the correlation with its number of bands, and how it draws batches; shows how the best was found."""
    q = sampling_probability
    if correlation.bands == BEST:
        epsilon, delta = target
        if epsilon is None or delta is None:
            raise ValueError(f'{WHERE}: correlation=Banded("best") needs target_epsilon and delta, to compare at.')
        table = correlation.table(epsilon, delta, sampling_probability=q, num_steps=num_steps, beside=prior)
        correlation = replace(correlation, bands=table.best)
        if shows:
            print(f"{table}\n{table.best} bands are best.")
    bands = correlation.bands
    assert isinstance(bands, int)
    most = int(1 / q * (1 + 1e-9))
    if bands > most and not correlation.inverse:
        raise Refused(
            f"{WHERE}: correlation={correlation!r} with expected_batch_size / n = {q:.6g}: bands times that must be at "
            f"most 1. Take at most {most} bands, or smaller batches."
        )
    fixed = correlation.order == "fixed"
    classes = correlation.classes(q)
    if fixed and abs(classes * q - 1) > 1e-6:
        raise Refused(
            f'{WHERE}: order="fixed" needs a whole number of batches in an epoch, but n / expected_batch_size is '
            f"{1 / q:.6g}. Take n / {int(1 / q)} or n / {int(1 / q) + 1}."
        )
    return correlation, Cyclic(classes, sum(count for _, count in prior), fixed)
