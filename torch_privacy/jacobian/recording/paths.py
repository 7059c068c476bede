# SPDX-License-Identifier: Apache-2.0
"""Finds the calls between losses and parameters, recorded or not, and checks losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from ...support.validate import Refused
from .calls import Call, edge_of
from .graph import Graph
from .unrecorded import UnrecordedUses


class CallFinder:
    """Finds the calls that the losses depend on.

    Args:
        calls: all recorded ones, in order.
        leaves: id of a recorded parameter -> the parameter.
        is_constant: True for other leaves of the graph that hold no data.
    """

    def __init__(self, calls: Sequence[Call], leaves: Mapping[int, Tensor], is_constant: Callable[[Tensor], bool]):
        self._calls, self._leaves, self._is_constant = calls, leaves, is_constant

    def reached(self, graph: Graph, losses: Tensor) -> tuple[list[Call], list[Call]]:
        """Returns the recorded calls between losses and parameters, in order, and calls for what was not recorded."""
        by_node: dict[Node, list[Call]] = {}
        for call in self._calls:
            by_node.setdefault(call.edge.node, []).append(call)
        reached: list[Call] = []
        stack, seen, complete = [graph.root], {graph.root}, True
        while stack:
            node = stack.pop()
            if _may_end(type(node)):
                complete = self._is_end(node) and complete
            calls = by_node.get(node)
            if calls is None:
                following = graph.following(node)
            else:
                reached += calls
                following = [edge.node for call in calls for edge in call.inputs]
            for n in following:
                if n not in seen:
                    seen.add(n)
                    stack.append(n)
        order = {id(call): i for i, call in enumerate(self._calls)}
        reached.sort(key=lambda call: order[id(call)])
        if complete:
            return reached, []
        starts = [edge_of(losses), *(edge for call in reached for edge in call.inputs)]
        return reached, UnrecordedUses(by_node, self._leaves, self._is_constant).calls(starts)

    def nodes_before(self, graph: Graph) -> Iterator[Node]:
        """Yields the nodes between the losses and the first recorded call on every path."""
        return graph.before({call.output.edge.node for call in self._calls})

    def _is_end(self, node: Node) -> bool:
        """True unless the node is a recorded parameter, which is then reached other than by a recorded call."""
        if isinstance(node, BackwardCFunction) and node.name().startswith("CheckpointFunction"):
            raise Refused("tape: reentrant activation checkpointing hides ops. Pass use_reentrant=False to checkpoint.")
        return id(getattr(node, "variable", None)) not in self._leaves


@cache
def _may_end(kind: type) -> bool:
    """True for the types of nodes that `CallFinder` looks at: leaves, and custom functions."""
    return kind.__name__ == "AccumulateGrad" or issubclass(kind, BackwardCFunction)


def check_losses(losses: Tensor) -> None:
    """Raises ``Refused`` unless there is one loss per example, with a gradient."""
    if not isinstance(losses, Tensor) or losses.ndim != 1:
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        if isinstance(losses, Tensor) and losses.ndim == 2 and losses.shape[0] == losses.shape[1] > 1:
            raise Refused(
                f"losses of shape {shape} given: must be (n,), one loss per example. A broadcast of (n, 1) against "
                "(n,) makes (n, n), which combines every example with every other. Give outputs and targets one "
                "shape, e.g. outputs.squeeze(1) or targets.view_as(outputs)."
            )
        if isinstance(losses, Tensor) and losses.ndim == 2 and losses.shape[1] == 1:
            raise Refused(
                f"losses of shape {shape} given: must be (n,), one loss per example. Pass losses.squeeze(1); plain "
                "squeeze() would also drop an n of 1. If the loss function has targets, give outputs and targets one "
                "shape before it, e.g. outputs.squeeze(1)."
            )
        a_model_of_transformers = (
            " The .loss of a transformers model is a mean over the batch: take "
            "torch_privacy.huggingface.per_example_loss(model, batch) instead of model(**batch).loss."
        )
        raise Refused(
            f"losses of shape {shape} given: must be (n,), one loss per example. Pass reduction='none' to the loss "
            f"function.{a_model_of_transformers if shape == () or not isinstance(losses, Tensor) else ''} "
            "If an example has several positions, sum their losses and divide by the example's own count: "
            "(losses * mask).sum(1) / mask.sum(1)."
        )
    if not losses.is_floating_point() or losses.grad_fn is None:
        raise Refused(
            f"losses of dtype {losses.dtype} with requires_grad={losses.requires_grad} given: must be floating-point "
            "and computed from the model with gradients enabled (not under torch.no_grad())."
        )


def check_unchanged(call: Call) -> None:
    """Raises ``Refused`` if an input of the call was changed in place."""
    if any(tensor._version != version for tensor, version in call.versions):
        raise Refused(
            f"tape: an input of {call.op!r} was changed in place after its use, so its Jacobian is lost. "
            "Write the later step out of place."
        )
