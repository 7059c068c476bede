# SPDX-License-Identifier: Apache-2.0
"""What a step releases where norms are estimated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import privacy
from .._model_state import ModelTensors
from ..clipping import ClippingRule
from ..mechanism import ClippedSum, Recording
from .choose import Sketched, check_price, check_rule, sketching
from .directions import Directions


class SketchedSum(ClippedSum):
    """The sum of the clipped rows, their norms estimated at random.

    Args:
        setting: how they are estimated.
        not_for_release: whether few of them will do.
        rule, names, expected_batch_size: as of `ClippedSum`.
    """

    def __init__(
        self,
        setting: Sketched,
        rule: ClippingRule,
        names: Sequence[str],
        expected_batch_size: float,
        *,
        not_for_release: bool,
    ):
        check_rule(rule)
        super().__init__(rule, names, expected_batch_size)
        self._not_for_release = not_for_release
        self._sketching = sketching(setting, self._layouts)

    def event(
        self, noise_multiplier: float, sampling_probability: float
    ) -> privacy.SubsampledJL | privacy.SubsampledSketch:
        return self._sketching.setting.event(noise_multiplier, sampling_probability)

    def check_price(self, noise_multiplier: float, sampling_probability: float, num_steps: int, delta: float) -> None:
        if not self._not_for_release:
            check_price(self.event(noise_multiplier, sampling_probability), num_steps, delta)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "jacobian": repr(self._sketching.setting)}

    def recorder(self, tensors: ModelTensors, key: bytes, step: int, part: int, size: int) -> Recording:
        return self._sketching.recorder(tensors, size, Directions(key, step, part))

    def explain(self) -> str:
        return self._sketching.explain()

    def state(self) -> dict[str, Any]:
        return {**super().state(), "projections": self._sketching.way}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self._sketching.way = state["projections"]
