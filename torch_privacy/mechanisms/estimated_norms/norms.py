# SPDX-License-Identifier: Apache-2.0
"""Provides ``estimate_norms``: gradient norms by random projections, outside of private training."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...support.notes import NOTES
from ...support.torch_modes import UNCOMPILED
from ..noise import KEY_BYTES
from .directions import Directions
from .projected import ProjectedRecording, Projector
from .settings import Projections
from .sketched_rows import SketchedJacobian

WHERE = "estimate_norms"


def estimate_norms(
    model: nn.Module,
    losses_of: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    *,
    num_projections: int = 32,
    group_size: int | None = None,
    method: str | None = None,
) -> Tensor:
    """Returns an estimate of the norm of each example's gradient, (n,), from random projections.

    With directions v₁ ... v_r of standard normal entries, ``Mᵢ = sqrt(mean over j of (gᵢ·vⱼ)²)``. It needs only losses
    that can be differentiated, r forward passes with tangents or r double backward passes, and no row gᵢ. Where
    `record` accepts the model, its exact norms usually take less time.

    **Not private.** Norms depend on the data, and no noise is added. Use the estimates for data that need no
    protection, for example as probabilities of importance sampling. Private training by estimated norms is
    ``PrivateTraining(..., clipping=Sketched(r, clip_norm=1.0))``.

    Args:
        model: any module with parameters that require a gradient.
        losses_of: ``losses_of(model, batch) -> (n,)``, one loss for each example. It must call ``model``.
        batch: is passed on to ``losses_of``.
        num_projections: r, 1 or more.
        group_size: largest number of directions that are projected at once, see `Sketched`.
        method: "forward mode" or "double vjp", see `Sketched`; None for the first of these that works.

    Guarantees:
        - ``Mᵢ / ‖gᵢ‖`` is χ_r / √r distributed, up to rounding: Mᵢ² is unbiased, with relative standard deviation
          ``sqrt(2 / r)``; Mᵢ is too small on average, by a factor of about ``1 - 1 / (4 r)``.
        - All examples of a call share the r directions, so their errors are dependent. Calls are independent: the
          directions come from a fresh secret key at each call, and no seed affects them.
        - The projections agree with a backward pass through the losses; parameters, buffers that the forward leaves
          alone, their ``grad`` and torch's random state beyond one forward are unchanged.

    Edge cases: an example with projections that are not finite has an infinite or undefined estimate. Whether examples
    depend on each other is not tested; `check` does.

    Raises:
        ValueError: a number of projections below 1, an unknown method, or a model without a parameter to train.
        Refused: losses that are not (n,), that do not reach a parameter, or that cannot be projected; half precision.

    Source: Bu, Gopi, Kulkarni, Lee, Shen & Tantipongpipat (2021), arXiv:2102.03013, Proposition 2.1, who name
        importance sampling (Zhao & Zhang 2015) as a use.

    Example:
        >>> model, x = nn.Linear(3, 1), torch.ones(4, 3)
        >>> estimates = estimate_norms(model, lambda model, x: model(x).squeeze(1), x, num_projections=1000)
        >>> bool((estimates / 2 - 1).abs().max() < 0.2)  # all norms are 2
        True
    """
    setting = Projections(num_projections, group_size, method)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError(f"{WHERE}: no parameter of the model requires a gradient. Unfreeze those to be counted.")
    key = secrets.token_bytes(KEY_BYTES)
    recording = ProjectedRecording(_projector(model, setting), trained, Directions(key, 0, 0))
    with UNCOMPILED, torch.enable_grad(), _recorded(model, recording):
        losses = losses_of(model, batch)
    found: list[Tensor] = []

    def observe(jacobian: SketchedJacobian, label: str) -> None:
        found.append(jacobian.squared_norms().sqrt())
        if found[0].isfinite().all():
            jacobian.weighted_sum(torch.ones_like(found[0]))  # raises unless the projections agree with a backward

    recording.clipped_sum(losses, {"all": [*trained]}, None, observe=observe)
    return found[0].detach()


@contextmanager
def _recorded(model: nn.Module, recording: ProjectedRecording) -> Iterator[None]:
    """Records the model's forward calls, but for those that a projection repeats, which run without gradients."""
    recorded: list[bool] = []

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        recorded.append(torch.is_grad_enabled())
        if recorded[-1]:
            recording.begin(model, args, kwargs)

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        if recorded.pop():
            recording.end(output)

    handles = [
        model.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        model.register_forward_hook(after, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Projectors:
    """The projectors of a model; each remembers the method that worked on the model's first batch."""

    def __init__(self, model: nn.Module):
        self._of: dict[Projections, Projector] = {}

    def of(self, setting: Projections) -> Projector:
        return self._of.setdefault(setting, Projector(setting))


def _projector(model: nn.Module, setting: Projections) -> Projector:
    return NOTES.of(model, _Projectors).of(setting)
