# SPDX-License-Identifier: Apache-2.0
"""The autograd graph of the losses, read once, because asking torch for a node's neighbors is slow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, cached_property
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from ..parallel.shards import on_this_rank

LEAF = 2**64 - 1  # sequence number of all leaves


class Graph:
    """The nodes that ``losses`` were computed by; ``children`` are those that a node's gradients go to."""

    def __init__(self, losses: Tensor):
        assert losses.grad_fn is not None
        self.root: Node = losses.grad_fn
        self.children: dict[Node, list[Node]] = {}
        self._numbers: list[int] = []  # of each child's output that a node takes
        stack, found, numbers = [self.root], self.children, self._numbers
        while stack:
            node = stack.pop()
            if node not in found:
                children = found[node] = []
                for child, number in node.next_functions:
                    if child is not None:
                        children.append(child)
                        numbers.append(number)
                stack += children

    @cached_property
    def made(self) -> list[Node]:
        """Returns the nodes in the order in which they were made, which torch's sequence numbers show; leaves last."""
        return sorted(self.children, key=_sequence_number)

    def wiring(self) -> tuple[int, dict[int, int]]:
        """Returns a hash of what goes where, and the place of each sequence number among those of the nodes.

        The order in which nodes were made counts, because Python code may choose among results of equal calls, or put
        them together in another order.
        """
        made = self.made
        places = {node: place for place, node in enumerate(made)}
        found: list[Any] = []
        for node in made:
            found.append(node.name())
            found += map(places.__getitem__, self.children[node])
        return hash((*found, *self._numbers)), dict(zip(map(_sequence_number, made), places.values(), strict=True))

    def nodes(self) -> Iterator[Node]:
        """Yields all nodes, starting with that of the losses."""
        return iter(self.children)

    def has_custom_functions(self) -> bool:
        """True if a gradient passes an ``autograd.Function``, which cannot be looked into."""
        return any(map(_is_custom, {*map(type, self.children)}))

    def has_scripted_parts(self) -> bool:
        """True if a gradient passes a part that TorchScript has compiled, which cannot be looked into."""
        return any(map(_is_scripted, {*map(type, self.children)}))

    def is_made_by(self, numbers: Collection[int]) -> bool:
        """True if all nodes but leaves and custom functions have one of these sequence numbers."""
        others = [node for node in self.children if node._sequence_nr() not in numbers]
        return all([_is_custom(type(node)) for node in others if node._sequence_nr() != LEAF])

    def cast_dtypes(self) -> set[torch.dtype]:
        """Returns the floating-point types that a gradient is cast to on its way."""
        casts = [node for node in self.children if node.name() == "ToCopyBackward0"]
        return {metadata.dtype for node in casts for metadata in node._input_metadata}

    def following(self, node: Node) -> list[Node]:
        """Returns a node's children; the node may be outside of the graph, as that of a tensor changed in place."""
        known = self.children.get(node)
        return _children(node) if known is None else known

    def before(self, stops: Collection[Node]) -> list[Node]:
        """Returns the nodes that are reached from the losses without passing one of ``stops``."""
        stack, seen, found = [self.root], {self.root}, []
        while stack:
            node = stack.pop()
            if node not in stops:
                found.append(node)
                for n in self.children[node]:
                    if n not in seen:
                        seen.add(n)
                        stack.append(n)
        return found

    def above(self, nodes: Collection[Node]) -> set[Node]:
        """Returns the nodes that have one of ``nodes`` strictly below them."""
        parents = self._parents
        stack = [parent for node in nodes for parent in parents.get(node, ())]
        found: set[Node] = set()
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack += parents.get(node, ())
        return found

    @cached_property
    def _parents(self) -> dict[Node, list[Node]]:
        parents: dict[Node, list[Node]] = {}
        for node, children in self.children.items():
            for child in children:
                parents.setdefault(child, []).append(node)
        return parents


_sequence_number = methodcaller("_sequence_nr")


@cache
def _is_custom(kind: type) -> bool:
    return issubclass(kind, BackwardCFunction)


@cache
def _is_scripted(kind: type) -> bool:
    return kind.__name__ == "CppFunction"


def _children(node: Node) -> list[Node]:
    return [n for n, _ in node.next_functions if n is not None]


def leaves_below(node: Node, children: Callable[[Node], list[Node]] = _children) -> list[Tensor]:
    """Returns the leaves, such as parameters, that the gradient of a node goes to, on the way of these children."""
    found: dict[int, Tensor] = {}
    stack, seen = [node], {node}
    while stack:
        node = stack.pop()
        leaf = leaf_of(node)
        if leaf is not None:
            found[id(leaf)] = leaf
        below = [n for n in children(node) if n not in seen]
        seen.update(below)
        stack += below
    return [*found.values()]


def leaf_of(node: Node) -> Tensor | None:
    """Returns the leaf in which a node accumulates gradients; None for all other nodes."""
    return getattr(node, "variable", None) if node.name() == "torch::autograd::AccumulateGrad" else None


def saved_bytes(graph: Graph, n: int, excluded: Iterable[Tensor]) -> int:
    """Returns the bytes that autograd saves for the backward in tensors that can hold n examples.

    Shared memory counts once. Sparse tensors do not count, nor do ``excluded`` ones, which are held in any case.
    """
    excluded_memory = {on_this_rank(t).untyped_storage().data_ptr() for t in excluded if _has_memory(t)}
    sizes: dict[int, int] = {}
    for node in graph.nodes():
        for tensor in map(on_this_rank, _saved_by(node)):
            if _has_memory(tensor) and any([size and size % n == 0 for size in tensor.shape]):
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum([size for start, size in sizes.items() if start not in excluded_memory])


def _has_memory(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or is_functorch_wrapped_tensor(tensor) or tensor._is_zerotensor():
        return False  # zeros of forward-mode derivatives have none
    if type(tensor) is Tensor or type(tensor) is torch.nn.Parameter:
        return True
    try:  # a subclass may hold other tensors in place of its own entries, as quantized weights do
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


def _saved_by(node: Node) -> Iterator[Tensor]:
    """Yields the tensors that a node saves, if it shows them."""
    if isinstance(node, BackwardCFunction):
        yield from (t for t in node.saved_tensors if isinstance(t, Tensor))
        return
    for name in _saved_names(type(node)):
        try:
            saved = getattr(node, name)
        except RuntimeError:  # freed, or changed in place since: the backward itself will raise
            continue
        yield from (t for t in (saved if isinstance(saved, (list, tuple)) else (saved,)) if isinstance(t, Tensor))


@cache
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_saved_"))
