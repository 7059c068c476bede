# SPDX-License-Identifier: Apache-2.0
"""Measures which dimension of each call's output holds the examples, by backwards with different cotangents.

With cotangent ones a backward gives b = Σᵢ ∂ℓᵢ/∂y, with cotangent c it gives Σᵢ cᵢ ∂ℓᵢ/∂y. If an entry belongs to
example j alone, the second is cⱼ times the first; an entry that several examples share fails that. The cⱼ are powers of
two with signs: multiplying by them commutes with rounding, so that the two agree bit for bit, or nearly, in any type.
If no regular layout fits, the ratio of the two determines the example of each entry.

An entry that affects the loss of one example only may still be computed from other examples' data: rehearsals show
that it is not, see ``model_check/rehearsal/rehearsal.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...ops import AnyLayout, Layout, Ragged
from ...support.own_draws import randint
from ...support.validate import Refused
from ..recording.backward import gradients_at
from ..recording.calls import Call
from ..recording.paths import RecordedGraph
from .codes import Codes, Rounding, fresh_generator
from .fit import CandidateLayouts
from .predict import Expected

# Powers of two by which losses are weighted, at most: 2^96, and the gradients that follow, are in float32's range.
MAX_EXPONENT = 96
NOT_SEPARATED = "examples of the batch cannot be separated"

NamesOf = Callable[[Tensor], tuple[str, ...]]
OnLayout = Callable[[int, Tensor, AnyLayout], None]  # (number of a call, gradient in its output, layout)


class Measurement:
    """Measures the layouts of the calls' outputs, and of the cuts, for one batch.

    Args:
        reached: the batch, on all ranks that make the same backwards, each with its own parts of the gradients.
        known: returns the layout that a call has had so far, which decides if several fit.
    """

    def __init__(self, reached: RecordedGraph, known: Callable[[Call], Expected | None] = lambda call: None):
        self.calls, self.n = reached.places, reached.num_losses
        self.options: dict[int, list[AnyLayout]] = {}  # by call: layouts that assign its entries to the same examples
        self.in_doubt = False  # some examples' gradients are not finite
        self._reached, self._known = reached, known
        self._names_of, self._peers = reached.names_of, reached.ranks.peers
        self._rounding = Rounding.of(reached.dtypes())

    def run(self, portion: Sequence[int], on_layout: OnLayout | None = None) -> None:
        """Measures the layouts of some of the calls, and passes each call's gradient and layout to ``on_layout``."""
        plain = self._gradients_of(torch.ones_like(self._reached.losses), portion)
        candidates = self._candidates(plain, portion)
        found = [candidate.layouts() for candidate in candidates]
        sure = [candidate.is_sure(options) for candidate, options in zip(candidates, found, strict=True)]
        unsure = self._peers.any_of([not is_sure for is_sure in sure])
        for number, candidate, options, g, decides in zip(portion, candidates, found, plain, unsure, strict=True):
            if decides:
                options = self._decide(number, candidate, options)
            self.options[number] = options
            self.in_doubt |= bool(candidate.num_not_finite)
            if on_layout is not None:
                on_layout(number, g, options[0])

    def agrees_in_part(self, known: Sequence[AnyLayout], portions: Sequence[Sequence[int]]) -> bool:
        """True if one random portion of the calls has the layouts that are known."""
        portion = portions[int(randint(len(portions), (), generator=fresh_generator()))]
        self.run(portion)
        regular = {
            number: [option for option in options if isinstance(option, Layout)]
            for number, options in self.options.items()
        }
        return all(known[number] in options for number, options in regular.items())

    def _candidates(
        self, plain: Sequence[Tensor], portion: Sequence[int], weights: Tensor | float = 1.0
    ) -> list[CandidateLayouts]:
        """Returns the layouts that agree with coded backwards; refuses a call without any.

        ``plain`` are the gradients with cotangent ``weights``.
        """
        codes = Codes(self.n, self._rounding.exponents)
        dims = [example_dims(self.calls[number]) for number in portion]
        candidates = [CandidateLayouts(g, d, codes, self._rounding) for g, d in zip(plain, dims, strict=True)]
        for k in range(codes.num_digits if self.n > 1 else 0):
            scaled = self._gradients_of(codes.cotangent(k) * weights, portion)
            for candidate, g in zip(candidates, scaled, strict=True):
                candidate.narrow(k, g)
            del scaled
        found = [candidate.layouts() for candidate in candidates]
        self._refuse_coupled([number for number, options in zip(portion, found, strict=True) if not options])
        if self._peers.any(any(isinstance(options[0], Ragged) for options in found)):
            c = codes.independent()
            again = zip(portion, candidates, self._gradients_of(c * weights, portion), strict=True)
            self._refuse_coupled([number for number, candidate, g in again if not candidate.confirmed(c, g)])
        return candidates

    def _refuse_coupled(self, numbers: Sequence[int]) -> None:
        """Raises, on all ranks, if examples cannot be separated in some call."""
        self._peers.refuse(_coupled(self.calls[numbers[0]], self._names_of, self.n) if numbers else None)

    def _decide(self, number: int, candidate: CandidateLayouts, options: list[AnyLayout]) -> list[AnyLayout]:
        """Returns the right one of several layouts that all fit because one example's gradient is by far the largest.

        It is the one that the call has had so far. Otherwise the losses are weighted so that all examples' gradients
        have one size, and one layout must remain, whichever of the layouts the sizes were computed under.
        """
        call = self.calls[number]
        if self._peers.all(candidate.num_not_finite == self.n):
            return options[:1]  # all examples are left out, in whichever order they are
        known = self._known(call)
        if self._peers.all(known in [option for option in options if isinstance(option, Layout)]):
            return [option for option in options if option == known]
        remaining: list[AnyLayout] = []
        for option in self._common(call, options):
            weights = _equalizing(self._largest(candidate.sizes(option)))
            again = self._candidates(self._gradients_of(weights, [number]), [number], weights)[0]
            found = again.layouts()
            remaining += found[:1]
            is_one = again.are_alike([*found, *remaining]) and (isinstance(found[0], Ragged) or found[0] in options)
            wrong = not is_one or type(found[0]) is not type(option)
            self._peers.refuse(_ambiguous(call, self._names_of, self.n) if wrong else None)
        return remaining[:1]

    def _common(self, call: Call, options: list[AnyLayout]) -> list[AnyLayout]:
        """Returns the layouts that fit on all ranks, in one order; raises if there are none, or irregular ones."""
        if self._peers.size == 1:
            return options
        regular = [[option for option in some if isinstance(option, Layout)] for some in self._peers.gather(options)]
        common = [option for option in regular[0] if all(option in others for others in regular)]
        if not common:  # the same on all ranks
            raise Refused(_ambiguous(call, self._names_of, self.n))
        return [*common]

    def _largest(self, sizes: Tensor) -> Tensor:
        """Returns the largest over the ranks, because the cotangents must be equal on all."""
        return sizes if self._peers.size == 1 else torch.stack(self._peers.gather(sizes)).amax(0)

    def _gradients_of(self, c: Tensor, portion: Sequence[int]) -> list[Tensor]:
        """Returns the gradients in the calls' outputs; zeros for outputs that the losses do not depend on."""
        some = [self.calls[number] for number in portion]
        return gradients_at(self._reached, some, c.to(self._reached.losses))


def _equalizing(sizes: Tensor) -> Tensor:
    """Returns (n,), powers of two that scale all sizes near the largest, or near 1 if that is far below 1."""
    usable = sizes.double().isfinite() & (sizes > 0)
    sizes = torch.where(usable, sizes.double(), 1)
    largest = sizes[usable].max().clamp(min=2.0**-8) if usable.any() else sizes.new_ones(())
    exponents = (largest / sizes).log2().round().clamp(-MAX_EXPONENT, MAX_EXPONENT)
    return torch.where(usable, exponents.exp2(), 1)


def example_dims(call: Call) -> list[int]:
    """Returns the dimensions that can hold the examples in all uses of the call."""
    if call.is_cut:
        return list(range(len(call.shape)))
    dims = [set(use.example_dims(len(call.shape))) for use in call.uses]
    return sorted(set.intersection(*dims))


def _where(call: Call, names_of: NamesOf) -> str:
    """Returns a description of the call for a message."""
    if call.is_cut:
        return f"in a tensor given to {call.op!r} (of shape {tuple(call.shape)})"
    names = sorted({name for use in call.uses for name in names_of(use.weight)})
    return f"at op {call.op!r} with parameter {', '.join(map(repr, names))} (output {tuple(call.shape)})"


def _coupled(call: Call, names_of: NamesOf, n: int) -> str:
    if not example_dims(call):
        return (
            f"tape: {_where(call, names_of)} no dimension can hold examples. If the layer is called for one example "
            "at a time, give it a batch of one, as in layer(x[None])[0]; better, call it once for all examples."
        )
    shared = (
        f" If the input there is the same for all examples, such as fixed points or public data ({n} examples do not "
        "fit into this output), keep it in a buffer of the model."
    )
    return (
        f"tape: {_where(call, names_of)} the {n} {NOT_SEPARATED}: either one example's loss "
        "depends on another example (batch normalization, in-batch negatives, a loss averaged over the batch), or the "
        "examples are in no regular order. Make each loss depend on its own example only, e.g. with GroupNorm in place "
        f"of BatchNorm.{shared if all(call.shape[dim] % n for dim in example_dims(call)) else ''}"
    )


def _ambiguous(call: Call, names_of: NamesOf, n: int) -> str:
    return (
        f"tape: {_where(call, names_of)} several orders of the {n} examples fit this batch, because some examples' "
        "gradients are much larger than the others', and no earlier batch has shown the right one. Nothing was "
        "released. Scale the inputs, or bound the loss of one example, e.g. by smooth_l1_loss in place of mse_loss."
    )
