# SPDX-License-Identifier: Apache-2.0
"""Provides the optimizer that `PrivacyEngine.make_private` returns: its ``step()`` makes the private step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..support.validate import Refused


class DPOptimizer(Optimizer):
    """Makes a step of the private training where an ordinary loop calls ``optimizer.step()``.

    Learning rates, state and ``state_dict()`` are those of ``original_optimizer``, which makes the update. Schedulers
    of ``torch.optim.lr_scheduler`` may be given either of the two. Not to be made by hand; see `PrivacyEngine`.

    Args:
        optimizer: the user's optimizer.
        run: makes the steps.
    """

    def __init__(self, optimizer: Optimizer, run: Any):  # the base class's would ask for parameters
        self.original_optimizer = optimizer
        self._run = run
        self._hook: Any = None
        self._set: dict[str, float] = {}  # by schedulers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Returns the groups of the original optimizer."""
        return self.original_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.original_optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """Returns the state of the original optimizer."""
        return self.original_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.original_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """Returns the defaults of the original optimizer."""
        return self.original_optimizer.defaults

    @property
    def params(self) -> list[nn.Parameter]:
        """Returns the parameters that the optimizer trains."""
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    @property
    def noise_multiplier(self) -> float | None:
        """Returns the noise multiplier, as given or as a noise scheduler has set it."""
        return self._set.get("noise", self._run.trainings.noise_at(0))

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        self._check("noise_multiplier", value, self._run.trainings.noise_at(), "noise_schedule", "ExponentialNoise")
        self._set["noise"] = value

    @property
    def max_grad_norm(self) -> float | None:
        """Returns the bound on the gradient of an example, as given or as a gradient clip scheduler has set it."""
        return self._set.get("clip", self._run.trainings.clip_norm_at(0))

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        self._check("max_grad_norm", value, self._run.trainings.clip_norm_at(), "clip_schedule", "ExponentialGradClip")
        self._set["clip"] = value

    def _check(self, name: str, value: float, planned: float | None, argument: str, scheduler: str) -> None:
        """Refuses a value that is not the planned one of the next step; after the last step any will do."""
        if planned is not None and not math.isclose(value, planned, rel_tol=1e-9):
            raise Refused(
                f"DPOptimizer.{name} = {value!r}: the next step is planned with {planned!r}. Opacus' noise and "
                f"gradient clip schedulers, such as {scheduler}, change it in the loop; here every step is priced "
                f"before the first batch. Give make_private the same schedule as factors, {argument}=lambda step: ..., "
                "and epochs; the scheduler may then stay."
            )

    @property
    def expected_batch_size(self) -> float:
        """Returns q·n, the divisor of the update; Opacus rounds it down."""
        return self._run.training.settings.expected_batch_size

    @property
    def loss_reduction(self) -> str:
        """Returns "mean" or "sum"; with "sum" the update is not divided by the expected batch size."""
        return self._run.loss_reduction

    @property
    def accumulated_iterations(self) -> int:
        """Returns 1: gradients are never accumulated over batches."""
        return 1

    @property
    def grad_samples(self) -> list[Any]:
        """Refuses: per-example gradients are not formed."""
        raise Refused(
            "DPOptimizer.grad_samples (p.grad_sample): per-example gradients are not formed, only their norms and "
            "their clipped sum. torch_privacy.Jacobian gives products with them."
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clips, adds noise, records the release and updates the weights; does nothing more for a rehearsal.

        Raises:
            Refused: there was no ``loss.backward()`` on a batch of the private loader, or the step is refused.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._opt_called = self.original_optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedulers
        self._run.step()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients; a private step needs no clearing."""
        self.original_optimizer.zero_grad(set_to_none)

    def attach_step_hook(self, fn: Callable[[Any], None]) -> None:
        """Calls ``fn(self)`` before every update, after the noise was added; replaces an earlier function."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = self.original_optimizer.register_step_pre_hook(lambda *_: fn(self))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters to the original optimizer."""
        self.original_optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the original optimizer."""
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of the original optimizer."""
        self.original_optimizer.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"DPOptimizer({self.original_optimizer!r})"

    def __getattr__(self, name: str) -> Any:  # what else an optimizer has, such as hooks and settings
        if name in ("original_optimizer", "_run", "_hook", "_set"):
            raise AttributeError(name)
        return getattr(self.original_optimizer, name)

    def __getstate__(self) -> Any:
        raise Refused("DPOptimizer cannot be copied or pickled. Save optimizer.state_dict().")
