# SPDX-License-Identifier: Apache-2.0
"""Clipping by estimated norms: which estimates there are, what they cost, and when they are refused.

The price of an estimate is its chance of being too small, which the accountant counts: ``SubsampledJL`` for random
projections of whole gradients, ``SubsampledSketch`` for sketches of the factors that the tape notes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .._validate import Refused, in_range, one_of, whole
from ..clipping import ClippingRule, Flat
from ..jacobian.layout import Layouts
from ..privacy import SubsampledJL, SubsampledSketch, compose
from .directions import Directions as Directions
from .estimates import Estimating
from .factored import FactoredNorms
from .floored import FlooredNorms
from .projected import Sketch as Sketch
from .projected import Sketching as Sketching

FEWEST = 16  # projections; with fewer, examples with large gradients escape clipping so often that epsilon explodes
QUICKLY_PRICED = 10  # projections; the accountant needs seconds for fewer


@dataclass(frozen=True)
class Sketched:
    """Norms that are estimated at random, for ``PrivateTraining(..., jacobian=Sketched(32))``.

    Row i is weighted by ``min(1, clip_norm / Mᵢ)`` with an estimate Mᵢ of its norm ‖gᵢ‖:

    * ``Sketched(r)``: ``Mᵢ² = mean over j of (gᵢ·vⱼ)²``, with directions v₁ ... v_r of standard normal entries drawn
      anew in every step; Mᵢ²/‖gᵢ‖² is χ²_r / r. This is DP-SGD-JL, and with ``torch.optim.Adam`` DP-Adam-JL. It needs
      nothing but losses that can be differentiated: for models that the tape refuses.
    * ``Sketched(r, floor=f)``: ``max(Mᵢ, f·Uᵢ)`` in the place of Mᵢ, with a sure bound ``Uᵢ >= ‖gᵢ‖``, of which few
      projections can do with; Mᵢ and Uᵢ come from the tape.
    * ``Sketched(k, kind="factored")``: ``Mᵢ² = Σ ‖Gᵢ Sᵀ‖² / k`` over the parameters, each taken for a matrix that is
      multiplied by k directions without being formed. On the tape, for long sequences and large batches: neither the
      square of the length nor the size of the parameters enters.

    Where the tape takes a model, its exact norms cost less epsilon, and often less time: see docs/sketched.md.

    Args:
        num_projections: r or k. Below 16 training is refused, since epsilon explodes; unless there is a floor or it is
            ``not_for_release``.
        group_size: most directions that are projected at once, which takes memory. None leaves it to the network: where
            tensors are large one at a time, sharing the forward's values, else up to 8.
        kind: "projected" or "factored".
        floor: in (0, 1], for projections.

    Guarantees:
        - The directions come from AES-256-CTR under a key of their own, derived from that of the noise: a function of
          step and microbatch, never used for two of them, in which no seed of the user's has a part.
        - The estimate of one example is a function of its own row (with a floor: of its row's factors) and of the
          directions; what else is in its batch has no part in it.
        - The law is that of the estimate up to rounding: projections are compared with a weighted vjp in every step,
          sketches with projections on the first batches.

    Raises:
        ValueError: a floor for sketches, whose law with a floor has no price.

    Source: Bu, Gopi, Kulkarni, Lee, Shen & Tantipongpipat (2021), arXiv:2102.03013, Algorithm 1; the floor and the
        laws are of the project's notes.

    Example:
        >>> Sketched(32).event(noise_multiplier=1.0, sampling_probability=0.01)
        SubsampledJL(noise_multiplier=1.0, num_projections=32, sampling_probability=0.01)
        >>> Sketched(64, kind="factored").event(noise_multiplier=1.0, sampling_probability=0.01)
        SubsampledSketch(noise_multiplier=1.0, num_directions=64, sampling_probability=0.01)
    """

    num_projections: int = 32
    group_size: int | None = None
    kind: str = "projected"
    floor: float | None = None

    def __post_init__(self) -> None:
        whole("Sketched", num_projections=self.num_projections, at_least=1)
        if self.group_size is not None:
            whole("Sketched", group_size=self.group_size, at_least=1)
        one_of("Sketched", ("projected", "factored"), kind=self.kind)
        if self.floor is not None:
            in_range("Sketched", 0, 1, floor=self.floor)
            if self.kind == "factored":
                raise ValueError(
                    f"Sketched: floor={self.floor!r} has no price with kind='factored'. Leave one of the two out."
                )

    def event(self, noise_multiplier: float, sampling_probability: float) -> SubsampledJL | SubsampledSketch:
        """What one step releases, for the accountant."""
        if self.kind == "factored":
            return SubsampledSketch(noise_multiplier, self.num_projections, sampling_probability)
        return SubsampledJL(noise_multiplier, self.num_projections, sampling_probability, self.floor)


def sketching(setting: Sketched, layouts: Layouts) -> Sketching | Estimating:
    """What estimates norms as the setting says, and learns from batch to batch; ``layouts`` are those of tapes."""
    k = setting.num_projections
    if setting.kind == "factored":
        return Estimating(setting, FactoredNorms, layouts, f"norms by sketches of the factors with {k} directions")
    if setting.floor is not None:
        text = f"norms by {k} projections on the tape, at least {setting.floor:g} times a bound"
        return Estimating(setting, FlooredNorms, layouts, text)
    return Sketching(setting)


def check_rule(clipping: ClippingRule) -> None:
    """Refuse rules for whose factors, taken from estimated norms, the accountant has no price."""
    if not isinstance(clipping, Flat):
        raise Refused(
            f"PrivateTraining: {type(clipping).__name__} has no price with norms estimated by jacobian=Sketched(...). "
            "Take Flat(clip_norm), or exact norms, without jacobian=."
        )


def check_price(event: SubsampledJL | SubsampledSketch, num_steps: int, delta: float) -> None:
    """Refuse so few projections that there is no privacy to speak of, with the epsilon that they would cost."""
    if isinstance(event, SubsampledSketch):
        count, quick = event.num_directions, replace(event, num_directions=max(event.num_directions, QUICKLY_PRICED))
        setting, cures = f"Sketched({count}, kind='factored')", ""
    elif event.floor is None:
        count = event.num_projections
        quick = replace(event, num_projections=max(count, QUICKLY_PRICED))  # fewer cost more
        setting, cures = f"Sketched({count})", f" give Sketched({count}, floor=0.8);"
    else:
        return
    if count < FEWEST:
        low = compose([(quick, num_steps)]).epsilon(delta).low
        raise Refused(
            f"PrivateTraining: jacobian={setting} would cost an epsilon of {low:.4g} or more "
            f"at delta = {delta:g}: with fewer than {FEWEST} projections large gradients escape clipping too often. "
            f"Take at least {FEWEST}, better 32;{cures} or, on data that need no protection, pass not_for_release=True."
        )
