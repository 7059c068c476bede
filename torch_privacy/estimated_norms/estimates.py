# SPDX-License-Identifier: Apache-2.0
"""Provides the base class of norm estimates from the tape, and enforces the condition under which they are priced.

The accountant assumes that the clipping factor of one example is a function of its own row and of public randomness. So
the form of an estimate may depend only on the model: see ``Forms``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..jacobian.layout import PROOFS, Layouts
from ..jacobian.tape import Tape
from ..support.validate import Refused
from .directions import Directions
from .settings import Sketched

if TYPE_CHECKING:
    from ..jacobian.blocks import Block
    from ..jacobian.operator import Jacobian
    from ..support.model_state import ModelTensors


class Forms:
    """Remembers in which form the norms of each part of the row were computed, and refuses any other form.

    ``known`` maps parameter names to the form. It is plain data, so that a resumed run keeps its forms.
    """

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self._checks: Counter[str] = Counter()

    def require(self, names: Sequence[str], form: str) -> None:
        """Records the form for these parameters; raises if it was another one before."""
        key = ", ".join(names)
        known = self.known.setdefault(key, form)
        if known != form:
            raise Refused(
                f"Sketched: parameter {key!r} was {known} in earlier batches, and now is {form}. Other examples of the "
                "batch would then affect how its part of a norm is estimated, which has no price. Let the forward run "
                "the same ops on every batch; or use exact norms, without jacobian=."
            )

    def needs_check(self, names: Sequence[str]) -> bool:
        """Returns True if the sketch of this part must still be checked; counts the calls."""
        key = ", ".join(names)
        self._checks[key] += 1
        return self._checks[key] <= PROOFS

    def lines(self) -> list[str]:
        """Returns one line for each form, with its parameters."""
        forms: dict[str, list[str]] = {}
        for key, form in self.known.items():
            forms.setdefault(form, []).append(key)
        return [f"{form}: {', '.join(keys)}" for form, keys in forms.items()]


class Estimates(ABC):
    """Estimated norms of one (micro)batch.

    Args:
        setting: the user's choice.
        directions: those of this (micro)batch only.
        parameters: all trained parameters, by name.
        forms: the forms used on earlier batches.
    """

    block_by_block = True  # whether norms add up over the blocks, so that each block's factors may be freed

    def __init__(self, setting: Sketched, directions: Directions, parameters: Mapping[str, Tensor], forms: Forms):
        self.setting, self.directions, self.parameters, self.forms = setting, directions, parameters, forms

    @abstractmethod
    def prepare(self, block: Block, *, alone: bool) -> None:
        """Prepares a block once all uses of its weight are in; ``alone`` if no other block shares its parameter."""

    def squared_norms(self, jacobian: Jacobian) -> Tensor | None:
        """Returns estimates (n,) for whole rows; None if the estimates of the blocks are to be added."""
        return None


class TapeEstimator:
    """Estimates norms on the tape, and remembers the forms from batch to batch.

    Args:
        setting: the user's choice.
        make: returns the estimates of one batch.
        layouts: those of the tapes.
        summary: a short description, for ``explain``.
    """

    def __init__(self, setting: Sketched, make: Callable[..., Estimates], layouts: Layouts, summary: str):
        self.setting, self._make, self._layouts, self._summary = setting, make, layouts, summary
        self._forms = Forms()

    @property
    def learned(self) -> dict[str, str] | None:
        """State for a resumed run: the forms; None before the first batch."""
        return self._forms.known or None

    @learned.setter
    def learned(self, known: dict[str, str] | None) -> None:
        if isinstance(known, str):
            raise Refused("PrivateTraining.load_state_dict: projections must be the forms. Use another state.")
        self._forms.known = dict(known or {})

    def join(self, known: Sequence[dict[str, str]]) -> None:
        """Joins the forms of all ranks; refuses those that differ."""
        for forms in known:
            for key, form in forms.items():
                self._forms.require([key], form)

    def recording(self, tensors: ModelTensors, size: int, directions: Directions) -> Tape:
        """Returns the tape for one (micro)batch of ``size`` examples."""
        estimates = self._make(self.setting, directions, tensors.trained, self._forms)
        return Tape(tensors.trained, tensors.constants, self._layouts, size, estimates)

    def explain(self) -> str:
        """Describes how the norms are estimated, and which parameters' parts are exact."""
        return "\n  ".join([self._summary, *(self._forms.lines() or ["determined on the first batch"])])
