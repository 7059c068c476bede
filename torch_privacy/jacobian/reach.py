# SPDX-License-Identifier: Apache-2.0
"""Finds the recorded calls between losses and parameters, and refuses losses that reach a parameter another way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from ..ops import OPS
from ..support.validate import Refused
from .calls import Call
from .graph import Graph


class CallFinder:
    """Finds the calls that the losses depend on.

    Args:
        calls: all recorded ones, in order.
        unknown: node -> op and parameters' names, of ops without an exact rule.
        leaves: id of a recorded parameter -> its name.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        unknown: Mapping[Node, tuple[str, tuple[str, ...]]],
        leaves: Mapping[int, str],
    ):
        self._calls, self._unknown, self._leaves = calls, unknown, leaves

    def reached(self, graph: Graph) -> list[Call]:
        """Returns the calls between losses and parameters, in order.

        Raises:
            Refused: a path from the losses reaches a parameter without passing a recorded call.
        """
        by_node: dict[Node, list[Call]] = {}
        for call in self._calls:
            by_node.setdefault(call.edge.node, []).append(call)
        reached: list[Call] = []
        stack, above = [graph.root], {graph.root: graph.root}
        while stack:
            node = stack.pop()
            if node in self._unknown or _may_be_refused(type(node)):
                self._check(node, above[node])
            calls = by_node.get(node)
            if calls is None:
                following = graph.following(node)
            else:
                reached += calls
                following = [n for call in calls for n in call.inputs]
            for n in following:
                if n not in above:
                    above[n] = node
                    stack.append(n)
        order = {id(call): i for i, call in enumerate(self._calls)}
        return sorted(reached, key=lambda call: order[id(call)])

    def nodes_before(self, graph: Graph) -> Iterator[Node]:
        """Yields the nodes between the losses and the first recorded call on every path."""
        return graph.before({call.output.edge.node for call in self._calls})

    def _check(self, node: Node, above: Node) -> None:
        if node in self._unknown:
            op, names = self._unknown[node]
            raise Refused(
                f"tape: parameter {', '.join(map(repr, names))} was used by {op!r}, which has no exact rule. "
                f"Allowed: {', '.join(sorted({f.__name__.strip('_') for f in OPS}))}. "
                "Write that step with these, or freeze the parameter."
            )
        leaf = getattr(node, "variable", None) if node.name() == "torch::autograd::AccumulateGrad" else None
        if leaf is not None and id(leaf) in self._leaves:
            raise Refused(
                f"tape: parameter {self._leaves[id(leaf)]!r} reaches the losses by a path that was not recorded "
                f"(through {above.name()}). {_advice(above)}"
            )
        if isinstance(node, BackwardCFunction) and node.name().startswith("CheckpointFunction"):
            raise Refused("tape: reentrant activation checkpointing hides ops. Pass use_reentrant=False to checkpoint.")


@cache
def _may_be_refused(kind: type) -> bool:
    """True for the types of nodes that `CallFinder` looks at: leaves, and custom functions."""
    return kind.__name__ == "AccumulateGrad" or issubclass(kind, BackwardCFunction)


def _advice(node: Node) -> str:
    """Returns what to do about a parameter that is used at a node without a recorded op."""
    if isinstance(node, BackwardCFunction):
        return (
            "A custom autograd.Function does not show how it uses a parameter. Write it with torch's functions (a "
            "straight-through estimator is w + (f(w) - w).detach()), or estimate the norms by "
            "jacobian=tp.Sketched(32), or freeze the parameter."
        )
    return (
        "It was used where nothing is recorded: before the batch was handed out (or before tp.record), in another "
        "thread outside of the model's forward, or inside of torch.func, vmap, TorchScript or autograd.grad, which "
        "hide their ops. Compute what depends on parameters between batch and step, without these, or estimate the "
        "norms by jacobian=tp.Sketched(32), or freeze the parameter. For a penalty on the weights, such as their "
        "squared norm, use the optimizer's weight_decay."
    )


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
