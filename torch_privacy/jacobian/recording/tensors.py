# SPDX-License-Identifier: Apache-2.0
"""Knows what the tensors of a forward are: parameters, tensors computed from them alone, constants, or data.

A tensor that was made without data counts as a constant, or as an input with a part for each example.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ...ops import Use
from ...ops._base import is_half
from ...ops.einsum import ContractionUse
from ...ops.elementwise import EntrywiseUse
from ..parallel.shards import WayBack
from .coverage import FEW
from .functions import EXPANSIONS, FROM_PYTHON, rearranges, tensors_among
from .graph import leaves_below

# Factories with results that hold no data of the batch.
_CONSTANTS = {torch.arange, torch.linspace, torch.logspace, torch.eye, torch.tril_indices, torch.triu_indices}
# Factories with results that may stand for an input with a part for every example, such as a first hidden state.
_FILLED = {torch.zeros, torch.ones, torch.full, torch.empty, torch.rand, torch.randn}
_PLAIN = {Tensor, nn.Parameter, nn.Buffer}
_FILLED |= FROM_PYTHON
# Entries above which a filled tensor with a part for each example counts as an input: rows in it, as in a constant,
# would take n times its size.
LARGE = 2**20

_Kind = tuple[Callable, torch.Size]  # function that made it, and its shape


class FilledTensors:
    """Decides which tensors filled with numbers may stand for an input, such as a first hidden state (n, d).

    All others count as constants. Constants are exact in any case, but one with a part for each example takes n times
    its size.
    """

    def __init__(self) -> None:
        self._of_any_batch: set[_Kind] = set()  # seen in batches that do not fit into any of their dimensions
        self._seen: set[_Kind] = set()  # in the present batch, while its size is not known
        self._shape: tuple[int, ...] = ()  # of the batch's first input
        self._dims = {0}  # dimensions of first inputs that may hold the examples
        self._stamps: dict[int, tuple[Any, int, str]] = {}  # of constants that last, by id
        self._numbers = count()
        self._read: dict[int, tuple[Any, int, list[float]]] = {}  # small tensors on other devices

    def entries_of(self, tensor: Tensor, *, lasts: bool) -> list[float]:
        """Returns the entries of a small tensor; none on other devices, where reading waits, unless the tensor lasts.

        Those of one that lasts are read once for each version.
        """
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_complex() or tensor.is_meta:
            return []
        if tensor.device.type == "cpu":
            return tensor.detach().reshape(-1).tolist()
        if not lasts:
            return []
        alive, version, entries = self._read.get(id(tensor), (None, None, []))
        if alive is None or alive() is not tensor or version != tensor._version:
            entries = tensor.detach().reshape(-1).tolist()
            self._read[id(tensor)] = weakref.ref(tensor), tensor._version, entries
        return entries

    def stamp(self, tensor: Tensor) -> str:
        """Returns a name of the tensor as it is now: another one once it was written into, or is another tensor."""
        alive, version, stamp = self._stamps.get(id(tensor), (None, None, ""))
        if alive is None or alive() is not tensor or version != tensor._version:
            stamp = f"constant {next(self._numbers)}"
            self._stamps[id(tensor)] = weakref.ref(tensor), tensor._version, stamp
        return stamp

    def guess(self, shape: tuple[int, ...]) -> int | None:
        """Returns the size of a batch with a first input of this shape, as earlier batches suggest."""
        self._shape = shape
        return next((shape[dim] for dim in sorted(self._dims) if dim < len(shape)), None)

    def learn(self, num_examples: int) -> None:
        """Remembers the size of the present batch."""
        dims = {dim for dim, size in enumerate(self._shape) if size == num_examples}
        self._dims, self._shape = self._dims & dims or dims or self._dims, ()
        if self._seen:
            self._of_any_batch |= {kind for kind in self._seen if _holds_none(kind[1], num_examples)}
            self._seen.clear()

    def _is_of_any_batch(self, kind: _Kind, num_examples: int | None) -> bool:
        """True if it was seen in a batch with examples that it cannot hold, the present batch included."""
        if num_examples is None:
            self._seen.add(kind)
        elif _holds_none(kind[1], num_examples):
            self._of_any_batch.add(kind)
        return kind in self._of_any_batch

    def stands_for_input(self, func: Callable, out: Tensor, num_examples: int | None) -> bool:
        """True if it is large, has a dimension of n, and was never seen with another n."""
        if self._is_of_any_batch((func, out.shape), num_examples):
            return False
        return num_examples is None or (num_examples * out.numel() > LARGE and num_examples in out.shape)

    def may_be_filled_by_examples(self, func: Callable, out: Any, num_examples: int | None) -> bool:
        """True if it is made to be written into, and may have a part for each example: (n, 7, 4) of zeros."""
        if not isinstance(out, Tensor) or not out.is_floating_point() or num_examples not in out.shape:
            return False
        name = getattr(func, "__name__", "")
        is_new = func in _FILLED or name.startswith("new_") or name.endswith("_like")
        return is_new and (func, out.shape) not in self._of_any_batch

    def makes_constant(self, func: Callable, out: Any, num_examples: int | None) -> bool:
        """True if a factory's result holds no data of the batch; a list of integers counts as positions."""
        if func in _CONSTANTS:
            return True
        if func in FROM_PYTHON and not out.is_floating_point():
            return out.ndim < 2
        return func in _FILLED and not self.stands_for_input(func, out, num_examples)

    def is_cached(self, tensor: Tensor, num_examples: int | None) -> bool:
        """True for integers that no recorded function made, as those cached in a model, without a part per example."""
        return not tensor.is_floating_point() and self._is_of_any_batch((Tensor, tensor.shape), num_examples)

    def makes_new(self, func: Callable, out: Any, args: tuple, num_examples: int | None) -> bool:
        """True for an input that takes only type and device of its argument, as ``weight.new_zeros(n, d)``."""
        name = getattr(func, "__name__", "")
        if name.endswith("_like") and args and not args[0].requires_grad:
            return False  # of a constant's shape, which has no part for each example
        is_new = name.startswith("new_") or name.endswith("_like")
        return is_new and self.stands_for_input(func, out, num_examples)


def _holds_none(shape: torch.Size, num_examples: int) -> bool:
    """True if no dimension can hold ``num_examples`` examples."""
    return all(size % max(num_examples, 1) for size in shape)


@dataclass(slots=True)
class WeightSource:
    """A parameter (``direct``) or a tensor computed from parameters and constants alone.

    It is valid only while the tensor's version is the recorded one: an in-place change may mix data in.
    """

    tensor: Tensor
    version: int
    names: tuple[str, ...]  # of the parameters that it was computed from
    direct: bool
    rearranged: bool  # the entries of one parameter, only moved
    half: bool  # computed from half precision, or in it
    way_back: WayBack | None = None  # to the parameters, if it is this rank's part of a distributed tensor


class KnownTensors:
    """The tensors of one forward that hold no data of the batch, and how they were made; all others hold data.

    Args:
        parameters: name -> tensor, leaves of the autograd graph.
        constants: other tensors that hold no data of the batch (buffers, frozen parameters).
        num_examples: size of the batch, if it is known in advance; shows which tensors can have a part per example.
        filled: what earlier batches showed about tensors that are filled with numbers.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        constants: Iterable[Tensor],
        num_examples: int | None,
        filled: FilledTensors,
    ):
        # Tensors are identified by id; holding them keeps the ids from being used again.
        self.sources = {
            id(p): WeightSource(p, p._version, (name,), direct=True, rearranged=True, half=False)
            for name, p in parameters.items()
        }
        self.expanded: dict[int, Tensor] = {}  # id of an expanded source -> the tensor before ``expand``
        self._names: dict[tuple[int, ...], tuple[str, ...]] = {}  # of the parameters behind some sources
        self._constants = {id(t): (t, t._version) for t in constants}
        self._lasting = frozenset(self._constants)
        self._made: dict[int, weakref.ref[Tensor]] = {}  # integer tensors among the inputs, or made of data
        self._blank: dict[int, weakref.ref[Tensor]] = {}  # made to be filled, and with a dimension for the examples
        self.filled, self._num_examples = filled, num_examples
        self._reads_python = False  # the model was called without tensors, so it makes them of the batch itself
        self.left_torch = False  # data were given to numpy or Python, which may have made integers of them

    # Questions

    def classify(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], bool]:
        """Returns those that are sources, those that hold data of the batch, and whether others have no gradient."""
        weights: list[Tensor] = []
        data: list[Tensor] = []
        sources, constants, plain = self.sources, self._constants, False
        for t in tensors:
            key = id(t)
            if key in sources and sources[key].version == t._version:
                weights.append(t)
                continue
            if not t.requires_grad:
                plain = True
            elif (key in constants or t.grad_fn is None) and self._becomes_known(t):
                weights += [t] if key in sources else []
                continue
            if key in constants and self.is_constant(t):
                continue
            if t.is_floating_point() or not self._is_cached(t):
                data.append(t)
        return weights, data, plain

    def stamps(self, tensors: Sequence[Tensor]) -> tuple[str, ...]:
        """Returns the stamps of the constants that may put examples into another order, as a matrix does."""
        return tuple([self.filled.stamp(t) for t in tensors if id(t) in self._lasting and self._may_reorder(t)])

    def contents(self, func: Callable, out: Any) -> tuple[str, ...]:
        """Returns a hash of such a constant's entries if it was made of numbers of Python."""
        if func not in FROM_PYTHON or not self._may_reorder(out):
            return ()
        return (str(hash(tuple(self.filled.entries_of(out, lasts=True)))),)

    def _may_reorder(self, tensor: Tensor) -> bool:
        """True if at least two of its dimensions may hold the examples."""
        n = self._num_examples
        return tensor.ndim > 1 and (not n or sum([size % n == 0 for size in tensor.shape]) > 1)

    def source(self, tensor: Tensor) -> WeightSource | None:
        """Returns what a tensor was computed from; None unless it is a source."""
        source = self.sources.get(id(tensor))
        return source if source is not None and source.version == tensor._version else None

    def all_names(self, weights: Sequence[Tensor]) -> tuple[str, ...]:
        """Returns the names of the parameters that these sources were computed from."""
        key = tuple(map(id, weights))
        if key not in self._names:
            self._names[key] = tuple(sorted({*chain.from_iterable(map(_names, map(self.sources.__getitem__, key)))}))
        return self._names[key]

    def is_constant(self, tensor: Tensor) -> bool:
        """True for a known constant, which may be a leaf with a gradient, but is no trained parameter."""
        known = self._constants.get(id(tensor))
        return known is not None and known[1] == tensor._version and (not tensor.requires_grad or tensor.is_leaf)

    def has_been_constant(self, tensor: Tensor) -> bool:
        """True for a known constant, whatever was written into it since."""
        return id(tensor) in self._constants

    def constants(self) -> list[Tensor]:
        """Returns all known constants."""
        return [tensor for tensor, _ in self._constants.values()]

    def before_expansion(self, uses: tuple[Use, ...]) -> tuple[Use, ...]:
        """Returns uses with the parameter before ``expand``, where the op broadcasts by itself, as add and mul do."""
        before = self.expanded
        return tuple(
            replace(use, weight=before[id(use.weight)])
            if id(use.weight) in before and isinstance(use, (EntrywiseUse, ContractionUse))
            else use
            for use in uses
        )

    def read_constants(self, tensors: Sequence[Tensor], data: Sequence[Tensor]) -> Iterator[tuple[int, list[float]]]:
        """Yields number and entries of the small tensors that hold no data, such as a factor that begins to count."""
        for k, t in enumerate(tensors):
            if t.requires_grad or t.numel() > FEW or id(t) in self.sources or self._is_made(t):
                continue
            if not t.ndim or not any([t is other for other in data]):
                yield k, self.filled.entries_of(t, lasts=id(t) in self._lasting)

    def takes_examples(self, func: Callable, args: tuple, weights: Sequence[Tensor]) -> bool:
        """True if parameters are repeated in a tensor that is made to be filled by examples: it then holds their data.

        An example is a first token (d,) that is written into zeros (n, t, d), before the data are.
        """
        target = args[0]
        base = target if target._base is None else target._base
        if id(base) not in self._blank or self._blank[id(base)]() is not base:
            return False
        with torch._C.DisableTorchFunction():
            written = target.detach()[args[1]] if func is Tensor.__setitem__ else target
        pieces = [t for t in weights if t is not target]
        if self._num_examples != 1 and all([t.numel() == written.numel() for t in pieces]):
            return False  # a weight in pieces; for one example both are exact, and data may follow
        self._constants.pop(id(target), None)
        self._constants.pop(id(base), None)
        return True

    # What becomes known while the forward runs

    def note_inputs(self, tensors: Sequence[Tensor]) -> None:
        """Takes the tensors that the model is called with: integers among them hold data of the batch."""
        self._reads_python |= not tensors
        self._made.update({id(t): weakref.ref(t) for t in tensors if not t.ndim or not t.is_floating_point()})
        if self._num_examples is None:  # a wrong guess costs time, never exactness
            self._num_examples = next((self.filled.guess(t.shape) for t in tensors if t.ndim), None)

    def add_made(self, tensor: Tensor) -> None:
        """Adds integers, or a number, that were computed from data: they are no constants."""
        self._made[id(tensor)] = weakref.ref(tensor)

    def makes_data_of_python(self, func: Callable) -> bool:
        """True if the function makes a tensor of numbers that may be the batch's."""
        return self._reads_python and func in FROM_PYTHON

    def add_without_data(
        self, func: Callable, args: tuple, tensors: Sequence[Tensor], weights: Sequence[Tensor], out: Any, result: Any
    ) -> None:
        """Adds what an op on ``tensors``, or a factory, made without data; ``result`` is what it wrote or returned."""
        filled, n = self.filled, self._num_examples
        if tensors or filled.makes_constant(func, out, n):
            if not filled.makes_new(func, result, args, n):
                for tensor in tensors_among((result,)):
                    self.add_derived(func, args, weights, tensor)

    def add_blank(self, func: Callable, out: Any) -> None:
        """Adds a tensor that is made to be filled, if it may have a part for each example."""
        if self.filled.may_be_filled_by_examples(func, out, self._num_examples):
            self._blank[id(out)] = weakref.ref(out)

    def add_constant(self, tensor: Tensor) -> None:
        """Adds a constant, or a new version of one."""
        self._constants[id(tensor)] = tensor, tensor._version

    def add_derived(self, func: Callable, args: tuple, weights: Sequence[Tensor], result: Tensor) -> None:
        """Adds a tensor computed from parameters and constants alone: a source, or a constant without a gradient."""
        key = id(result)
        if not weights or not result.requires_grad:
            self._constants[key] = (result, result._version)
            if result.is_floating_point() and (weights or any([self._is_made(t) for t in tensors_among(args)])):
                self._made[key] = weakref.ref(result)
        if not weights or not result.requires_grad or self.source(result) is not None:  # contiguous() may return it
            return
        is_moved = len(weights) == 1 and self.sources[id(weights[0])].rearranged and rearranges(func, args)
        self._add_source(result, weights, rearranged=is_moved)
        if func in EXPANSIONS:
            self.expanded[key] = self.expanded.get(id(weights[0]), weights[0])
        else:
            self.expanded.pop(key, None)

    def _add_source(self, result: Tensor, weights: Sequence[Tensor], *, rearranged: bool) -> None:
        half = is_half(result) or any([is_half(t) or self.sources[id(t)].half for t in weights])
        self.sources[id(result)] = WeightSource(
            result, result._version, self.all_names(weights), False, rearranged, half
        )
        self._names.clear()  # the result may have been another source, before it was written into

    def _is_made(self, tensor: Tensor) -> bool:
        """True for a tensor that is an input, or was made of data, or of parameters alone but without a gradient."""
        made = self._made.get(id(tensor))
        return made is not None and made() is tensor

    def _is_cached(self, tensor: Tensor) -> bool:
        """True for a constant: no recorded function made it, and it has no part for each example."""
        if self.left_torch or self._is_made(tensor) or not self.filled.is_cached(tensor, self._num_examples):
            return False
        self.add_constant(tensor)
        return True

    def _becomes_known(self, tensor: Tensor) -> bool:
        """True if a tensor with a gradient turns out to be a source or a constant, which no recorded call made.

        A source is the result of an ``autograd.Function``: its forward, recorded without a gradient, used parameters
        and constants alone, and its backward goes to these. A constant is a new ``nn.Parameter`` over the memory of a
        constant, or what is computed from one.
        """
        if tensor.grad_fn is None:
            return type(tensor) is nn.Parameter and id(tensor) not in self.sources and self._shares_constant(tensor)
        known = self._constants.get(id(tensor))
        if known is None or known[1] != tensor._version:
            return False
        leaves = leaves_below(tensor.grad_fn)
        trained = [leaf for leaf in leaves if self.source(leaf) is not None]
        if not all(self.is_constant(leaf) or self.source(leaf) is not None for leaf in leaves):
            return False
        if trained:
            self._add_source(tensor, trained, rearranged=False)
        return True

    def _shares_constant(self, parameter: Tensor) -> bool:
        """True if a new parameter has the memory of a constant, or that of a known parameter without its gradient."""
        known = (t for t, version in self._constants.values() if t._version == version)
        trained = (source.tensor for source in self.sources.values() if source.version == source.tensor._version)
        where = parameter.data_ptr(), parameter.numel(), parameter._version
        if not any((t.data_ptr(), t.numel(), t._version) == where for t in chain(known, trained)):
            return False
        self.add_constant(parameter)
        return True


_names = attrgetter("names")
