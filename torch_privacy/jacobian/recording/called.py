# SPDX-License-Identifier: Apache-2.0
"""Runs torch functions that call functions of the user: ``cond`` by its branch; others if these use no parameter.

Run uncompiled, they drop the gradient of whatever a function takes from outside of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

from ...ops import branches
from ...support.torch_modes import OpMode
from ...support.validate import Refused
from .tensors import KnownTensors


class TakenBranches(OpMode):
    """Runs ``torch.cond`` by the branch that is taken, as the recorder does, where nothing is recorded."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in branches.COMPOSED:
            return func(*args, **(kwargs or {}))
        _push_mode(self)  # torch has disabled it here, and a branch may have another cond
        try:
            return branches.COMPOSED[func](None, *args, **(kwargs or {}))
        finally:
            _pop_mode()


def watched(func: Callable, args: tuple, kwargs: dict[str, Any], known: KnownTensors) -> tuple[tuple, dict[str, Any]]:
    """Returns arguments in which the functions refuse parameters that are not among the arguments."""
    mode = _NoParameters(func, {id(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}, known)

    def guarded(arg: Any) -> Any:
        return partial(mode.call, arg) if callable(arg) and not isinstance(arg, Tensor) else arg

    return tuple(map(guarded, args)), {name: guarded(arg) for name, arg in kwargs.items()}


class _NoParameters(TorchFunctionMode):
    """Refuses ops on parameters, or on tensors computed from them, except for some tensors by id."""

    def __init__(self, func: Callable, given: set[int], known: KnownTensors):
        super().__init__()
        self._func, self._given, self._known = func, given, known

    def call(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Calls a function of the user."""
        with self:
            return function(*args, **kwargs)

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for t in tree_leaves((args, kwargs)):
            source = self._known.source(t) if isinstance(t, Tensor) and id(t) not in self._given else None
            if source is not None:
                name = getattr(self._func, "__name__", str(self._func))
                raise Refused(
                    f"tape: a function given to torch's {name!r} uses parameter {', '.join(map(repr, source.names))} "
                    "without an argument for it, and torch drops its gradient there. Write the loop in Python, or use "
                    "torch.vmap."
                )
        return func(*args, **(kwargs or {}))
