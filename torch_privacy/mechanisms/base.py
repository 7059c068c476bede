# SPDX-License-Identifier: Apache-2.0
"""Defines mechanisms: the sums over a batch that a step releases with noise, and the gradient computed from them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import privacy
from ..jacobian.layouts.known import Layouts, Merging
from ..jacobian.tape import Tape
from ..privacy import NeighboringRelation
from ..sampling.samplers import Sampler
from ..support.model_state import ModelTensors
from ..support.units import ONE_EXAMPLE
from ..support.validate import Refused, positive, quoted
from .clipping import Adaptive, ClippingRule, Groups, MicroBatches
from .sums import COUNT, ROUNDING, ClippedSummation, Recording, Summation, merging_of_views

RELATION = NeighboringRelation.ADD_OR_REMOVE_ONE  # of sensitivities and events; they are those of zero-out, too
PRICED_ROUNDING = 1 + 2.1e-5  # smallest factor on the noise, so that its multiplier is that of rows that exceed it
LAW_ERROR = 2e-7  # root mean square; measured 1.5e-7 at most, see noise/processor.py


def noise_factors(num_trained: int, noise_multiplier: float) -> dict[str, float]:
    """Returns the factor that is made on the noise, and those that it covers, which docs/training.md derives.

    - "clipping": a clipped row may exceed its bound by the rounding of its norm and of its factor;
    - "grid": rounding to the grid lets a row change n numbers by ``2^-32 √n`` standard deviations more;
    - "law": the drawn law has an error of `LAW_ERROR` in the log probability of each point of the grid, which raises
      the Rényi divergence of order α by α times its square for each of n numbers: an estimate.

    A release has at most n = 2 ``num_trained`` numbers, with the coordinates and counts that some mechanisms add.
    """
    n = 2 * num_trained
    covered = {
        "clipping": (1 + ROUNDING) ** 2,
        "grid": 1 + 2.0**-32 * math.sqrt(n) * noise_multiplier,
        "law": math.sqrt(1 + 2 * n * (LAW_ERROR * noise_multiplier) ** 2),
    }
    return {"made": max(PRICED_ROUNDING, math.prod(covered.values())), **covered}


class Mechanism(ABC):
    """Defines what one step releases, under the add/remove-one relation; it is the same under zero-out.

    Each step calls ``begin``, then ``recorder`` and ``summation`` for every (micro)batch, then ``complete`` for all
    sums of the step. These sums, with noise of the standard deviations ``stddevs`` times ``PRICED_ROUNDING``, are the
    release. ``gradient`` computes the gradient from it.

    Args:
        expected_batch_size: the divisor, a number that does not depend on the data.
        views: number of consecutive views of each example in a batch; the mean over them is the example's row.
        unit: the unit of privacy, which the events name.
    """

    treated_as_public: tuple[str, ...] = ()  # listed in the privacy statement
    needs_whole_release = False  # True if ``gradient`` needs all numbers of the release, not those of a shard

    def __init__(self, expected_batch_size: float, views: int = 1, unit: str = ONE_EXAMPLE):
        self.expected_batch_size, self.views, self.unit = expected_batch_size, views, unit
        self._layouts = Layouts()

    @abstractmethod
    def event(self, noise_multiplier: float, sampling_probability: float) -> privacy.Event:
        """Returns the description of one step's release, for the accountant."""

    def check_price(self, noise_multiplier: float, sampling_probability: float, num_steps: int, delta: float) -> None:  # noqa: B027
        """Refuses noise that gives no meaningful privacy."""

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """Returns the largest L2 change of the sums between neighboring data sets, in units of ``noise_multiplier``."""

    @property
    def largest_sensitivity(self) -> float:
        """Returns the sensitivity of the step in which it is largest."""
        return self.sensitivity

    @abstractmethod
    def statement(self) -> dict[str, Any]:
        """Returns name and settings as plain data, for the privacy statement."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Returns the settings that a resumed run must share with its state."""

    @abstractmethod
    def groups(self, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Returns a partition of the parameters: the rows of one group are needed at the same time."""

    def begin(self, model: nn.Module, tensors: ModelTensors, key: bytes, step: int) -> None:  # noqa: B027
        """Begins a step, which may have an empty batch; ``key`` is the noise key."""

    def recorder(self, tensors: ModelTensors, key: bytes, step: int, part: int, size: int) -> Recording:
        """Returns the recorder for one (micro)batch of ``size`` rows of inputs (examples times views)."""
        return self.exact_recorder(tensors, size)

    def exact_recorder(self, tensors: ModelTensors, size: int) -> Tape:
        """Returns a recorder that computes exact norms, whatever the steps use."""
        return Tape(tensors.trained, tensors.constants, self._layouts, size)

    num_rows: int | None = None  # of a batch, if the mechanism itself lets several examples share a row

    def units(self, sampler: Sampler, step: int, size: int) -> np.ndarray | None:
        """Returns (size,) the row that the mechanism gives each example of a batch; None if it gives none."""
        return None

    @abstractmethod
    def summation(self, units: np.ndarray | None, size: int) -> Summation:
        """Returns the object that clips and sums one (micro)batch of ``size`` examples.

        ``units`` (size,) are their rows, those of the mechanism or of their owners; None if each has one of its own.
        """

    def merging(self, units: np.ndarray | None, size: int) -> Merging | None:
        """Assigns each view to the row of its example or, if several examples share rows, of its unit."""
        if units is None:
            return merging_of_views(size, self.views)
        if self.num_rows is not None:
            return Merging(torch.from_numpy(units), self.num_rows).of_views(self.views)
        sizes = np.bincount(units)
        if (sizes == sizes[0]).all() and (np.diff(units) >= 0).all():
            return merging_of_views(len(sizes), int(sizes[0]) * self.views)
        return Merging(torch.from_numpy(units), len(sizes)).of_views(self.views)

    @abstractmethod
    def complete(self, sums: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns all sums of the step, contiguous; zero where there are no examples."""

    @abstractmethod
    def stddevs(self, names: Iterable[str], noise_multiplier: float) -> dict[str, float]:
        """Returns the standard deviation of the noise for each of the sums."""

    @abstractmethod
    def gradient(self, release: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the mean gradient by name, from the noisy sums alone; updates what the next step takes from them."""

    def explain(self) -> str:
        """Returns how the norms are computed."""
        return "exact norms by the tape"

    def equal_tensors(self) -> list[Tensor]:
        """Returns tensors of the step that has begun, which must be equal on all ranks bit for bit."""
        return []

    def learned(self) -> Any:
        """Returns what the batches have shown, which all ranks must know, as plain data."""
        return None

    def learn(self, known: Sequence[Any]) -> None:  # noqa: B027
        """Joins what the ranks have `learned`; refuses what contradicts."""

    def state(self) -> dict[str, Any]:
        """Returns what the steps so far have changed in the mechanism, to be saved with the training's state."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restores what ``state`` returned, from the whole state of a training."""


class ClippedSum(Mechanism):
    """Releases the sum of the clipped rows and, with an adaptive rule, a count.

    Args:
        rule: the clipping rule.
        names: names of the trained parameters.
        expected_batch_size, views, unit: see `Mechanism`.
        clip_schedule: factor on the rule's bounds in each step; None for 1.
    """

    def __init__(
        self,
        rule: ClippingRule,
        names: Sequence[str],
        expected_batch_size: float,
        views: int = 1,
        clip_schedule: Sequence[float] | None = None,
        unit: str = ONE_EXAMPLE,
    ):
        super().__init__(expected_batch_size, views, unit)
        self._planned, self._names = rule.bind(names), frozenset(names)
        self._clip_schedule = clip_schedule
        self.rule = self._rule_at(0)  # for the next step
        self._divisor = self.rule.divisor(expected_batch_size)

    def _rule_at(self, step: int) -> ClippingRule:
        return self._planned if self._clip_schedule is None else self._planned.scaled(self._clip_schedule[step])

    def event(self, noise_multiplier: float, sampling_probability: float) -> privacy.Event:
        return _sampled(noise_multiplier, sampling_probability, self.unit)

    @property
    def sensitivity(self) -> float:
        return self.rule.sensitivity(RELATION)

    @property
    def largest_sensitivity(self) -> float:
        if self._clip_schedule is None:
            return self.sensitivity
        return self._planned.scaled(max(self._clip_schedule)).sensitivity(RELATION)

    def statement(self) -> dict[str, Any]:
        if self._clip_schedule is None:
            return self.rule.statement()
        return {**self._planned.statement(), "clip_schedule": summary_of(self._clip_schedule)}

    def settings(self) -> dict[str, Any]:
        return {"clipping": repr(self._planned), "jacobian": repr(None)}

    def groups(self, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
        return self.rule.groups(names)

    def begin(self, model: nn.Module, tensors: ModelTensors, key: bytes, step: int) -> None:
        new = [name for name in tensors.trained if name not in self._names]
        if new and isinstance(self.rule, Groups):
            kind = type(self.rule.made_by or self.rule).__name__
            raise Refused(
                f"PrivateTraining: parameter {quoted(new)} was unfrozen, but the bounds of {kind} were computed for "
                "the parameters that were trained at the start. Begin another PrivateTraining, with the releases so "
                "far as prior_releases."
            )
        if self._clip_schedule is not None:
            self.rule = self._rule_at(step)

    def summation(self, units: np.ndarray | None, size: int) -> Summation:
        return ClippedSummation(self.rule, self.merging(units, size), self.views)

    @property
    def num_rows(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.rule.num_groups(self.expected_batch_size) if isinstance(self.rule, MicroBatches) else None

    def units(self, sampler: Sampler, step: int, size: int) -> np.ndarray | None:
        return None if self.num_rows is None else sampler.groups(step, size, self.num_rows)

    def complete(self, sums: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        complete = sums_or_zeros(sums, parameters)
        if isinstance(self.rule, Adaptive):
            complete[COUNT] = sums.get(COUNT, torch.zeros(1, dtype=torch.float32, device="cpu"))
        return complete

    def stddevs(self, names: Iterable[str], noise_multiplier: float) -> dict[str, float]:
        if not isinstance(self.rule, Adaptive):
            return dict.fromkeys(names, noise_multiplier * self.sensitivity)
        split = self.rule.split(noise_multiplier, self.expected_batch_size, RELATION)
        stddev = split.gradient_noise_multiplier * self.sensitivity
        return {**dict.fromkeys(names, stddev), COUNT: split.count_noise_stddev}

    def gradient(self, release: dict[str, Tensor]) -> dict[str, Tensor]:
        if isinstance(self.rule, Adaptive):
            self.rule = self.rule.updated(float(release.pop(COUNT)), self.expected_batch_size)
        if release:  # a rank may have no number of a small model
            torch._foreach_div_([*release.values()], self._divisor)  # pyright: ignore[reportPrivateImportUsage]
        return release

    def state(self) -> dict[str, Any]:
        return {"clipping": self.rule.statement()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if isinstance(self.rule, Adaptive):
            clip_norm = state["clipping"].get("clip_norm")
            positive("PrivateTraining.load_state_dict", clip_norm=clip_norm)
            self.rule = replace(self.rule, clip_norm=clip_norm)


@lru_cache
def _sampled(noise_multiplier: float, sampling_probability: float, unit: str) -> privacy.Event:
    """Returns the event of one noisy sum; asked for in every step."""
    return privacy.SubsampledGaussian(noise_multiplier, sampling_probability, unit=unit)


def added(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the sums of both by name; neither is changed."""
    return {**first, **{name: first[name] + part if name in first else part for name, part in second.items()}}


def summary_of(schedule: Sequence[float]) -> dict[str, float]:
    """Returns the factors of a schedule in four numbers, for the privacy statement."""
    return {"first": schedule[0], "last": schedule[-1], "smallest": min(schedule), "largest": max(schedule)}


def sums_or_zeros(sums: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a contiguous sum for each parameter; zeros after an empty batch."""
    return {
        name: sums[name].contiguous()
        if name in sums
        else torch.zeros(p.shape, dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)
        for name, p in parameters.items()
    }
