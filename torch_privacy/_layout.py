# SPDX-License-Identifier: Apache-2.0
"""Which entries of an op's output belong to which example: measured by a second backward, never assumed.

With cotangent ones the backward gives b = Σᵢ ∂ℓᵢ/∂y, with cotangent c it gives Σᵢ cᵢ ∂ℓᵢ/∂y. Where an entry belongs to
example j alone the second is cⱼ times the first. For random c an entry that several examples share fails that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._check import Refused
from .ops import Layout

if TYPE_CHECKING:
    from ._tape import Call

# A call's layout is measured until this many batches have told it without doubt; then it is known by its signature.
PROOFS = 2

Signature = tuple
NamesOf = Callable[[Tensor], tuple[str, ...]]


class Layouts:
    """What earlier batches taught about the layout of each call, by the call's place, op, parameters and rank."""

    def __init__(self) -> None:
        self._proofs: dict[Signature, tuple[tuple[int, str | int], int]] = {}
        self._batches = 0

    @property
    def settled(self) -> bool:
        """Whether enough batches of two examples or more were measured to trust the model's inputs as well."""
        return self._batches >= PROOFS

    def recall(self, calls: list[Call], names_of: NamesOf, n: int) -> list[Layout] | None:
        """The layout of every call for a batch of n, or None if any of them must be measured."""
        layouts = []
        for key, call in zip(_signatures(calls, names_of), calls, strict=True):
            kind, count = self._proofs.get(key, (None, 0))
            layout = _recall(kind, call, n) if kind is not None and count >= PROOFS else None
            if layout is None:
                return None
            layouts.append(layout)
        return layouts

    def measure(
        self,
        calls: list[Call],
        names_of: NamesOf,
        bs: Sequence[Tensor | None],
        bs_scaled: Sequence[Tensor | None],
        cotangent: Tensor,
    ) -> list[Layout]:
        """The layout of every call, from the b of cotangent ones and of ``cotangent``; remembered for later batches."""
        layouts = []
        self._batches += len(cotangent) > 1
        for key, call, b, b_scaled in zip(_signatures(calls, names_of), calls, bs, bs_scaled, strict=True):
            zero = cotangent.new_zeros(call.shape)
            b, b_scaled = (zero if g is None else g.reshape(call.shape) for g in (b, b_scaled))
            fitting = list(fitting_layouts(b, b_scaled, cotangent, _example_dims(call)))
            if not fitting:
                raise Refused(_coupled(call, names_of, len(cotangent)))
            self._learn(key, fitting, len(cotangent))
            layouts.append(fitting[0])
        return layouts

    def _learn(self, key: Signature, fitting: list[Layout], n: int) -> None:
        """One batch that leaves no doubt is a proof; another answer than before starts the count anew."""
        if len(fitting) > 1 or n < 2:
            return
        kind = _kind(fitting[0])
        before, count = self._proofs.get(key, (kind, 0))
        self._proofs[key] = (kind, count + 1 if before == kind else 1)


def fresh_generator() -> torch.Generator:
    """A generator for checks, seeded by the system: it leaves the user's random state alone."""
    generator = torch.Generator()
    generator.seed()
    return generator


def random_cotangent(losses: Tensor) -> Tensor:
    """(n,) random numbers in [1, 2)."""
    return 1 + torch.rand(losses.shape, generator=fresh_generator()).to(losses)


def check_input(leaf: Tensor, g: Tensor | None, g_scaled: Tensor | None, cotangent: Tensor) -> None:
    """Refuse where one example's loss depends on another example's part of an input of the model."""
    if g is None or g_scaled is None:  # the losses do not depend on it
        return
    dims = [dim for dim, size in enumerate(leaf.shape) if size == len(cotangent)]
    if next(fitting_layouts(g, g_scaled, cotangent, dims), None) is None:
        raise Refused(
            f"tape: the losses of the {len(cotangent)} examples depend on each other's part of the model's input of "
            f"shape {tuple(leaf.shape)} (batch normalisation, in-batch negatives, a loss averaged over the batch?). "
            "Make each loss depend on its own example only, e.g. with GroupNorm in place of BatchNorm."
        )


def fitting_layouts(b: Tensor, b_scaled: Tensor, cotangent: Tensor, dims: list[int]) -> Iterator[Layout]:
    """Every layout with its examples in one of ``dims`` under which ``b_scaled`` is ``cotangent`` times ``b``."""
    n = len(cotangent)
    if n == 1:  # nothing to tell apart
        yield from (Layout(dim, 1, 1, b.shape[dim]) for dim in dims[:1])
        return
    tolerance = 2 * torch.finfo(b.dtype).eps ** 0.5
    for layout in _candidates(b.shape, n, dims):
        first = layout.examples_first(b.detach()).reshape(n, -1).to(cotangent.dtype)
        first_scaled = layout.examples_first(b_scaled.detach()).reshape(n, -1).to(cotangent.dtype)
        size = torch.linalg.vector_norm(first, dim=1)
        error = torch.linalg.vector_norm(first_scaled - cotangent[:, None] * first, dim=1)
        # A few examples' own b may be all but cancelled; rounding then comes from what was cancelled.
        finite = torch.isfinite(size) & torch.isfinite(error)
        largest = size[finite].max() if finite.any() else size.new_zeros(())
        if (error <= tolerance * (size + 0.1 * largest))[finite].all() and _same_finite(first, first_scaled, finite):
            yield layout


def _same_finite(first: Tensor, first_scaled: Tensor, finite: Tensor) -> bool:
    """Examples with infinite or undefined b are set aside, but only those that have them in both backwards."""
    aside = ~finite
    return bool((~torch.isfinite(first[aside])).any(1).all() and (~torch.isfinite(first_scaled[aside])).any(1).all())


def _candidates(shape: torch.Size, n: int, dims: list[int]) -> Iterator[Layout]:
    for dim in dims:
        if shape[dim] == 0 or shape[dim] % n:
            continue
        positions = shape[dim] // n
        # Consecutive positions first, interleaved next, then what lies between.
        befores = [1, positions] + [k for k in range(2, positions) if positions % k == 0]
        yield from (Layout(dim, before, n, positions // before) for before in dict.fromkeys(befores))


def _example_dims(call: Call) -> list[int]:
    """The dimensions in which all uses of the call can have their examples."""
    dims = [set(use.example_dims(len(call.shape))) for use in call.uses]
    return sorted(set.intersection(*dims))


def _signatures(calls: list[Call], names_of: NamesOf) -> list[Signature]:
    return [
        (i, call.op, len(call.shape), tuple(names_of(use.weight) for use in call.uses)) for i, call in enumerate(calls)
    ]


def _kind(layout: Layout) -> tuple[int, str | int]:
    """A layout less the sizes that change with the batch."""
    if layout.before == 1:
        return layout.dim, "after"
    return (layout.dim, "before") if layout.after == 1 else (layout.dim, layout.before)


def _recall(kind: tuple[int, str | int], call: Call, n: int) -> Layout | None:
    dim, where = kind
    positions, left = divmod(call.shape[dim], n)
    before = {"after": 1, "before": positions}.get(where, where) if isinstance(where, str) else where
    if left or positions == 0 or positions % int(before):
        return None
    return Layout(dim, int(before), n, positions // int(before))


def _coupled(call: Call, names_of: NamesOf, n: int) -> str:
    names = sorted({name for use in call.uses for name in names_of(use.weight)})
    return (
        f"tape: at op {call.op!r} with parameter {', '.join(map(repr, names))} (output {tuple(call.shape)}) the {n} "
        "examples of the batch cannot be told apart: either one example's loss depends on another example (batch "
        "normalisation, in-batch negatives, a loss averaged over the batch), or they lie in no regular order. "
        "Make each loss depend on its own example only, e.g. with GroupNorm in place of BatchNorm."
    )
