# SPDX-License-Identifier: Apache-2.0
"""The tape: it lets every op run untouched and notes where one meets a parameter. Nothing in the model is changed.

A use is (op, parameter, input x, gradient edge of the output y). After the forward, ``jacobian`` walks the autograd
graph from the losses: every path to a trainable parameter must lead through a noted use, or the call is refused with
the names of parameter and op. One backward, to the outputs only, then gives every use its b.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ._calls import SCAN, Call, Output, Reached
from ._check import Refused
from ._collect import Clip, Collector, RowsAsTheyCome, make_op
from ._functions import (
    EXPANSIONS,
    LIKE,
    SET_REQUIRES_GRAD,
    changes_in_place,
    looks_up_examples,
    makes_constant,
    makes_new,
    may_reorder,
    numbers_in,
    opened,
    picks_one,
    rearranges,
    tensors_in,
    without_numbers,
)
from ._graph import Graph, saved_bytes, saves_elsewhere
from ._layout import Footprint, Layouts, Measurement, Merging, Verdicts
from ._model import check_not_compiled
from ._plan import Budget, distinct_bytes, least_bytes
from ._shadow import Shadows
from ._verify import Checks
from .jacobian import Jacobian
from .ops import COMPOSED, OPS, AnyLayout, Use
from .ops._base import is_half
from .ops.einsum import ContractionUse
from .ops.elementwise import OVERWRITING, EntrywiseUse
from .ops.fallback import compared, replay, uses_of

if TYPE_CHECKING:
    from ._estimates import Estimates

# Peak memory allowed by default, in units of what non-private training needs.
MEMORY_BUDGET = 1.2

# Bytes of gradients that are measured at once, at least: a portion takes several backwards.
PORTION = 2**20


@dataclass
class Source:
    """A parameter (``direct``) or a tensor computed from parameters and constants alone.

    It is what it says only while its version is the one noted: an in-place change may mix data in.
    """

    tensor: Tensor
    version: int
    names: tuple[str, ...]  # the parameters behind it
    direct: bool
    rearranged: bool  # the entries of one parameter, only moved about
    half: bool  # it or a parameter behind it is in half precision


class Tape(TorchFunctionMode):
    """Notes every meeting of an op with one of ``parameters`` while it is active; made by ``record``.

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
        super().__init__()
        self._num_examples, self._estimates = num_examples, estimates
        self.parameters = dict(parameters)
        self.layouts = layouts if layouts is not None else Layouts()
        # Tensors are known by identity; holding them keeps the identities from being given away again.
        self._sources = {
            id(p): Source(p, p._version, (name,), direct=True, rearranged=True, half=is_half(p))
            for name, p in self.parameters.items()
        }
        self._expanded: dict[int, Tensor] = {}  # a source's id -> what the chain of ``expand`` that made it began with
        self._leaves = {id(p): name for name, p in self.parameters.items() if p.requires_grad}
        self._constants = {id(t): (t, t._version) for t in constants}
        self._inputs: list[Tensor] = []
        self._probed: set[Node] = set()  # where the graph reaches the probed inputs
        self._shadows = Shadows(num_examples)
        self._saved_elsewhere = False  # autograd's tensors are not kept by its nodes
        self._reorders = False  # the data of the batch may have decided where its examples lie
        self._program: list[tuple[Callable, tuple]] = []
        self._calls: list[Call] = []
        self._unknown: dict[Node, tuple[str, tuple[str, ...]]] = {}

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        if func == SET_REQUIRES_GRAD and args[0].requires_grad:
            return None  # as wav2vec2 asks of its input, which has a gradient here already
        values = (*args, *kwargs.values()) if kwargs else args
        kwargs = kwargs or {}
        tensors, met, data = self._sorted(values)
        if func in LIKE:
            data = [t for t in data if t is args[0]]
        if met and data and picks_one(func, args, self._source):
            data = []
        self._program.append((func, numbers_in(values)))
        behind = self._shadows.behind(func, args, kwargs, data) if data else None
        if met and (data or looks_up_examples(func, args)):
            out = self._meet(func, args, kwargs, data, met)
            if behind and isinstance(out, Tensor) and out.grad_fn is not None:
                output = _output(out)
                self._shadows.expect(output.edge, output.shape, behind)
            return out
        if data:
            self._reorders = self._reorders or may_reorder(func, args)
            out = func(*args, **kwargs)
            if behind:
                self._shadows.note(args[0] if changes_in_place(func) else out, behind)
            return out
        out = func(*args, **kwargs)
        if tensors or makes_constant(func, out, self._num_examples):
            result = args[0] if changes_in_place(func) else out
            if not makes_new(func, result, args, self._num_examples):
                for tensor in tensors_in((result,)):
                    self._add_derived(func, args, met, tensor)
        return out

    def _sorted(self, values: Iterable[Any]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The tensors among arguments: all, those that are sources, and those that hold data of the batch."""
        tensors, met, data = tensors_in(values), [], []
        sources, constants = self._sources, self._constants
        for t in tensors:
            key = id(t)
            if key in sources and sources[key].version == t._version:
                met.append(t)
            elif key not in constants or not self._is_constant(t):
                data.append(t)
        return tensors, met, data

    def probe(self, arguments: Any) -> Any:
        """The model's arguments, their floating-point tensors replaced by equal ones whose gradient is measured.

        An input in which examples cannot be told apart gives away a coupling that no parameter sees, such as batch
        normalization in front of the first layer. Any other tensor is followed by its shadow. The model sees inputs
        that require a gradient: what torch does not do with these, such as ``x.numpy()``, takes ``x.detach()`` first.
        """

        def replaced(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.requires_grad or not value.ndim:
                return value
            copy = value
            if value.is_floating_point():
                leaf = value.detach().requires_grad_()
                self._inputs.append(leaf)
                copy = leaf.clone()  # not the leaf itself, which could not be changed in place
                self._probed.add(_edge(copy).node)
            self._shadows.begin(copy)
            return copy

        return tree_map(replaced, arguments)

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
        with _without_autocast(losses.device.type):
            if not n:
                return Jacobian(0, losses.dtype, self.parameters, [])
            layouts, measured = self._layouts_of(reached, strict=False)
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
        clip: Clip,
        *,
        merging: Merging | None = None,
        may_miss: Iterable[str] = (),
        memory_budget: float = MEMORY_BUDGET,
        graph: Graph | None = None,
    ) -> dict[str, Tensor]:
        """Σᵢ cᵢ row_i with factors group by group, by one backward in which no more is kept than the budget allows.

        Args:
            losses: as of ``jacobian``; the graph is used up.
            groups: label -> names of parameters; a partition of the recorded ones.
            clip: (Jacobian restricted to a group, the group's label) -> the group's clipped sum by name; called as
                soon as the group's last b is there.
            merging: examples whose mean is to be one row.
            may_miss: as of ``jacobian``.
            memory_budget: peak memory allowed: up to 100 in units of what non-private training needs, else in bytes.
            graph: of the losses, where it was read already.

        Returns:
            The clipped sum by name, which on the first batches is verified. Under a budget below what must be held,
            the graph stays instead, and a second backward with the factors as cotangent gives the sum.
        """
        reached = self._reach(losses, may_miss, graph)
        calls, n = reached.calls, len(losses)
        with _without_autocast(losses.device.type):
            if not n:
                empty = Jacobian(0, losses.dtype, self.parameters, [])
                sums = [clip(empty.restricted(names), label) for label, names in groups.items()]
                return {name: total for part in sums for name, total in part.items()}
            layouts, measured = self._layouts_of(reached, strict=True)
            checks = None
            if measured and not self.layouts.verified(calls, n):
                checks = Checks(losses, self.parameters, reached.precision(), merging)
            rows = RowsAsTheyCome(reached, layouts, self._sources, self.parameters, merging, self._estimates)
            total = rows.clipped_sum(groups, clip, lambda: self._budget(reached, memory_budget), checks)
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

    def _reach(self, losses: Tensor, may_miss: Iterable[str], graph: Graph | None = None) -> Reached:
        """The calls between losses and parameters."""
        check_losses(losses)
        graph = graph or Graph(losses)
        calls = self._reached_calls(graph)
        self._check_all_reached(calls, set(may_miss))
        for call in calls:
            _check_versions(call)
        return Reached(losses, graph, calls, self._path(graph, len(losses)))

    def _layouts_of(self, reached: Reached, *, strict: bool) -> tuple[list[AnyLayout], bool]:
        """Where the examples sit in the calls' outputs, and whether this batch had to tell. The graph stays."""
        losses, calls, n = reached.losses, reached.calls, len(reached.losses)
        known = None if self._reorders and n > 1 else self.layouts.recall(reached.path, calls, n)
        leaves = [leaf for leaf in self._inputs if n in leaf.shape]
        targets = [*reached.edges, *leaves]

        def gradients(c: Tensor, some: Sequence[int]) -> list[Tensor | None]:
            return _gradients(losses, [targets[k] for k in some], c, retain_graph=True)

        measurement = Measurement(calls, self._names_of, gradients, losses, leaves, reached.dtypes)
        verdicts = Verdicts(self._shadows, self._names_of, n, self._probed)

        def judge(number: int, b: Tensor, layout: AnyLayout) -> None:
            verdicts.look(calls[number], b, layout)

        if known is not None:
            due = self.layouts.spot_check_is_due()
            if not due or measurement.agrees_in_part(known, self._portions(reached), judge):
                return known, False
        portions = [[*range(len(targets))]] if self._reorders else self._portions(reached)
        activations, least = self._activations(reached), 0.0

        def look(number: int, b: Tensor, layout: AnyLayout) -> None:
            nonlocal least
            judge(number, b, layout)
            with torch.no_grad():
                for use in calls[number].uses:
                    least += least_bytes(make_op(use, b, layout, self._names_of(use.weight)))

        layouts = self.layouts.measure(reached.path, measurement, portions, look)
        if strict:
            verdicts.conclude(reached.graph)
        self.layouts.learn(reached.path, measurement)
        self.layouts.note_footprint(reached.path, n, Footprint(activations, least))
        return layouts, True

    def _portions(self, reached: Reached) -> list[list[int]]:
        """The calls by number, and then the inputs, so many at a time that their gradients take little memory."""
        leaves = [leaf for leaf in self._inputs if len(reached.losses) in leaf.shape]
        sizes = [*(call.output.size for call in reached.calls), *(leaf.nbytes for leaf in leaves)]
        most, portions, size = max(PORTION, self._activations(reached) / 8), [], float("inf")
        for number, own in enumerate(sizes):
            if size + own > most:
                portions.append([])
                size = 0
            portions[-1].append(number)
            size += own
        return portions

    def _path(self, graph: Graph, n: int) -> int:
        """Number of what was computed: functions with their whole-number arguments, and the graph of the losses.

        Another path, as by a branch in the model's or the loss's code, may have other layouts or mix examples; so it
        must be measured anew.
        """
        numbers: list[int] = []
        functions = [(func, without_numbers(values, numbers)) for func, values in self._program]
        program = hash((*functions, *(node.name() for node in self.nodes_before_calls(graph))))
        return self.layouts.path(program, n, tuple(numbers))

    def _source(self, tensor: Tensor) -> Source | None:
        source = self._sources.get(id(tensor))
        return source if source is not None and source.version == tensor._version else None

    def _is_constant(self, tensor: Tensor) -> bool:
        known = self._constants.get(id(tensor))
        return known is not None and known[1] == tensor._version and not tensor.requires_grad

    def _names_of(self, tensor: Tensor) -> tuple[str, ...]:
        return self._sources[id(tensor)].names

    def _meet(self, func: Callable, args: tuple, kwargs: dict, data: list[Tensor], met: list[Tensor]) -> Any:
        """Run an op that meets parameters: noted, taken apart, or remembered as unknown."""
        inside = None if func in OPS else COMPOSED.get(func) or opened(func)
        if inside is None:
            return self._run_and_note(func, args, kwargs, data, met)
        with self:
            return inside(self._note_part, *args, **kwargs) if func in COMPOSED else inside(*args, **kwargs)

    def _run_and_note(self, func: Callable, args: tuple, kwargs: dict, data: list[Tensor], met: list[Tensor]) -> Any:
        inputs = tuple([t.grad_fn for t in data if t.grad_fn is not None])
        changed = changes_in_place(func)
        copied = changed and (func in OVERWRITING or func not in OPS)
        before = (args[0].detach().clone(), *args[1:]) if copied else args
        out = func(*args, **kwargs)
        result = args[0] if changed else out
        results = [result] if isinstance(result, Tensor) else tensors_in((result,))
        outputs = [t for t in results if t.grad_fn is not None]
        if not outputs:
            return out
        op = getattr(func, "__name__", None) or str(func)
        noted: list[tuple[Tensor, tuple[Use, ...]]] = []
        if not any([t.is_complex() for t in (*outputs, *data, *met)]):
            wanted = [t for t in met if t.requires_grad]
            uses = self._uses(func, result, before, kwargs, wanted)
            if uses is not None:
                noted = [(result, tuple(map(self._before_expansion, uses)) if self._expanded else uses)]
            else:
                noted = self._by_fallback(func, before, kwargs, wanted, results, changed)
        for y, uses in noted:
            self._note(op, y, uses, inputs)
        if not noted:
            names = self._names_behind(met)
            self._unknown.update({t.grad_fn: (op, names) for t in outputs if t.grad_fn is not None})
        return out

    def _note(self, op: str, y: Tensor, uses: tuple[Use, ...], inputs: tuple[Node, ...] = ()) -> None:
        if saves_elsewhere():
            self._saved_elsewhere = True
        versions = [(t, t._version) for use in uses for t in (*use.saved(), use.weight)]
        self._calls.append(Call(op, _output(y), inputs, uses, versions))

    def _note_part(self, y: Tensor, uses: Iterable[Use]) -> None:
        """What a composition of our own notes: parameters that met y out of sight of torch's functions."""
        uses = tuple(use for use in uses if use.weight.requires_grad and self._source(use.weight) is not None)
        if uses:
            self._note(SCAN, y, uses)

    def _by_fallback(
        self, func: Callable, args: tuple, kwargs: dict, wanted: list[Tensor], outputs: list[Tensor], changed: bool
    ) -> list[tuple[Tensor, tuple[Use, ...]]]:
        """Uses by the op's own backward, if it gives the same when it is run again."""
        weights = list({id(t): t for t in wanted}.values())
        try:
            replayed = compared(replay(func, args, kwargs, weights, changed), outputs)
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return []
        if replayed is None:
            return []
        return [
            (y, tuple(uses_of(replayed, weights, k)))
            for k, y in enumerate(outputs)
            if y.grad_fn is not None and replayed.outputs[k].grad_fn is not None
        ]

    def _names_behind(self, met: list[Tensor]) -> tuple[str, ...]:
        return tuple(sorted({name for t in met for name in self._names_of(t)}))

    def _uses(self, func: Callable, y: Any, args: tuple, kwargs: dict, wanted: list[Tensor]) -> tuple[Use, ...] | None:
        """A use of each of the wanted sources, as the op's recorder finds them; None where it does not find all."""
        recorder = OPS.get(func)
        if recorder is None:
            return None
        ids = [id(t) for t in wanted]
        try:
            uses = [use for use in recorder(y, *args, **kwargs) if id(use.weight) in ids]
        except Refused as error:
            names = ", ".join(map(repr, self._names_behind(wanted)))
            raise Refused(f"{error} Met by parameter {names}.") from None
        found = [id(use.weight) for use in uses]
        return tuple(uses) if found == ids or sorted(found) == sorted(ids) else None

    def _before_expansion(self, use: Use) -> Use:
        """Adding or multiplying broadcasts by itself: an expanded parameter is as good as the one before ``expand``."""
        before = self._expanded.get(id(use.weight))
        if before is None or not isinstance(use, (EntrywiseUse, ContractionUse)):
            return use
        return replace(use, weight=before)

    def _add_derived(self, func: Callable, args: tuple, met: list[Tensor], result: Tensor) -> None:
        key = id(result)
        if not result.requires_grad:
            self._constants[key] = (result, result._version)
        if not met or not result.requires_grad or self._source(result) is not None:  # as contiguous() may give back
            return
        sources = [self._sources[id(t)] for t in met]
        self._sources[key] = Source(
            result,
            result._version,
            self._names_behind(met),
            direct=False,
            half=is_half(result) or any(source.half for source in sources),
            rearranged=len(met) == 1 and sources[0].rearranged and rearranges(func, args),
        )
        if func in EXPANSIONS:
            self._expanded[key] = self._expanded.get(id(met[0]), met[0])
        else:
            self._expanded.pop(key, None)

    def nodes_before_calls(self, graph: Graph) -> Iterator[Node]:
        """The nodes between the losses and the first noted calls on every path."""
        return graph.before({call.output.edge.node for call in self._calls})

    def _reached_calls(self, graph: Graph) -> list[Call]:
        """The calls between losses and parameters, in the order they were made; refuses any path around them."""
        by_node: dict[Node, list[Call]] = {}
        for call in self._calls:
            by_node.setdefault(call.edge.node, []).append(call)
        reached: list[Call] = []
        stack, seen = [graph.root], {graph.root}
        while stack:
            node = stack.pop()
            self._check_known(node)
            if node in by_node:
                reached += by_node[node]
                following = [n for call in by_node[node] for n in call.inputs]
            else:
                following = graph.following(node)
            for n in following:
                if n not in seen:
                    seen.add(n)
                    stack.append(n)
        order = {id(call): i for i, call in enumerate(self._calls)}
        return sorted(reached, key=lambda call: order[id(call)])

    def _check_known(self, node: Node) -> None:
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
                f"tape: parameter {self._leaves[id(leaf)]!r} reaches the losses by a path that no recorded op explains."
                " Call the model as model(x) and use its parameters nowhere else (or put all of it under tp.record / "
                "training.record()), or freeze the parameter."
            )
        if isinstance(node, BackwardCFunction) and node.name().startswith("CheckpointFunction"):
            raise Refused("tape: reentrant activation checkpointing hides ops. Pass use_reentrant=False to checkpoint.")

    def _check_all_reached(self, calls: list[Call], may_miss: set[str]) -> None:
        reached = {name for call in calls for use in call.uses for name in self._names_of(use.weight)}
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


def _output(y: Tensor) -> Output:
    """Where y hangs in the graph also after it is changed in place, as by ``relu_``.

    Some ops give back a view of what they computed (linear of a rank-3 input, conv1d). Changing that view in place
    gives it a new history, which hangs on its base; so the base's edge is taken where the two hold the same entries.
    An op that changes a part of a tensor in place gives the whole a new history: b is that part of the whole's.
    """
    base = y._base
    if base is None or base.grad_fn is None:
        return Output(_edge(y), y.shape, y.dtype, None)
    if base.numel() == y.numel() and base.is_contiguous() and y.is_contiguous():
        return Output(_edge(base), y.shape, y.dtype, None)
    if not base.grad_fn.name().endswith("CopySlices"):
        return Output(_edge(y), y.shape, y.dtype, None)
    shape_only = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    return Output(_edge(base), y.shape, y.dtype, (shape_only, y.stride(), int(y.storage_offset())))


def _edge(y: Tensor) -> GradientEdge:
    assert y.grad_fn is not None
    return GradientEdge(y.grad_fn, y.output_nr)


def check_losses(losses: Tensor) -> None:
    if not isinstance(losses, Tensor) or losses.ndim != 1:
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise Refused(
            f"losses of shape {shape} given: must be (n,), one loss per example. Pass reduction='none' to the loss "
            "function, and average the losses of one example's positions yourself, e.g. losses.view(n, -1).mean(1)."
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


def _without_autocast(device: str) -> AbstractContextManager:
    """Norms and sums are taken in the types that ops ask for, whatever the user's autocast says."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
