# SPDX-License-Identifier: Apache-2.0
"""Provides the light mode, which ``torch.compile`` takes whole: it remembers inputs and adds probes to outputs.

The gradient of a probe is the gradient in the output that it was added to. Parameters are detached, so that no other
gradient is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ...ops import COMPOSED, OPS
from ...ops.elementwise import OVERWRITING
from ..torch_functions import changes_in_place, decomposed, traits
from .actions import CALL, COMPOSITIONS, CONSTANT, DERIVE, INSIDE, NONE, PASSED

# These are tables, and not calls of functions, because dynamo reads tables.
_NAMES = {func: rule.__name__ for func, rule in OPS.items()}
_IN_PLACE = {func for func in OPS if changes_in_place(func)}
_INNER: dict[Callable, Callable] = {
    func: inner
    for module in (torch.functional, F)
    for func in vars(module).values()
    if callable(func) and func not in OPS and func not in COMPOSED and (inner := decomposed(func)) is not None
}
_COMPOSED = {func: composition for func, composition in COMPOSED.items() if composition in COMPOSITIONS}


def _has_parameter(values: Sequence[Any], derived: Sequence[Tensor]) -> bool:
    for value in values:
        if isinstance(value, nn.Parameter):
            if value.requires_grad:
                return True
        elif isinstance(value, Tensor):
            for tensor in derived:
                if value is tensor:
                    return True
        elif isinstance(value, (list, tuple)) and _has_parameter(value, derived):
            return True
    return False


def _without_gradients(value: Any) -> Any:
    """Returns the argument with parameters detached."""
    if isinstance(value, nn.Parameter):
        return value.detach()
    if isinstance(value, tuple):
        return tuple([_without_gradients(part) for part in value])
    if isinstance(value, list):
        return [_without_gradients(part) for part in value]
    return value


class LightMode(TorchFunctionMode):
    """Repeats the actions of a tape, without looking anything up.

    Args:
        actions: of the tape, in order.
        probes: added to the outputs of the calls; None adds none, and ``outputs`` takes the outputs' shapes.
        wanted: for each tensor among the calls' inputs, whether it is remembered; None remembers all.
    """

    def __init__(
        self,
        actions: Sequence[tuple[str, str]],
        probes: Sequence[Tensor] | None = None,
        wanted: Sequence[bool] | None = None,
    ):
        super().__init__()
        self.actions, self.probes, self.wanted = actions, probes, wanted
        self.done = self.calls = self.met = 0
        self.fits = True
        self.derived: list[Tensor] = []
        self.tensors: list[Tensor] = []

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not _has_parameter(args, self.derived) and not _has_parameter(tuple(kwargs.values()), self.derived):
            if func is Tensor.unflatten:  # dynamo does not follow this method inside of a mode
                return torch.unflatten(*args, **kwargs)
            return func(*args, **kwargs)
        if not torch.compiler.is_compiling() and traits(func).metadata:  # dynamo answers these itself
            return func(*args, **kwargs)
        plain = [_without_gradients(value) for value in args]
        named = {key: _without_gradients(value) for key, value in kwargs.items()}
        if not torch.is_grad_enabled() or func in PASSED:
            return func(*plain, **named)
        goes_inside = func in _COMPOSED or func in _INNER
        kind, name = self._next()
        while kind == INSIDE and not goes_inside:  # dynamo has gone inside already
            kind, name = self._next()
        if kind == INSIDE:
            with self:
                return _COMPOSED[func](None, *args, **kwargs) if func in _COMPOSED else _INNER[func](*args, **kwargs)
        if kind == CONSTANT:
            return func(*plain, **named)
        if kind == DERIVE:
            y = func(*plain, **named)
            self.note(kind, func, args, kwargs)
            for tensor in y if isinstance(y, (tuple, list)) else (y,):
                self.derived.append(tensor)
            return y
        if kind != CALL or func not in _NAMES or _NAMES[func] != name:
            self.fits = False  # no exception, which dynamo would report in its own words
            return func(*plain, **named)
        self.note(kind, func, args, kwargs)
        y = func(*plain, **named)
        return self.probed(args[0] if func in _IN_PLACE else y, func in _IN_PLACE)

    def _next(self) -> tuple[str, str]:
        self.done += 1
        return self.actions[self.done - 1] if self.done <= len(self.actions) else (NONE, "")

    def note(self, kind: str, func: Callable, args: tuple, kwargs: dict) -> None:
        """Remembers the tensors among the arguments, except for parameters."""
        self._keep(args, func in OVERWRITING)
        self._keep(tuple(kwargs.values()), False)

    def _keep(self, values: Sequence[Any], copied: bool) -> None:
        for value in values:
            if isinstance(value, nn.Parameter):
                continue
            if isinstance(value, Tensor):
                if not _has_parameter((value,), self.derived):
                    if self.wanted is not None and self.met >= len(self.wanted):
                        self.fits = False
                    elif self.wanted is None or self.wanted[self.met]:
                        self.tensors.append(value.detach().clone() if copied else value.detach())
                    self.met += 1
            elif isinstance(value, (list, tuple)):
                self._keep(value, copied)

    def probed(self, y: Tensor, in_place: bool) -> Tensor:
        """Returns the output of a call with its probe added."""
        assert self.probes is not None
        if self.calls == len(self.probes) or self.probes[self.calls].shape != y.shape:
            self.fits = False
            return y
        probe = self.probes[self.calls]
        self.calls += 1
        return y.add_(probe) if in_place else y + probe


def run_with_probes(
    forward: Callable,
    args: tuple,
    kwargs: dict,
    actions: Sequence[tuple[str, str]],
    probes: Sequence[Tensor],
    wanted: Sequence[bool],
) -> tuple[Any, list[Tensor], bool]:
    """Returns the model's output, the tensors that its calls used, and whether the actions were those of the plan.

    This is the function that is compiled.
    """
    mode = LightMode(actions, probes, wanted)
    with mode:
        out = forward(*args, **kwargs)
    return out, mode.tensors, mode.fits and mode.done == len(actions) and mode.calls == len(probes)


@dataclass(frozen=True)
class Ref:
    """The place of a tensor argument: a parameter by name, or the number of a derived or a remembered tensor."""

    kind: str  # "parameter", "derived" or "tensor"
    key: str | int


@dataclass(frozen=True)
class Action:
    """One action with its function; ``Ref`` stands for each tensor among the arguments."""

    kind: str
    func: Callable
    args: tuple
    kwargs: dict[str, Any]
    name: str  # of the op's rule


@dataclass
class Program:
    """The actions of one forward, with the shapes of the calls' outputs."""

    actions: list[Action] = field(default_factory=list)
    outputs: list[tuple[torch.Size, torch.dtype, torch.device]] = field(default_factory=list)

    def parameters(self) -> set[str]:
        """Returns the names of the parameters among the arguments."""
        values = [value for action in self.actions for value in tree_leaves((action.args, action.kwargs))]
        return {value.key for value in values if isinstance(value, Ref) and isinstance(value.key, str)}


class ObservingMode(LightMode):
    """The light mode, run once without compiling: notes the program."""

    def __init__(self, actions: Sequence[tuple[str, str]], parameters: dict[int, str]):
        super().__init__(actions)
        self._parameters, self.program = parameters, Program()

    def note(self, kind: str, func: Callable, args: tuple, kwargs: dict) -> None:
        number = len(self.tensors)

        def ref(value: Any) -> Any:
            nonlocal number
            if isinstance(value, nn.Parameter):
                return Ref("parameter", self._parameters[id(value)])
            if isinstance(value, Tensor):
                for k, tensor in enumerate(self.derived):
                    if value is tensor:
                        return Ref("derived", k)
                number += 1
                return Ref("tensor", number - 1)
            return type(value)(map(ref, value)) if type(value) in (tuple, list) else value

        _, name = self.actions[self.done - 1]
        noted = Action(kind, func, ref(args), {key: ref(value) for key, value in kwargs.items()}, name)
        self.program.actions.append(noted)
        super().note(kind, func, args, kwargs)

    def probed(self, y: Tensor, in_place: bool) -> Tensor:
        self.program.outputs.append((y.shape, y.dtype, y.device))
        return y
