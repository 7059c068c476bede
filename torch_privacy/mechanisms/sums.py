# SPDX-License-Identifier: Apache-2.0
"""Defines how the rows of one batch become sums: recordings, summations, and the check of a rule's bound."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..jacobian.layouts.known import Merging
from ..jacobian.recording.coverage import CodePath
from ..jacobian.rows.blocks import Direction
from ..jacobian.rows.operator import Jacobian, RowsOfBatch
from ..jacobian.rows.streamed_sum import DeferredSum
from ..support.validate import Refused
from .clipping import Adaptive, ClippingRule

ROUNDING = 1e-5  # relative, of a factor times a norm, and of a norm: a clipped row may exceed its bound by both
COUNT = "the count of examples within the clip norm"  # key beside the parameters' names, which have no spaces


class RunAgain(Exception):
    """Asks for the same batch once more, to compute its sum in another way; nothing was released."""


class Recording(Protocol):
    """Records the user's code and computes the clipped sum of its losses, with exact or estimated norms."""

    @property
    def code(self) -> CodePath:
        """Returns the path through the model's code that was run."""
        ...

    @property
    def reached(self) -> Collection[str]:
        """Returns the names of the parameters that the losses were found to depend on."""
        ...

    @property
    def measured(self) -> bool:
        """Returns whether layouts had to be measured, by additional backward passes."""
        ...

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """Returns the trained parameters by name."""
        ...

    def begin(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """Called before the model's forward, with its arguments."""

    def end(self, output: Any) -> None:
        """Called after the model's forward with its output, or with None if it did not finish."""

    def start(self, batch: Any) -> None:
        """Records the user's code from the batch on."""

    def stop(self) -> None:
        """Ends what `start` began, when the losses are there or the loop was left; may be called again."""

    def __enter__(self) -> Any: ...

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any, /) -> bool | None: ...

    def clipped_sum(
        self,
        losses: Tensor,
        groups: Mapping[str, Sequence[str]],
        clip: Callable[[RowsOfBatch, str], dict[str, Tensor]] | None,
        *,
        merging: Merging | None = None,
        may_miss: Iterable[str] = (),
        memory_budget: float = ...,
        observe: Callable[[RowsOfBatch, str], None] | None = None,
        observe_on: Direction | None = None,
    ) -> dict[str, Tensor]:
        """Returns the clipped sum by name; see `Tape.clipped_sum`. Raises `RunAgain` where it takes another forward."""
        ...


class Summation(ABC):
    """Clips and sums the rows of one (micro)batch; called once for each group of parameters, with its rows."""

    merging: Merging | None = None  # assigns examples to rows where the mean of several is one row
    defers = False  # whether it may return a `DeferredSum` for each name, as where sums are reduced bucket by bucket

    def __init__(self) -> None:
        self.factors: dict[str, Tensor] = {}  # (rows,) by group: the clip factors; 0 for rows that were left out
        self.norms_of_groups: dict[str, Tensor] = {}  # (rows,) by group: norms before clipping, as they were computed

    @property
    @abstractmethod
    def num_left_out(self) -> int:
        """Returns the number of examples left out because a gradient (of their micro-batch) was not finite. Secret."""

    @abstractmethod
    def __call__(self, jacobian: RowsOfBatch, group: str) -> dict[str, Tensor]:
        """Returns the sums, by name, of the clipped rows in one group of parameters. Secret."""

    def compute_factors(self, jacobian: RowsOfBatch, group: str) -> None:
        """Computes only the factors of the rows in one group of parameters."""
        self(jacobian, group)

    @abstractmethod
    def responses(
        self, jacobian: RowsOfBatch, group: str, release: Mapping[str, Tensor], stddevs: Mapping[str, float]
    ) -> tuple[Tensor, Tensor]:
        """Returns ⟨release, vᵢ⟩ and ‖vᵢ‖² for the part vᵢ of each row in the sums, in units of the noise.

        Each entry of both is divided by the standard deviation of its noise. An audit computes its scores from this.
        """

    def check_bound(self) -> None:  # noqa: B027
        """Refuses sums in which a row exceeds the clipping rule's bound; called after all groups."""

    def norms(self) -> Tensor:
        """Returns (rows,) norms before clipping, over all groups; not finite for rows that were left out. Secret."""
        return torch.stack([norms.double().square() for norms in self.norms_of_groups.values()]).sum(0).sqrt()

    def clipped(self) -> Tensor:
        """Returns (rows,) True for rows with a factor below 1 in some group. Secret."""
        return torch.stack([factors < 1 for factors in self.factors.values()]).any(0)


def checked_factors(rule: ClippingRule, norms: Tensor, group: str) -> Tensor:
    """Returns the rule's factors, one for each row; refuses another shape."""
    factors = rule.factors(norms, group)
    if not isinstance(factors, Tensor) or factors.shape != norms.shape:
        shape = tuple(factors.shape) if isinstance(factors, Tensor) else type(factors).__name__
        raise Refused(
            f"PrivateTraining: {type(rule).__name__}.factors returned {shape} for {len(norms)} norms: must be a tensor "
            "with one factor for each."
        )
    return factors


class BoundCheck:
    """Checks that no clipped row exceeds its rule's bound."""

    def __init__(self, rule: ClippingRule):
        self._rule = rule
        self._norms: dict[str, Tensor] = {}  # (rows,) by group: norms of the clipped rows

    def note(self, group: str, factors: Tensor, norms: Tensor) -> None:
        """Notes the factors and norms (rows,) of the rows in one group of parameters."""
        self._norms[group] = factors * norms  # of single precision at least, as the norms are

    def longest(self) -> Tensor:
        """Returns the norm of the longest clipped row so far, a number on the rows' device; 0 if there are none."""
        first, *others = self._norms.values()
        longest = torch.linalg.vector_norm(torch.stack([first, *others]), dim=0) if others else first
        return torch.linalg.vector_norm(longest, torch.inf) if len(longest) else longest.sum()

    def check(self, longest: float | None = None) -> None:
        """Refuses a row longer than ``largest_norm``; called after all groups, with their `longest` if it was read."""
        bound, longest = self._rule.largest_norm(), float(self.longest()) if longest is None else longest
        if not longest <= bound * (1 + ROUNDING):  # also refuses NaN
            raise Refused(
                f"PrivateTraining: {type(self._rule).__name__}.factors lets a row be {longest / bound:.2g} times as "
                f"long as largest_norm() allows, {bound:.7g}, and the noise is scaled to that. Return factors with "
                "factors * norms <= the bound, such as (clip_norm / norms).clamp(max=1)."
            )


class ClippedSummation(Summation):
    """Clips and sums the rows; counts those within the clip norm, and those that are not finite."""

    def __init__(self, rule: ClippingRule, merging: Merging | None, views: int):
        super().__init__()
        self._rule, self.merging, self._views = rule, merging, views
        self._non_finite: set[int] = set()
        self._bound_check = BoundCheck(rule)
        self._longest: float | None = None  # of the clipped rows, if it was read from the device already

    @property
    def num_left_out(self) -> int:
        if self.merging is None:
            return len(self._non_finite)
        left_out = torch.isin(self.merging.assignment, self.merging.assignment.new_tensor(sorted(self._non_finite)))
        return int(left_out.sum()) // self._views

    @torch.no_grad()
    def __call__(self, jacobian: RowsOfBatch, group: str) -> dict[str, Tensor]:
        factors, kept, count = self._weigh(jacobian, group)
        rows = jacobian if kept is None else jacobian.select(kept)
        if self.defers and isinstance(rows, Jacobian) and not rows.depends_on_graph:
            sums: dict[str, Any] = dict.fromkeys(rows.shapes, DeferredSum(rows, factors))
        else:
            sums = rows.weighted_sum(factors)
        return sums if count is None else sums | {COUNT: count}

    @torch.no_grad()
    def compute_factors(self, jacobian: RowsOfBatch, group: str) -> None:
        self._weigh(jacobian, group)

    @torch.no_grad()
    def responses(
        self, jacobian: RowsOfBatch, group: str, release: Mapping[str, Tensor], stddevs: Mapping[str, float]
    ) -> tuple[Tensor, Tensor]:
        squares, names = jacobian.squared_norms(), jacobian.shapes
        self._factors_of_finite(squares.sqrt(), group)
        factors, stddev = self.factors[group].double(), stddevs[next(iter(names))]
        products = jacobian.project({name: release[name][None] for name in names})[:, 0]
        finite = squares.isfinite()
        products, squares = (torch.where(finite, part.double(), 0) for part in (products, squares))
        return factors * products / stddev**2, factors.square() * squares / stddev**2

    def _weigh(self, jacobian: RowsOfBatch, group: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the factors, the indices of the finite rows as `_factors_of_finite` does, and the count, if wanted.

        The host waits for a GPU once, for all that it must know before the sum; if some norm is not finite or must be
        computed again, a few more times.
        """
        norms = jacobian.squared_norms(final=False).sqrt()
        if norms.device.type != "cpu":
            known = norms.nan_to_num(0, 0)
            factors = checked_factors(self._rule, known, group)
            self._note(group, factors, known)
            counts = [self._rule.count(norms)] if isinstance(self._rule, Adaptive) else []
            asked = [_largest(norms), self._bound_check.longest(), *counts]
            read = torch.stack(asked).cpu()  # in the widest type, which is double
            if read[0].isfinite():
                self._longest, self.norms_of_groups[group] = float(read[1]), norms
                return factors, None, read[2:].to(counts[0].dtype) if counts else None
            self._longest, norms = None, jacobian.squared_norms().sqrt()
        count = self._rule.count(norms).reshape(1).cpu() if isinstance(self._rule, Adaptive) else None
        return *self._factors_of_finite(norms, group), count

    def _factors_of_finite(self, norms: Tensor, group: str) -> tuple[Tensor, Tensor | None]:
        """Returns the factors of the rows with finite norms, and the indices of these rows; None if all are finite."""
        self.norms_of_groups[group] = norms
        if math.isfinite(float(_largest(norms))):
            factors = checked_factors(self._rule, norms, group)
            self._note(group, factors, norms)
            return factors, None
        finite = norms < math.inf
        self._non_finite.update((~finite).nonzero().flatten().tolist())
        kept = finite.nonzero().flatten()
        factors = checked_factors(self._rule, norms[kept], group)
        zeros = norms.new_zeros(len(norms), dtype=factors.dtype)
        self._note(group, zeros.index_copy(0, kept, factors), torch.where(finite, norms, 0))
        return factors, kept

    def _note(self, group: str, factors: Tensor, norms: Tensor) -> None:
        self.factors[group] = factors
        self._bound_check.note(group, factors, norms)

    def check_bound(self) -> None:
        self._bound_check.check(self._longest)


def _largest(norms: Tensor) -> Tensor:
    """Returns the largest of some norms; NaN if one is NaN, 0 if there are none."""
    return norms.max() if len(norms) else norms.sum()


def merging_of_views(size: int, views: int) -> Merging | None:
    """Returns the merging of the ``views`` rows of each of ``size`` examples into one; None if ``views`` is 1."""
    return None if views == 1 else Merging.views(size, views)
