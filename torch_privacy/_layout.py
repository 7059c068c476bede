# SPDX-License-Identifier: Apache-2.0
"""Which entries of an op's output belong to which example: measured by a second backward, never assumed.

With cotangent ones the backward gives b = Σᵢ ∂ℓᵢ/∂y, with cotangent c it gives Σᵢ cᵢ ∂ℓᵢ/∂y. Where an entry belongs to
example j alone the second is cⱼ times the first. For random c an entry that several examples share fails that.
Where no regular layout fits, the ratio of the two says entry by entry whose it is: no two cⱼ are close.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._check import Refused
from .ops import AnyLayout, Layout, Ragged

if TYPE_CHECKING:
    from ._tape import Call

# The layouts on a path are measured until this many batches have told them without doubt; then they are known.
PROOFS = 2
# A known path is measured again on one batch in so many, in case that not all of its branches could be seen.
SPOT_CHECK = 64
# A gradient that has all but cancelled is rounding: up to so many units of it, relative to the largest on the way.
CANCELLED = 1000

Kind = tuple[int, str]
NamesOf = Callable[[Tensor], tuple[str, ...]]


class Layouts:
    """What earlier batches taught about the layout of every call on a path (see ``Tape._path``)."""

    def __init__(self) -> None:
        self._proofs: dict[int, tuple[list[Kind], int]] = {}
        self._generator = fresh_generator()
        self._batches = 0
        self._verified: Counter[tuple] = Counter()

    @property
    def settled(self) -> bool:
        """Whether enough batches of two examples or more were measured to trust the model's inputs as well."""
        return self._batches >= PROOFS

    def verified(self, calls: list[Call]) -> bool:
        """Whether enough batches with such calls were compared with native backwards."""
        return all(self._verified[kind] >= PROOFS for kind in map(_kind_of_call, calls))

    def note_verified(self, calls: list[Call], n: int) -> None:
        """A batch of n with these calls was compared."""
        if n > 1:
            self._verified.update({_kind_of_call(call) for call in calls})

    def knows(self, path: int) -> bool:
        """Whether enough batches have told the layouts on this path."""
        return path in self._proofs and self._proofs[path][1] >= PROOFS

    def recall(self, path: int, calls: list[Call], n: int) -> list[AnyLayout] | None:
        """The layout of every call for a batch of n, or None if they must be measured."""
        if not self.knows(path) or not torch.randint(SPOT_CHECK, (), generator=self._generator):
            return None
        layouts = [_recall(kind, call, n) for kind, call in zip(self._proofs[path][0], calls, strict=True)]
        return None if any(layout is None for layout in layouts) else [layout for layout in layouts if layout]

    def measure(
        self,
        path: int,
        calls: list[Call],
        names_of: NamesOf,
        bs: Sequence[Tensor | None],
        bs_scaled: Sequence[Tensor | None],
        cotangent: Tensor,
        precision: float,
    ) -> list[AnyLayout]:
        """The layout of every call, from the b of cotangent ones and of ``cotangent``; remembered for later batches.

        ``precision`` is the relative rounding of the coarsest type in which the gradients were computed.
        """
        self._batches += len(cotangent) > 1
        largest = max((float(b.norm()) for b in bs if b is not None), default=0.0)
        found: list[list[AnyLayout]] = []
        for call, b, b_scaled in zip(calls, bs, bs_scaled, strict=True):
            b, b_scaled = (call.output.gradient(g, cotangent) for g in (b, b_scaled))
            dims = _example_dims(call)
            fitting: list[AnyLayout] = list(fitting_layouts(b, b_scaled, cotangent, dims, precision))
            fitting = fitting or [Ragged(*found) for found in _owners(b, b_scaled, cotangent, dims, precision)]
            if not fitting and max(b.norm(), b_scaled.norm()) <= CANCELLED * precision * largest:
                fitting = 2 * list(_candidates(b.shape, len(cotangent), dims))  # rounding of zero: any will do, for now
            if not fitting:
                raise Refused(_coupled(call, names_of, len(cotangent)))
            found.append(fitting)
        self._learn(path, found, len(cotangent))
        return [fitting[0] for fitting in found]

    def confirm(
        self,
        calls: list[Call],
        layouts: Sequence[AnyLayout],
        names_of: NamesOf,
        bs: Sequence[Tensor | None],
        bs_scaled: Sequence[Tensor | None],
        cotangent: Tensor,
        precision: float,
    ) -> None:
        """Refuse unless the owners found entry by entry hold for other cotangents as well."""
        for call, layout, b, b_scaled in zip(calls, layouts, bs, bs_scaled, strict=True):
            if isinstance(layout, Ragged):
                plain, scaled = (_entries(call.output.gradient(g, cotangent), layout.dim) for g in (b, b_scaled))
                owner, dtype = layout.owner.to(plain.device), torch.promote_types(cotangent.dtype, torch.float32)
                if not _owned(owner, plain.to(dtype), scaled.to(dtype), cotangent.to(dtype), precision):
                    raise Refused(_coupled(call, names_of, len(cotangent)))

    def _learn(self, path: int, found: list[list[AnyLayout]], n: int) -> None:
        """One batch that leaves no doubt is a proof; another answer than before starts the count anew."""
        if n < 2 or any(len(fitting) > 1 for fitting in found):
            return
        regular = [fitting[0] for fitting in found if isinstance(fitting[0], Layout)]
        if len(regular) < len(found):  # where the data decide, nothing can be learned
            return
        kinds = [_kind(layout) for layout in regular]
        before, count = self._proofs.get(path, (kinds, 0))
        self._proofs[path] = (kinds, count + 1 if before == kinds else 1)


def _kind_of_call(call: Call) -> tuple:
    """An op and how it meets its parameters, less the sizes."""
    return (call.op, len(call.shape), *((type(use).__name__, use.weight.shape) for use in call.uses))


@dataclass(frozen=True)
class Merging:
    """Examples taken together: ``assignment`` (n,) has the number below ``count`` of each one's group.

    A group's row is the mean of its examples' rows.
    """

    assignment: Tensor
    count: int

    def layout(self, layout: AnyLayout) -> Ragged:
        """Where the groups sit, given where the examples do."""
        numbers = torch.cat([self.assignment.cpu(), torch.tensor([-1])])  # the last is nobody's, also by the index -1
        return Ragged(layout.dim, self.count, numbers[layout.owners()])

    def weights(self) -> Tensor:
        """(n,): one over the size of each example's group."""
        return 1 / torch.bincount(self.assignment, minlength=self.count)[self.assignment]


def fresh_generator() -> torch.Generator:
    """A generator for checks, seeded by the system: it leaves the user's random state alone."""
    generator = torch.Generator()
    generator.seed()
    return generator


def random_cotangent(losses: Tensor) -> Tensor:
    """(n,) random numbers in [1, 2), in no order, no two of them closer than 1/(2n)."""
    n, generator = len(losses), fresh_generator()
    grid = torch.randperm(n, generator=generator) + torch.rand(n, generator=generator, dtype=torch.float64) / 2
    return (1 + grid / max(n, 1)).to(losses)


def check_input(leaf: Tensor, g: Tensor | None, g_scaled: Tensor | None, cotangent: Tensor, precision: float) -> None:
    """Refuse where one example's loss depends on another example's part of an input of the model."""
    if g is None or g_scaled is None:  # the losses do not depend on it
        return
    dims = [dim for dim, size in enumerate(leaf.shape) if size == len(cotangent)]
    if next(fitting_layouts(g, g_scaled, cotangent, dims, precision), None) is None:
        raise Refused(
            f"tape: the losses of the {len(cotangent)} examples depend on each other's part of the model's input of "
            f"shape {tuple(leaf.shape)} (batch normalisation, in-batch negatives, a loss averaged over the batch?). "
            "Make each loss depend on its own example only, e.g. with GroupNorm in place of BatchNorm."
        )


def fitting_layouts(
    b: Tensor, b_scaled: Tensor, cotangent: Tensor, dims: list[int], precision: float
) -> Iterator[Layout]:
    """Every layout with its examples in one of ``dims`` under which ``b_scaled`` is ``cotangent`` times ``b``.

    Up to rounding, which is relative to an example's own b and, at a tenth, to the largest of the examples.
    """
    n = len(cotangent)
    if n == 1:  # nothing to tell apart
        yield from (Layout(dim, 1, 1, b.shape[dim]) for dim in dims[:1])
        return
    dtype = torch.promote_types(cotangent.dtype, torch.float32)
    for layout in _candidates(b.shape, n, dims):
        first = layout.examples_first(b.detach()).reshape(n, -1).to(dtype)
        first_scaled = layout.examples_first(b_scaled.detach()).reshape(n, -1).to(dtype)
        size = torch.linalg.vector_norm(first, dim=1)
        error = torch.linalg.vector_norm(first_scaled - cotangent[:, None].to(dtype) * first, dim=1)
        finite = torch.isfinite(size) & torch.isfinite(error)
        largest = size[finite].max() if finite.any() else 0.0
        allowed = 2 * precision**0.5 * (size + 0.1 * largest)
        if (error <= allowed)[finite].all() and _same_finite(first, first_scaled, finite):
            yield layout


def _owners(
    b: Tensor, b_scaled: Tensor, cotangent: Tensor, dims: list[int], precision: float
) -> Iterator[tuple[int, int, Tensor]]:
    """(dim, n, owners) for each of ``dims`` whose entries all belong to one example each, in whatever order.

    Entries without a gradient belong to nobody. An entry of two examples would have a ratio between theirs, which is
    no third one's but by chance; ``confirm`` makes that chance small.
    """
    n = len(cotangent)
    dtype = torch.promote_types(cotangent.dtype, torch.float32)
    if n < 2 or 100 * precision > 1 / n:  # this type is too coarse to tell so many apart
        return
    c, order = cotangent.to(dtype).sort()
    for dim in dims:
        plain, scaled = _entries(b, dim).to(dtype), _entries(b_scaled, dim).to(dtype)
        size = torch.linalg.vector_norm(plain, dim=1)
        ratio = torch.linalg.vecdot(plain, scaled) / size.square()
        nearest = torch.bucketize(ratio, (c[1:] + c[:-1]) / 2)
        without = torch.linalg.vector_norm(scaled, dim=1) + size == 0
        owner = torch.where(without, -1, order[nearest])
        if _owned(owner, plain, scaled, cotangent.to(dtype), precision):
            yield dim, n, owner.cpu()


def _entries(tensor: Tensor, dim: int) -> Tensor:
    """(.., size, ..) -> (size, everything else)."""
    rows = tensor.movedim(dim, 0)
    return rows.reshape(len(rows), rows.shape[1:].numel())


def _owned(owner: Tensor, plain: Tensor, scaled: Tensor, cotangent: Tensor, precision: float) -> bool:
    """Whether each entry (row of the first two) was scaled by its owner's cotangent, up to rounding."""
    size = torch.linalg.vector_norm(plain, dim=1)
    error = torch.linalg.vector_norm(scaled - cotangent[owner, None] * plain, dim=1)
    tolerance = min(1 / (100 * len(cotangent)), 10 * precision**0.75)
    largest = size.max() if len(size) else 0.0
    return bool(((owner < 0) | (error <= tolerance * size + 10 * precision * largest)).all())


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


def _kind(layout: Layout) -> Kind:
    """A layout less the sizes that change with the batch."""
    if layout.before == layout.after == 1:
        return layout.dim, "only"
    if layout.before == 1 or layout.after == 1:
        return layout.dim, "after" if layout.before == 1 else "before"
    return layout.dim, f"{layout.before} before, {layout.after} after"


def _recall(kind: Kind, call: Call, n: int) -> Layout | None:
    """The layout of this kind for a batch of n, unless the sizes say that it must be another one."""
    dim = kind[0]
    positions, left = divmod(call.shape[dim], n)
    layouts = [Layout(dim, 1, n, positions), Layout(dim, positions, n, 1)] if positions and not left else []
    return next((layout for layout in layouts if _kind(layout) == kind), None)


def _coupled(call: Call, names_of: NamesOf, n: int) -> str:
    names = sorted({name for use in call.uses for name in names_of(use.weight)})
    return (
        f"tape: at op {call.op!r} with parameter {', '.join(map(repr, names))} (output {tuple(call.shape)}) the {n} "
        "examples of the batch cannot be told apart: either one example's loss depends on another example (batch "
        "normalisation, in-batch negatives, a loss averaged over the batch), or they lie in no regular order. "
        "Make each loss depend on its own example only, e.g. with GroupNorm in place of BatchNorm."
    )
