# SPDX-License-Identifier: Apache-2.0
"""The tape: notes where ops meet parameters, and the per-example gradients that follow from them.

After the forward, ``jacobian`` walks the autograd graph from the losses: every path to a trainable parameter must lead
through a noted use, or the call is refused with the names of parameter and op. One backward, to the outputs only, then
gives every use its b, the gradient in its output y.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from ._autocast import without_autocast
from ._calls import Call, Reached
from ._check import Refused
from ._collect import Clip, Collector, Observe, RowsAsTheyCome, make_op
from ._functions import without_numbers
from ._graph import Graph, saved_bytes
from ._layout import Footprint, Layouts, Measurement, Merging
from ._model import check_not_compiled
from ._notes import Notes
from ._plan import Budget, distinct_bytes, least_bytes
from ._verify import Checks
from .jacobian import Jacobian
from .ops import OPS, AnyLayout

if TYPE_CHECKING:
    from ._estimates import Estimates

# Peak memory allowed by default, in units of what non-private training needs.
MEMORY_BUDGET = 1.2

# Bytes of gradients that are measured at once, at least: a portion takes several backwards.
PORTION = 2**20


class Tape(Notes):
    """Per-example gradients from what was noted while it was active; ``record`` makes one of a model.

    Args:
        parameters: name -> tensor, leaves of the autograd graph.
        constants: other tensors that hold no data of the batch (buffers, frozen parameters).
        layouts: what earlier batches taught about where the examples sit.
        num_examples: size of the batch, where it is known beforehand: tells what may hold a part for each example.
        estimates: take the place of exact norms in the clipped sum.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        constants: Iterable[Tensor] = (),
        layouts: Layouts | None = None,
        num_examples: int | None = None,
        estimates: Estimates | None = None,
    ):
        self.layouts = layouts if layouts is not None else Layouts()
        super().__init__(parameters, constants, num_examples, self.layouts.filled)
        self._estimates = estimates
        self.reached: set[str] = set()  # names of the parameters that the losses were found to depend on
        self.measured = False  # whether layouts had to be measured, by backwards of their own
        self._leaves = {id(p): name for name, p in self.parameters.items() if p.requires_grad}

    def jacobian(
        self, losses: Tensor, *, retain_graph: bool = False, may_miss: Iterable[str] = (), verify: bool = False
    ) -> Jacobian:
        """The Jacobian of the per-example losses in the recorded parameters.

        Args:
            losses: (n,) one loss per example, computed under this tape; the graph is used up unless retained.
            retain_graph: keep the graph for further backwards.
            may_miss: names of parameters that the losses need not reach; their rows are then zero.
            verify: compare with native backwards whenever layouts had to be measured, as on the first batches.

        Returns:
            A ``Jacobian`` with n rows, detached from the graph.

        Raises:
            Refused: losses of another shape; a parameter that is reached past the known ops, or never; an output in
                which examples cannot be told apart; an input changed in place since it was used; disagreement with
                a native backward.
        """
        reached = self._reach(losses, may_miss)
        calls, n = reached.calls, len(losses)
        with without_autocast(losses.device.type):
            if not n:
                return Jacobian(0, losses.dtype, self.parameters, [])
            layouts, measured = self._layouts_of(reached)
            verify = verify and measured and not self.layouts.verified(calls, n)
            bs = _gradients(losses, reached.edges, torch.ones_like(losses), retain_graph=retain_graph or verify)
            collector = Collector(calls, layouts, self._sources)
            with torch.no_grad():
                for number, g in enumerate(bs):
                    collector.take(number, g, losses)
            jacobian = Jacobian(n, losses.dtype, self.parameters, collector.blocks)
            if verify:
                checks = Checks(losses, self.parameters, reached.precision())
                checks.look(jacobian)
                checks.conclude()
                self.layouts.note_verified(calls, n)
        return jacobian

    def clipped_sum(
        self,
        losses: Tensor,
        groups: Mapping[str, Sequence[str]],
        clip: Clip | None,
        *,
        merging: Merging | None = None,
        may_miss: Iterable[str] = (),
        memory_budget: float = MEMORY_BUDGET,
        observe: Observe | None = None,
    ) -> dict[str, Tensor]:
        """Σᵢ cᵢ row_i with factors group by group, by one backward in which no more is kept than the budget allows.

        Args:
            losses: as of ``jacobian``; the graph is used up.
            groups: label -> names of parameters; a partition of the recorded ones.
            clip: (Jacobian restricted to a group, the group's label) -> the group's clipped sum by name; called as
                soon as the group's last b is there. None sums nothing: the rows are observed alone.
            merging: examples whose mean is to be one row.
            may_miss: as of ``jacobian``.
            memory_budget: peak memory allowed: up to 100 in units of what non-private training needs, else in bytes.
            observe: is shown the rows of every group before they are summed.

        Returns:
            The clipped sum by name, which on the first batches is verified. Under a budget below what must be held,
            the graph stays instead, and a second backward with the factors as cotangent gives the sum.
        """
        reached = self._reach(losses, may_miss)
        calls, n = reached.calls, len(losses)
        with without_autocast(losses.device.type):
            if not n:
                empty = Jacobian(0, losses.dtype, self.parameters, [])
                sums = [clip(empty.restricted(names), label) for label, names in groups.items() if clip is not None]
                return {name: total for part in sums for name, total in part.items()}
            layouts, measured = self._layouts_of(reached)
            self.measured, checks = measured, None
            if measured and not self.layouts.verified(calls, n):
                checks = Checks(losses, self.parameters, reached.precision(), merging)
            rows = RowsAsTheyCome(reached, layouts, self._sources, self.parameters, merging, self._estimates)
            total = rows.clipped_sum(groups, clip, lambda: self._budget(reached, memory_budget), checks, observe)
            if checks is not None:
                self.layouts.note_verified(calls, n)
        return total

    def _budget(self, reached: Reached, limit: float) -> Budget:
        known = self.layouts.footprint(reached.path, len(reached.losses)) or Footprint(self._activations(reached), 0)
        parameters = sum([p.numel() * p.itemsize for p in self.parameters.values()])
        on_the_way = sum([call.size for call in reached.calls])
        return Budget(limit, known.activations, known.least, on_the_way, parameters)

    def _activations(self, reached: Reached) -> int:
        """Bytes that autograd keeps for the backward."""
        if self._saved_elsewhere:  # by checkpointing or offloading, which give it back but once
            return distinct_bytes([t for call in reached.calls for use in call.uses for t in use.saved()])
        lasting = [*self.parameters.values(), *(tensor for tensor, _ in self._constants.values())]
        return saved_bytes(reached.graph, len(reached.losses), lasting)

    def _reach(self, losses: Tensor, may_miss: Iterable[str]) -> Reached:
        """The calls between losses and parameters."""
        check_losses(losses)
        graph = Graph(losses)
        calls = self._reached_calls(graph)
        self._check_all_reached(calls, set(may_miss))
        for call in calls:
            _check_versions(call)
        return Reached(losses, graph, calls, self._path(graph, calls, len(losses)))

    def _layouts_of(self, reached: Reached) -> tuple[list[AnyLayout], bool]:
        """Where the examples sit in the calls' outputs, and whether this batch had to tell. The graph stays."""
        losses, calls, n = reached.losses, reached.calls, len(reached.losses)
        known = None if self._reorders and n > 1 else self.layouts.recall(reached.path, calls, n)
        edges = reached.edges

        def gradients(c: Tensor, some: Sequence[int]) -> list[Tensor | None]:
            return _gradients(losses, [edges[k] for k in some], c, retain_graph=True)

        measurement = Measurement(calls, self._names_of, gradients, losses, reached.dtypes)
        if known is not None:
            due = self.layouts.spot_check_is_due()
            if not due or measurement.agrees_in_part(known, self._portions(reached)):
                return known, False
        activations, least = self._activations(reached), 0.0

        def look(number: int, b: Tensor, layout: AnyLayout) -> None:
            nonlocal least
            with torch.no_grad():
                for use in calls[number].uses:
                    least += least_bytes(make_op(use, b, layout, self._names_of(use.weight)))

        layouts = self.layouts.measure(reached.path, measurement, self._portions(reached), look)
        self.layouts.learn(reached.path, measurement)
        self.layouts.note_footprint(reached.path, n, Footprint(activations, least))
        return layouts, True

    def _portions(self, reached: Reached) -> list[list[int]]:
        """The calls by number, so many at a time that their gradients take little memory."""
        sizes = [call.output.size for call in reached.calls]
        most, portions, size = max(PORTION, self._activations(reached) / 8), [], float("inf")
        for number, own in enumerate(sizes):
            if size + own > most:
                portions.append([])
                size = 0
            portions[-1].append(number)
            size += own
        return portions

    def _path(self, graph: Graph, calls: Sequence[Call], n: int) -> int:
        """Number of what was computed: functions with their whole-number arguments, the graph of the losses, the calls.

        Another path, as by a branch in the model's or the loss's code, or with other parameters that are trained, may
        have other layouts or mix examples; so it must be measured anew.
        """
        numbers: list[int] = []
        functions = [(func, without_numbers(values, numbers)) for func, values in self._program]
        met = [(call.op, *(self._names_of(use.weight) for use in call.uses)) for call in calls]
        names = [node.name() for node in self.nodes_before_calls(graph)]
        self.code.note(names)
        program = hash((*functions, *names, *met))
        return self.layouts.path(program, n, tuple(numbers))

    def nodes_before_calls(self, graph: Graph) -> Iterator[Node]:
        """The nodes between the losses and the first noted calls on every path."""
        return graph.before({call.output.edge.node for call in self._calls})

    def _reached_calls(self, graph: Graph) -> list[Call]:
        """The calls between losses and parameters, in the order they were made; refuses any path around them."""
        by_node: dict[Node, list[Call]] = {}
        for call in self._calls:
            by_node.setdefault(call.edge.node, []).append(call)
        reached: list[Call] = []
        stack, above = [graph.root], {graph.root: graph.root}
        while stack:
            node = stack.pop()
            self._check_known(node, above[node])
            if node in by_node:
                reached += by_node[node]
                following = [n for call in by_node[node] for n in call.inputs]
            else:
                following = graph.following(node)
            for n in following:
                if n not in above:
                    above[n] = node
                    stack.append(n)
        order = {id(call): i for i, call in enumerate(self._calls)}
        return sorted(reached, key=lambda call: order[id(call)])

    def _check_known(self, node: Node, above: Node) -> None:
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
                f"tape: parameter {self._leaves[id(leaf)]!r} reaches the losses by a path that no recorded op explains,"
                f" at {above.name()}. {_advice(above)}"
            )
        if isinstance(node, BackwardCFunction) and node.name().startswith("CheckpointFunction"):
            raise Refused("tape: reentrant activation checkpointing hides ops. Pass use_reentrant=False to checkpoint.")

    def _check_all_reached(self, calls: list[Call], may_miss: set[str]) -> None:
        reached = {name for call in calls for use in call.uses for name in self._names_of(use.weight)}
        self.reached = reached
        missing = [name for name in self.parameters if name not in reached | may_miss]
        if missing:
            raise Refused(
                f"tape: the losses never reach parameter {', '.join(map(repr, missing))}. Use it, freeze it with "
                "requires_grad_(False), or leave it out of the optimizer."
            )


class record(Tape):
    """Notes every use of the model's trainable parameters inside the ``with`` block.

    Args:
        model: any module; its parameters with ``requires_grad`` are recorded.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 1)
        >>> with record(model) as tape:
        ...     losses = model(torch.ones(2, 3)).flatten()
        >>> tape.jacobian(losses).squared_norms()
        tensor([4., 4.])
    """

    def __init__(self, model: nn.Module):
        check_not_compiled(model)
        named = dict(model.named_parameters())
        trainable = {name: p for name, p in named.items() if p.requires_grad}
        frozen = [p for p in named.values() if not p.requires_grad]
        super().__init__(trainable, constants=(*frozen, *model.buffers()))


def _advice(node: Node) -> str:
    """What to do where a parameter hangs at a node that no op was noted for."""
    if isinstance(node, BackwardCFunction):
        return (
            "How a custom autograd.Function uses a parameter cannot be seen. Write it with torch's functions (a "
            "straight-through estimator is w + (f(w) - w).detach()), or estimate the norms by "
            "jacobian=tp.Sketched(32), or freeze the parameter."
        )
    return (
        "Call the model as model(x) and use its parameters nowhere else (or put all of it under tp.record / "
        "training.record()). torch.func, vmap, autograd.grad inside of the forward and TorchScript hide what they do: "
        "do without them, or estimate the norms by jacobian=tp.Sketched(32), or freeze the parameter."
    )


def check_losses(losses: Tensor) -> None:
    if not isinstance(losses, Tensor) or losses.ndim != 1:
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        if isinstance(losses, Tensor) and losses.ndim == 2 and losses.shape[0] == losses.shape[1] > 1:
            raise Refused(
                f"losses of shape {shape} given: must be (n,), one loss per example. A broadcast of (n, 1) against "
                "(n,) makes (n, n), in which every example meets every other. Give outputs and targets one shape, e.g. "
                "outputs.squeeze(1) or targets.view_as(outputs)."
            )
        raise Refused(
            f"losses of shape {shape} given: must be (n,), one loss per example. Pass reduction='none' to the loss "
            "function. Where an example has several positions, sum their losses over the example's own count: "
            "(losses * mask).sum(1) / mask.sum(1)."
        )
    if not losses.is_floating_point() or losses.grad_fn is None:
        raise Refused(
            f"losses of dtype {losses.dtype} with requires_grad={losses.requires_grad} given: must be floating-point "
            "and computed from the model with gradients enabled (not under torch.no_grad())."
        )


def _check_versions(call: Call) -> None:
    if any(tensor._version != version for tensor, version in call.versions):
        raise Refused(
            f"tape: an input of {call.op!r} was changed in place after its use, so its Jacobian is lost. "
            "Write the later step out of place."
        )


def _gradients(losses: Tensor, inputs: Sequence[Any], cotangent: Tensor, *, retain_graph: bool) -> list[Tensor | None]:
    """Gradients of ``cotangent · losses`` in the inputs (tensors or edges), by one backward that goes no further."""
    if not inputs:
        return []
    return list(torch.autograd.grad(losses, inputs, cotangent, retain_graph=retain_graph, allow_unused=True))
