# SPDX-License-Identifier: Apache-2.0
"""Provides ``Sketched``, the public setting of clipping by estimated norms.

An estimate can be too small, and the accountant prices the probability of that: see ``SubsampledJL``.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

from ...privacy import SubsampledJL
from ...support.validate import one_of, plain_numbers, positive, whole
from ..scheduled import Schedule, Scheduled

METHODS = "forward mode", "double vjp"


@plain_numbers
@dataclass(frozen=True)
class Projections:
    """Holds how norms are estimated; see `Sketched` for each."""

    num_projections: int = 32
    group_size: int | None = None
    method: str | None = None

    def __post_init__(self) -> None:
        whole("Sketched", num_projections=self.num_projections, at_least=1)
        if self.group_size is not None:
            whole("Sketched", group_size=self.group_size, at_least=1)
        one_of("Sketched", (None, *METHODS), method=self.method)

    @property
    def in_states(self) -> str:
        """Returns the text that states and run folders have had from the start; the method is no part of the price."""
        return f"Sketched(num_projections={self.num_projections}, group_size={self.group_size})"

    def event(self, noise_multiplier: float, sampling_probability: float) -> SubsampledJL:
        """Returns the event of one step, for the accountant."""
        return SubsampledJL(noise_multiplier, self.num_projections, sampling_probability)


@plain_numbers
@dataclass(frozen=True)
class Sketched:
    """Clipping by randomly estimated norms, for ``PrivateTraining(..., clipping=Sketched(32, clip_norm=1.0))``.

    Row i is weighted by ``min(1, clip_norm / Mᵢ)`` with an estimate Mᵢ of its norm ‖gᵢ‖: ``Mᵢ² = mean over j of
    (gᵢ·vⱼ)²``, with directions v₁ ... v_r of standard normal entries drawn anew in every step; Mᵢ²/‖gᵢ‖² is χ²_r / r.
    This is DP-SGD-JL, and with ``torch.optim.Adam`` DP-Adam-JL. It needs only losses that can be differentiated, so it
    also trains models that the tape refuses.

    Where the tape accepts a model, its exact norms cost less epsilon, and often less time: see docs/sketched.md.

    Args:
        num_projections: r. Training with fewer than 16 is refused, because epsilon explodes, unless it is
            ``not_for_release``.
        clip_norm: bound on the estimated norm of each per-example gradient.
        group_size: largest number of directions that are projected at once, which takes memory. None chooses by the
            network: one at a time, sharing the forward's values, where tensors are large; else up to 8 at once.
        method: "forward mode" or "double vjp". None takes forward mode where it works, which is faster; the double vjp
            is what the paper uses where there is no forward mode. Both give the same projections, up to rounding.
        not_for_release: allows fewer than 16 projections, and noise multipliers below 0.05, for which no bound on
            epsilon is known; every statement then says NOT PRIVATE.

    Guarantees:
        - The directions come from AES-256-CTR under a key of their own, derived from the key of the noise. They are a
          function of step and microbatch, never used for two of these, and no seed set by the user affects them.
        - The estimate of one example is a function of its own row and of the directions; the other examples of its
          batch do not affect it.
        - The estimate has the stated distribution up to rounding: projections are compared with a weighted vjp in
          every step.

    Source: Bu, Gopi, Kulkarni, Lee, Shen & Tantipongpipat (2021), arXiv:2102.03013, Algorithm 1.

    Example:
        >>> Sketched(32, clip_norm=1.0).event(noise_multiplier=1.0, sampling_probability=0.01)
        SubsampledJL(noise_multiplier=1.0, num_projections=32, sampling_probability=0.01)
    """

    num_projections: int = 32
    _: KW_ONLY
    clip_norm: float = field(default=None)  # type: ignore[assignment]  # checked below, with a better message
    group_size: int | None = None
    method: str | None = field(default=None, repr=False)  # is no part of the mechanism that is priced
    not_for_release: bool = False

    def __post_init__(self) -> None:
        _ = self.projections  # checks them
        if self.clip_norm is None:
            raise TypeError(
                f"Sketched: clip_norm is missing. Pass clipping=tp.Sketched({self.num_projections}, clip_norm=1.0) to "
                "PrivateTraining, in place of clipping=tp.Flat(1.0) and jacobian=."
            )
        positive("Sketched", clip_norm=self.clip_norm)

    @property
    def projections(self) -> Projections:
        """Returns how the norms are estimated."""
        return Projections(self.num_projections, self.group_size, self.method)

    def event(self, noise_multiplier: float, sampling_probability: float) -> SubsampledJL:
        """Returns the event of one step, for the accountant."""
        return self.projections.event(noise_multiplier, sampling_probability)

    def scheduled(self, factors: Schedule) -> Scheduled:
        """Returns the same with a clip norm that is multiplied by a factor in every step, as a clipping rule does."""
        return Scheduled(self, factors)
