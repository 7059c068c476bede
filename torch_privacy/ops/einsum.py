# SPDX-License-Identifier: Apache-2.0
"""Products with a parameter (linear, matmul, bmm, einsum, tensordot, ...), recorded as contractions over labels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._base import AnyLayout, Layout, Op, Use, in_one_dtype
from .dense import Rows, in_its_precision
from .elementwise import TermUse, check_entries_per_example
from .linear import Arrangement, Bilinear, GroupedLinear, Linear

Labels = tuple[str, ...]  # one for each dimension; a letter, or ".k" for the k-th broadcast dimension from the right
Names = list[str]


@dataclass(frozen=True)
class ContractionUse(Use):
    """Records one call of ``y = scale·Σ x W`` with the sum over the labels that y lacks, as in ``torch.einsum``.

    A label of the weight has one of three roles: both y and x have it (it indexes matrices), only y has it (an output),
    y lacks it (an input, summed out). The remaining labels of x and y are the examples and their positions. A dimension
    of size one is broadcast, so it counts as absent; the weight may also lack its first labels.
    """

    x: Tensor
    x_labels: Labels
    weight_labels: Labels
    y_labels: Labels
    scale: float = 1.0

    def example_dims(self, b_ndim: int) -> list[int]:
        return [dim for dim, label in enumerate(self.y_labels) if label in self.x_labels]

    def saved(self) -> tuple[Tensor, ...]:
        return (self.x,)

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        example, weight_sizes = self.y_labels[layout.dim], self._weight_sizes()
        if example in weight_sizes:
            return self._rows_of_entries_per_example(b, layout, weight_sizes)
        in_half = b.dtype is torch.bfloat16
        x, b = in_one_dtype(self.x, b)
        x, x_labels = _without_single(x, self.x_labels, example)
        b, y_labels = _without_single(b if self.scale == 1 else b * self.scale, self.y_labels, example)
        shared = [label for label in weight_sizes if label in x_labels and label in y_labels]
        outputs = [label for label in weight_sizes if label in y_labels and label not in x_labels]
        inputs = [label for label in weight_sizes if label not in y_labels]
        in_both = [label for label in x_labels if label in y_labels and label != example]
        positions = [label for label in in_both if label not in weight_sizes]
        x = _grouped(x, x_labels, (example, shared, positions, inputs), weight_sizes, layout)
        b = _grouped(b, y_labels, (example, shared, positions, outputs), weight_sizes, layout)
        return _simplest(x, b, (shared, outputs, inputs), weight_sizes, self.weight.shape, in_half=in_half)

    def _weight_sizes(self) -> dict[str, int]:
        """Returns labels and sizes of the weight's dimensions of more than one entry."""
        labels = self.weight_labels[len(self.weight_labels) - self.weight.ndim :]
        return {label: size for label, size in zip(labels, self.weight.shape, strict=True) if size != 1}

    def _rows_of_entries_per_example(self, b: Tensor, layout: AnyLayout, weight_sizes: Mapping[str, int]) -> Op:
        """Returns the rows of a weight with separate entries for every example: parts of the whole gradient."""
        n, example = layout.num_examples, self.y_labels[layout.dim]
        check_entries_per_example("ops.einsum", self.weight, n)
        batch = "the whole batch"
        whole = replace(self, x=self.x[None], x_labels=(batch, *self.x_labels), y_labels=(batch, *self.y_labels))
        total = whole.op(b[None], Layout(0, 1, 1, 1)).rows()
        dim = self.weight.ndim - len(self.weight_labels) + self.weight_labels.index(example)
        owned = _owned(layout, weight_sizes[example], total)
        kept = owned.view(n, *(owned.shape[1] if k == dim else 1 for k in range(self.weight.ndim)))
        return Rows(torch.where(kept > 0, total, 0))  # a product would compute 0 times infinity


def _owned(layout: AnyLayout, size: int, like: Tensor) -> Tensor:
    """Returns (n, size): 1 if an entry along the layout's dimension belongs to the example, else 0."""
    numbers = torch.arange(1, size + 1, device=like.device).view(*(1,) * layout.dim, size)
    numbers = layout.examples_first(numbers).flatten(1)  # padding has number 0
    return like.new_zeros(len(numbers), size + 1).scatter_(1, numbers, 1)[:, 1:]


def _without_single(tensor: Tensor, labels: Labels, example: str) -> tuple[Tensor, Labels]:
    """Removes the dimensions of size one, except that of the examples."""
    single = [dim for dim, label in enumerate(labels) if tensor.shape[dim] == 1 and label != example]
    return tensor.squeeze(single), tuple(label for dim, label in enumerate(labels) if dim not in single)


def _grouped(
    tensor: Tensor, labels: Labels, roles: tuple[str, Names, Names, Names], sizes: Mapping[str, int], layout: AnyLayout
) -> Tensor:
    """Returns (n, g, t, d) for the labels (examples, matrices, positions, inputs or outputs); sums out all others.

    An input that only the weight has is repeated, with the given size.
    """
    example, shared, positions, rest = roles
    wanted = [example, *shared, *positions, *rest]
    others = [dim for dim, label in enumerate(labels) if label not in wanted]
    tensor = tensor.sum(others) if others else tensor
    labels = tuple(label for label in labels if label in wanted)
    for label in wanted:
        if label not in labels:
            tensor, labels = tensor.unsqueeze(-1).expand(*tensor.shape, sizes[label]), (*labels, label)
    tensor = tensor.permute([labels.index(label) for label in wanted])[(None,) * layout.dim]
    first = layout.examples_first(tensor).flatten(1, layout.dim + 1)  # (n, positions, shared, positions, rest)
    n, before, *more = first.shape
    g, t = len(shared), len(positions)
    counts = math.prod(more[:g]), math.prod(more[g : g + t]), math.prod(more[g + t :])
    grouped = first.reshape(n, before, *counts).transpose(1, 2)
    return grouped.reshape(n, counts[0], before * counts[1], counts[2])


def _simplest(
    x: Tensor,
    b: Tensor,
    roles: tuple[Names, Names, Names],
    weight_sizes: Mapping[str, int],
    shape: torch.Size,
    *,
    in_half: bool,
) -> Op:
    """Returns the equivalent op with the simplest structure, so that different uses of one weight can be merged."""
    shared, outputs, inputs = roles
    if 1 in (x.shape[3], b.shape[3]):  # rows of vectors are no larger than the input
        return Rows(_arranged(x, b, roles, weight_sizes, shape).rows())
    if next(label for label in weight_sizes if label not in shared) in inputs:  # the row of y = x W is the transpose
        x, b, outputs, inputs = b, x, inputs, outputs
    if len(shape) == 2 and not shared:
        return in_its_precision(Linear(x.squeeze(1), b.squeeze(1)), in_half=in_half)
    return _arranged(x, b, (shared, outputs, inputs), weight_sizes, shape)


def _arranged(
    x: Tensor, b: Tensor, roles: tuple[Names, Names, Names], weight_sizes: Mapping[str, int], shape: torch.Size
) -> GroupedLinear:
    labels = [label for role in roles for label in role]
    order = tuple(labels.index(label) for label in weight_sizes)
    return GroupedLinear(x, b, Arrangement(tuple(weight_sizes[label] for label in labels), order, shape))


@dataclass(frozen=True)
class LinearUse(Use):
    """Records one call of ``y = x Wᵀ``: ``x`` (*positions, d), y (*positions, e); a fast path for the usual case."""

    x: Tensor

    def example_dims(self, b_ndim: int) -> list[int]:
        return list(range(b_ndim - 1))

    def saved(self) -> tuple[Tensor, ...]:
        return (self.x,)

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        x, in_half = self.x, b.dtype is torch.bfloat16
        if b.ndim == 2 and type(layout) is Layout and layout.num_examples == len(b):  # one position each
            x, b = x.unsqueeze(1), b.unsqueeze(1)
        else:
            x, b = (_positions(layout.examples_first(factor)) for factor in (x, b))
        return in_its_precision(Linear(x, b), in_half=in_half)


@dataclass(frozen=True)
class BilinearUse(Use):
    """Records one call of ``y_k = x₁ᵀ W_k x₂``: ``x1`` (*positions, p), ``x2`` (*positions, q), y (*positions, e)."""

    x1: Tensor
    x2: Tensor

    def example_dims(self, b_ndim: int) -> list[int]:
        return list(range(b_ndim - 1))

    def saved(self) -> tuple[Tensor, ...]:
        return (self.x1, self.x2)

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        (x1, b), (x2, _) = in_one_dtype(self.x1, b), in_one_dtype(self.x2, b)
        return Bilinear(*(_positions(layout.examples_first(tensor)) for tensor in (x1, x2, b)))


def _positions(tensor: Tensor) -> Tensor:
    """Flattens (n, *positions, d) to (n, t, d)."""
    if tensor.ndim == 3:
        return tensor
    n, *positions, d = tensor.shape
    return tensor.reshape(n, math.prod(positions), d)


def contraction(
    y_labels: Sequence[str], a: Tensor, a_labels: Sequence[str], b: Tensor, b_labels: Sequence[str], scale: float = 1.0
) -> Iterator[Use]:
    """Records the uses of both operands of ``y = scale·Σ a b``, except an operand of which the diagonal is taken."""
    for weight, weight_labels, x, x_labels in ((a, a_labels, b, b_labels), (b, b_labels, a, a_labels)):
        if len(set(weight_labels)) == len(weight_labels):
            x, x_labels = _diagonal(x, tuple(x_labels))
            yield ContractionUse(weight, x, x_labels, tuple(weight_labels), tuple(y_labels), float(scale))


def _diagonal(x: Tensor, labels: Labels) -> tuple[Tensor, Labels]:
    """Returns the view of the entries with equal indices for labels that appear twice."""
    distinct = tuple(dict.fromkeys(labels))
    if distinct == labels:
        return x, labels
    numbers = {label: number for number, label in enumerate(distinct)}
    return torch.einsum(x.detach(), [numbers[label] for label in labels], list(numbers.values())), distinct


def _broadcast(ndim: int) -> Labels:
    """Returns labels of broadcast dimensions, which are aligned on the right."""
    return tuple(f".{k}" for k in reversed(range(ndim)))


# The functions below have the signature of the torch function they record, preceded by its output. Each yields a use
# for every argument that may be a parameter; the tape keeps the uses of parameters.


def linear(y: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Use]:
    """Records ``y = x Wᵀ + bias``."""
    of_bias = [] if bias is None else [TermUse(bias)]
    if weight.requires_grad and weight.ndim == 2 and min(weight.shape) > 1:  # if input is a parameter, too: fallback
        return [LinearUse(weight, input), *of_bias]
    positions, outputs = _broadcast(input.ndim - 1), "e" * (weight.ndim - 1)
    return [*contraction((*positions, *outputs), input, (*positions, "d"), weight, (*outputs, "d")), *of_bias]


def matmul(y: Tensor, input: Tensor, other: Tensor, *, scale: float = 1.0) -> Iterator[Use]:
    """Records ``y = a b`` of matrices, stacks of matrices and vectors."""
    left, right = "t" * (input.ndim > 1), "e" * (other.ndim > 1)
    a_labels = (*_broadcast(input.ndim - 2), *left, "d")
    b_labels = (*_broadcast(other.ndim - 2), "d", *right)
    y_labels = (*_broadcast(max(input.ndim, other.ndim) - 2), *left, *right)
    yield from contraction(y_labels, input, a_labels, other, b_labels, scale)


def reversed_matmul(y: Tensor, input: Tensor, other: Tensor) -> Iterator[Use]:
    """Records ``y = other input``."""
    yield from matmul(y, other, input)


def added_matmul(
    y: Tensor, input: Tensor, first: Tensor, second: Tensor, *, beta: float = 1, alpha: float = 1
) -> Iterator[Use]:
    """Records ``y = beta·input + alpha·a b``: addmm, addmv and baddbmm."""
    yield TermUse(input, float(beta))
    yield from matmul(y, first, second, scale=float(alpha))


def addbmm(
    y: Tensor, input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Iterator[Use]:
    """Records ``y = beta·input + alpha·Σ_k a_k b_k``."""
    yield TermUse(input, float(beta))
    yield from contraction("te", batch1, "ktd", batch2, "kde", float(alpha))


def addr(y: Tensor, input: Tensor, vec1: Tensor, vec2: Tensor, *, beta: float = 1, alpha: float = 1) -> Iterator[Use]:
    """Records ``y = beta·input + alpha·a bᵀ``."""
    yield TermUse(input, float(beta))
    yield from contraction("te", vec1, "t", vec2, "e", float(alpha))


def outer(y: Tensor, input: Tensor, vec2: Tensor) -> Iterator[Use]:
    """Records ``y = a bᵀ``."""
    yield from contraction("te", input, "t", vec2, "e")


def inner(y: Tensor, input: Tensor, other: Tensor) -> Iterator[Use]:
    """Records ``y = Σ_d a_d b_d`` over the last dimension of both."""
    if input.ndim and other.ndim:  # a scalar only scales the other
        a_labels = tuple(f"a{k}" for k in range(input.ndim - 1))
        b_labels = tuple(f"b{k}" for k in range(other.ndim - 1))
        yield from contraction((*a_labels, *b_labels), input, (*a_labels, "d"), other, (*b_labels, "d"))


def vecdot(y: Tensor, x: Tensor, other: Tensor, *, dim: int = -1) -> Iterator[Use]:
    """Records ``y = Σ_d a_d b_d`` over one dimension, with the others broadcast."""
    if dim == -1:
        a_labels, b_labels = _broadcast(x.ndim), _broadcast(other.ndim)
        yield from contraction(_broadcast(y.ndim + 1)[:-1], x, a_labels, other, b_labels)


def tensordot(y: Tensor, a: Tensor, b: Tensor, dims: Any = 2, out: None = None) -> Iterator[Use]:
    """Records ``y = Σ a b`` over pairs of dimensions; an integer means the last ones of a and the first ones of b."""
    if isinstance(dims, Tensor):
        dims = dims.tolist()
    if isinstance(dims, int):
        dims = (range(a.ndim - dims, a.ndim), range(dims))
    a_labels, b_labels = [f"a{k}" for k in range(a.ndim)], [f"b{k}" for k in range(b.ndim)]
    for summed, (a_dim, b_dim) in enumerate(zip(*dims, strict=True)):
        a_labels[a_dim] = b_labels[b_dim] = f"d{summed}"
    y_labels = [label for label in (*a_labels, *b_labels) if not label.startswith("d")]
    yield from contraction(y_labels, a, a_labels, b, b_labels)


def einsum(y: Tensor, equation: str, *operands: Any) -> Iterator[Use]:
    """Records ``y = Σ a b`` for any equation of two operands; torch.einsum converts sublists to an equation."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if len(operands) == 2:
        a, b = operands
        a_labels, b_labels, y_labels = _parse(equation, (a.ndim, b.ndim))
        yield from contraction(y_labels, a, a_labels, b, b_labels)


def _parse(equation: str, ndims: Sequence[int]) -> tuple[Labels, ...]:
    """Returns the labels of every operand and of the result, with the ellipsis expanded."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    hidden = [ndim - len(term.replace("...", "")) for term, ndim in zip(terms, ndims, strict=True)]
    if not arrow:  # by default the ellipsis, then the letters that appear once, in alphabetical order
        counts = Counter(left.replace("...", "").replace(",", ""))
        right = "..." + "".join(sorted(letter for letter, count in counts.items() if count == 1))
    most = max((count for term, count in zip(terms, hidden, strict=True) if "..." in term), default=0)
    return tuple(_labels(term, count) for term, count in zip([*terms, right], [*hidden, most], strict=True))


def _labels(term: str, hidden: int) -> Labels:
    before, ellipsis, after = term.partition("...")
    return (*before, *(_broadcast(hidden) if ellipsis else ()), *after)


def bilinear(y: Tensor, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Iterator[Use]:
    """Records ``y_k = x₁ᵀ W_k x₂ + bias_k``."""
    yield BilinearUse(weight, input1, input2)
    if bias is not None:
        yield TermUse(bias)


RECORDERS = {
    F.linear: linear,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.linalg.matmul), matmul),
    **dict.fromkeys((torch.mm, Tensor.mm, torch.bmm, Tensor.bmm, torch.mv, Tensor.mv, torch.dot, Tensor.dot), matmul),
    Tensor.__rmatmul__: reversed_matmul,
    **dict.fromkeys(
        (torch.addmm, Tensor.addmm, torch.addmv, Tensor.addmv, torch.baddbmm, Tensor.baddbmm), added_matmul
    ),
    **dict.fromkeys((torch.addbmm, Tensor.addbmm), addbmm),
    **dict.fromkeys((torch.addr, Tensor.addr), addr),
    **dict.fromkeys((torch.outer, Tensor.outer, torch.ger, Tensor.ger), outer),
    **dict.fromkeys((torch.inner, Tensor.inner), inner),
    torch.linalg.vecdot: vecdot,
    torch.tensordot: tensordot,
    torch.einsum: einsum,
    **dict.fromkeys((F.bilinear, torch.bilinear), bilinear),
}
