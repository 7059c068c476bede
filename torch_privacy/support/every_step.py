# SPDX-License-Identifier: Apache-2.0
"""Calls functions before or after every optimizer's step, and lets them leave while a step runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Hook = Callable[[Optimizer, tuple, dict[str, Any]], None]


class EveryStep:
    """Has one hook of torch, which stays, for all functions.

    A function may leave at any time, as when the garbage collector ends a loop in the middle of another optimizer's
    step. Torch iterates over its own hooks then, and would raise a RuntimeError if one of them left.

    Args:
        register: torch's function that registers a hook.
    """

    def __init__(self, register: Callable[[Any], object]):
        self._register = register
        self._hooks: dict[object, Hook] = {}
        self._is_registered = False

    def add(self, hook: Hook) -> Callable[[], None]:
        """Calls the hook at every step from now on; returns what ends that."""
        if not self._is_registered:
            self._register(self._call)
            self._is_registered = True
        key = object()
        self._hooks[key] = hook
        return partial(self._remove, key)

    def _remove(self, key: object) -> None:
        self._hooks.pop(key, None)

    def _call(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        for hook in list(self._hooks.values()):
            hook(optimizer, args, kwargs)


BEFORE_EVERY_STEP = EveryStep(register_optimizer_step_pre_hook)
AFTER_EVERY_STEP = EveryStep(register_optimizer_step_post_hook)
