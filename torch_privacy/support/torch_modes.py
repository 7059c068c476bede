# SPDX-License-Identifier: Apache-2.0
"""Controls torch's modes around the user's code: autocast, torch.compile, hooks for saved tensors; walks its values."""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

from .held_state import SIMPLE

Method = TypeVar("Method", bound=Callable[..., Any])
Change = Callable[[], Callable[[], object] | None]  # returns what undoes it


def tensors_in(tree: Any) -> list[Tensor]:
    """Returns the tensors in nested tuples, lists, mappings and other containers that torch's pytree knows."""
    found: list[Tensor] = []
    stack = [tree]
    while stack:
        value = stack.pop()
        kind = type(value)
        if isinstance(value, Tensor):
            found.append(value)
        elif kind is tuple or kind is list:  # faster than by the pytree
            stack += value[::-1]
        elif kind is dict:
            stack += [*value.values()][::-1]
        elif kind not in SIMPLE:
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor):
                    found.append(leaf)
                elif isinstance(leaf, Mapping):  # a kind that the pytree does not know, such as a tokenizer's output
                    found += tensors_in([*leaf.values()])
    return found


class OpMode(TorchFunctionMode):
    """A mode that may be entered while it is active, in any thread, and left while later modes are still active."""

    def __init__(self) -> None:
        super().__init__()
        self._depths: dict[int, int] = {}  # by thread

    @property
    def _entered(self) -> int:
        return self._depths.get(threading.get_ident(), 0)

    @property
    def is_active(self) -> bool:
        """True if the mode was entered in this thread, and not left."""
        return self._entered > 0

    def __enter__(self) -> Self:
        thread = threading.get_ident()
        depth = self._depths[thread] = self._depths.get(thread, 0) + 1
        if depth == 1:
            super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        thread = threading.get_ident()
        if self._depths.get(thread, 0) > 1:
            self._depths[thread] -= 1
        else:
            self.stop()

    def stop(self) -> None:
        """Leaves the mode in this thread, however often it was entered; does nothing if it is not active."""
        if self._depths.pop(threading.get_ident(), 0):
            for mode in reversed(_above(self)):
                _push_mode(mode)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Makes the mode inactive in this thread within the ``with`` block."""
        if not self._entered:
            yield
            return
        above = _above(self)
        try:
            for mode in reversed(above):
                _push_mode(mode)
            yield
        finally:
            above = [_pop_mode() for _ in above]
            for mode in (self, *reversed(above)):
                _push_mode(mode)


def _above(mode: TorchFunctionMode) -> list[TorchFunctionMode]:
    """Removes a mode and those that were entered after it from this thread's stack; returns the latter, last first."""
    above: list[TorchFunctionMode] = []
    while torch._C._len_torch_function_stack() and (top := _pop_mode()) is not mode:
        above.append(top)
    return above


def without_autocast(device: str) -> AbstractContextManager:
    """Returns a context that turns autocast off on devices of this type."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


class _ForAllThreads:
    """Changes settings that torch has once for all threads: the first to enter does, the last to leave undoes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: dict[Change, int] = {}
        self._undo: dict[Change, Callable[[], object]] = {}

    def enter(self, changes: tuple[Change, ...]) -> None:
        """Makes changes, unless they are made; each returns what undoes it, or None if it cannot be made yet."""
        with self._lock:
            for change in changes:
                self._inside[change] = self._inside.get(change, 0) + 1
                if change not in self._undo and (undo := change()) is not None:
                    self._undo[change] = undo

    def leave(self, changes: tuple[Change, ...]) -> None:
        """Undoes the changes, latest first, where no other is inside."""
        with self._lock:
            for change in reversed(changes):
                self._inside[change] -= 1
                if not self._inside[change] and change in self._undo:
                    self._undo.pop(change)()


_FOR_ALL_THREADS = _ForAllThreads()


class _Changed(AbstractContextManager[None]):
    """Has changes made inside; may be entered again."""

    def __init__(self, *changes: Change):
        self._changes = changes

    def __enter__(self) -> None:
        _FOR_ALL_THREADS.enter(self._changes)

    def __exit__(self, *error: object) -> None:
        _FOR_ALL_THREADS.leave(self._changes)


def _set_others_alone() -> Callable[[], object] | None:
    usual = getattr(parametrize, "_maybe_set", None)
    if usual is None:
        return None

    def set_others(dest: Tensor, src: Tensor) -> None:
        if src is not dest:
            usual(dest, src)

    parametrize._maybe_set = set_others
    return partial(setattr, parametrize, "_maybe_set", usual)


def _run_eagerly() -> Callable[[], object]:
    if "torch._dynamo" in sys.modules:
        return _forced_eager()
    usual, undo = torch.compile, ExitStack()  # dynamo takes a second to import, which only the first compilation needs

    def compile_eagerly(*args: Any, **kwargs: Any) -> Any:
        if torch.compile is compile_eagerly:  # still inside
            torch.compile = usual
            undo.callback(_forced_eager())
        return usual(*args, **kwargs)

    undo.callback(lambda: setattr(torch, "compile", usual))
    torch.compile = compile_eagerly
    return undo.close


# A context in which compiled functions run uncompiled, so that their ops can be recorded. A parameter that the forward
# parametrizes, as adapters of single parameters do, is not set to itself: torch would count that as a write, after
# which it is no longer known for the same parameter.
UNCOMPILED = _Changed(_set_others_alone, _run_eagerly)


def _forced_eager() -> Callable[[], object]:
    return partial(torch.compiler.set_stance("force_eager").__exit__, None, None, None)


# () -> True inside of the transforms of ``torch.func``, such as ``vmap``, where tensors stand for others.
is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active


# Units of rounding of the factors of float32 products, by torch's names: TensorFloat-32 keeps 10 bits, bfloat16 7.
COARSE_EPS = {"tf32": 2.0**-10, True: 2.0**-10, "bf16": 2.0**-7}
# (backend, op) -> torch's setting there, since torch 2.9; its public properties take ten times as long.
_precision_of: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)


def _precision_settings(on_cpu: bool) -> list[tuple[Any, str]]:
    """Returns torch's settings of the precision of float32 products, as objects and names; that of matrices first."""
    backends = torch.backends
    if _precision_of is None:  # one setting for the CPU and matrices on a GPU
        return [(backends.cuda.matmul, "allow_tf32"), *([] if on_cpu else [(backends.cudnn, "allow_tf32")])]
    layers, matmul = (backends.mkldnn,) * 2 if on_cpu else (backends.cudnn, backends.cuda)
    return [(place, "fp32_precision") for place in (matmul.matmul, layers.conv, layers.rnn)]


def _set_full(place: Any, name: str) -> Any:
    """Sets full precision; returns what restores the setting: "none" where it follows a more general one."""
    before = getattr(place, name)
    if name == "allow_tf32":
        setattr(place, name, False)
        return before
    place.fp32_precision = "none"
    inherited = place.fp32_precision
    place.fp32_precision = "ieee"
    return "none" if inherited == before else before


def is_dense(tensor: Tensor) -> bool:
    """True if the entries fill a piece of memory in any order, each place once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def full_precision(device: torch.device) -> AbstractContextManager:
    """Returns a context in which float32 products are computed in float32, where the user's settings allow less.

    A row's norm and its part of the clipped sum come from different products of the same factors. If these are rounded
    to 10 bits, the part exceeds the clip norm by up to 4e-4; in float32 by 2e-7.
    """
    return _Changed(_compute_fully) if device.type != "cpu" or _cpu_multiplies_coarsely() else nullcontext()


def _compute_fully() -> Callable[[], object]:
    """Computes products of float32 in float32."""
    settings = [*_precision_settings(False), *_precision_settings(True)]
    before = [(place, name, _set_full(place, name)) for place, name in settings]

    def restore() -> None:
        for setting in before:
            setattr(*setting)

    return restore


def _cpu_multiplies_coarsely() -> bool:
    """True if torch's settings allow a CPU to compute float32 products with less precision."""
    if _precision_of is None:
        return torch.get_float32_matmul_precision() != "highest"
    for op in ("matmul", "conv", "rnn"):
        if _precision_of("mkldnn", op) in COARSE_EPS:
            return True
    return False


def product_rounding(device: torch.device, *, of_matrices: bool = False) -> float:
    """Returns the relative rounding of factors in the user's own float32 products, if settings allow it; else 0.

    Args:
        device: of the factors.
        of_matrices: products of matrices are meant alone, not those in convolutions and recurrent networks.
    """
    settings = _precision_settings(device.type == "cpu")[: 1 if of_matrices else None]
    return max(COARSE_EPS.get(getattr(*setting), 0.0) for setting in settings)


def exact(method: Method) -> Method:
    """Decorates a method of an object with a ``_device``: no gradients, no autocast, float32 products in float32."""

    @wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() and self._device.type == "cpu" and not torch.is_autocast_enabled("cpu"):
            if not _cpu_multiplies_coarsely():  # most of the time
                return method(self, *args, **kwargs)
        with torch.no_grad(), without_autocast(self._device.type), full_precision(self._device):
            return method(self, *args, **kwargs)

    return guarded  # pyright: ignore[reportReturnType]


# () -> True if autocast is on for some type of device; the question for one type takes longer.
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled

# Returns hooks that tensors pass through when autograd saves them, as with checkpointing or offloading; None if none.
saves_elsewhere: Callable[[], Any] = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)  # type: ignore[attr-defined]

# Returns the number of the backward that is running; -1 if none is.
backward_number: Callable[[], int] = torch._C._current_graph_task_id
