# SPDX-License-Identifier: Apache-2.0
"""What one step releases: noisy sums over the examples of its batch, and the gradient that is made of these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from . import privacy
from ._model import Census
from ._validate import Refused
from .clipping import Adaptive, ClippingRule, Groups, MicroBatches
from .jacobian.code_path import CodePath
from .jacobian.layout import Layouts, Merging
from .jacobian.tape import Tape
from .privacy import NeighboringRelation
from .sampling import Poisson

RELATION = NeighboringRelation.ADD_OR_REMOVE_ONE  # that of every event here
ROUNDING = 2e-5  # relative, of a clipped row's norm
COUNT = "the count of examples within the clip norm"  # beside the parameters' names, which have no spaces


class Recording(Protocol):
    """Looks on while the model's forward runs, and gives the clipped sum of its losses: a tape, or a sketch."""

    code: CodePath  # that ran
    reached: set[str]  # names of the parameters that the losses were found to depend on
    measured: bool  # whether layouts had to be measured, by backwards of their own

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The trained ones, by name."""
        ...

    def begin(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """The model is called with these arguments."""

    def end(self, output: Any) -> None:
        """The model gave its output, or None if it came to no end."""

    def __enter__(self) -> Any: ...

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any, /) -> bool | None: ...

    def clipped_sum(
        self,
        losses: Tensor,
        groups: Mapping[str, Sequence[str]],
        clip: Any,
        *,
        merging: Merging | None = None,
        may_miss: Iterable[str] = (),
        memory_budget: float = ...,
        observe: Any = None,
    ) -> dict[str, Tensor]:
        """The clipped sum by name, as of `Tape.clipped_sum`."""
        ...


class Summing(ABC):
    """The sums over one (micro)batch: called with the rows of each group of parameters, as soon as these are there."""

    merging: Merging | None = None  # examples whose mean is one row

    def __init__(self) -> None:
        self.factors: dict[str, Tensor] = {}  # (rows,) by group: what rows were multiplied by; 0 for those left out

    @property
    @abstractmethod
    def num_left_out(self) -> int:
        """Examples that were left out, or their micro-batch: some gradient was not finite. Secret."""

    @abstractmethod
    def __call__(self, jacobian: Any, group: str) -> dict[str, Tensor]:
        """The sums, by name, to which the rows in one group of parameters give rise. Secret."""

    def weigh(self, jacobian: Any, group: str) -> None:
        """Note the factors of the rows in one group of parameters; the sums are not wanted."""
        self(jacobian, group)

    def check_bound(self) -> None:  # noqa: B027
        """Refuse sums in which a row is longer than the clipping rule says; asked when all groups are done."""


def factors_of(rule: ClippingRule, norms: Tensor, group: str) -> Tensor:
    """The rule's factors, one for each row."""
    factors = rule.factors(norms, group)
    if not isinstance(factors, Tensor) or factors.shape != norms.shape:
        shape = tuple(factors.shape) if isinstance(factors, Tensor) else type(factors).__name__
        raise Refused(
            f"PrivateTraining: {type(rule).__name__}.factors gave {shape} for {len(norms)} norms: must be a tensor "
            "with one factor for each."
        )
    return factors


class Bound:
    """Checks that no clipped row is longer than its rule says."""

    def __init__(self, rule: ClippingRule):
        self._rule = rule
        self._squares: dict[str, Tensor] = {}  # (rows,) by group: squared norms of the clipped rows

    def note(self, group: str, factors: Tensor, norms: Tensor) -> None:
        """The rows of one group of parameters have these factors and norms (rows,)."""
        self._squares[group] = (factors.double() * norms.double()).square()

    def check(self) -> None:
        """Refuse if a row is longer than ``largest_norm``; all groups were noted."""
        squares = torch.stack([*self._squares.values()]).sum(0)
        if not len(squares):
            return
        bound, longest = self._rule.largest_norm(), float(squares.max().sqrt())
        if not longest <= bound * (1 + ROUNDING):  # also where it is undefined
            raise Refused(
                f"PrivateTraining: {type(self._rule).__name__}.factors lets a row have the norm {longest:.7g}, and "
                f"largest_norm() says at most {bound:.7g}, from which the noise follows. Return factors with "
                "factors * norms <= the bound, such as (clip_norm / norms).clamp(max=1)."
            )


class Mechanism(ABC):
    """What one step releases, under add/remove-one.

    In each step ``begin`` comes first, then ``watch`` and ``summing`` for every (micro)batch. ``complete`` gives all
    sums. With noise of the standard deviations ``stddevs`` they are the release, of which ``gradient`` is made.

    Args:
        expected_batch_size: the divisor, a number that no data have a part in.
        views: how often each example is in a batch, one behind the other; the mean is its row.
    """

    treated_as_public: tuple[str, ...] = ()  # for the statement

    def __init__(self, expected_batch_size: float, views: int = 1):
        self.expected_batch_size, self.views = expected_batch_size, views
        self._layouts = Layouts()

    @abstractmethod
    def event(self, noise_multiplier: float, sampling_probability: float) -> privacy.Event:
        """What one step releases, for the accountant."""

    def check_price(self, noise_multiplier: float, sampling_probability: float, num_steps: int, delta: float) -> None:  # noqa: B027
        """Refuse noise at which there is no privacy to speak of."""

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """Largest L2 change of the sums between neighboring data sets, in the units of ``noise_multiplier``."""

    @abstractmethod
    def statement(self) -> dict[str, Any]:
        """Its name and settings, as plain data."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What a run that goes on must have in common with its state."""

    @abstractmethod
    def groups(self, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Partition of the parameters: rows of one group are needed at once."""

    def begin(self, model: nn.Module, census: Census, key: bytes, step: int) -> None:  # noqa: B027
        """A step begins, whose batch may be empty. The key is that of the noise."""

    def watch(self, census: Census, key: bytes, step: int, part: int, size: int) -> Recording:
        """What is to look on at the model's forward on a (micro)batch of so many views of examples."""
        return Tape(census.trained, census.constants, self._layouts, size)

    def units(self, sampler: Poisson, step: int, size: int) -> np.ndarray | None:
        """(size,) number of the row that each example of a (micro)batch belongs to; None where each has its own."""
        return None

    @abstractmethod
    def summing(self, sampler: Poisson, step: int, size: int) -> Summing:
        """The sums of a (micro)batch of so many examples."""

    @abstractmethod
    def complete(self, sums: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All sums of the step, contiguous; zero where no example gave rise to one."""

    @abstractmethod
    def stddevs(self, names: Iterable[str], noise_multiplier: float) -> dict[str, float]:
        """Standard deviation of the noise for each of the sums."""

    @abstractmethod
    def gradient(self, release: dict[str, Tensor]) -> dict[str, Tensor]:
        """The mean gradient by name, of the noisy sums alone; what they say of the next step is remembered."""

    def explain(self) -> str:
        """How it is computed."""
        return "exact norms by the tape"

    def state(self) -> dict[str, Any]:
        """What the steps so far have changed, beside a training's own state."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """The inverse of ``state``, of a whole training's state."""


class ClippedSum(Mechanism):
    """The sum of the clipped rows, and, where the rule is adaptive, a count.

    Args:
        rule: clips.
        names: of the trained parameters.
        expected_batch_size, views: as of `Mechanism`.
    """

    def __init__(self, rule: ClippingRule, names: Sequence[str], expected_batch_size: float, views: int = 1):
        super().__init__(expected_batch_size, views)
        self.rule = rule.bind(names)  # of the next step
        self._planned, self._names = self.rule, frozenset(names)
        self._divisor = self.rule.divisor(expected_batch_size)

    def event(self, noise_multiplier: float, sampling_probability: float) -> privacy.Event:
        return privacy.SubsampledGaussian(noise_multiplier, sampling_probability)

    @property
    def sensitivity(self) -> float:
        return self.rule.sensitivity(RELATION)

    def statement(self) -> dict[str, Any]:
        return self.rule.statement()

    def settings(self) -> dict[str, Any]:
        return {"clipping": repr(self._planned), "jacobian": repr(None)}

    def groups(self, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
        return self.rule.groups(names)

    def begin(self, model: nn.Module, census: Census, key: bytes, step: int) -> None:
        new = [name for name in census.trained if name not in self._names]
        if new and isinstance(self.rule, Groups):
            kind = type(self.rule.made_by or self.rule).__name__
            raise Refused(
                f"PrivateTraining: parameter {', '.join(map(repr, new))} was unfrozen, and the bounds of {kind} were "
                "made for the parameters that were trained at the start. Begin another PrivateTraining, with the "
                "releases so far as prior_releases."
            )

    def summing(self, sampler: Poisson, step: int, size: int) -> Summing:
        return _Clipping(self.rule, self._merging(sampler, step, size), self.views)

    def units(self, sampler: Poisson, step: int, size: int) -> np.ndarray | None:
        if not isinstance(self.rule, MicroBatches):
            return None
        return sampler.groups(step, size, self.rule.num_groups(self.expected_batch_size))

    def _merging(self, sampler: Poisson, step: int, size: int) -> Merging | None:
        """Which row each view joins: its example's, or a micro-batch's, drawn by the sampler's key, data unseen."""
        units = self.units(sampler, step, size)
        if units is None:
            return views_of(size, self.views)
        assert isinstance(self.rule, MicroBatches)
        count = self.rule.num_groups(self.expected_batch_size)
        return Merging(torch.from_numpy(units), count).of_views(self.views)

    def complete(self, sums: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        complete = sums_or_zeros(sums, parameters)
        if isinstance(self.rule, Adaptive):
            complete[COUNT] = sums.get(COUNT, torch.zeros(1))
        return complete

    def stddevs(self, names: Iterable[str], noise_multiplier: float) -> dict[str, float]:
        if not isinstance(self.rule, Adaptive):
            return dict.fromkeys(names, noise_multiplier * self.sensitivity)
        split = self.rule.split(noise_multiplier, self.expected_batch_size, RELATION)
        stddev = split.gradient_noise_multiplier * self.sensitivity
        return {**dict.fromkeys(names, stddev), COUNT: split.count_noise_stddev}

    def gradient(self, release: dict[str, Tensor]) -> dict[str, Tensor]:
        if isinstance(self.rule, Adaptive):
            self.rule = self.rule.updated(float(release.pop(COUNT)), self.expected_batch_size)
        return {name: total.div_(self._divisor) for name, total in release.items()}

    def state(self) -> dict[str, Any]:
        return {"clipping": self.rule.statement()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if isinstance(self.rule, Adaptive):
            self.rule = replace(self.rule, clip_norm=state["clipping"]["clip_norm"])


class _Clipping(Summing):
    """Clips one group of parameters after the other, and counts what the rule and the training must know."""

    def __init__(self, rule: ClippingRule, merging: Merging | None, views: int):
        super().__init__()
        self._rule, self.merging, self._views = rule, merging, views
        self._non_finite: set[int] = set()
        self._bound = Bound(rule)

    @property
    def num_left_out(self) -> int:
        if self.merging is None:
            return len(self._non_finite)
        left_out = torch.isin(self.merging.assignment, torch.tensor(sorted(self._non_finite)))
        return int(left_out.sum()) // self._views

    @torch.no_grad()
    def __call__(self, jacobian: Any, group: str) -> dict[str, Tensor]:
        norms = jacobian.squared_norms().sqrt()
        count = {COUNT: self._rule.count(norms).reshape(1).cpu()} if isinstance(self._rule, Adaptive) else {}
        factors, kept = self._weigh(norms, group)
        return (jacobian if kept is None else jacobian.select(kept)).weighted_sum(factors) | count

    @torch.no_grad()
    def weigh(self, jacobian: Any, group: str) -> None:
        self._weigh(jacobian.squared_norms().sqrt(), group)

    def _weigh(self, norms: Tensor, group: str) -> tuple[Tensor, Tensor | None]:
        """The factors of the rows that are finite, and the numbers of these rows; None for all."""
        finite = norms.isfinite()
        if finite.all():
            factors = factors_of(self._rule, norms, group)
            self._note(group, factors, norms)
            return factors, None
        self._non_finite.update((~finite).nonzero().flatten().tolist())
        kept = finite.nonzero().flatten()
        factors = factors_of(self._rule, norms[kept], group)
        zeros = norms.new_zeros(len(norms), dtype=factors.dtype)
        self._note(group, zeros.index_copy(0, kept, factors), torch.where(finite, norms, 0))
        return factors, kept

    def _note(self, group: str, factors: Tensor, norms: Tensor) -> None:
        self.factors[group] = factors
        self._bound.note(group, factors, norms)

    def check_bound(self) -> None:
        self._bound.check()


def views_of(size: int, views: int) -> Merging | None:
    """So many examples, each in a batch in so many views, where there is more than one."""
    return None if views == 1 else Merging.views(size, views)


def sums_or_zeros(sums: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sums of the parameters' shapes; zero after an empty batch."""
    return {
        name: sums[name].contiguous()
        if name in sums
        else torch.zeros(p.shape, dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)
        for name, p in parameters.items()
    }
