# SPDX-License-Identifier: Apache-2.0
"""Provides ``SketchedSum``, the mechanism that clips by estimated norms and checks their price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import privacy
from ...jacobian.rows.operator import RowsOfBatch
from ...privacy.events.estimated_norms import LEAST_PRICED
from ...privacy.rounding import round_down, short
from ...support.model_state import ModelTensors
from ...support.units import ONE_EXAMPLE
from ...support.validate import Refused
from ..base import ClippedSum
from ..clipping import Flat
from ..sums import ClippedSummation, Recording, Summation, checked_factors
from .directions import Directions
from .projected import ProjectedRecording, Projector
from .settings import Sketched
from .sketched_rows import SketchedJacobian

MIN_PROJECTIONS = 16  # with fewer, examples with large gradients escape clipping so often that epsilon explodes
QUICKLY_PRICED = 10  # projections; the accountant needs seconds for fewer


class SketchedSum(ClippedSum):
    """The sum of the clipped rows, clipped by randomly estimated norms.

    Args:
        setting: the clip norm, and how norms are estimated.
        names, expected_batch_size, clip_schedule, unit: see `ClippedSum`.
    """

    def __init__(
        self,
        setting: Sketched,
        names: Sequence[str],
        expected_batch_size: float,
        clip_schedule: Sequence[float] | None = None,
        unit: str = ONE_EXAMPLE,
    ):
        rule = Flat(setting.clip_norm)
        super().__init__(rule, names, expected_batch_size, clip_schedule=clip_schedule, unit=unit)
        self._not_for_release = setting.not_for_release
        self._estimator = Projector(setting.projections)

    def event(self, noise_multiplier: float, sampling_probability: float) -> privacy.SubsampledJL:
        return replace(self._estimator.setting.event(noise_multiplier, sampling_probability), unit=self.unit)

    def check_price(self, noise_multiplier: float, sampling_probability: float, num_steps: int, delta: float) -> None:
        if not self._not_for_release:
            _check_price(self.event(noise_multiplier, sampling_probability), num_steps, delta)

    def settings(self) -> dict[str, Any]:
        setting = self._estimator.setting
        method = {} if setting.method is None else {"method": setting.method}  # decides about the last bits
        return {**super().settings(), "jacobian": setting.in_states, **method}

    def recorder(self, tensors: ModelTensors, key: bytes, step: int, part: int, size: int) -> Recording:
        return ProjectedRecording(self._estimator, tensors.trained, Directions(key, step, part))

    def summation(self, units: np.ndarray | None, size: int) -> Summation:
        return _SketchedSummation(self.rule, self.merging(units, size), self.views)

    def learned(self) -> Any:
        return self._estimator.learned

    def learn(self, known: Sequence[Any]) -> None:
        self._estimator.join([one for one in known if one is not None])

    def explain(self) -> str:
        return self._estimator.explain()

    def state(self) -> dict[str, Any]:
        return {**super().state(), "projections": self._estimator.learned}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self._estimator.learned = state["projections"]


class _SketchedSummation(ClippedSummation):
    """Clips and sums rows with estimated norms; on a GPU the sum does not wait for these norms."""

    @torch.no_grad()
    def __call__(self, jacobian: RowsOfBatch, group: str) -> dict[str, Tensor]:
        if isinstance(jacobian, SketchedJacobian) and jacobian.device.type != "cpu":
            return self._sum_before_reading(jacobian, group)
        return super().__call__(jacobian, group)

    def _sum_before_reading(self, jacobian: SketchedJacobian, group: str) -> dict[str, Tensor]:
        """Returns the sum where a factor of 0 leaves a row out: the host waits once, afterwards, for all to be checked.

        The rule has one group and no count, because other rules have no price with estimated norms.
        """
        norms = self.norms_of_groups[group] = jacobian.squared_norms().sqrt()
        finite = norms.isfinite()
        norms = torch.where(finite, norms, 0)
        factors = torch.where(finite, checked_factors(self._rule, norms, group), 0)
        self._note(group, factors, norms)
        sums, measured = jacobian.measured_sum(factors)
        asked = torch.cat([finite.double(), self._bound_check.longest().double()[None], measured]).tolist()
        self._longest = asked[len(norms)]
        self._non_finite.update(k for k, is_finite in enumerate(asked[: len(norms)]) if not is_finite)
        jacobian.judge(sums, asked[len(norms) + 1 :])
        return sums


def _check_price(event: privacy.SubsampledJL, num_steps: int, delta: float) -> None:
    """Raises if there are too few projections for a useful epsilon, or too little noise for any."""
    count = event.num_projections
    if event.noise_multiplier < LEAST_PRICED:
        raise Refused(
            f"PrivateTraining: noise_multiplier={event.noise_multiplier!r} is less than {LEAST_PRICED:g}, and then no "
            "bound on epsilon is known for estimated norms. Take more noise; or, on data that need no protection, pass "
            "Sketched(..., not_for_release=True)."
        )
    if count < MIN_PROJECTIONS:
        quick = replace(event, num_projections=max(count, QUICKLY_PRICED))  # fewer cost more
        low = privacy.compose([(quick, num_steps)]).epsilon(delta).low
        raise Refused(
            f"PrivateTraining: clipping=Sketched({count}, ...) would cost an epsilon of {round_down(low)} or more "
            f"at delta = {short(delta)}: with fewer than {MIN_PROJECTIONS} projections large gradients escape clipping "
            f"too often. Take at least {MIN_PROJECTIONS}, better 32; or, on data that need no protection, pass "
            "Sketched(..., not_for_release=True)."
        )
