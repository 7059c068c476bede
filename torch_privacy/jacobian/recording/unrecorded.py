# SPDX-License-Identifier: Apache-2.0
"""Rows of parameters that are used where no op was recorded, by the graph's own nodes: one backward for each example.

TorchScript, ``torch.func``, ``vmap``, an ``autograd.Function`` of the user's and the second backward of
``autograd.grad(create_graph=True)`` run without a call that could be recorded, but they leave nodes in the graph. The
gradient that enters a node has a part for each example, as that of a recorded op has. The node's backward, run for one
part after the other and followed from there to the parameters alone, gives the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._vmap_internals import _vmap
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from ...ops import AnyLayout, Op, Use
from ...ops.dense import Rows
from ...ops.fallback import for_each_cotangent, rows_of_each
from .calls import Call, Output
from .graph import leaf_of, leaves_below

Edge = tuple[Node, int]
DATA, WEIGHTS, CONSTANT = "data", "weights", "constant"  # what gradients go to


class UnrecordedUses:
    """Finds where trained parameters enter the graph without a recorded call.

    Args:
        recorded: the nodes of recorded calls.
        leaves: id of a trained parameter -> the parameter.
        is_constant: True for other leaves that hold no data.
    """

    def __init__(self, recorded: Collection[Node], leaves: Mapping[int, Tensor], is_constant: Callable[[Tensor], bool]):
        self._recorded, self._leaves, self._is_constant = recorded, leaves, is_constant
        self._kinds: dict[Node, str] = {}

    def calls(self, starts: Sequence[GradientEdge]) -> list[Call]:
        """Returns a call for every node at which data and parameters meet, or a start that leads to parameters alone.

        Args:
            starts: edges to which gradients are passed: of the losses, and of the data in recorded calls.
        """
        outputs: dict[Node, set[int]] = {}  # those of each node that gradients are passed to
        parents: dict[Node, set[Node]] = {}
        stack: list[Edge] = [(edge.node, edge.output_nr) for edge in starts]
        found = {edge.node for edge in starts if self._kind(edge.node) == WEIGHTS}
        while stack:
            node, number = stack.pop()
            is_new = node not in outputs
            outputs.setdefault(node, set()).add(number)
            if is_new and node not in self._recorded and self._kind(node) == DATA:
                edges = _children(node)
                found |= {node for child, _ in edges if self._kind(child) == WEIGHTS}
                for child, _ in edges:
                    parents.setdefault(child, set()).add(node)
                stack += edges
        passed = _complex(found, parents, outputs)
        above = {parent for node in passed for parent in parents.get(node, ())}
        places = [node for node in outputs if node in found | above and node not in passed]
        return [self._call(node, number, passed) for node in places for number in sorted(outputs[node])]

    def _kind(self, node: Node) -> str:
        """Returns what a node's gradient goes to: data of the batch, trained parameters without data, or neither."""
        stack = [node]
        while stack:
            node = stack[-1]
            if node not in self._kinds:
                leaf = leaf_of(node)
                if node in self._recorded:
                    self._kinds[node] = DATA
                elif leaf is not None:
                    self._kinds[node] = self._kind_of_leaf(leaf)
                else:
                    missing = [child for child, _ in _children(node) if child not in self._kinds]
                    stack += missing
                    if missing:
                        continue
                    kinds = {self._kinds[child] for child, _ in _children(node)}
                    self._kinds[node] = next((kind for kind in (DATA, WEIGHTS) if kind in kinds), CONSTANT)
            stack.pop()
        return self._kinds[node]

    def _kind_of_leaf(self, leaf: Tensor) -> str:
        if id(leaf) in self._leaves:
            return WEIGHTS
        return CONSTANT if self._is_constant(leaf) else DATA

    def _call(self, node: Node, number: int, passed: Collection[Node]) -> Call:
        metadata = _metadata(node, number)
        output = Output(GradientEdge(node, number), torch.Size(metadata.shape), metadata.dtype, None)
        step = _Step(node, number, self._kinds, passed, self._leaves)
        uses = tuple(NodeUse(leaf, step) for leaf in step.leaves)
        return Call(node.name(), output, (), uses, [], size=output.size, needs_graph=True)


@dataclass(frozen=True)
class NodeUse(Use):
    """The use of a parameter by nodes of the graph; their backward gives its rows."""

    step: _Step

    def example_dims(self, b_ndim: int) -> list[int]:
        return list(range(b_ndim))

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        return Rows(self.step.rows(b, layout, self.weight))


class _Step:
    """The backward of a node, or of a few, from one output to the parameters that are used there.

    Args:
        node: where the gradient enters.
        number: of its output.
        kinds: what the gradients of nodes go to.
        passed: further nodes that the gradient passes on the way.
        leaves: id of a trained parameter -> the parameter.
    """

    def __init__(
        self, node: Node, number: int, kinds: Mapping[Node, str], passed: Collection[Node], leaves: Mapping[int, Tensor]
    ):
        self._node, self._number, self._kinds, self._passed = node, number, kinds, passed
        self.leaves = [leaf for leaf in leaves_below(node, self._followed) if id(leaf) in leaves]
        self._of: Tensor | None = None  # the gradient that the present rows belong to
        self._rows: dict[int, Tensor] = {}

    def _followed(self, node: Node) -> list[Node]:
        ends = self._kinds[node] == WEIGHTS
        return [n for n, _ in _children(node) if ends or n in self._passed or self._kinds[n] == WEIGHTS]

    def rows(self, b: Tensor, layout: AnyLayout, leaf: Tensor) -> Tensor:
        """Returns (n, *leaf.shape), given the gradient b in the output; keeps those of the other leaves for later."""
        if self._of is not b:
            found = rows_of_each(self._gradients, self.leaves, b, layout, self._node.name())
            self._of, self._rows = b, dict(zip(map(id, self.leaves), found, strict=True))
        rows = self._rows.pop(id(leaf))
        if not self._rows:
            self._of = None
        return rows

    def _gradients(self, cotangents: Tensor) -> list[Tensor]:
        """Maps cotangents (k, *shape of the output) to gradients (k, *leaf.shape) in all leaves."""
        total = {id(leaf): cotangents.new_zeros(len(cotangents), *leaf.shape, dtype=leaf.dtype) for leaf in self.leaves}
        stack = [((self._node, self._number), cotangents)]
        while stack:
            (node, number), g = stack.pop()
            if self._kinds[node] == WEIGHTS:
                for key, part in self._to_leaves(node, number, g):
                    total[key] = total[key] + part
                continue
            for edge, part in _pass(node, number, g):
                if self._kinds[edge[0]] == WEIGHTS or edge[0] in self._passed:
                    stack.append((edge, part))
        return [total[id(leaf)] for leaf in self.leaves]

    def _to_leaves(self, node: Node, number: int, g: Tensor) -> list[tuple[int, Tensor]]:
        """Returns the gradients in the leaves below a node that leads to parameters alone."""
        leaf = leaf_of(node)
        if leaf is not None:
            return [(id(leaf), g)]

        def backward(one: Tensor, *, batched: bool) -> Sequence[Tensor | None]:
            edge = [GradientEdge(node, number)]
            return torch.autograd.grad(
                edge, self.leaves, [one], retain_graph=True, allow_unused=True, is_grads_batched=batched
            )

        found = for_each_cotangent(backward, g)
        return [(id(leaf), part) for leaf, part in zip(self.leaves, found, strict=True) if part is not None]


def _pass(node: Node, number: int, cotangents: Tensor) -> list[tuple[Edge, Tensor]]:
    """Returns the gradients (k, *shape) that one node passes on, with the edges that they go to."""
    count = len(node._input_metadata)

    def apply(g: Tensor) -> tuple[Tensor | None, ...]:
        if isinstance(node, BackwardCFunction):
            shapes = [_metadata(node, k).shape for k in range(count)]
            found = node.apply(*[g if k == number else g.new_zeros(shape) for k, shape in enumerate(shapes)])
        else:
            found = node(*[g if k == number else None for k in range(count)])  # pyright: ignore[reportCallIssue]
        return found if isinstance(found, tuple) else (found,)

    def backward(g: Tensor, *, batched: bool) -> Sequence[Tensor | None]:
        return _vmap(apply, allow_none_pass_through=True)(g) if batched else apply(g)

    found = for_each_cotangent(backward, cotangents)
    if isinstance(node, BackwardCFunction):  # it also returns a gradient for each argument that needs none
        found = [g for g, needed in zip(found, node.needs_input_grad, strict=False) if needed]
        edges = _children(node)
    else:
        edges = node.next_functions
    pairs = zip(edges, found, strict=True)
    return [((n, k), _fitted(g, n, k)) for (n, k), g in pairs if n is not None and g is not None]


def _fitted(g: Tensor, node: Node, number: int) -> Tensor:
    """Returns gradients (k, *shape) in the shape and type of a node's output, which autograd itself would sum to."""
    leaf = leaf_of(node)
    wanted = _metadata(node, number) if leaf is None else leaf
    if g.shape[1:] != wanted.shape:
        g = torch.stack([one.sum_to_size(wanted.shape) for one in g])
    return g.to(wanted.dtype)


def _complex(found: set[Node], parents: Mapping[Node, set[Node]], outputs: Mapping[Node, set[int]]) -> set[Node]:
    """Returns those of the nodes found, and of the nodes above these, with gradients that are no real numbers."""
    passed: set[Node] = set()
    stack = [*found]
    while stack:
        node = stack.pop()
        if node not in passed and any(_metadata(node, number).dtype.is_complex for number in outputs[node]):
            passed.add(node)
            stack += parents.get(node, ())
    return passed


def _children(node: Node) -> list[Edge]:
    return [(n, k) for n, k in node.next_functions if n is not None]


def _metadata(node: Node, number: int) -> Any:
    """Returns shape and type of a node's output, and so of the gradient that enters it there."""
    return node._input_metadata[number]
