# SPDX-License-Identifier: Apache-2.0
"""Provides the tape that also notes what it did with each torch function, for the light mode to do the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ...ops import COMPOSED, OPS, AnyLayout, Layout
from ...ops.attention import scaled_dot_product_attention
from ..calls import Reached
from ..layout import Merging
from ..plan import Budget
from ..prediction import Prediction
from ..recorder import Step
from ..tape import Tape
from ..torch_functions import LIKE, NEW, decomposed, tensors_among

# What is done with a function that has parameters among its arguments: its output gets a probe, its output counts as a
# parameter itself, or as a constant, or its inner functions are looked at.
CALL, DERIVE, CONSTANT, INSIDE, NONE = "call", "derive", "constant", "inside", "none"
REARRANGED = "rearranged"  # the name of an action that only rearranges a parameter's entries
PASSED = LIKE | NEW  # they use a parameter's shape or type alone
OUTSIDE = "parameters are used outside of the model's forward"
COMPOSITIONS = {scaled_dot_product_attention}  # of ``COMPOSED``, those that torch.compile can take


class Unfit(Exception):
    """Raised inside of the library if a batch cannot be, or was not, computed by compiled graphs; says why.

    ``by_data`` if the next batch may well be.
    """

    def __init__(self, reason: str, *, by_data: bool = False):
        super().__init__(reason)
        self.by_data = by_data


class ActionTape(Tape):
    """A tape that also notes its actions, and keeps layouts and budget, from which a plan is made."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.actions: list[tuple[str, str]] = []  # kind of action and name of the op's rule
        self.unfit = ""  # why no plan can be made
        self.is_inside = True  # of the model's forward
        self.reached_calls: Reached | None = None
        self.found: Sequence[AnyLayout] | Prediction = ()
        self.budget: Budget | None = None

    def _run_without_data(
        self, step: Step, args: tuple, kwargs: dict, tensors: list[Tensor], weights: list[Tensor]
    ) -> Any:
        out = super()._run_without_data(step, args, kwargs, tensors, weights)
        if weights and not self.is_inside:
            if any(t.requires_grad for t in tensors_among((out,))):  # not a copy, or an evaluation
                self.unfit = OUTSIDE
        elif weights and step.func not in PASSED:
            if step.traits.in_place:
                self.unfit = f"a tensor made of parameters is changed in place by {step.func.__name__!r}"
            sources = [self._sources.get(id(t)) for t in tensors_among((out,)) if t.requires_grad]
            rearranged = any(source is not None and source.rearranged for source in sources)
            self.actions.append((DERIVE if sources else CONSTANT, REARRANGED if rearranged else ""))
        return out

    def _run_op(self, func: Callable, args: tuple, kwargs: dict, data: list[Tensor], weights: list[Tensor]) -> Any:
        if not self.is_inside:
            self.unfit = OUTSIDE
        elif func not in OPS:
            if func in COMPOSED and COMPOSED[func] not in COMPOSITIONS:
                self.unfit = f"{getattr(func, '__name__', func)!r} is computed by a scan"
            elif func in COMPOSED or decomposed(func) is not None:
                self.actions.append((INSIDE, ""))
        return super()._run_op(func, args, kwargs, data, weights)

    def _run_and_record(
        self, func: Callable, args: tuple, kwargs: dict, data: list[Tensor], weights: list[Tensor]
    ) -> Any:
        if func in PASSED or not self.is_inside:
            return super()._run_and_record(func, args, kwargs, data, weights)
        before = len(self._calls)
        out = super()._run_and_record(func, args, kwargs, data, weights)
        if len(self._calls) != before + 1 or func not in OPS or len(tensors_among((out,))) > 1:
            self.unfit = f"{getattr(func, '__name__', func)!r} has no rule for its rows"
        else:
            self.actions.append((CALL, OPS[func].__name__))
        return out

    def _layouts_for_sum(
        self, reached: Reached, groups: Mapping[str, Sequence[str]], memory_budget: float, merging: Merging | None
    ) -> Sequence[AnyLayout] | Prediction:
        found = super()._layouts_for_sum(reached, groups, memory_budget, merging)
        self.reached_calls, self.found = reached, found
        return self.found

    def _budget(self, reached: Reached, limit: float) -> Budget:
        self.budget = super()._budget(reached, limit)
        return self.budget

    def constant_tensors(self) -> list[Tensor]:
        """Returns the tensors that hold no data of the batch."""
        return [tensor for tensor, _ in self._constants.values()]

    def regular_layouts(self) -> list[Layout]:
        """Returns the layout of every recorded call, in the order in which they were made.

        Raises:
            Unfit: some have none, or the plan would have to be another for every batch.
        """
        if self.unfit:
            raise Unfit(self.unfit)
        reached = self.reached_calls
        if reached is None or self._moved or self._moved_unseen or self._saved_elsewhere or reached.cuts:
            raise Unfit("the data determine the order of the examples, or saved tensors are kept elsewhere")
        found = self.found.expected if isinstance(self.found, Prediction) else self.found
        layouts = [layout for layout in found if isinstance(layout, Layout)]
        if len(layouts) != len(found) or len(found) != len(self._calls):
            raise Unfit("examples are in no regular order, or the losses leave out a part of the model's output")
        return layouts
