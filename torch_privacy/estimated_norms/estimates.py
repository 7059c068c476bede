# SPDX-License-Identifier: Apache-2.0
"""Norms that are estimated from what the tape noted, and what must hold of any such estimate to be priced.

The accountant's laws take that the factor of one example is a function of its own row and of public randomness. So the
form in which an estimate is made may depend on the model alone: see ``Forms``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from .._validate import Refused
from ..jacobian.layout import PROOFS, Layouts
from ..jacobian.tape import Tape

if TYPE_CHECKING:
    from .._model_state import ModelTensors
    from ..jacobian.blocks import Block
    from ..jacobian.operator import Jacobian
    from .choose import Sketched
    from .directions import Directions


class Forms:
    """In which form the norms of each part of the row were taken so far; another form is refused.

    ``known``: parameters -> form. Plain data, so that a run goes on with the forms it began with.
    """

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self._looks: Counter[str] = Counter()

    def take(self, names: Sequence[str], form: str) -> None:
        """Note the form of the part of these parameters."""
        key = ", ".join(names)
        known = self.known.setdefault(key, form)
        if known != form:
            raise Refused(
                f"Sketched: parameter {key!r} was {known} in earlier batches, and now is {form}. What else is in the "
                "batch would decide how its part of a norm is estimated, which has no price. Let the forward take the "
                "same ops on every batch; or use exact norms, without jacobian=."
            )

    def doubted(self, names: Sequence[str]) -> bool:
        """Whether the form of this part is new enough to be proved; counts the looks."""
        key = ", ".join(names)
        self._looks[key] += 1
        return self._looks[key] <= PROOFS

    def lines(self) -> list[str]:
        """What is known, one line for each form."""
        forms: dict[str, list[str]] = {}
        for key, form in self.known.items():
            forms.setdefault(form, []).append(key)
        return [f"{form}: {', '.join(keys)}" for form, keys in forms.items()]


class Estimates(ABC):
    """Estimated norms of one (micro)batch.

    Args:
        setting: the user's choice.
        directions: of this (micro)batch alone.
        parameters: all trained ones, by name.
        forms: what earlier batches taught.
    """

    block_by_block = True  # whether norms add up over the blocks, so that what they are made of may be let go

    def __init__(self, setting: Sketched, directions: Directions, parameters: Mapping[str, Tensor], forms: Forms):
        self.setting, self.directions, self.parameters, self.forms = setting, directions, parameters, forms

    @abstractmethod
    def prepare(self, block: Block, *, alone: bool) -> None:
        """All uses of a weight are in; ``alone`` says that no other block has to do with its parameter."""

    def squared_norms(self, jacobian: Jacobian) -> Tensor | None:
        """Estimates (n,) for whole rows; None where those of the blocks are added."""
        return None


class Estimating:
    """What batches have taught about a model whose norms are estimated on the tape.

    Args:
        setting: the user's choice.
        make: what estimates the norms of a batch.
        layouts: of the tapes.
        summary: how, in a few words.
    """

    def __init__(self, setting: Sketched, make: Callable[..., Estimates], layouts: Layouts, summary: str):
        self.setting, self._make, self._layouts, self._summary = setting, make, layouts, summary
        self._forms = Forms()

    @property
    def way(self) -> dict[str, str] | None:
        """What a run that goes on must know: the forms; None before the first batch."""
        return self._forms.known or None

    @way.setter
    def way(self, known: dict[str, str] | None) -> None:
        self._forms.known = dict(known or {})

    def settled(self, size: int) -> bool:
        """Whether enough batches were looked at to trust one of this size."""
        return self._layouts.settled(size)

    def recorder(self, tensors: ModelTensors, size: int, directions: Directions) -> Tape:
        """The tape of a (micro)batch of so many examples."""
        estimates = self._make(self.setting, directions, tensors.trained, self._forms)
        return Tape(tensors.trained, tensors.constants, self._layouts, size, estimates)

    def explain(self) -> str:
        """How the norms are estimated, and which parameters' parts are exact."""
        return "\n  ".join([self._summary, *(self._forms.lines() or ["to be seen on the first batch"])])
