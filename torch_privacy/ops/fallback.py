# SPDX-License-Identifier: Apache-2.0
"""Rows for any op without a rule, by a batched backward of that op alone with one cotangent per example."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..support.validate import Refused
from ._base import CHUNK_FLOATS, AnyLayout, Op, Use, in_sum_dtype
from .dense import Rows


@dataclass(frozen=True)
class Replay:
    """The op repeated on detached inputs, with a separate graph from copies of its parameters to its outputs.

    Infinite and NaN inputs are replaced, because 0 times infinity would make the rows of other examples NaN.
    ``valid`` is, for each output, the mask of finite entries of the original output; None if all are finite.
    """

    name: str
    leaves: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    valid: tuple[Tensor | None, ...]
    data: tuple[Tensor, ...]
    changed: bool  # whether the op changes its first input in place


@dataclass(frozen=True)
class ReplayUse(Use):
    """Records the use of a parameter by an op without a rule; ``output`` is the index of the output of b."""

    replay: Replay
    leaf: Tensor
    output: int

    def example_dims(self, b_ndim: int) -> list[int]:
        return list(range(b_ndim))

    def saved(self) -> tuple[Tensor, ...]:
        return () if self.replay.changed else self.replay.data

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        y, valid = self.replay.outputs[self.output], self.replay.valid[self.output]
        name = self.replay.name
        (rows,) = rows_of_each(lambda c: [self._backward(y, c.to(y.dtype))], [self.weight], b, layout, name, valid)
        return Rows(rows)

    def _backward(self, y: Tensor, cotangents: Tensor) -> Tensor:
        """Maps cotangents (k, *y.shape) to gradients (k, *weight.shape)."""

        def backward(g: Tensor, *, batched: bool) -> Sequence[Tensor | None]:
            return torch.autograd.grad(y, self.leaf, g, retain_graph=True, is_grads_batched=batched, allow_unused=True)

        with torch.enable_grad():
            (rows,) = for_each_cotangent(backward, cotangents)
        return cotangents.new_zeros(len(cotangents), *self.weight.shape) if rows is None else rows


def rows_of_each(
    backward: Callable[[Tensor], list[Tensor]],
    weights: Sequence[Tensor],
    b: Tensor,
    layout: AnyLayout,
    name: str,
    valid: Tensor | None = None,
) -> list[Tensor]:
    """Returns the rows (n, *shape) of some weights, by a backward with the cotangent of one example after the other.

    Args:
        backward: maps cotangents (k, *b.shape) to the gradients (k, *weight.shape) in each weight.
        weights: the parameters to return rows for.
        b: the gradient of the losses in the output.
        layout: of b.
        name: of what is run backwards, for messages.
        valid: mask of the finite entries of the output; None if all are finite.

    Raises:
        Refused: an infinite derivative of one example makes the rows of others NaN.
    """
    owner = layout.owners().to(b.device).view(-1, *(1,) * (b.ndim - 1 - layout.dim))
    if not layout.num_examples:
        return [b.new_zeros(0, *weight.shape) for weight in weights]
    finite, parts = b.isfinite(), []
    for examples in torch.arange(layout.num_examples, device=b.device).split(max(1, CHUNK_FLOATS // max(1, b.numel()))):
        belongs = (owner == examples.view(-1, *(1,) * b.ndim)) & finite
        parts.append(backward(torch.where(belongs, b, 0)))
    finite = finite if valid is None else finite & valid
    invalid = None if finite.all() else layout.examples_first((~finite).to(b.dtype)).flatten(1).any(1)
    return [_checked(in_sum_dtype(torch.cat(rows)), invalid, name) for rows in zip(*parts, strict=True)]


def _checked(rows: Tensor, invalid: Tensor | None, name: str) -> Tensor:
    """Sets the rows of examples with non-finite values to NaN; raises if any other row is not finite."""
    bad_rows = ~rows.reshape(len(rows), rows[0].numel()).isfinite().all(1)
    if (bad_rows if invalid is None else bad_rows & ~invalid).any():
        raise Refused(
            f"ops.fallback: {name!r} has an infinite derivative for one example of this batch, which makes the rows of "
            "the others NaN. Keep its inputs away from such points (clamp them), or freeze the parameter."
        )
    return rows if invalid is None else rows.masked_fill(invalid.view(-1, *(1,) * (rows.ndim - 1)), torch.nan)


def for_each_cotangent(backward: Callable[..., Sequence[Tensor | None]], cotangents: Tensor) -> list[Tensor | None]:
    """Returns the gradients (k, *shape) for cotangents (k, ...): all at once, or one by one where torch cannot batch.

    Args:
        backward: maps a cotangent to gradients; or, called with ``batched=True``, all of them.
        cotangents: at least one.

    Raises:
        Refused: the backward fails for a single cotangent, too.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        try:
            return [*backward(cotangents, batched=True)]
        except (RuntimeError, NotImplementedError, ValueError):
            pass
        try:
            found = [backward(g, batched=False) for g in cotangents]
        except (RuntimeError, NotImplementedError) as error:
            raise Refused(
                f"ops.fallback: a backward for one example fails ({str(error).splitlines()[0]}). Write that step with "
                "other functions, or freeze the parameter."
            ) from None
    return [None if some[0] is None else torch.stack([dense(g) for g in some]) for some in zip(*found, strict=True)]


def dense(gradient: Tensor) -> Tensor:
    """Returns a gradient that may be sparse as an ordinary tensor."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def replay(func: Callable, args: tuple, kwargs: dict[str, Any], weights: Sequence[Tensor], changed: bool) -> Replay:
    """Repeats an op outside of the model's graph.

    Args:
        func: the op, which must be deterministic.
        args: its arguments, as they were before the op; tensors among them are detached.
        kwargs: its keyword arguments, likewise.
        weights: the arguments that need rows.
        changed: whether the op changes its first argument in place, which is then its output.
    """
    leaves = {id(w): w.detach().requires_grad_() for w in weights}
    data: list[Tensor] = []

    def detached(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in leaves:
            return leaves[id(value)]
        data.append(value.detach())
        return torch.where(value.isfinite(), data[-1], 1) if value.is_floating_point() else data[-1]

    args, kwargs = tree_map(detached, args), tree_map(detached, kwargs)
    if changed:
        args = (args[0].clone(), *args[1:])
    with torch.enable_grad():
        out = func(*args, **kwargs)
    out = args[0] if changed else out
    outputs = tuple(out) if isinstance(out, (list, tuple)) else (out,)
    name = getattr(func, "__name__", str(func))
    return Replay(name, tuple(leaves.values()), outputs, (None,) * len(outputs), tuple(data), changed)


def compared(replayed: Replay, outputs: Sequence[Tensor], written: Tensor | None = None) -> Replay | None:
    """Returns the replay with masks of its valid outputs; None if it disagrees with the outputs of finite inputs.

    Where ``written`` is False, the op has left an entry as it was: what ``torch.empty`` found there matters to no row.
    """
    all_finite = all(t.isfinite().all() for t in replayed.data if t.is_floating_point())
    again = [t for t in replayed.outputs if isinstance(t, Tensor)]
    if len(again) != len(outputs):
        return None
    valid = []
    for y, repeated in zip(outputs, again, strict=True):
        finite = y.detach().isfinite()
        same = ~finite | (y.detach() == repeated.detach())
        if all_finite and not same.all():
            return None
        good = finite & same if written is None else (finite & same) | ~written
        valid.append(None if good.all() else good)
    return replace(replayed, outputs=tuple(again), valid=tuple(valid))


def uses_of(replayed: Replay, weights: Sequence[Tensor], output: int) -> Iterator[Use]:
    """Yields one use of every weight, for one of the outputs."""
    for weight, leaf in zip(weights, replayed.leaves, strict=True):
        yield ReplayUse(weight, replayed, leaf, output)
