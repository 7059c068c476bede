# SPDX-License-Identifier: Apache-2.0
"""One run of the user's code on a batch, as a rehearsal asks for it, and the answers that are compared."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from ...support.draws import AS_DRAWN, Drawn, RunDraws
from ...support.model_state import ModelState
from .row_digests import RowAnswers
from .trace import Trace


class BatchVariants(Protocol):
    """A batch with examples that can be replaced and left out."""

    batch: Any
    count: int
    drawn: Drawn | None  # what was drawn for the last ``whole`` batch as a whole
    notes: set[str]  # what could not be compared, in words

    @property
    def drawn_together(self) -> bool:
        """True if random numbers are drawn for the batch as a whole, as by collate_fn."""
        ...

    def whole(self, draws: RunDraws) -> Any:
        """Returns the batch as it is with these random numbers."""

    def with_others(self, keep: np.ndarray, draws: RunDraws = AS_DRAWN) -> Any:
        """Returns the batch with other examples where ``keep`` (count,) is false, at equal shapes; None if none fit."""

    def without(self, keep: np.ndarray, draws: RunDraws = AS_DRAWN) -> Any:
        """Returns a batch of the kept examples alone; None if they cannot be separated from the others."""


@dataclass
class Turn:
    """One run of the user's code on a batch."""

    batch: Any
    count: int
    is_batch: bool = False  # True for the batch itself, which is released unless something was found
    rows: bool = True  # whether rows are compared, not the losses alone
    draws: RunDraws = AS_DRAWN
    drawn: Drawn | None = None  # what was drawn in the run
    trace: Trace | None = None  # records what the modules return
    before: list[Callable[[], object]] = field(default_factory=list)  # what must be called right before the run
    around: Callable[[], AbstractContextManager[None]] | None = None  # entered for the run, and left in ``step``
    state: ModelState | None = None  # of the model before the run, as far as it is put back
    keep: np.ndarray | None = None  # (examples of the batch,) which of them these are, if some were left out
    take: Callable[[Any, Tensor], None] | None = None  # gets recording and losses of a run that only observes
    is_idle: bool = False  # True for a run of which nothing is used, made because other ranks make one
    replaces: bool = False  # True for a run with other examples in some places


@dataclass
class Answers:
    """The results of a run that must not depend on other examples."""

    losses: Tensor  # (count, views)
    rows: RowAnswers | None
    changes: dict[str, Any]  # buffers and attributes that the user's code changed
    random: Any  # state of the random number generators at the end
    later: dict[str, Any] = field(default_factory=dict)  # the same changes, after the backward passes
    settled: bool = False  # True if these passes were the usual ones, and none that only measures layouts
    drew: bool = False  # whether random numbers were drawn
    rounding: float = 0.0  # relative, of the coarsest type that was seen: losses may have more digits than that
    shapes: int = 0  # equal for two runs if all results in their forwards had the same shapes
