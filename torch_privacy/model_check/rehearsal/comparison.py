# SPDX-License-Identifier: Apache-2.0
"""Compares the answers of two runs for the examples that both kept, and words what a difference means."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...jacobian.layouts.measure import NOT_SEPARATED
from ...jacobian.recording.coverage import CodePath
from ...support.contents import same
from ...support.torch_modes import product_rounding
from ...support.validate import quoted
from .trace import Trace
from .turn import Answers, Turn

TIGHT = 64  # units of rounding by which losses at equal shapes may differ
TIGHT_ROWS = 1024  # the same for rows, which are long sums; in most networks both are equal to the last bit
HALF = 1e-5  # units of rounding above this one are those of half precision
SMALL_LOSS = 0.01  # losses below this one are differences of logits, of which half precision loses that much
ALIKE = 1e-5  # relative difference of answers that were computed twice
NEGLIGIBLE = 1e-6  # rows this much shorter than the longest are not compared where shapes depend on the data
COARSE = 0.02  # relative difference that is allowed in the norms of the rows of a part of the batch
TURNED = 0.2  # the same in their products with a direction: at a kink, such as a maximum, rounding turns a gradient
UNDERFLOW = 1e-14  # norms up to this one may be bounds, of more than the row: float32 loses the squares behind them

LOSS, FACTOR = "the loss", "the clip factor"
REPLACED = "when other examples took the places of the rest"
REMOVED = "when the rest was left out"
REPEATED = "when the batch was made again"
DEPENDS = "examples of a batch depend on each other"
CARRIES = "which would carry data past the noise"

CURE = (
    "Make each loss a function of its own example and of the model alone: use GroupNorm in place of BatchNorm, divide "
    "by a number of the example's own in place of the batch's size or tokens, mask the padding, and take negatives "
    "from within the example."
)
STATE_CURE = (
    "What is kept there carries data past the noise. Take a layer without running statistics, e.g. GroupNorm, put that "
    "module in eval mode, or return the value from the forward in place of keeping it. A metric, or a list of outputs: "
    "update it after the step, from what the forward returned (Lightning: in on_train_batch_end). If it is only set up "
    "in the first forward, run the model on made-up inputs once, before the training."
)
ORDER_CURE = (
    "The same losses come in another order: collate_fn, the model or the loop sorts or shuffles the examples. Losses "
    "must be in the order of the examples that the batch was made of: leave it as it is (pack_padded_sequence needs no "
    "sorted lengths with enforce_sorted=False), or put the losses back by losses[order.argsort()]."
)
RULE_CURE = (
    "The factor of a row must be a function of that row's norm alone. Let the clipping rule use no other norm, nor a "
    "statistic of them."
)


@dataclass(frozen=True)
class ChangedAnswer:
    """An answer that changed because of other examples."""

    what: str  # a clause: "the loss of example 3 of 8 changed by 12 %"; not from what, as that is private
    turn: Callable[[Trace], Turn] | None  # the run that shows it
    kept: np.ndarray  # numbers of the examples that were kept
    cure: str = ""  # if it is known without another run


class AnswerComparison:
    """Compares the answers for the kept examples of a batch.

    Args:
        count: number of examples in the batch.
        units: (count,) number of the row that each example belongs to; None if each example has a row of its own.

    Attributes:
        parts_alone: only parts can be compared, because no example fits in the place of another one.
        rounding: the coarsest of all runs; those that compare losses alone do not see what happens within.
    """

    parts_alone = False
    rounding = 0.0

    def __init__(self, count: int, units: np.ndarray | None):
        self._count, self._units = count, units

    def compare(
        self,
        keep: np.ndarray,
        answers: Answers,
        original: Answers,
        places: np.ndarray,
        turn: Callable[[Trace], Turn] | None,
        how: str,
        *,
        loose: bool,
    ) -> list[ChangedAnswer]:
        """Returns the first answer of a kept example that changed, if there is one.

        Args:
            keep: (count,) which examples were kept.
            answers: of the run with other examples, or without some.
            original: of the whole batch.
            places: numbers of the kept examples in ``answers``.
            turn: makes the run again, with a trace.
            how: a clause that says what was done to the other examples.
            loose: allow the differences that other shapes make.
        """
        kept = np.flatnonzero(keep)
        if not len(kept):
            return []
        found: list[ChangedAnswer] = []

        def check(name: str, a: Tensor, b: Tensor, scale: Tensor, eps: float, numbers: np.ndarray) -> None:
            worst = _worst(a, b, scale, _tolerance(eps, loose))
            if worst is not None and not found:
                change = _change(*(float(t.flatten()[worst]) for t in (b, a, scale)))
                example = int(numbers[worst * len(numbers) // max(1, a.numel())])
                which = "example" if numbers is kept or self._units is None else "row"
                what = f"{name} of {which} {example} of {self._count} changed {change} {how}"
                cure = _scaled_alike(answers.losses[places], original.losses[kept], self._count)
                if name == LOSS and _are_moved(answers.losses, original.losses, len(kept), _tolerance(eps, loose)):
                    cure = ORDER_CURE
                found.append(ChangedAnswer(what, turn, kept, RULE_CURE if name == FACTOR else cure))

        a, b = answers.losses.double().cpu()[places], original.losses.double().cpu()[kept]
        finite = b[b.isfinite()].abs()
        typical = float(finite.max()) if len(finite) and loose else 0.0
        eps = self._rounding(original, loose)
        least = max(0.1 * typical, SMALL_LOSS if loose and self.rounding > HALF else 0.0)
        check(LOSS, a, b, b.abs().nan_to_num(0).clamp(min=least), eps, kept)
        if answers.rows is not None and original.rows is not None:
            self._compare_rows(answers, original, keep, places, check, loose)
        return found

    def _compare_rows(
        self, answers: Answers, original: Answers, keep: np.ndarray, places: np.ndarray, check: Any, loose: bool
    ) -> None:
        assert answers.rows is not None
        assert original.rows is not None
        if self._units is None:
            rows, theirs = np.flatnonzero(keep), places
        else:  # rows that several examples share are compared if all of these were kept
            rows = theirs = np.setdiff1d(self._units[keep], self._units[~keep])
            if len(answers.losses) != len(original.losses):  # those of a part are numbered without gaps
                theirs = np.searchsorted(np.unique(self._units[keep]), rows)
        eps = self._rounding(original, loose) * (1 if loose else TIGHT_ROWS / TIGHT)
        is_part = len(answers.losses) != len(original.losses)
        for group, norms in original.rows.norms.items():
            a, b = answers.rows.norms[group][theirs], norms[rows]
            longest = norms[norms.isfinite()]
            least = NEGLIGIBLE * float(longest.max()) if len(longest) and loose else 0.0
            if len(a) and is_part:  # all shapes differ, and so does the rounding
                least, eps = COARSE * float(longest.max()) if len(longest) else 0.0, max(eps, COARSE**2 / 4)
            scale = b.nan_to_num(0).clamp(min=least)
            a, b = (torch.where(t <= UNDERFLOW, 0, t) for t in (a, b))
            check("the norm of the gradient", a, b, scale, eps, rows)
            if is_part and not self.parts_alone:
                continue
            of_products = max(eps, TURNED**2 / 4) if is_part else eps
            if group in original.rows.fingerprints and group in answers.rows.fingerprints:
                a, b = answers.rows.fingerprints[group][theirs], original.rows.fingerprints[group][rows]
                check(
                    "the direction of the gradient",
                    a,
                    b,
                    torch.maximum(scale, b.abs().nan_to_num(0)),
                    of_products,
                    rows,
                )
        for name, factors in original.rows.factors.items():
            a, b = answers.rows.factors[name][theirs], factors[rows]
            largest = float(b.abs().max()) if len(b) and loose else 0.0
            check(FACTOR, a, b, b.abs().clamp(min=NEGLIGIBLE * largest), eps, rows)

    def _rounding(self, original: Answers, loose: bool) -> float:
        """Returns the unit of rounding; that of the losses' own type where equal shapes are computed equally.

        Where shapes differ, and half precision is on the way, `_tolerance` makes 8 of its units of what is returned.
        """
        least, coarsest = _eps(original.losses.dtype), self.rounding
        if not loose:
            return least
        return max(least, 16 * coarsest**2 if coarsest > HALF else coarsest)


def _change(was: float, now: float, scale: float) -> str:
    """Returns how far a number changed, relatively and in two digits: the number itself is exact and private."""
    if not (math.isfinite(was) and math.isfinite(now)):
        return "between a finite number and one that is not"
    share = abs(now - was) / scale if scale else math.inf
    return f"by {100 * share:.2g} %" if share < 1 else "by more than its size"


def losses_repeat(again: Answers, original: Answers) -> bool:
    """True if the same batch gave the same losses twice."""
    a, b = again.losses.double().cpu(), original.losses.double().cpu()
    return _worst(a, b, b.abs().nan_to_num(0), _tolerance(_eps(original.losses.dtype), False)) is None


def repeats(again: Tensor, first: Tensor, scale: Tensor) -> bool:
    """True if numbers are equal up to the rounding of two ways to compute them, relative to ``scale``."""
    return _worst(again, first, scale.nan_to_num(0), ALIKE) is None


def coarsest_rounding(weights: Iterable[Tensor], code: CodePath | None) -> float:
    """Returns the largest unit of rounding of weights and of results, where half precision need not be in losses.

    Where float32 is multiplied in TensorFloat-32, that of its factors counts: with few rows torch takes other products.
    """
    devices = {weight.dtype: weight.device for weight in weights}
    dtypes, of_matrices = ({*devices}, True) if code is None else ({*devices, *code.dtypes}, not code.convolves)
    rounded = {*devices.values()} if torch.float32 in dtypes else ()
    products = [product_rounding(device, of_matrices=of_matrices) for device in rounded]
    return max([*map(_eps, dtypes), *products], default=0.0)


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _tolerance(eps: float, loose: bool) -> float:
    """Returns the relative difference that rounding explains.

    Half precision is allowed fewer units of rounding, because each of them is large.
    """
    tight = 4 * eps if HALF < eps < 0.01 else TIGHT * eps
    return min(2 * eps**0.5 if loose else tight, 0.2)


def _worst(a: Tensor, b: Tensor, scale: Tensor, tolerance: float) -> int | None:
    """Returns the number of the entry that differs most, if it differs by more than is allowed; else None."""
    if torch.equal(a, b):
        return None
    undefined = a.isnan() & b.isnan()
    excess = torch.where((a == b) | undefined, 0, (a - b).abs() / (tolerance * scale + 1e-300))
    excess = excess.flatten().nan_to_num(torch.inf)
    if not excess.numel() or float(excess.max()) <= 1:
        return None
    return int(excess.argmax())


def _are_moved(some: Tensor, whole: Tensor, count: int, tolerance: float) -> bool:
    """True if two runs have as many losses in common as examples were kept, though not all of these are in place."""
    a, b = some.double().flatten(1).sum(1), whole.double().flatten(1).sum(1)
    near = (a - b[:, None]).abs() <= tolerance * b[:, None].abs()
    return count > 1 and len(b[near.any(1)].unique()) >= count


def _scaled_alike(some: Tensor, whole: Tensor, count: int) -> str:
    """Returns the cure if every loss changed by the same factor; else an empty string."""
    ratios = (some.double() / whole.double()).flatten()
    ratios = ratios[ratios.isfinite()]
    if len(ratios) < 2 or float(ratios.max() - ratios.min()) > 1e-3 * float(ratios.abs().max()):
        return ""
    ratio = float(ratios.mean())
    if abs(ratio - 1) < 1e-3:
        return ""
    if len(some) and abs(ratio * len(some) / count - 1) < 1e-3:
        return (
            "The losses are divided by the number of examples in the batch. Leave the division out: PrivateTraining "
            "divides by the expected batch size."
        )
    return (
        f"Every loss is {ratio:.4g} times as large then: it is divided or multiplied by a number of the whole batch "
        "(its tokens, a sum of weights, a mean). Divide each example's loss by a number of its own, such as the count "
        "of its own tokens."
    )


def differing(some: dict[str, Any], others: dict[str, Any]) -> set[str]:
    """Returns the names with contents that differ between two sets of changes."""
    absent = object()
    return {name for name in {*some, *others} if not same(some.get(name, absent), others.get(name, absent))}


def depend(what: str, where: str, cure: str) -> str:
    """Returns the message for examples that depend on each other."""
    return f"rehearsal: {DEPENDS}: {what}. {where + ' ' if where else ''}{cure or CURE}"


def shows_dependence(error: Exception) -> bool:
    """True if the message of a refusal, perhaps of another rank, says that examples depend on each other."""
    return any(clause in str(error) for clause in (DEPENDS, CARRIES, NOT_SEPARATED))


def written_into(names: Sequence[str]) -> str:
    """Returns the message for a forward that changed parameters."""
    return (
        f"rehearsal: the forward changed {quoted(names)}, or the loop did, {CARRIES}. "
        "Write into no parameter; training.step makes the updates."
    )


def not_repeating(what: str) -> str:
    """Returns the message for a batch that does not give the same losses twice."""
    return (
        f"rehearsal: the same batch does not give the same losses twice ({what}), so independence cannot be shown. "
        "Model or loop keep a state of their own (a counter of batches, a running value outside of the model, a "
        "hidden state carried over from the batch before, a teacher that follows the weights), or draw random numbers"
        " from a generator of their own. Begin each example with a new hidden state; move a teacher where "
        "training.step(losses) returns True; use training.step_count in place of a counter, and the global generators"
        " of torch, numpy or Python, which are set for every batch; or state why examples do not depend on each "
        "other: Examples(data, assume_independent='...'), which the privacy statement prints."
    )


def not_repeated(functions: Sequence[str]) -> str:
    """Returns the message for a loop that ran these functions for a batch once, and not when it was made again."""
    called = f", which called {', '.join(functions)} of torch and did not call them again" if functions else ""
    return (
        f"rehearsal: the loop gave other losses or gradients when a batch was handed out first{called}. It counts its "
        "own turns, or switches something once. Let it depend on training.step_count instead, which is the same in all "
        "turns of a batch, or switch between steps, where training.step(losses) returned True."
    )
