# SPDX-License-Identifier: Apache-2.0
"""Pads a batch to a fixed size inside of the compiled call, and cuts the output back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from .actions import Unfit


def flattened(tree: Any) -> tuple[list[Any], Any]:
    """Returns the leaves of a tree and its form; a tensor or tensors as arguments alone take the shortest way."""
    if isinstance(tree, Tensor):
        return [tree], "tensor"
    if type(tree) is tuple and len(tree) == 2 and type(tree[0]) is tuple and tree[1] == {}:
        if all([isinstance(leaf, Tensor) for leaf in tree[0]]):
            return [*tree[0]], len(tree[0])
    return tree_flatten(tree)


def unflattened(leaves: list[Any], form: Any) -> Any:
    """Returns the tree of this form."""
    if form == "tensor":
        return leaves[0]
    return (tuple(leaves), {}) if isinstance(form, int) else tree_unflatten(leaves, form)


@dataclass
class Dimensions:
    """Learns which dimension of each tensor in a tree has the size of the batch, from batches of several sizes."""

    sizes: set[int] = field(default_factory=set)  # of the batches seen
    known: dict[tuple[Any, int], set[int]] = field(default_factory=dict)

    def learn(self, tree: Any, size: int) -> None:
        """Takes the inputs or outputs of a batch with this many examples."""
        leaves, spec = flattened(tree)
        self.sizes.add(size)
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                dims = {dim for dim, length in enumerate(leaf.shape) if length == size}
                self.known[spec, number] = self.known.get((spec, number), dims) & dims

    def of(self, leaves: Sequence[Any], spec: Any) -> list[int | None]:
        """Returns the batch's dimension of every leaf; None for those without one."""
        found: list[int | None] = []
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                if leaf is not None and not isinstance(leaf, (bool, int, float, str, torch.dtype)):
                    raise Unfit(f"an input or output of the model is a {type(leaf).__name__}")
                found.append(None)
                continue
            dims = self.known.get((spec, number))
            if dims is None or len(self.sizes) < 2 or len(dims) > 1:
                raise Unfit("which dimension holds the examples is not known yet")
            found.append(next(iter(dims), None))
        return found


@dataclass(frozen=True)
class Padded:
    """Arguments of the model padded to ``size`` examples, by copies of the first one, whose losses are never summed.

    Copies of an example that is there bring no value, such as an infinity, that is not there anyway.
    """

    args: tuple
    kwargs: dict[str, Any]
    size: int
    count: int  # examples without the padding
    signature: tuple

    @classmethod
    def to(cls, args: tuple, kwargs: dict[str, Any], dimensions: Dimensions, count: int, size: int) -> Padded:
        """Pads a batch of ``count`` examples."""
        leaves, spec = flattened((args, kwargs))
        padded: list[Any] = []
        for leaf, dim in zip(leaves, dimensions.of(leaves, spec), strict=True):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise Unfit("an input of the model requires a gradient")
            if dim is not None and leaf.shape[dim] != count:
                raise Unfit("an input of the model has another size than its batch")
            padded.append(leaf if dim is None or size == count else _extended(leaf, dim, size))
        args, kwargs = unflattened(padded, spec)
        kinds = [(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf for leaf in padded]
        return cls(args, kwargs, size, count, (spec, *kinds))

    def cut(self, output: Any, dimensions: Dimensions) -> Any:
        """Returns the output without the padding."""
        leaves, spec = flattened(output)
        dims = dimensions.of(leaves, spec)
        for leaf, dim in zip(leaves, dims, strict=True):
            if dim is not None and leaf.shape[dim] != self.size:
                raise Unfit("an output of the model has another size than its batch")
        if self.size == self.count:
            return output
        cut = [leaf if dim is None else leaf.narrow(dim, 0, self.count) for leaf, dim in zip(leaves, dims, strict=True)]
        return unflattened(cut, spec)


def _extended(tensor: Tensor, dim: int, size: int) -> Tensor:
    first = tensor.narrow(dim, 0, 1)
    shape = list(tensor.shape)
    shape[dim] = size - tensor.shape[dim]
    return torch.cat([tensor, first.expand(shape)], dim)
