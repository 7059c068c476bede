# SPDX-License-Identifier: Apache-2.0
"""Provides noise that is correlated between steps, so that later steps take back noise of earlier ones.

With C the lower triangular Toeplitz matrix of the coefficients ``c_0, ..., c_{b-1}`` (b bands) and z independent
standard normal numbers, the noise of step t is ``x_t = (z_t - c_1 x_{t-1} - ... - c_{b-1} x_{t-b+1}) / c_0``: C x = z.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...support.validate import whole
from .chunks import add_on_device, grid_unit, places_of
from .gaussian import Noise, checked_stddev, has_generator
from .processor import MAX_STEP

Values = dict[str, Tensor]


class BandedNoise(Noise):
    """Gaussian noise that is correlated between steps: a function of key, step and place, as `Noise`.

    Args:
        key: 32 secret bytes.
        coefficients: c_0, ..., c_{b-1}, the first above 0; of norm 1, so that the noise multiplier keeps its meaning.
        since: the first step that the key makes.

    Guarantees:
        - C x = z, where z are the numbers that `Noise` has for the key; whoever holds a slice makes that of the slice.
        - x is computed in float64 in a fixed order, so that it is the same bit for bit after a resumed run. The last
          b - 1 steps are kept; where they are missing, all steps since the first are drawn again.

    Source: Choquette-Choo et al. (2023), arXiv:2306.08153; Kalinin & Lampert (2024), arXiv:2405.13763.
    """

    def __init__(self, key: bytes | None, coefficients: Sequence[float], since: int = 0):
        super().__init__(key)
        self.coefficients, self.since = tuple(coefficients), since
        self._layout: tuple[object, ...] = ()  # names, places, shapes and devices of the tensors in `_past`
        self._past: dict[int, Values] = {}  # step -> its x

    def add_to(
        self,
        step: int,
        sums: Mapping[str, Tensor],
        stddev: float | Mapping[str, float],
        places: Mapping[str, int] | None = None,
    ) -> None:
        whole("BandedNoise.add_to", at_least=self.since, at_most=MAX_STEP, step=step)
        scales = {name: checked_stddev(stddev[name] if isinstance(stddev, Mapping) else stddev) for name in sums}
        noise = self.correlated(step, sums, places_of("BandedNoise.add_to", sums, places))
        for name, total in sums.items():
            if scales[name]:
                unit = grid_unit(scales[name])
                scaled = noise[name] * (scales[name] / unit)
                total.copy_(add_on_device(total.to(scaled.device), scaled, unit))

    def correlated(self, step: int, like: Mapping[str, Tensor], places: Mapping[str, int]) -> Values:
        """Returns the step's x at the places of the tensors, float64, in their shapes; it must not be changed."""
        layout = tuple((name, places[name], t.shape, t.device) for name, t in like.items())
        if layout != self._layout:
            self._layout, self._past = layout, {}
        first = max(step - len(self.coefficients) + 1, self.since)
        known = all(earlier in self._past for earlier in range(first, step))
        for number in range(step if known else self.since, step + 1):
            if number not in self._past:
                self._past[number] = self._next(number, like, places)
            self._past.pop(number - len(self.coefficients), None)
        return self._past[step]

    def _drawn(self, step: int, like: Mapping[str, Tensor], places: Mapping[str, int]) -> Values:
        """Returns the step's z."""
        drawn = {
            name: torch.empty(t.shape, dtype=torch.float64, device=t.device if has_generator(t) else "cpu")
            for name, t in like.items()
        }
        self.fill(step, drawn, places)
        return drawn

    def _next(self, step: int, like: Mapping[str, Tensor], places: Mapping[str, int]) -> Values:
        """Returns the x of a step from those before."""
        drawn = self._drawn(step, like, places)
        for back, coefficient in enumerate(self.coefficients[1:], 1):
            if step - back < self.since:
                break
            for name, values in drawn.items():
                values.sub_(self._past[step - back][name], alpha=coefficient)
        for values in drawn.values():
            values.div_(self.coefficients[0])
        return drawn


class InverseBandedNoise(BandedNoise):
    """Gaussian noise ``x_t = w_0 z_t + ... + w_{b-1} z_{t-b+1}``: a function of key, step and place, as `Noise`.

    Nothing is kept between steps: each draws the z of b steps again.

    Args:
        key: 32 secret bytes.
        coefficients: w_0, ..., w_{b-1}, the first above 0, as `privacy.inverse_coefficients` returns them.
        since: the first step that the key makes.

    Guarantees:
        - x = W z, where z are the numbers that `Noise` has for the key; whoever holds a slice makes that of the slice.
        - x is computed in float64 in a fixed order, so that a step is the same bit for bit whatever was made before.

    Source: Kalinin, McKenna, Upadhyay & Lampert (2025), arXiv:2505.12128.
    """

    def correlated(self, step: int, like: Mapping[str, Tensor], places: Mapping[str, int]) -> Values:
        found: Values = {}
        for back, coefficient in enumerate(self.coefficients):
            if step - back < self.since:
                break
            for name, z in self._drawn(step - back, like, places).items():
                found[name] = found[name].add_(z, alpha=coefficient) if back else z.mul_(coefficient)
        return found
