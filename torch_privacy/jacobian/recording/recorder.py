# SPDX-License-Identifier: Apache-2.0
"""Records every op call whose inputs include batch data and a trainable parameter.

A use is (op, parameter, input x, gradient edge of the output y). A tensor computed from parameters and constants alone
counts as a parameter itself. Every op runs unchanged, and nothing in the model is changed.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.overrides import _pop_mode, _push_mode
from torch.utils._pytree import tree_map

from ...ops import COMPOSED, OPS, Use
from ...ops._base import is_half
from ...ops.einsum import ContractionUse
from ...ops.elementwise import OVERWRITING, EntrywiseUse
from ...ops.fallback import compared, replay, uses_of
from ...support.torch_modes import OpMode, is_transformed, saves_elsewhere, tensors_in
from ...support.validate import Refused
from ..parallel.shards import (
    PartsOfCall,
    WayBack,
    is_distributed,
    is_internal,
    may_be_parallel,
    on_this_rank,
    splits_positions,
)
from .calls import SCAN, Call, Output, edge_of, output_of, without_entries
from .constants import FROM_PYTHON, FilledTensors
from .coverage import FEW, CodePath
from .functions import (
    EXPANSIONS,
    Traits,
    changes_in_place,
    decomposed,
    looks_up_examples,
    may_reorder,
    numbers_in,
    picks_one,
    rearranges,
    tensors_among,
    traits,
)
from .graph import leaves_below


@dataclass
class Source:
    """A parameter (``direct``) or a tensor computed from parameters and constants alone.

    It is valid only while the tensor's version is the recorded one: an in-place change may mix data in.
    """

    tensor: Tensor
    version: int
    names: tuple[str, ...]  # of the parameters that it was computed from
    direct: bool
    rearranged: bool  # the entries of one parameter, only moved
    half: bool  # it or a parameter that it was computed from is in half precision
    way_back: WayBack | None = None  # to the parameters, if it is this rank's part of a distributed tensor


@dataclass(slots=True, eq=False)
class Step:
    """A call of a torch function with its arguments, except for the tensors' entries."""

    func: Callable
    traits: Traits
    numbers: tuple  # integers, names and flags
    made_of: list[Step]  # the steps that made its arguments, for tensors that no gradient goes back to
    reorders: bool = False  # the data may have determined where entries of the result come from


_PLAIN = {Tensor, nn.Parameter, nn.Buffer}  # types of tensors that are whole on this rank


def _plain_output(t: Tensor) -> Output:
    return Output(edge_of(t), t.shape, t.dtype, None)


class Recorder(OpMode):
    """Records every op call with data and one of ``parameters`` among its inputs, while it is active.

    Args:
        parameters: name -> tensor, leaves of the autograd graph.
        constants: other tensors that hold no data of the batch (buffers, frozen parameters).
        num_examples: size of the batch, if it is known in advance; shows which tensors can have a part per example.
        filled: what earlier batches showed about tensors that are filled with numbers.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        constants: Iterable[Tensor] = (),
        num_examples: int | None = None,
        filled: FilledTensors | None = None,
    ):
        super().__init__()
        self._num_examples, self._forwards = num_examples, 0  # forwards of the model that are running
        self._filled, self.code = filled or FilledTensors(), CodePath()
        self.parameters = dict(parameters)
        # Tensors are identified by id; holding them keeps the ids from being used again.
        self._sources = {
            id(p): Source(p, p._version, (name,), direct=True, rearranged=True, half=is_half(p))
            for name, p in self.parameters.items()
        }
        self._expanded: dict[int, Tensor] = {}  # id of an expanded source -> the tensor before ``expand``
        self._constants = {id(t): (t, t._version) for t in constants}
        self._lasting = frozenset(self._constants)
        self._made: dict[int, weakref.ref[Tensor]] = {}  # integer tensors among the inputs, or made of data
        self._blank: dict[int, weakref.ref[Tensor]] = {}  # made to be filled, and with a dimension for the examples
        self._reads_python = False  # the model was called without tensors, so it makes them of the batch itself
        self._left_torch = False  # data were given to numpy or Python, which may have made integers of them
        self._saved_elsewhere = False  # saved-tensor hooks keep autograd's tensors outside of its nodes
        self._program: list[Step] = []  # steps that a gradient goes back through
        self._made_by: dict[int, tuple[weakref.ref[Tensor], Step]] = {}  # of tensors that no gradient goes back to
        self._cuts: list[Call] = []  # tensors with entries that the data may have reordered
        self._moved = False  # the data reordered entries of some tensor, with or without a gradient
        self._moved_unseen = False  # the same, of tensors that are not known
        self._calls: list[Call] = []
        # Base's id -> calls with outputs that are views of it, with their strides and offset.
        self._views: dict[int, list[tuple[weakref.ref[Tensor], Call, tuple[int, ...], int]]] = {}
        self._may_be_parallel = may_be_parallel([*self.parameters.values(), *(t for t, _ in self._constants.values())])
        self._meshes: list[Any] = []  # over which the tensors of some op were distributed
        self._splits_positions = False  # attention runs on a part of every example's positions
        self._inputs: list[tuple[Tensor, int]] = []  # of a model that may be parallel, with their versions
        self._pieces: dict[int, tuple[int, Tensor]] = {}  # id of a distributed weight -> its version, this rank's part

    @contextmanager
    def _recording_inside(self) -> Iterator[None]:
        """Records inside a function that is running, where torch has disabled this mode."""
        _push_mode(self)
        try:
            yield
        finally:
            _pop_mode()

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = traits(func)
        if known.metadata:
            return func(*args, **(kwargs or {}))
        values = (*args, *kwargs.values()) if kwargs else args
        if self._may_be_parallel and self._is_internal(func, values, sys._getframe(1)):
            return self._run_internal(func, args, kwargs or {})
        numbers = numbers_in(values)
        self.code.note_call(func, numbers, values)
        kwargs = kwargs or {}
        if is_transformed():  # the graph will tell what was used
            if known.reorders is not False:
                self._moved = self._moved_unseen = True
            return func(*args, **kwargs)
        tensors, weights, data = self._classify(values)
        if len(tensors) > len(weights):
            self._note_constants(tensors, data)
        step = Step(func, known, numbers, self._steps_that_made(tensors) if self._made_by else [])
        if not torch.is_grad_enabled():
            return self._run_without_gradient(step, args, kwargs, tensors, weights, data)
        if known.like_second:
            data = [t for t in data if t is args[0]]
        elif known.like_first:
            data = [t for t in data if t is not args[0]]
        if weights and data and picks_one(func, args, self._source):
            data = []
        if known.in_place and weights and not data and self._takes_examples(func, args, weights):
            data = [args[0]]
        if self._views and known.in_place:
            self._move_views_to_base(args[0])
        if weights and (data or looks_up_examples(func, args)):
            return self._run_with_weights(step, args, kwargs, data, weights)
        if data:
            self._check_order(step, args, data, tensors)
            return self._run_on_data(step, args, kwargs)
        return self._run_without_data(step, args, kwargs, tensors, weights)

    def _run_without_data(
        self, step: Step, args: tuple, kwargs: dict, tensors: list[Tensor], weights: list[Tensor]
    ) -> Any:
        """Runs an op on parameters and constants, or a factory, and keeps what its result is."""
        func = step.func
        base = args[0]._base if step.traits.in_place and not weights else None
        constant = base if base is not None and self._is_constant(base) else None
        out = func(*args, **kwargs)
        result = args[0] if step.traits.in_place else out
        self._add_step(step, tensors_among((result,)))
        if constant is not None:  # constants were written into a part of it
            self._constants[id(constant)] = constant, constant._version
        if self._reads_python and func in FROM_PYTHON:
            self._add_results(tensors_among((out,)))
        elif tensors or self._filled.makes_constant(func, out, self._num_examples):
            if not self._filled.makes_new(func, result, args, self._num_examples):
                for tensor in tensors_among((result,)):
                    self._add_derived(func, args, weights, tensor)
        if self._filled.may_be_filled_by_examples(func, out, self._num_examples):
            self._blank[id(out)] = weakref.ref(out)
        return out

    def _run_without_gradient(
        self, step: Step, args: tuple, kwargs: dict, tensors: list[Tensor], weights: list[Tensor], data: list[Tensor]
    ) -> Any:
        """Runs an op under ``no_grad``; results made of constants alone are constants, as in spectral norm."""
        target = kwargs.get("out", args[0] if args and step.traits.in_place else None)
        is_constant = target is None or id(target) in self._constants
        self._check_order(step, args, data, ())
        out = self._run_on_data(step, args, kwargs)
        if tensors and is_constant and all(t is target for t in data):
            for t in tensors_among((out if target is None else target,)):
                self._add_derived(step.func, args, weights, t)  # a view of a parameter requires a gradient even here
        return out

    def _run_with_weights(
        self, step: Step, args: tuple, kwargs: dict, data: list[Tensor], weights: list[Tensor]
    ) -> Any:
        """Runs an op on parameters and data. There are no calls before data that no gradient goes back to."""
        if any([t.grad_fn is not None for t in data]):
            self._check_order(step, args, data, data)
        else:
            step.made_of = []
        self._program.append(step)
        out = self._run_op(step.func, args, kwargs, data, weights)
        self._add_results(tensors_among((out,)), with_weights=True)
        return out

    def _run_on_data(self, step: Step, args: tuple, kwargs: dict) -> Any:
        """Runs an op without parameters, or without a gradient."""
        out = step.func(*args, **kwargs)
        results = [out] if isinstance(out, Tensor) else tensors_among((args[0] if step.traits.in_place else out,))
        self._add_step(step, results)
        self._add_results(results)
        if step.traits.leaves_torch and args and isinstance(args[0], Tensor):
            self._left_torch = True
            self._moved_unseen |= step.reorders
        return out

    # Tensor-parallel models

    def _is_internal(self, func: Callable, values: tuple, frame: Any) -> bool:
        """True for calls by which torch moves shards about. Also notes over which mesh tensors are distributed."""
        tensors = tensors_among(values)
        for t in tensors:
            if is_distributed(t) and t.device_mesh not in self._meshes:  # pyright: ignore[reportAttributeAccessIssue]
                self._meshes.append(t.device_mesh)  # pyright: ignore[reportAttributeAccessIssue]
        self._splits_positions |= splits_positions(func, tensors)
        return is_internal(frame)

    def _run_internal(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs a call that only moves entries between ranks: nothing is recorded but that integers may hold data.

        Which steps made its results is forgotten. That is no loss: if any step reordered examples, the layouts of this
        batch are confirmed in any case, because the graph has functions of ``torch.distributed``, unseen inside.
        """
        out = func(*args, **kwargs)
        self._made.update({id(t): weakref.ref(t) for t in tensors_among((out,)) if not t.is_floating_point()})
        return out

    def _uses_of_parts(
        self, func: Callable, args: tuple, kwargs: dict, wanted: list[Tensor], data: list[Tensor], result: Any,
        results: list[Tensor], in_place: bool,
    ) -> list[tuple[Tensor, tuple[Use, ...]]]:  # fmt: skip
        """Returns the uses of a call with distributed tensors, each of this rank's part of the weight."""
        call = PartsOfCall(func, self._all_names(wanted), data, results[0])
        pieces = {id(t): self._piece(t) for t in wanted}
        whole = {id(piece): t for piece, t in zip(pieces.values(), wanted, strict=True)}
        args, kwargs = call.localized((args, kwargs), pieces)
        y = tree_map(lambda t: on_this_rank(t) if isinstance(t, Tensor) else t, result)  # of ordinary type
        uses = self._uses(func, y, args, kwargs, [*pieces.values()])
        if uses is not None:
            return [(result, tuple(call.use(use, whole[id(use.weight)], args, kwargs) for use in uses))]
        if not call.is_replicated or in_place:
            return []
        return self._by_fallback(func, args, kwargs, [*pieces.values()], results, in_place)

    def _piece(self, weight: Tensor) -> Tensor:
        """Returns this rank's part of a weight, as a source; an ordinary weight is whole."""
        if not is_distributed(weight):
            return weight
        version, piece = self._pieces.get(id(weight), (None, weight))
        if version != weight._version:
            piece, source = (
                on_this_rank(weight).detach().requires_grad_(weight.requires_grad),
                self._sources[id(weight)],
            )
            self._pieces[id(weight)] = weight._version, piece
            way_back = None if source.direct else WayBack(weight, tuple(self.parameters[name] for name in source.names))
            self._sources[id(piece)] = replace(source, tensor=piece, version=piece._version, way_back=way_back)
        return piece

    # Which steps were made, and whether the data reordered examples

    def _add_results(self, results: Iterable[Tensor], *, with_weights: bool = False) -> None:
        """Adds results that were computed from data: their integers are no constants."""
        for t in results:
            if with_weights or self._forwards:  # the loop's other results, such as its logs, round no row
                self.code.note_shape(t.shape)
            if not t.ndim or not t.is_floating_point():
                self._made[id(t)] = weakref.ref(t)

    def _steps_that_made(self, tensors: Iterable[Tensor]) -> list[Step]:
        """Returns the steps that made those of the tensors that no gradient goes back to."""
        made_by = self._made_by
        known = [(t, *made_by[id(t)]) for t in tensors if id(t) in made_by]
        return [step for t, alive, step in known if alive() is t]

    def _add_step(self, step: Step, results: Sequence[Tensor]) -> None:
        """Adds a step to the program if its result has a gradient; else it is added once the result is used."""
        for t in results:
            if t.requires_grad:
                self._program.append(step)
                return
        for t in results:
            self._made_by[id(t)] = weakref.ref(t), step
            if step.traits.in_place and t._base is not None:
                self._made_by[id(t._base)] = weakref.ref(t._base), step

    def _steps(self) -> Iterator[Step]:
        """Yields the steps that a gradient goes back through, and those that made the other tensors used there."""
        seen: set[int] = set()
        for step in self._program:
            stack = [step]
            while stack:
                step = stack.pop()
                if id(step) not in seen:
                    seen.add(id(step))
                    yield step
                    stack += step.made_of

    def _check_order(self, step: Step, args: tuple, data: Sequence[Tensor], tensors: Iterable[Tensor]) -> None:
        """Adds cuts, before a step is run, if its data may determine where entries with a gradient go."""
        step.reorders = may_reorder(step.func, args, data) or any([maker.reorders for maker in step.made_of])
        if not step.reorders:
            return
        self._moved = True
        differentiable = [t for t in tensors if t.grad_fn is not None]
        if not differentiable:
            return
        unmeasurable = [
            t for t in differentiable if not t.is_floating_point() or t.layout is not torch.strided or t.is_nested
        ]
        if unmeasurable or step.traits.in_place:
            self._moved_unseen = True
            return
        outputs = map(output_of if self._may_be_parallel else _plain_output, differentiable)
        self._cuts += [Call.cut(step.func, output, self.code.place) for output in outputs]

    # What tensors are: parameters, constants, or data

    def _classify(self, values: Iterable[Any]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Returns the tensors among arguments: all, those that are sources, and those that hold data of the batch."""
        tensors, weights, data = tensors_among(values), [], []
        sources, constants = self._sources, self._constants
        for t in tensors:
            key = id(t)
            if key in sources and sources[key].version == t._version:
                weights.append(t)
            elif t.requires_grad and self._becomes_known(t):
                weights += [t] if key in sources else []
            elif (key not in constants or not self._is_constant(t)) and (
                t.is_floating_point() or not self._is_cached(t)
            ):
                data.append(t)
        return tensors, weights, data

    def _note_constants(self, tensors: Sequence[Tensor], data: Sequence[Tensor]) -> None:
        """Notes the kinds of the numbers in small tensors that hold no data, such as a factor that begins to count."""
        for k, t in enumerate(tensors):
            if t.requires_grad or t.numel() > FEW or id(t) in self._sources or self._is_made(t):
                continue
            if not t.ndim or not any([t is other for other in data]):
                self.code.note_kinds(k, self._filled.entries_of(t, lasts=id(t) in self._lasting))

    def _is_made(self, tensor: Tensor) -> bool:
        """True for a tensor that is an input, or was made of data, or of parameters alone but without a gradient."""
        made = self._made.get(id(tensor))
        return made is not None and made() is tensor

    def note_inputs(self, *inputs: Any) -> None:
        """Takes the arguments that the model is called with: integers among them hold data of the batch."""
        if is_transformed():
            return
        tensors = tensors_in(inputs)
        self._reads_python |= not tensors
        if self._may_be_parallel:
            self._inputs += [(t, t._version) for t in tensors]
        self._made.update({id(t): weakref.ref(t) for t in tensors if not t.ndim or not t.is_floating_point()})
        if self._num_examples is None:  # a wrong guess costs time, never exactness
            self._num_examples = next((self._filled.guess(t.shape) for t in tensors if t.ndim), None)

    def _is_cached(self, tensor: Tensor) -> bool:
        """True for a constant: no recorded function made it, and it has no part for each example."""
        if self._left_torch or self._is_made(tensor) or not self._filled.is_cached(tensor, self._num_examples):
            return False
        self._constants[id(tensor)] = tensor, tensor._version
        return True

    def _takes_examples(self, func: Callable, args: tuple, weights: Sequence[Tensor]) -> bool:
        """True if parameters are repeated in a tensor that is made to be filled by examples: it then holds their data.

        An example is a first token (d,) that is written into zeros (n, t, d), before the data are.
        """
        target = args[0]
        base = target if target._base is None else target._base
        if id(base) not in self._blank or self._blank[id(base)]() is not base:
            return False
        with torch._C.DisableTorchFunction():
            written = target.detach()[args[1]] if func is Tensor.__setitem__ else target
        if all([t.numel() == written.numel() for t in weights]):
            return False
        self._constants.pop(id(target), None)
        self._constants.pop(id(base), None)
        return True

    def _source(self, tensor: Tensor) -> Source | None:
        source = self._sources.get(id(tensor))
        return source if source is not None and source.version == tensor._version else None

    def _is_constant(self, tensor: Tensor) -> bool:
        """True for a known constant, which may be a leaf with a gradient, but is no trained parameter."""
        known = self._constants.get(id(tensor))
        return known is not None and known[1] == tensor._version and (not tensor.requires_grad or tensor.is_leaf)

    def _becomes_known(self, tensor: Tensor) -> bool:
        """True if a tensor with a gradient turns out to be a source or a constant, which no recorded call made.

        A source is the result of an ``autograd.Function``: its forward, recorded without a gradient, used parameters
        and constants alone, and its backward goes to these. A constant is a new ``nn.Parameter`` over the memory of a
        constant, or what is computed from one.
        """
        if tensor.grad_fn is None:
            return type(tensor) is nn.Parameter and id(tensor) not in self._sources and self._shares_constant(tensor)
        known = self._constants.get(id(tensor))
        if known is None or known[1] != tensor._version:
            return False
        leaves = leaves_below(tensor.grad_fn)
        trained = [leaf for leaf in leaves if self._source(leaf) is not None]
        if not all(self._is_constant(leaf) or self._source(leaf) is not None for leaf in leaves):
            return False
        if trained:
            self._add_source(tensor, trained, rearranged=False)
        return True

    def _shares_constant(self, parameter: Tensor) -> bool:
        """True if a new parameter has the memory of a constant, or that of a known parameter without its gradient."""
        known = (t for t, version in self._constants.values() if t._version == version)
        trained = (source.tensor for source in self._sources.values() if source.version == source.tensor._version)
        where = parameter.data_ptr(), parameter.numel(), parameter._version
        if not any((t.data_ptr(), t.numel(), t._version) == where for t in chain(known, trained)):
            return False
        self._constants[id(parameter)] = parameter, parameter._version
        return True

    def _names_of(self, tensor: Tensor) -> tuple[str, ...]:
        return self._sources[id(tensor)].names

    def _all_names(self, weights: list[Tensor]) -> tuple[str, ...]:
        return tuple(sorted({name for t in weights for name in self._names_of(t)}))

    def _add_derived(self, func: Callable, args: tuple, weights: list[Tensor], result: Tensor) -> None:
        """Adds a tensor computed from parameters and constants alone: a source, or a constant without a gradient."""
        key = id(result)
        if not weights or not result.requires_grad:
            self._constants[key] = (result, result._version)
            if result.is_floating_point() and (weights or any([self._is_made(t) for t in tensors_among(args)])):
                self._made[key] = weakref.ref(result)
        if not weights or not result.requires_grad or self._source(result) is not None:  # contiguous() may return it
            return
        is_moved = len(weights) == 1 and self._sources[id(weights[0])].rearranged and rearranges(func, args)
        self._add_source(result, weights, rearranged=is_moved)
        if func in EXPANSIONS:
            self._expanded[key] = self._expanded.get(id(weights[0]), weights[0])
        else:
            self._expanded.pop(key, None)

    def _add_source(self, result: Tensor, weights: Sequence[Tensor], *, rearranged: bool) -> None:
        half = is_half(result) or any(self._sources[id(t)].half for t in weights)
        names = self._all_names([*weights])
        self._sources[id(result)] = Source(result, result._version, names, False, rearranged, half)

    # The calls

    def _run_op(self, func: Callable, args: tuple, kwargs: dict, data: list[Tensor], weights: list[Tensor]) -> Any:
        """Runs an op on parameters and data, and records it, or the ops that it is composed of."""
        inside = None if func in OPS else COMPOSED.get(func) or decomposed(func)
        if inside is None:
            return self._run_and_record(func, args, kwargs, data, weights)
        with self._recording_inside():
            return inside(self._add_composed, *args, **kwargs) if func in COMPOSED else inside(*args, **kwargs)

    def _run_and_record(
        self, func: Callable, args: tuple, kwargs: dict, data: list[Tensor], weights: list[Tensor]
    ) -> Any:
        if any([t.is_nested for t in data]):
            names = ", ".join(map(repr, self._all_names(weights)))
            raise Refused(
                f"tape: parameter {names} is used with a nested tensor, in which examples cannot be separated. Pad it "
                "to a fixed length and use a mask, or take one tensor for each example."
            )
        inputs = tuple([edge_of(t) for t in data if t.grad_fn is not None])
        in_place = changes_in_place(func)
        copied = in_place and (func in OVERWRITING or func not in OPS)
        before = (args[0].detach().clone(), *args[1:]) if copied else args
        out = func(*args, **kwargs)
        result = args[0] if in_place else out
        results = [result] if isinstance(result, Tensor) else tensors_among((result,))
        outputs = [t for t in results if t.grad_fn is not None]
        if not outputs:
            return out
        op = getattr(func, "__name__", None) or str(func)
        self.code.note([(op, self._all_names(weights))])
        recorded: list[tuple[Tensor, tuple[Use, ...]]] = []
        if not any([t.is_complex() for t in (*outputs, *data, *weights)]):
            wanted = [t for t in weights if t.requires_grad]
            is_plain = not self._may_be_parallel or all(type(t) in _PLAIN for t in (*outputs, *data, *weights))
            uses = self._uses(func, result, before, kwargs, wanted) if is_plain else None
            if not is_plain:
                recorded = self._uses_of_parts(func, before, kwargs, wanted, data, result, results, in_place)
            elif uses is not None:
                recorded = [(result, tuple(map(self._before_expansion, uses)) if self._expanded else uses)]
            else:
                recorded = self._by_fallback(func, before, kwargs, wanted, results, in_place)
        for y, uses in recorded:
            self._add_call(op, y, uses, inputs)
        return out

    def _add_call(self, op: str, y: Tensor, uses: tuple[Use, ...], inputs: tuple[GradientEdge, ...] = ()) -> None:
        if saves_elsewhere():
            self._saved_elsewhere = True
        saved = [t for use in uses for t in use.saved()]
        versions = [(t, t._version) for t in (*saved, *[use.weight for use in uses])]
        output = output_of(y)
        size = output.size + sum([t.numel() * t.itemsize for t in saved])
        call = Call(op, output, inputs, uses, versions, self.code.place, size)
        self._calls.append(call)
        if y._base is not None and call.output.part is None and output.placed is None and call.edge == edge_of(y):
            where = y.stride(), int(y.storage_offset())
            self._views.setdefault(y._base._cdata, []).append((weakref.ref(y._base), call, *where))

    def _move_views_to_base(self, changed: Tensor) -> None:
        """Moves the edges of outputs that are views of a tensor to its base, before it is changed in place.

        The change gives the views a new history, so that their present edges leave the graph.
        """
        base = changed if changed._base is None else changed._base
        for alive, call, stride, offset in self._views.pop(base._cdata, []):
            if alive() is base and base.grad_fn is not None:
                call.output = replace(call.output, edge=edge_of(base), part=(without_entries(base), stride, offset))

    def _add_composed(self, y: Tensor, uses: Iterable[Use]) -> None:
        """Adds the uses of parameters that one of our own compositions reports for y."""
        uses = tuple(use for use in uses if use.weight.requires_grad and self._source(use.weight) is not None)
        if uses:
            self._add_call(SCAN, y, uses)

    def _by_fallback(
        self, func: Callable, args: tuple, kwargs: dict, wanted: list[Tensor], outputs: list[Tensor], in_place: bool
    ) -> list[tuple[Tensor, tuple[Use, ...]]]:
        """Returns uses by the op's own backward, if running the op again gives the same result."""
        weights = list({id(t): t for t in wanted}.values())
        try:
            replayed = compared(replay(func, args, kwargs, weights, in_place), [*map(on_this_rank, outputs)])
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return []
        if replayed is None:
            return []
        return [
            (y, tuple(uses_of(replayed, weights, k)))
            for k, y in enumerate(outputs)
            if y.grad_fn is not None and replayed.outputs[k].grad_fn is not None
        ]

    def _uses(self, func: Callable, y: Any, args: tuple, kwargs: dict, wanted: list[Tensor]) -> tuple[Use, ...] | None:
        """Returns one use of each wanted source, as the op's rule finds them; None if it does not find all."""
        uses_by_rule = OPS.get(func)
        if uses_by_rule is None:
            return None
        ids = [id(t) for t in wanted]
        try:
            uses = [use for use in uses_by_rule(y, *args, **kwargs) if id(use.weight) in ids]
        except Refused as error:
            names = ", ".join(map(repr, self._all_names(wanted)))
            raise Refused(f"{error} Used with parameter {names}.") from None
        found = [id(use.weight) for use in uses]
        return tuple(uses) if found == ids or sorted(found) == sorted(ids) else None

    def _before_expansion(self, use: Use) -> Use:
        """Returns the use with the parameter before ``expand``, if the op broadcasts by itself, as add and mul do."""
        before = self._expanded.get(id(use.weight))
        if before is None or not isinstance(use, (EntrywiseUse, ContractionUse)):
            return use
        return replace(use, weight=before)
