# SPDX-License-Identifier: Apache-2.0
"""Compiles norms and clipped sums of the rows of a plan, into one graph before the factors and one after them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ...ops import AnyLayout
from ...ops.gram import doubts_noted
from ..blocks import Block
from ..calls import Call, Output
from ..clipped_sum import Collector, layouts_by
from ..layout import Merging
from ..operator import Jacobian
from ..plan import Budget
from ..recorder import Recorder
from ..torch_functions import EXPANSIONS, tensors_among
from .actions import DERIVE, REARRANGED, Unfit
from .light import Action, Program, Ref

Compile = Callable[[fx.GraphModule, Sequence[Tensor]], Callable]  # compiles a graph for inputs of these sizes


@dataclass(frozen=True)
class RowsOf:
    """The rows of one batch of fixed size, as functions of tensors alone.

    Args:
        program: the actions of the forward.
        layouts: of the calls' outputs, in order.
        groups: label -> names of parameters.
        merging: examples whose mean is one row.
        count: number of rows.
        dtype: of the losses.
        budget: decides what is kept between norms and sums.
    """

    program: Program
    layouts: Sequence[AnyLayout]
    groups: Mapping[str, Sequence[str]]
    merging: Merging | None
    count: int
    dtype: torch.dtype
    budget: Budget

    def norms_and_sums(
        self,
        parameters: Mapping[str, Tensor],
        trained: frozenset[str],
        tensors: Sequence[Tensor],
        bs: Sequence[Tensor],
        factors: Sequence[Tensor],
    ) -> tuple[Tensor, list[Tensor], list[dict[str, Tensor]]]:
        """Returns whether norms may be inaccurate, and for each group the norms and the sums.

        Norms are squared, (rows,); sums are by name, weighted with the factors (rows,).
        """
        leaves = {name: p.detach().requires_grad_(name in trained) for name, p in parameters.items()}
        own = {name: leaves[name] for name in trained}
        with torch.no_grad(), doubts_noted() as doubts:
            blocks = self._blocks(leaves, own, tensors, bs)
            whole = Jacobian(self.count, self.dtype, own, blocks)
            parts = [whole.restricted(names) for names in self.groups.values()]
            norms = [part.squared_norms() for part in parts]
            sums = [part.weighted_sum(c) for part, c in zip(parts, factors, strict=True)]
            doubt = torch.stack(doubts).any() if doubts else norms[0].new_zeros((), dtype=torch.bool)
            return doubt, norms, sums

    def _blocks(
        self,
        leaves: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        tensors: Sequence[Tensor],
        bs: Sequence[Tensor],
    ) -> list[Block]:
        recorder, derived, calls = Recorder(own), [], []

        def value(ref: Any) -> Any:
            if isinstance(ref, Ref):
                known: Any = {"parameter": leaves, "derived": derived, "tensor": tensors}[ref.kind]
                return known[ref.key]
            return type(ref)(map(value, ref)) if type(ref) in (tuple, list) else ref

        for action in self.program.actions:
            args, kwargs = value(action.args), {key: value(ref) for key, ref in action.kwargs.items()}
            weights = [t for t in tensors_among((*args, *kwargs.values())) if recorder._source(t) is not None]
            if action.kind == DERIVE:
                derived += _derived(recorder, action, args, kwargs, weights)
            else:
                calls.append(_call(recorder, action, bs[len(calls)], args, kwargs, weights))
        collector = Collector(
            calls, layouts_by(self.layouts, self.merging), recorder._sources, self.budget, _NothingDropped()
        )
        for number, b in enumerate(bs):
            collector.take(number, b, b)
        return collector.blocks


def _derived(recorder: Recorder, action: Action, args: tuple, kwargs: dict, weights: list[Tensor]) -> list[Tensor]:
    with torch.enable_grad():
        results = tensors_among((action.func(*args, **kwargs),))
    for result in results:
        # The tape knows whether entries are only moved; to find out again may take looking at the data.
        recorder._add_derived(action.func if action.func in EXPANSIONS else torch.add, args, weights, result)
        source = recorder._source(result)
        if source is not None and not source.direct:
            source.rearranged = action.name == REARRANGED
    return results


def _call(recorder: Recorder, action: Action, b: Tensor, args: tuple, kwargs: dict, weights: list[Tensor]) -> Call:
    uses = recorder._uses(action.func, b, args, kwargs, [w for w in weights if w.requires_grad])
    if uses is None:
        raise Unfit(f"the rule of {action.func.__name__!r} does not find all parameters again")
    uses = tuple(map(recorder._before_expansion, uses)) if recorder._expanded else uses
    edge: Any = None  # there is no graph
    return Call(action.func.__name__, Output(edge, b.shape, b.dtype, None), (), uses, [])


class _NothingDropped:
    """Stands for the second backward, which compiled graphs have not."""

    def expect(self, name: str) -> None:
        raise Unfit("a second backward is needed within memory_budget")

    def __call__(self, c: Tensor, name: str) -> Tensor:
        raise AssertionError("nothing was dropped")


class CompiledRows:
    """Norms and sums of the rows as two graphs: what both need is computed once and kept in between.

    Args:
        rows: what they compute.
        parameters: the trained ones by name.
        others: other parameters that the calls use, by name.
        tensors, bs: of one batch; later ones have the same shapes.
        compile: compiles a graph.
    """

    def __init__(
        self,
        rows: RowsOf,
        parameters: Mapping[str, Tensor],
        others: Mapping[str, Tensor],
        tensors: Sequence[Tensor],
        bs: Sequence[Tensor],
        compile: Compile,
    ):
        self._names, self._others = [*parameters], [p.detach() for p in others.values()]
        names, trained = [*parameters, *others], frozenset(parameters)
        self._sum_names: list[str] = []
        count, num_tensors = len(names), len(tensors)

        def function(*flat: Tensor) -> tuple[Tensor, ...]:
            named = dict(zip(names, flat[:count], strict=True))
            rest = flat[count:]
            split = num_tensors + len(bs)
            doubt, norms, sums = rows.norms_and_sums(
                named, trained, rest[:num_tensors], rest[num_tensors:split], rest[split:]
            )
            self._sum_names = [name for of_group in sums for name in of_group]
            return doubt, *norms, *(total for of_group in sums for total in of_group.values())

        dtypes = (rows.dtype, *(p.dtype for p in parameters.values()))
        self._factor_dtype = reduce(torch.promote_types, dtypes, torch.float32)  # graphs take no other type
        factors = [bs[0].new_ones(rows.count, dtype=self._factor_dtype) for _ in rows.groups]
        flat = [*(p.detach() for p in parameters.values()), *self._others, *tensors, *bs, *factors]
        try:
            graph = make_fx(function, tracing_mode="real")(*flat)
            _check_constants(graph)
            graph = make_fx(torch.func.functionalize(graph, remove="mutations"))(*flat)
        except RuntimeError as error:
            raise Unfit(f"its rows depend on the data in a way that no graph can have ({error!s:.100})") from None
        _check_shapes(graph)
        num_inputs = len(flat) - len(factors)
        before, after = _split(graph, num_inputs, 1 + len(rows.groups))
        self.wanted = tuple([_is_used(node) for node in _placeholders(graph)][count : count + num_tensors])
        self._places = [k for k, is_wanted in enumerate(self.wanted) if is_wanted]
        self._first, self._num_tensors = count, num_tensors
        self._num_norms = len(rows.groups)
        self._taken_before, self._taken_after = before.meta["taken"], after.meta["taken"]
        with torch.no_grad():
            first = [flat[k] for k in self._taken_before]
            middle = before(*first)[1 + self._num_norms :]
            self._before = compile(before, first)
            self._after = compile(after, [*(flat[k] for k in self._taken_after), *middle])

    @torch.no_grad()
    def norms(self, parameters: Mapping[str, Tensor], kept: Sequence[Tensor], bs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the squared norms (rows,) of every group, from the wanted tensors; keeps what the sums need.

        Raises:
            Unfit: some norm is inaccurate and has to be computed from the row, as the tape does.
        """
        tensors: list[Any] = [None] * self._num_tensors
        for place, tensor in zip(self._places, kept, strict=True):
            tensors[place] = tensor
        inputs = [*(parameters[name].detach() for name in self._names), *self._others, *tensors, *bs]
        results = self._before(*[inputs[k] for k in self._taken_before])
        doubt, *norms = results[: 1 + self._num_norms]
        if doubt:
            raise Unfit("the norm of a row has to be computed from the row itself", by_data=True)
        self._inputs, self._middle = inputs, results[1 + self._num_norms :]
        return norms

    @torch.no_grad()
    def sums(self, factors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns the sums of all groups by name, weighted with the factors (rows,) of each group."""
        inputs, middle = self._inputs, self._middle
        self._inputs, self._middle = [], ()
        everything = [*inputs, *(c.to(self._factor_dtype) for c in factors)]
        totals = self._after(*[everything[k] for k in self._taken_after], *middle)
        return dict(zip(self._sum_names, totals, strict=True))


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _is_used(node: fx.Node) -> bool:
    return bool(node.users)


def _check_constants(graph: fx.GraphModule) -> None:
    """Refuses a graph into which a tensor of the batch was frozen, other than numbers written in the code."""
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            users = {str(user.target) for user in node.users}
            if not users <= {"aten.lift_fresh_copy.default", "aten.lift_fresh.default"}:
                raise Unfit("the rows depend on a tensor that would be frozen into the graph")


def _check_shapes(graph: fx.GraphModule) -> None:
    """Refuses a graph in which the data determine shapes, which would be frozen to those of one batch."""
    for node in graph.graph.nodes:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
            by_mask = [value.meta["tensor_meta"].dtype is torch.bool for value in node.all_input_nodes[1:]]
            if "index" not in str(node.target) or any(by_mask):
                raise Unfit(f"the data determine shapes in the computation of its rows, by {node.target}")


def _split(graph: fx.GraphModule, num_inputs: int, num_norms: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Splits a graph into the part that the factors do not enter, and the part that they do.

    The first returns the norms and what the second needs of it. Each has the numbers of its inputs in ``meta``.
    """
    nodes, inputs = [*graph.graph.nodes], _placeholders(graph)
    results = [*nodes[-1].args[0]]
    later = set(inputs[num_inputs:])
    for node in nodes[:-1]:
        if not later.isdisjoint(node.all_input_nodes):
            later.add(node)
    norms, sums = results[:num_norms], results[num_norms:]
    if not later.isdisjoint(norms):
        raise Unfit("the norms depend on the factors")
    of_sums = _needed(sums)
    early = {node for node in of_sums - later if node.op != "placeholder"}
    kept = [node for node in nodes if node in early and (node in sums or not later.isdisjoint(node.users))]
    first = {node for node in _needed([*norms, *kept]) if node.op != "placeholder"}
    before = _part(graph, nodes, inputs[:num_inputs], [], first, [*norms, *kept])
    after = _part(graph, nodes, inputs, kept, (of_sums & later) - set(inputs), sums)
    return before, after


def _needed(results: Sequence[fx.Node]) -> set[fx.Node]:
    """Returns the nodes that results depend on, and the results themselves."""
    found, stack = set(), [*results]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _part(
    graph: fx.GraphModule,
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    kept: Sequence[fx.Node],
    body: set[fx.Node],
    results: Sequence[fx.Node],
) -> fx.GraphModule:
    """Returns the part of a graph with these nodes, which takes the inputs that it uses and the values kept."""
    used = {node for inner in body for node in inner.all_input_nodes} | {*results}
    part, copies = fx.Graph(), {}
    taken = [number for number, node in enumerate(inputs) if node in used]
    for node in [*(inputs[number] for number in taken), *kept]:
        copies[node] = part.placeholder(node.name)
    for node in nodes:
        if node in body:
            copies[node] = part.node_copy(node, lambda known: copies[known])
    part.output(tuple(copies[node] for node in results))
    module = fx.GraphModule(graph, part)
    module.meta["taken"] = taken
    return module
