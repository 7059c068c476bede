# SPDX-License-Identifier: Apache-2.0
"""Records one run of the model for ``check``: the calls that used each parameter, and the rows or the refusal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..jacobian.layouts.known import Layouts, Measurement
from ..jacobian.recording.calls import Call
from ..jacobian.recording.unrecorded import NodeUse
from ..jacobian.rows.operator import Jacobian, PlanRow
from ..jacobian.tape import Tape
from ..ops import AnyLayout, Layout
from ..ops.fallback import ReplayUse
from ..support.model_state import ModelTensors
from ..support.script_modules import takes_hooks
from ..support.validate import Refused
from .checkup import ParameterUse


class RecordedRun:
    """Records the model on one batch with respect to some of the parameters, and asks for the rows in them."""

    def __init__(self, tensors: ModelTensors, names: Sequence[str], n: int):
        frozen = (p for name, p in tensors.trained.items() if name not in names)
        self._layouts = _RememberedLayouts()
        trained = {name: tensors.trained[name] for name in names}
        self.tape = Tape(trained, [*frozen, *tensors.constants], self._layouts, n)
        self.losses: Tensor | None = None  # None also where the tape refused before the losses were computed
        self.refusal: str | None = None  # message of the tape, if it refused
        self._jacobian: Jacobian | None = None
        self._forwards: list[tuple[str, range]] = []

    def run(self, model: nn.Module, losses_of: Callable[[], Tensor]) -> None:
        """Computes the losses, and asks for their Jacobian."""
        try:
            with _noting_forwards(model, self.tape, self._forwards), self.tape:
                self.losses = losses_of()
            self._jacobian = self.tape.jacobian(self.losses, retain_graph=True, verify=bool(self.tape.parameters))
        except Refused as error:
            self.refusal = message_of(error)

    def meetings(self) -> dict[str, tuple[ParameterUse, ...]]:
        """Returns the calls that used each parameter."""
        found: dict[str, tuple[ParameterUse, ...]] = {}
        for number, call in enumerate([*self.tape.log.calls, *self.tape.log.unrecorded]):
            modules = [name for name, calls in self._forwards if number in calls]  # from the outermost inwards
            for use in call.uses:
                innermost = modules[-1] if modules else ""
                is_generic = isinstance(use, ReplayUse | NodeUse)
                met = ParameterUse(call.op.split("::")[-1], innermost, self._layouts.of(call), is_generic)
                found |= {name: (*found.get(name, ()), met) for name in self.tape.tensors.all_names([use.weight])}
        return found

    def plan(self) -> list[PlanRow]:
        """Returns how norms and sums are computed."""
        return [] if self._jacobian is None else self._jacobian.plan()


class _RememberedLayouts(Layouts):
    """Remembers the layout that was measured for each call."""

    def __init__(self) -> None:
        super().__init__()
        self._shapes: dict[int, str] = {}

    def guess(self, *args: Any, **kwargs: Any) -> None:
        """Returns no guess, so that all layouts are measured."""

    def of(self, call: Call) -> str:
        """Returns the layout of a call as text; empty if it was not measured."""
        return self._shapes.get(id(call), "")

    def measure(self, path: int, measurement: Measurement, *args: Any, **kwargs: Any) -> list[AnyLayout]:
        layouts = super().measure(path, measurement, *args, **kwargs)
        calls = measurement.calls
        self._shapes = {id(call): _shape(call, layout) for call, layout in zip(calls, layouts, strict=True)}
        return layouts


def _shape(call: Call, layout: AnyLayout) -> str:
    """Returns the shape of a call's output: (n, 3), (n·16, 3), (16·n, 3) or (80 by owner, 3) for n examples."""
    sizes = [str(size) for size in call.shape]
    if isinstance(layout, Layout):
        factors = str(layout.before) * (layout.before > 1), "n", str(layout.after) * (layout.after > 1)
        sizes[layout.dim] = "·".join(filter(None, factors))
    else:
        sizes[layout.dim] += " by owner"
    return f"({', '.join(sizes)})"


@contextmanager
def _noting_forwards(model: nn.Module, tape: Tape, forwards: list[tuple[str, range]]) -> Iterator[None]:
    """Appends to ``forwards`` each module's name and the range of the tape's calls during its forward."""
    running: list[int] = []
    names = {module: name for name, module in model.named_modules() if takes_hooks(module)}

    def before(module: nn.Module, _: Any) -> None:
        running.append(len(forwards))
        forwards.append((names[module], range(len(tape.log.calls), len(tape.log.calls))))

    def after(module: nn.Module, *_: Any) -> None:
        number = running.pop()
        forwards[number] = names[module], range(forwards[number][1].start, len(tape.log.calls))

    hooks = [module.register_forward_pre_hook(before) for module in names]
    hooks += [module.register_forward_hook(after, always_call=True) for module in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def message_of(error: Refused) -> str:
    """Returns the error's message without the name of the component that raised it."""
    return re.sub(r"^(PrivateTraining|tape|rehearsal): ", "", str(error))
