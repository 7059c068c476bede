# SPDX-License-Identifier: Apache-2.0
"""What meets what: every op runs untouched, and is noted where data of the batch meet a parameter.

A use is (op, parameter, input x, gradient edge of the output y). What is computed from parameters and constants alone
counts as a parameter itself. Nothing in the model is changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .._torch_modes import saves_elsewhere
from .._validate import Refused
from ..ops import COMPOSED, OPS, Use
from ..ops._base import is_half
from ..ops.einsum import ContractionUse
from ..ops.elementwise import OVERWRITING, EntrywiseUse
from ..ops.fallback import compared, replay, uses_of
from .calls import SCAN, Call, Output
from .code_path import CodePath
from .torch_functions import (
    EXPANSIONS,
    FROM_PYTHON,
    Filled,
    Traits,
    changes_in_place,
    looks_up_examples,
    may_reorder,
    numbers_in,
    opened,
    picks_one,
    rearranges,
    tensors_in,
    traits,
)


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


@dataclass(slots=True, eq=False)
class Step:
    """A call of a torch function: what it was given, less the tensors' entries."""

    func: Callable
    known: Traits
    numbers: tuple  # whole numbers, names and flags
    made_of: list[Step]  # those that made tensors it was given, of such as no gradient goes back to
    moves: bool = False  # the data may have decided which entries of the result come from where


class Notes(TorchFunctionMode):
    """Notes every meeting of an op with one of ``parameters`` while it is active.

    Args:
        parameters: name -> tensor, leaves of the autograd graph.
        constants: other tensors that hold no data of the batch (buffers, frozen parameters).
        num_examples: size of the batch, where it is known beforehand: tells what may hold a part for each example.
        filled: what earlier batches taught of tensors that are filled with numbers.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        constants: Iterable[Tensor] = (),
        num_examples: int | None = None,
        filled: Filled | None = None,
    ):
        super().__init__()
        self._num_examples, self._entered = num_examples, 0
        self._filled, self.code = filled or Filled(), CodePath()
        self.parameters = dict(parameters)
        # Tensors are known by identity; holding them keeps the identities from being given away again.
        self._sources = {
            id(p): Source(p, p._version, (name,), direct=True, rearranged=True, half=is_half(p))
            for name, p in self.parameters.items()
        }
        self._expanded: dict[int, Tensor] = {}  # a source's id -> what the chain of ``expand`` that made it began with
        self._constants = {id(t): (t, t._version) for t in constants}
        self._made: dict[int, weakref.ref[Tensor]] = {}  # whole numbers among the inputs, or made of data
        self._blank: dict[int, weakref.ref[Tensor]] = {}  # made to be filled, and with a dimension for the examples
        self._reads_python = False  # the model was called without tensors, so it makes them of the batch itself
        self._left_torch = False  # data were given to numpy or Python, which may have made whole numbers of them
        self._saved_elsewhere = False  # autograd's tensors are not kept by its nodes
        self._program: list[Step] = []  # those that a gradient goes back through
        self._made_by: dict[int, tuple[weakref.ref[Tensor], Step]] = {}  # of tensors that no gradient goes back to
        self._cuts: list[Call] = []  # where the data may have decided which entries of a tensor go where
        self._moved = False  # the data decided such a thing, be it of tensors that no gradient goes back to
        self._moved_unseen = False  # they may have done so where it cannot be said of which tensors
        self._calls: list[Call] = []
        # Calls whose outputs are views, by their base; with strides and offset in it.
        self._views: dict[int, list[tuple[weakref.ref[Tensor], Call, tuple[int, ...], int]]] = {}
        self._unknown: dict[Node, tuple[str, tuple[str, ...]]] = {}

    def __enter__(self) -> Self:
        """Begin to look on, or go on where it does already, as for a model called under ``training.record()``."""
        self._entered += 1
        if self._entered == 1:
            super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._entered -= 1
        if not self._entered:
            super().__exit__(*error)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Looking on within a function that is under way, for which torch has put this aside."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = traits(func)
        if known.tells:
            return func(*args, **(kwargs or {}))
        values = (*args, *kwargs.values()) if kwargs else args
        numbers = numbers_in(values)
        self.code.note_call(func, numbers)
        kwargs = kwargs or {}
        tensors, met, data = self._sorted(values)
        step = Step(func, known, numbers, self._steps_behind(tensors) if self._made_by else [])
        if not torch.is_grad_enabled():
            return self._run_without_gradient(step, args, kwargs, tensors, met, data)
        if known.like:
            data = [t for t in data if t is args[0]]
        elif known.new:
            data = [t for t in data if t is not args[0]]
        if met and data and picks_one(func, args, self._source):
            data = []
        if known.in_place and met and not data and self._takes_examples(func, args, met):
            data = [args[0]]
        if self._views and known.in_place:
            self._hang_on_base(args[0])
        if met and (data or looks_up_examples(func, args)):
            return self._meet_data(step, args, kwargs, data, met)
        if data:
            self._look_for_moves(step, args, data, tensors)
            return self._run_on_data(step, args, kwargs)
        out = func(*args, **kwargs)
        result = args[0] if known.in_place else out
        self._place(step, tensors_in((result,)))
        if self._reads_python and func in FROM_PYTHON:
            self._note_results(tensors_in((out,)))
        elif tensors or self._filled.makes_constant(func, out, self._num_examples):
            if not self._filled.makes_new(func, result, args, self._num_examples):
                for tensor in tensors_in((result,)):
                    self._add_derived(func, args, met, tensor)
        if self._filled.may_be_filled_by_examples(func, out, self._num_examples):
            self._blank[id(out)] = weakref.ref(out)
        return out

    def _run_without_gradient(
        self, step: Step, args: tuple, kwargs: dict, tensors: list[Tensor], met: list[Tensor], data: list[Tensor]
    ) -> Any:
        """Run what no gradient follows; what is made of constants alone is one, such as spectral norm's vectors."""
        target = kwargs.get("out", args[0] if args and step.known.in_place else None)
        is_own = target is None or id(target) in self._constants
        self._look_for_moves(step, args, data, ())
        out = self._run_on_data(step, args, kwargs)
        if tensors and is_own and all(t is target for t in data):
            for t in tensors_in((out if target is None else target,)):
                self._add_derived(step.func, args, met, t)  # a view of a parameter requires a gradient even here
        return out

    def _meet_data(self, step: Step, args: tuple, kwargs: dict, data: list[Tensor], met: list[Tensor]) -> Any:
        """Run an op that meets parameters and data. Behind data that no gradient goes back to there are no calls."""
        if any([t.grad_fn is not None for t in data]):
            self._look_for_moves(step, args, data, data)
        else:
            step.made_of = []
        self._program.append(step)
        out = self._meet(step.func, args, kwargs, data, met)
        self._note_results(tensors_in((out,)))
        return out

    def _run_on_data(self, step: Step, args: tuple, kwargs: dict) -> Any:
        """Run what meets no parameter, or no gradient."""
        out = step.func(*args, **kwargs)
        results = [out] if isinstance(out, Tensor) else tensors_in((args[0] if step.known.in_place else out,))
        self._place(step, results)
        self._note_results(results)
        if step.known.leaves and args and isinstance(args[0], Tensor):
            self._left_torch = True
            self._moved_unseen |= step.moves
        return out

    def _note_results(self, results: Iterable[Tensor]) -> None:
        """Whole numbers that were made of data are no constants."""
        for t in results:
            self.code.note_shape(t.shape)
            if not t.is_floating_point():
                self._made[id(t)] = weakref.ref(t)

    def _steps_behind(self, tensors: Iterable[Tensor]) -> list[Step]:
        """The steps that made some tensors, of those that no gradient goes back to."""
        made_by = self._made_by
        known = [(t, *made_by[id(t)]) for t in tensors if id(t) in made_by]
        return [step for t, alive, step in known if alive() is t]

    def _place(self, step: Step, results: Sequence[Tensor]) -> None:
        """A step whose result takes a gradient is part of the program; any other only where its result is used."""
        for t in results:
            if t.requires_grad:
                self._program.append(step)
                return
        for t in results:
            self._made_by[id(t)] = weakref.ref(t), step
            if step.known.in_place and t._base is not None:
                self._made_by[id(t._base)] = weakref.ref(t._base), step

    def _steps(self) -> Iterator[Step]:
        """The program: what a gradient goes back through, with what made the other tensors that were used there."""
        seen: set[int] = set()
        for step in self._program:
            stack = [step]
            while stack:
                step = stack.pop()
                if id(step) not in seen:
                    seen.add(id(step))
                    yield step
                    stack += step.made_of

    def _look_for_moves(self, step: Step, args: tuple, data: Sequence[Tensor], tensors: Iterable[Tensor]) -> None:
        """Before a step is run: may its data decide which entries of tensors with a gradient go where?"""
        step.moves = may_reorder(step.func, args, data) or any([behind.moves for behind in step.made_of])
        if not step.moves:
            return
        self._moved = True
        followed = [t for t in tensors if t.grad_fn is not None]
        if not followed:
            return
        strange = [t for t in followed if not t.is_floating_point() or t.layout is not torch.strided or t.is_nested]
        if strange or step.known.in_place:
            self._moved_unseen = True
            return
        outputs = (Output(_edge(t), t.shape, t.dtype, None) for t in followed)
        self._cuts += [Call.cut(step.func, output, self.code.place) for output in outputs]

    def _sorted(self, values: Iterable[Any]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The tensors among arguments: all, those that are sources, and those that hold data of the batch."""
        tensors, met, data = tensors_in(values), [], []
        sources, constants = self._sources, self._constants
        for t in tensors:
            key = id(t)
            if key in sources and sources[key].version == t._version:
                met.append(t)
            elif (key not in constants or not self._is_constant(t)) and (
                t.is_floating_point() or not self._is_cached(t)
            ):
                data.append(t)
        return tensors, met, data

    def note_inputs(self, *inputs: Any) -> None:
        """The model is called with these arguments: whole numbers among them hold data of the batch."""
        tensors = [t for t in tree_leaves(inputs) if isinstance(t, Tensor)]
        self._reads_python |= not tensors
        self._made.update({id(t): weakref.ref(t) for t in tensors if not t.is_floating_point()})
        if self._num_examples is None:  # a wrong guess costs time, never exactness
            self._num_examples = next((self._filled.guess(t.shape) for t in tensors if t.ndim), None)

    def _is_cached(self, tensor: Tensor) -> bool:
        """Whether nothing that was seen made the tensor, and it has no part for each example: then it is a constant."""
        made = self._made.get(id(tensor))
        is_made = self._left_torch or (made is not None and made() is tensor)
        if is_made or not self._filled.is_cached(tensor, self._num_examples):
            return False
        self._constants[id(tensor)] = tensor, tensor._version
        return True

    def _takes_examples(self, func: Callable, args: tuple, met: Sequence[Tensor]) -> bool:
        """Whether parameters are repeated in what was made to be filled by examples: then it holds their data.

        As with a first token (d,) that is written into zeros (n, t, d), before the data are.
        """
        target = args[0]
        owner = target if target._base is None else target._base
        if id(owner) not in self._blank or self._blank[id(owner)]() is not owner:
            return False
        with torch._C.DisableTorchFunction():
            written = target.detach()[args[1]] if func is Tensor.__setitem__ else target
        if all([t.numel() == written.numel() for t in met]):
            return False
        self._constants.pop(id(target), None)
        self._constants.pop(id(owner), None)
        return True

    def _source(self, tensor: Tensor) -> Source | None:
        source = self._sources.get(id(tensor))
        return source if source is not None and source.version == tensor._version else None

    def _is_constant(self, tensor: Tensor) -> bool:
        known = self._constants.get(id(tensor))
        return known is not None and known[1] == tensor._version and not tensor.requires_grad

    def _names_of(self, tensor: Tensor) -> tuple[str, ...]:
        return self._sources[id(tensor)].names

    def _names_behind(self, met: list[Tensor]) -> tuple[str, ...]:
        return tuple(sorted({name for t in met for name in self._names_of(t)}))

    def _meet(self, func: Callable, args: tuple, kwargs: dict, data: list[Tensor], met: list[Tensor]) -> Any:
        """Run an op that meets parameters: noted, taken apart, or remembered as unknown."""
        inside = None if func in OPS else COMPOSED.get(func) or opened(func)
        if inside is None:
            return self._run_and_note(func, args, kwargs, data, met)
        with self._inside():
            return inside(self._note_part, *args, **kwargs) if func in COMPOSED else inside(*args, **kwargs)

    def _run_and_note(self, func: Callable, args: tuple, kwargs: dict, data: list[Tensor], met: list[Tensor]) -> Any:
        if any([t.is_nested for t in data]):
            names = ", ".join(map(repr, self._names_behind(met)))
            raise Refused(
                f"tape: parameter {names} meets a nested tensor, in which examples cannot be told apart. Pad it to a "
                "fixed length and use a mask, or take one tensor for each example."
            )
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
        self.code.note([(op, self._names_behind(met))])
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
        call = Call(op, _output(y), inputs, uses, versions, self.code.place)
        self._calls.append(call)
        if y._base is not None and call.output.part is None and call.edge == _edge(y):
            where = y.stride(), int(y.storage_offset())
            self._views.setdefault(y._base._cdata, []).append((weakref.ref(y._base), call, *where))

    def _hang_on_base(self, changed: Tensor) -> None:
        """A tensor is about to be changed in place: outputs that are views of it leave the graph where they hung."""
        base = changed if changed._base is None else changed._base
        for alive, call, stride, offset in self._views.pop(base._cdata, []):
            if alive() is base and base.grad_fn is not None:
                call.output = replace(call.output, edge=_edge(base), part=(_without_entries(base), stride, offset))

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
    return Output(_edge(base), y.shape, y.dtype, (_without_entries(base), y.stride(), int(y.storage_offset())))


def _without_entries(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _edge(y: Tensor) -> GradientEdge:
    assert y.grad_fn is not None
    return GradientEdge(y.grad_fn, y.output_nr)
