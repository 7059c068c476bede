# SPDX-License-Identifier: Apache-2.0
"""Inputs of calls under saved-tensor hooks, as of activation checkpointing: made again in the backward, not held.

Under such hooks autograd hands each tensor that it saves to ``pack``, and gets it back from ``unpack`` when the
backward reaches the node. Checkpointing packs nothing, and computes its whole part again at the first ``unpack``. So a
recorded call there holds what ``pack`` returned in place of its input, and unpacks the input once its b is known. The
node of the call, which comes next, is then given the same tensor, because hooks need not give it twice.

A part that runs again must run the same ops with the same numbers, or the batch is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ...ops import COMPOSED, AnyLayout, Op, Use
from ...support.own_draws import randint
from ...support.torch_modes import backward_number, is_dense, saves_elsewhere
from ...support.validate import Refused
from .functions import decomposed

SAMPLES = 64  # entries of an input that are compared with those of the forward

_OpKey = tuple[Callable, tuple[int, ...]]


class MadeAgain:
    """Holds what a recorded forward did in parts that run again, to compare and to repeat it in each backward.

    Args:
        parameters: the recorded ones.
        saved_at: where an input of an op is among the tensors that autograd saves for it, as earlier batches showed.

    Attributes:
        differences: of the backward that is running, flags () that say whether an input has other entries than before.
        saved_at: as given, and what this batch shows.
    """

    def __init__(self, parameters: Iterable[Tensor], saved_at: dict[tuple, int]):
        self.differences: list[Tensor] = []
        self.saved_at = saved_at
        self._inside: set[_OpKey] = set()
        self._parameters = {*map(id, parameters)}

    def note_inside(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        """Notes that the inner calls of a function were run in its place, in a part that runs again."""
        self._inside.add(self._key(func, args, kwargs))

    def _key(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> _OpKey:
        return func, tuple(id(t) for t in tree_leaves((args, kwargs)) if id(t) in self._parameters)

    def ran_inside(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
        """True if the inner calls of the function ran in its place before."""
        return self._key(func, args, kwargs) in self._inside

    @contextmanager
    def watching(self, device: torch.device) -> Iterator[None]:
        """Runs backwards in the ``with`` block, in which parts of the forward may run again.

        Raises:
            Refused: they drew from torch's random numbers, an input had other entries than in the forward, or they can
                run again only once.
        """
        before, outer = _random_states(device), self.differences
        self.differences = found = []
        try:
            with _SameOps(self) if self._inside else nullcontext():
                yield
        except RuntimeError as error:
            if "selective activation checkpoint" not in str(error):
                raise
            raise Refused(
                "tape: selective activation checkpointing allows one backward, but rows take several. Leave context_fn "
                "out of checkpoint."
            ) from None
        finally:
            self.differences = outer
        drew = any(not torch.equal(a, b) for a, b in zip(before, _random_states(device), strict=True))
        if drew or (found and bool(torch.stack([flag.to(device) for flag in found]).any())):
            what = "drew random numbers" if drew else "gave an op another input than in the forward"
            raise Refused(
                f"tape: a part under activation checkpointing, or another saved-tensor hook, {what} when it ran "
                "again in the backward, so that its rows are not those of the losses. Leave preserve_rng_state=True, "
                "its default, in checkpoint, and let nothing in that part depend on generators or counts of its own."
            )


class _SameOps(TorchFunctionMode):
    """Runs the inner calls of functions in their place where the recorder did, so that the same tensors are saved."""

    def __init__(self, again: MadeAgain):
        super().__init__()
        self._again = again

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.autograd.grad and not self._again.ran_inside(func, args, kwargs):
            return func(*args, **kwargs)
        with self:  # a backward, too, which is where parts run again
            if func in COMPOSED:
                return COMPOSED[func](_add_nothing, *args, **kwargs)
            inside = decomposed(func)
            assert inside is not None
            return inside(*args, **kwargs)


def _add_nothing(y: Tensor, uses: Any) -> None:
    return None


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.random.get_rng_state()]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        if hasattr(module, "get_rng_state"):
            states.append(module.get_rng_state(device))
    return states


@lru_cache(maxsize=256)
def _places(shape: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    """Returns the indices in each dimension of random places in a tensor."""
    generator = torch.Generator().manual_seed(len(shape))
    places = (randint(max(size, 1), (SAMPLES,), generator=generator) for size in shape)
    return tuple(place.to(device) for place in places)


@torch.no_grad()
def sample(x: Tensor) -> Tensor:
    """Returns some entries of x, always at the same places for tensors of this shape."""
    return x.detach()[_places(x.shape, x.device)] if x.numel() and x.ndim else x.detach().reshape(-1).clone()


@torch.no_grad()
def differ(before: Tensor, now: Tensor) -> Tensor:
    """Returns (), true if samples differ by more than a GPU that adds in another order could make them."""
    if before.shape != now.shape or before.dtype != now.dtype:
        return torch.ones((), dtype=torch.bool, device=now.device)
    tolerance = torch.finfo(now.dtype).eps ** 0.5 if now.is_floating_point() else 0.0
    scale = torch.where(before.isfinite(), before, 0).abs().amax() if before.numel() else 0.0
    same = (before == now) | ((before - now).abs() <= tolerance * scale) | (before.isnan() & now.isnan())
    return ~same.all()


class Packed:
    """One tensor that autograd saved by hooks.

    Args:
        holder: what ``pack`` returned.
        unpack: returns the tensor; once in each backward.
    """

    __slots__ = ("_backward", "_holder", "_taken", "_unpack")

    def __init__(self, holder: Any, unpack: Callable[[Any], Tensor]):
        self._holder, self._unpack = holder, unpack
        self._taken: Tensor | None = None
        self._backward = -1  # number of the backward that `take` was called in

    def take(self) -> Tensor:
        """Returns the tensor, before the backward that is running reaches the node that saved it."""
        if self._taken is None or self._backward != backward_number():
            self._taken, self._backward = self._unpack(self._holder), backward_number()
        return self._taken

    def give(self) -> Tensor:
        """Returns the tensor to the node that saved it."""
        taken, self._taken = self._taken, None
        return taken if taken is not None and self._backward == backward_number() else self._unpack(self._holder)

    def forget(self) -> None:
        """Frees the tensor, if the node did not ask for it."""
        self._taken = None


@contextmanager
def noting_saved() -> Iterator[list[tuple[Tensor, Packed]]]:
    """Yields a list of the tensors that autograd saves by the hooks in place within the ``with`` block.

    Clear it afterwards: the graph holds the hooks, and so the list.
    """
    saved: list[tuple[Tensor, Packed]] = []
    pack, unpack = saves_elsewhere()

    def note(tensor: Tensor) -> Packed:
        packed = Packed(pack(tensor), unpack)
        saved.append((tensor, packed))
        return packed

    with saved_tensors_hooks(note, Packed.give):
        yield saved


def keeping_saved() -> AbstractContextManager:
    """Returns a context for ops that the user's code does not run: their tensors must not pass through its hooks."""
    return nullcontext() if saves_elsewhere() is None else saved_tensors_hooks(_itself, _itself)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class PackedInput:
    """A call's input x that is read from a tensor that autograd saved.

    Attributes:
        packed: the tensor, which holds the same entries as x; perhaps rounded to the type that the op computes in.
        stride: x's strides in the tensor's memory; None if the tensor has x's entries in x's order.
        saved_stride: the tensor's own.
        entries: some of x, in the tensor's type.
        again: receives whether x has other entries when it is made again.
    """

    packed: Packed
    shape: torch.Size
    stride: tuple[int, ...] | None
    saved_stride: tuple[int, ...]
    entries: Tensor
    again: MadeAgain

    def take(self) -> Tensor:
        """Returns x."""
        x = self._x()
        self.again.differences.append(differ(self.entries, sample(x)))
        return x

    def _x(self) -> Tensor:
        saved = self.packed.take().detach()
        if self.stride is None:
            return saved.reshape(self.shape)
        if saved.stride() != self.saved_stride:
            raise Refused(
                "tape: the tensor that a saved-tensor hook returns has other strides than the one it was given, so an "
                "input of an op cannot be found in it. Return a tensor of the same layout from the hook."
            )
        return saved.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class PackedUse(Use):
    """A use with inputs that are not held; in ``use`` tensors without entries take their place.

    Attributes:
        inputs: field of ``use`` -> the input.
    """

    use: Use
    inputs: tuple[tuple[str, PackedInput], ...]

    def example_dims(self, b_ndim: int) -> Sequence[int]:
        return self.use.example_dims(b_ndim)

    def saved(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.use.saved() if not t.is_meta)

    @property
    def padding(self) -> int | None:
        return self.use.padding

    @property
    def kind(self) -> str:
        return f"packed {self.use.kind}"

    def op(self, b: Tensor, layout: AnyLayout) -> Op:
        """Returns the block without entries if b has none: its methods have the same prices."""
        return self._without_entries().op(b, layout) if b.is_meta else self.unpacked().op(b, layout)

    def _without_entries(self) -> Use:
        tensors: dict[str, Any] = {field.name: getattr(self.use, field.name) for field in fields(self.use)}
        return replace(self.use, **{name: without_entries(t) for name, t in tensors.items() if isinstance(t, Tensor)})

    def unpacked(self) -> Use:
        """Returns the use with its inputs."""
        inputs: dict[str, Any] = {name: packed.take() for name, packed in self.inputs}
        return replace(self.use, **inputs)

    @property
    def packed_bytes(self) -> int:
        """Returns the bytes of the inputs that are not held."""
        return sum(t.numel() * t.itemsize for t in self.use.saved() if t.is_meta)

    def forget(self) -> None:
        """Frees inputs that were taken for the use and are still held for the node that saved them."""
        for _, packed in self.inputs:
            packed.packed.forget()


def packed_uses(
    uses: Iterable[Use], saved: Sequence[tuple[Tensor, Packed]], again: MadeAgain, place: int
) -> tuple[Use, ...]:
    """Returns the uses, without those of their inputs that are among the saved tensors and have a node in the graph.

    Others are held, as by checkpointing itself: no backward passes the op on its way to them. ``place`` is the place in
    the code, which an op has in every batch.
    """
    if not saved:
        return tuple(uses)
    return tuple(_packed_use(use, saved, again, (place, number, use.kind)) for number, use in enumerate(uses))


def _packed_use(use: Use, saved: Sequence[tuple[Tensor, Packed]], again: MadeAgain, where: tuple) -> Use:
    found, blank = {}, {}
    for name in (field.name for field in fields(use)):
        x = getattr(use, name)
        if type(x) is Tensor and x.grad_fn is not None and x.layout is torch.strided and name != "weight":
            packed = _in_same_memory(saved, x, again) or _with_equal_entries(saved, x, again, (*where, name, x.dtype))
            if packed is not None:
                found[name], blank[name] = packed, without_entries(x)
    return PackedUse(use.weight, replace(use, **blank), tuple(found.items())) if found else use


def _in_same_memory(saved: Sequence[tuple[Tensor, Packed]], x: Tensor, again: MadeAgain) -> PackedInput | None:
    for tensor, packed in saved:
        if type(tensor) is Tensor and tensor.layout is torch.strided and tensor.numel() == x.numel():
            if tensor.data_ptr() == x.data_ptr() and tensor.dtype == x.dtype and is_dense(tensor) and is_dense(x):
                is_alike = tensor.shape == x.shape and tensor.stride() == x.stride()
                same = is_alike or (tensor.is_contiguous() and x.is_contiguous())
                stride = None if same else x.stride()
                return PackedInput(packed, x.shape, stride, tensor.stride(), sample(x), again)
    return None


def _with_equal_entries(
    saved: Sequence[tuple[Tensor, Packed]], x: Tensor, again: MadeAgain, where: tuple
) -> PackedInput | None:
    """Returns the saved tensor that has x's entries after the op has cast it, as under autocast.

    All entries are compared the first time, for which a GPU must be waited for. Later the tensor saved at the same
    place is taken, and some entries are compared when it is made again.
    """
    like_x = [
        k
        for k, (tensor, _) in enumerate(saved)
        if type(tensor) is Tensor and tensor.is_floating_point() and tensor.numel() == x.numel()
    ]
    if not like_x:
        return None
    number = again.saved_at.get(where)
    if number is None:
        with torch.no_grad():
            equal = [k for k in like_x if torch.equal(saved[k][0].reshape(x.shape), x.to(saved[k][0].dtype))]
        if len(equal) == 1:
            again.saved_at[where] = equal[0]
        number = equal[0] if equal else None
    if number not in like_x:
        return None
    tensor, packed = saved[number]
    return PackedInput(packed, x.shape, None, tensor.stride(), sample(x).to(tensor.dtype), again)


def without_entries(tensor: Tensor) -> Tensor:
    """Returns a tensor with the same shape, strides and type, and without memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def version_of(x: Tensor) -> Tensor:
    """Returns a tensor without entries that shows whether x, which it does not hold, is changed in place."""
    shown = x.detach()
    shown.data = x.new_empty(0)
    return shown
