# SPDX-License-Identifier: Apache-2.0
"""Any other op: rows by a batched backward of that op alone, one cotangent per example."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .._check import Refused
from ._base import CHUNK_FLOATS, AnyLayout, Op, Use, in_sum_dtype
from .dense import Rows


@dataclass(frozen=True)
class Replay:
    """The op run again on detached inputs: a graph of its own, from copies of its parameters to its outputs."""

    name: str
    leaves: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class ReplayUse(Use):
    """A parameter met by an op without a rule of its own; ``output`` is the number of the output that b belongs to."""

    replay: Replay
    leaf: Tensor
    output: int

    def example_dims(self, b_ndim: int) -> list[int]:
        return list(range(b_ndim))

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        owner = layout.owners().to(b.device).view(-1, *(1,) * (b.ndim - 1 - layout.dim))
        y, size = self.replay.outputs[self.output], max(1, CHUNK_FLOATS // max(1, b.numel()))
        rows = []
        for examples in torch.arange(layout.num_examples, device=b.device).split(size):
            cotangents = torch.where(owner == examples.view(-1, *(1,) * b.ndim), b, 0).to(y.dtype)
            rows.append(in_sum_dtype(self._backward(y, cotangents)))
        return Rows(torch.cat(rows) if rows else b.new_zeros(0, *self.weight.shape))

    def _backward(self, y: Tensor, cotangents: Tensor) -> Tensor:
        """(k, *y.shape) -> (k, *weight.shape)."""
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            try:
                (rows,) = torch.autograd.grad(
                    y, self.leaf, cotangents, retain_graph=True, is_grads_batched=True, allow_unused=True
                )
            except (RuntimeError, NotImplementedError) as error:
                raise Refused(
                    f"ops.fallback: {self.replay.name!r} has no exact rule, and torch cannot batch its backward "
                    f"({str(error).splitlines()[0]}). Write that step with ops that have one, or freeze the parameter."
                ) from None
        return cotangents.new_zeros(len(cotangents), *self.weight.shape) if rows is None else rows


def replay(func: Callable, args: tuple, kwargs: dict[str, Any], weights: Sequence[Tensor], changed: bool) -> Replay:
    """Run an op again, apart from the graph of the model.

    Args:
        func: the op, which must give the same again.
        args: its arguments, as they were before the op; tensors among them are detached.
        kwargs: likewise.
        weights: the arguments whose rows are wanted.
        changed: whether the op changes its first argument in place, which is then its output.
    """
    leaves = {id(w): w.detach().requires_grad_() for w in weights}

    def apart(value: Any) -> Any:
        return leaves.get(id(value), value.detach()) if isinstance(value, Tensor) else value

    args, kwargs = tree_map(apart, args), tree_map(apart, kwargs)
    if changed:
        args = (args[0].clone(), *args[1:])
    with torch.enable_grad():
        out = func(*args, **kwargs)
    out = args[0] if changed else out
    outputs = out if isinstance(out, (list, tuple)) else (out,)
    return Replay(getattr(func, "__name__", str(func)), tuple(leaves.values()), tuple(outputs))


def uses_of(replayed: Replay, weights: Sequence[Tensor], output: int) -> Iterator[Use]:
    """One use for every weight, of one of the outputs."""
    for weight, leaf in zip(weights, replayed.leaves, strict=True):
        yield ReplayUse(weight, replayed, leaf, output)
