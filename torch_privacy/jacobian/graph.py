# SPDX-License-Identifier: Apache-2.0
"""The autograd graph behind the losses, read once: asking torch for a node's neighbors costs more than all the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import cache

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node


class Graph:
    """Nodes behind ``losses``; ``children`` are those a node's gradients go to."""

    def __init__(self, losses: Tensor):
        assert losses.grad_fn is not None
        self.root: Node = losses.grad_fn
        self.children: dict[Node, list[Node]] = {}
        self._parents: dict[Node, list[Node]] = {}
        stack = [self.root]
        while stack:
            node = stack.pop()
            if node in self.children:
                continue
            children = self.children[node] = _children(node)
            for child in children:
                self._parents.setdefault(child, []).append(node)
            stack += children

    def nodes(self) -> Iterator[Node]:
        """All nodes, the losses' own first."""
        return iter(self.children)

    def has_custom_functions(self) -> bool:
        """Whether a gradient goes back through an ``autograd.Function``, which shows nothing of what it does."""
        return any(isinstance(node, BackwardCFunction) for node in self.children)

    def following(self, node: Node) -> list[Node]:
        """A node's children; also of one outside, as is the history of a tensor that was changed in place since."""
        known = self.children.get(node)
        return _children(node) if known is None else known

    def before(self, stops: Collection[Node]) -> Iterator[Node]:
        """The nodes that are reached from the losses without passing one of ``stops``."""
        stack, seen = [self.root], {self.root}
        while stack:
            node = stack.pop()
            if node not in stops:
                yield node
                following = [n for n in self.children[node] if n not in seen]
                seen.update(following)
                stack += following

    def above(self, nodes: Collection[Node]) -> set[Node]:
        """The nodes that have one of ``nodes`` strictly below them."""
        stack = [parent for node in nodes for parent in self._parents.get(node, ())]
        found: set[Node] = set()
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack += self._parents.get(node, ())
        return found


def saved_bytes(graph: Graph, n: int, but: Iterable[Tensor]) -> int:
    """Bytes of what autograd keeps for the backward and that can hold n examples; shared memory counts once.

    Not counted is the memory of some tensors, which is there in any case, and of sparse ones.
    """
    own = {t.untyped_storage().data_ptr() for t in but if t.layout is torch.strided}
    sizes: dict[int, int] = {}
    for node in graph.nodes():
        for tensor in _saved_by(node):
            if tensor.layout is torch.strided and any([size and size % n == 0 for size in tensor.shape]):
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum([size for start, size in sizes.items() if start not in own])


def _saved_by(node: Node) -> Iterator[Tensor]:
    """The tensors that a node keeps; none where it will not say."""
    if isinstance(node, BackwardCFunction):
        yield from (t for t in node.saved_tensors if isinstance(t, Tensor))
        return
    for name in _saved_names(type(node)):
        try:
            saved = getattr(node, name)
        except RuntimeError:  # freed, or changed in place since: the backward itself will say so
            continue
        yield from (t for t in (saved if isinstance(saved, (list, tuple)) else (saved,)) if isinstance(t, Tensor))


@cache
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_saved_"))


def _children(node: Node) -> list[Node]:
    return [n for n, _ in node.next_functions if n is not None]
