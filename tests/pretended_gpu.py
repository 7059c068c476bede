# SPDX-License-Identifier: Apache-2.0
"""Provides ``pretend:0``, a device in pure Python that behaves like a GPU where a GPU finds mistakes.

Its memory is the CPU's and so are its numbers, bit for bit. Its rules are CUDA's: tensors of two devices do not meet
(`MixedDevices`); what makes the host wait for the device is counted, or refused (`HostWaits`); the device has a random
generator of its own; and backwards run in a thread of their own. There is one such device, because torch's autograd
has one queue for a device in Python; the CPU is the second where a model lies on two.

    register(); model.to(NAME)
    with watched() as log: ...          # log.waits: Counter of (kind, op, "file.py:line")

Nothing here shows that a kernel of a GPU is right, fast or repeatable: only a GPU does.
"""

from __future__ import annotations

import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import return_and_correct_aliasing

NAME = "pretend"
CPU = torch.device("cpu")

# Their results are needed on the host: values, or shapes that depend on values.
WAITING = frozenset(
    "_local_scalar_dense nonzero masked_select _unique _unique2 unique_dim unique_consecutive bincount equal histc "
    "multinomial _linalg_eigh _linalg_svd _linalg_solve_ex".split()
)
COPIES = frozenset({"_to_copy", "copy_", "_copy_from", "_foreach_copy_"})
INDEXED = frozenset(
    {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
)  # take indices of the CPU
TAKES_CPU = frozenset({"_pack_padded_sequence"})  # must be given a tensor of the CPU
NO_NUMBERS = frozenset({"cat", "stack", "mm", "bmm", "gather", "index_select", "embedding", "searchsorted"})
NOT_REGISTERED = ("sparse", "quantized", "cudnn", "nested", "from_file")


class MixedDevices(RuntimeError):
    """Raised where tensors of two devices meet that CUDA keeps apart."""


class HostWaits(RuntimeError):
    """Raised, if asked for, where the host would wait for the device."""


class Log:
    """What ran on the device: ops, threads, and places where the host waited, as (kind, op, place)."""

    def __init__(self, refuses: bool):
        self.refuses = refuses
        self.waits: Counter[tuple[str, str, str]] = Counter()
        self.ops: Counter[str] = Counter()
        self.threads: set[int] = set()

    def wait(self, kind: str, op: str) -> None:
        """Counts or refuses one wait of the host."""
        place = place_of_caller()
        self.waits[kind, op, place] += 1
        if self.refuses:
            raise HostWaits(f"{kind} by {op} at {place}")

    @property
    def library_waits(self) -> dict[tuple[str, str, str], int]:
        """Returns the waits that torch_privacy itself causes."""
        return {key: count for key, count in self.waits.items() if not key[2].startswith("/")}


_LOGS: list[Log] = []


@contextmanager
def watched(*, refuses: bool = False) -> Iterator[Log]:
    """Gives a log of what runs on the device inside; the innermost one counts."""
    _LOGS.append(Log(refuses))
    try:
        yield _LOGS[-1]
    finally:
        _LOGS.pop()


def place_of_caller(package: str = "torch_privacy") -> str:
    """Returns the innermost line of the package on this thread's stack, else of a file that is not torch's."""
    frame, first = sys._getframe(1), None
    while frame is not None:
        file = frame.f_code.co_filename
        if f"/{package}/" in file:
            return f"{file.rpartition(f'/{package}/')[2]}:{frame.f_lineno}"
        if first is None and "/torch/" not in file and file != __file__:
            first = f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return first or "/autograd"


class PretendedTensor(torch.Tensor):
    """A tensor on the device; ``raw`` holds its numbers on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # modes see plain torch functions
    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor, requires_grad: bool = False) -> PretendedTensor:
        out = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
            requires_grad=requires_grad,
        )
        out.raw = raw
        return out

    def untyped_storage(self) -> Any:
        return self.raw.untyped_storage()

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def tolist(self) -> Any:  # torch refuses it for subclasses before it dispatches anything
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")
        return self.detach().cpu().numpy()

    def __array__(self, *args: Any) -> Any:
        return self.numpy()

    def __repr__(self, **_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"PretendedTensor({self.raw}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = self.detach().clone()
        copy = copy.requires_grad_(self.requires_grad) if self.is_leaf else copy
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        return memo.setdefault(id(self), copy)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs an op on the CPU's numbers of its tensors, by the device's rules; wraps what it returns."""
    name = func._schema.name.partition("::")[2]
    call = _Call(name, args, kwargs)
    log = _LOGS[-1] if _LOGS else Log(refuses=False)
    log.ops[name] += 1
    log.threads.add(threading.get_ident())
    call.check_devices(log)
    call.count_waits(log)
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if kwargs.get("device") is not None:
        kwargs["device"] = CPU if call.onto_us else kwargs["device"]
    with _drawing() if call.is_random(func, kwargs) else nullcontext():
        args_there, kwargs_there = _raw(tuple(args)), {key: _raw(value) for key, value in kwargs.items()}
        if call.ours and name in PRODUCTS:
            setting, factors = PRODUCTS[name]
            if setting().fp32_precision == "tf32":
                args_there = [_to_tf32(t) if k in factors else t for k, t in enumerate(args_there)]
        out = _BY_HAND.get(name, func)(*args_there, **kwargs_there)
    if call.to_host or not (call.onto_us or call.ours):
        return out
    out = (_wrapped(out[0]), out[1]) if name == "_pack_padded_sequence" else _wrapped(out)  # sizes stay on the CPU
    return return_and_correct_aliasing(func, tuple(args), dict(kwargs), out) if call.ours else out


class _Call:
    """The tensors of one op call, sorted by device."""

    def __init__(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]):
        self.name, self.args, self.kwargs = name, args, kwargs
        self.tensors = tensors = _tensors((*args, *kwargs.values()))
        self.ours = [t for t in tensors if isinstance(t, PretendedTensor)]
        self.theirs = [t for t in tensors if not isinstance(t, PretendedTensor) and t.device == CPU]
        onto = kwargs.get("device")
        self.onto = None if onto is None else torch.device(onto)
        self.onto_us = self.onto is not None and self.onto.type == NAME
        self.to_host = False
        if name in COPIES and self.ours:
            first = tensors[0] if name != "_foreach_copy_" else args[0][0]
            to_host = self.onto is not None and not self.onto_us
            self.to_host = to_host if name == "_to_copy" else not isinstance(first, PretendedTensor)

    def check_devices(self, log: Log) -> None:
        """Refuses tensors of two devices."""
        in_lists = self.name.startswith("_foreach_") and self.name.endswith("_")  # torch then goes tensor by tensor
        if self.name in COPIES or in_lists:
            return
        generator = self.kwargs.get("generator")
        bad = generator is not None and bool(self.ours or self.onto_us) and generator._cdata not in _GENERATORS
        if self.ours and self.theirs and self.name not in TAKES_CPU:
            if self.name in INDEXED and isinstance(self.args[0], PretendedTensor):
                if any(t.ndim for t in self.theirs):
                    log.wait("hidden copy of an index", self.name)
            else:
                bad |= self.name in NO_NUMBERS or any(t.ndim for t in self.theirs)  # takes the CPU's numbers
        if bad:
            found = [(str(t.device), tuple(t.shape)) for t in self.tensors]
            raise MixedDevices(f"{self.name} of {found} at {place_of_caller()}")

    def count_waits(self, log: Log) -> None:
        """Counts what makes the host wait: copies from the device, blocking copies to it, and values that it needs."""
        if self.ours and (self.name in WAITING or self._repeats_by_values()):
            log.wait("wait", self.name)
        elif self.ours and self.name in INDEXED and any(t.dtype in (torch.bool, torch.uint8) for t in self._indices()):
            log.wait("wait (boolean index)", self.name)
        elif self.to_host:
            log.wait("device -> host", self.name)
        elif self.name in COPIES and self.theirs and (self.onto_us or self.ours) and not self._is_non_blocking():
            log.wait("host -> device", self.name)

    def _repeats_by_values(self) -> bool:
        return self.name == "repeat_interleave" and self.kwargs.get("output_size") is None

    def _indices(self) -> list[Tensor]:
        return _tensors(self.args[1:2])

    def _is_non_blocking(self) -> bool:
        return bool(
            self.kwargs.get("non_blocking") or (self.name in ("copy_", "_foreach_copy_") and self.args[2:3] == (True,))
        )

    def is_random(self, func: Any, kwargs: Mapping[str, Any]) -> bool:
        """True if the op draws from the device's own generator."""
        draws = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        return draws and bool(self.ours or self.onto_us)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Returns the tensors among an op's arguments, those in lists included; pytree's walk takes longer than the op."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _raw(value: Any) -> Any:
    """Returns a value with the CPU's tensors in place of the device's."""
    if isinstance(value, PretendedTensor):
        return value.raw
    return type(value)(map(_raw, value)) if type(value) in (list, tuple) else value


def _wrapped(value: Any) -> Any:
    """Returns a result with tensors on the device."""
    if type(value) is Tensor:
        return PretendedTensor(value)
    return type(value)(map(_wrapped, value)) if type(value) in (list, tuple) else value


# Products

_MATMUL, _CONV = (lambda: torch.backends.cuda.matmul), (lambda: torch.backends.cudnn.conv)
# Ops that a GPU computes with TensorFloat-32 where a setting allows it: the setting, and the positions of the factors.
PRODUCTS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    **dict.fromkeys(("mm", "bmm"), (_MATMUL, (0, 1))),
    **dict.fromkeys(("addmm", "addmm_", "baddbmm", "baddbmm_"), (_MATMUL, (1, 2))),
    "convolution": (_CONV, (0, 1)),
    "convolution_backward": (_CONV, (0, 1, 2)),
}


def _to_tf32(value: Any) -> Any:
    """Rounds a float32 tensor to the 10 bits of a TensorFloat-32's mantissa, to nearest."""
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return value
    bits = value.contiguous().view(torch.int32)
    rounded = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(value.isfinite(), rounded, value)


# Random numbers

_GENERATORS: set[int] = set()  # those of the device


@contextmanager
def _drawing() -> Iterator[None]:
    """Lets ops inside draw from the device's generator in place of the CPU's."""
    (ours,), cpus = getattr(torch, NAME).default_generators, torch.default_generator
    before = cpus.get_state()
    cpus.set_state(ours.get_state())
    try:
        yield
    finally:
        ours.set_state(cpus.get_state())
        cpus.set_state(before)


# Ops that torch has for GPUs only


def _lstm_cell(
    given: Tensor, hidden: Tensor, cx: Tensor, b_given: Tensor | None = None, b_hidden: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    gates = given + hidden + (0 if b_given is None else b_given + b_hidden)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, 1)
    after = cy.tanh()
    to_h = torch.zeros_like(cy) if grad_hy is None else grad_hy
    to_c = to_h * o * (1 - after**2) + (0 if grad_cy is None else grad_cy)
    parts = to_c * g * i * (1 - i), to_c * cx * f * (1 - f), to_c * i * (1 - g**2), to_h * after * o * (1 - o)
    grad = torch.cat(parts, 1)
    return grad, to_c * f, grad.sum(0)


def _gru_cell(
    given: Tensor, hidden: Tensor, hx: Tensor, b_given: Tensor | None = None, b_hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    given, hidden = (given, hidden) if b_given is None else (given + b_given, hidden + b_hidden)
    (r1, z1, n1), (r2, z2, n2) = given.chunk(3, 1), hidden.chunk(3, 1)
    r, z = (r1 + r2).sigmoid(), (z1 + z2).sigmoid()
    n = (n1 + r * n2).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, n2], 1)


def _gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
    r, z, n, hx, hidden_n = workspace.chunk(5, 1)
    to_n = grad_hy * (1 - z) * (1 - n**2)
    to_z, to_r = grad_hy * (hx - n) * z * (1 - z), to_n * hidden_n * r * (1 - r)
    to_given, to_hidden = torch.cat([to_r, to_z, to_n], 1), torch.cat([to_r, to_z, to_n * r], 1)
    return to_given, to_hidden, grad_hy * z, to_given.sum(0), to_hidden.sum(0)


_BY_HAND: dict[str, Callable[..., Any]] = {
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}


# Registration

_LIBRARIES: list[torch.library.Library] = []


def register() -> str:
    """Makes the device known to torch, once a process; returns its name."""
    if _LIBRARIES:
        return NAME
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_backend_module())
    _LIBRARIES.append(torch.library.Library("aten", "IMPL"))
    for full in torch._C._dispatch_get_all_op_names():
        if full.startswith("aten::") and not any(part in full for part in NOT_REGISTERED):
            op, _, overload = full[6:].partition(".")
            found = getattr(getattr(torch.ops.aten, op, None), overload or "default", None)
            arguments = found._schema.arguments if found is not None else ()
            takes_tensors = any("Tensor" in str(argument.type) for argument in arguments)
            if any(argument.name == "device" for argument in arguments) and not takes_tensors:
                _LIBRARIES[0].impl(full[6:], lambda *a, found=found, **k: run(found, a, k), "PrivateUse1")
    copy = torch.ops.aten.copy_.default
    _LIBRARIES[0].impl("_copy_from", lambda src, dst, non_blocking=False: run(copy, (dst, src), {}), "PrivateUse1")
    torch.__future__.set_swap_module_params_on_conversion(True)  # so that module.to() keeps tied weights tied
    return NAME


def _backend_module() -> types.ModuleType:
    """Returns ``torch.pretend``, with its generator; replaces `torch.Generator` by one that knows the device."""

    class Generator(torch.Generator):
        def __new__(cls, device: Any = "cpu") -> Generator:
            ours = str(device).startswith(NAME)
            out = super().__new__(cls, "cpu" if ours else device)
            (_GENERATORS.add if ours else _GENERATORS.discard)(out._cdata)
            return out

    torch.Generator = Generator
    generator = Generator(NAME)
    module = types.ModuleType(f"torch.{NAME}")
    vars(module).update(
        default_generators=(generator,),
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: 1,
        current_device=lambda: 0,
        synchronize=lambda *_: None,
        manual_seed=generator.manual_seed,
        manual_seed_all=generator.manual_seed,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        get_rng_state=lambda *_: generator.get_state(),
        set_rng_state=lambda state, *_: generator.set_state(state),
    )
    return module
