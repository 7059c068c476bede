# SPDX-License-Identifier: Apache-2.0
"""Running a model as often as one likes without leaving a trace: its tensors, modes and random numbers are put back."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Snapshot:
    """A model's tensors and modes as they are now; takes as much memory as the model."""

    def __init__(self, model: nn.Module):
        self._modes = [(module, module.training) for module in model.modules()]
        slots = [slot for module in model.modules() for slot in (module._parameters, module._buffers)]
        self._slots: list[tuple[dict[str, Any], dict[str, Any]]] = [(slot, dict(slot)) for slot in slots]
        tensors = {id(t): t for slot in slots for t in slot.values() if t is not None and not t.is_inference()}
        self._contents = [(t, t.detach().clone()) for t in tensors.values()]

    def restore(self) -> None:
        """Put everything back."""
        self.restore_tensors()
        for module, training in self._modes:
            module.training = training

    @torch.no_grad()
    def restore_tensors(self) -> None:
        """Put parameters and buffers back; what was not changed is not touched."""
        for slot, before in self._slots:
            slot.clear()
            slot.update(before)
        for tensor, content in self._contents:
            if not _equal(tensor, content):
                tensor.copy_(content)


def begin_random_numbers(seed: bytes) -> int:
    """Begins the random numbers of torch (every device in use), numpy and Python as a function of a secret seed.

    Torch's generator for the CPU is given a whole state: ``manual_seed`` would take 32 bits, which can be tried out.

    Returns:
        What ``torch.initial_seed()`` says from now on, until a seed is set.
    """
    stream = hashlib.shake_256(seed).digest(8 * (_WORDS // 2) + 72)
    mark = int.from_bytes(stream[:7], "little")
    words = np.frombuffer(stream, np.uint32, _WORDS, offset=72).astype(np.int64)
    state = _BEGINNING.clone()
    state[:8].view(torch.int64).fill_(mark)
    state[24 : 24 + 8 * _WORDS].view(torch.int64).copy_(torch.from_numpy(words))
    torch.default_generator.set_state(state)
    for generator in _device_generators():
        generator.manual_seed(int.from_bytes(stream[8:16], "little") >> 1)
    np.random.seed(np.frombuffer(stream, np.uint32, 8, offset=8))
    random.seed(stream[40:72])
    return mark


# numpy has them since 1.24, and its type stubs do not.
_get_bit_generator: Any = vars(np.random)["get_bit_generator"]
_set_bit_generator: Any = vars(np.random)["set_bit_generator"]
_WORDS = 624  # of the Mersenne twister
_BEGINNING = torch.Generator().manual_seed(0).get_state()  # no word was drawn yet


def _device_generators() -> list[torch.Generator]:
    """Torch's global generators of accelerators that are in use."""
    found: list[torch.Generator] = []
    for device in (torch.cuda, torch.xpu):
        if device.is_available() and device.is_initialized():
            found += device.default_generators
    if torch.backends.mps.is_available():
        found.append(torch.mps._get_default_mps_generator())
    return found


def torch_generators() -> list[tuple[torch.Generator, Tensor]]:
    """Torch's global generators, with their states."""
    return [(g, g.get_state()) for g in (torch.default_generator, *_device_generators())]


class RandomState:
    """Where the random generators of torch, numpy and Python stand now."""

    def __init__(self) -> None:
        self._torch = torch_generators()
        self._numpy: Any = np.random.get_state()
        self._python = random.getstate()

    def restore(self) -> None:
        """Put them back."""
        for generator, state in self._torch:
            generator.set_state(state)
        np.random.set_state(self._numpy)
        random.setstate(self._python)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RandomState):
            return NotImplemented
        same = all(torch.equal(a, b) for (_, a), (_, b) in zip(self._torch, other._torch, strict=False))
        same = same and all(np.array_equal(a, b) for a, b in zip(self._numpy, other._numpy, strict=True))
        return same and self._python == other._python

    __hash__ = None  # type: ignore[assignment]


def next_numbers() -> tuple[Any, ...]:
    """Tells where the generators stand, in less time than their whole states; draws from those of numpy and Python."""
    states = [state.numpy().tobytes() for _, state in torch_generators()]
    return *states, np.random.bytes(8), random.getrandbits(64)


class OwnRandomNumbers:
    """Random numbers that are a function of a secret seed, from now until ``close``, which puts back what was before.

    Dropout and augmentation then draw numbers that nobody can compute, and the same ones whenever the seed is the same.
    """

    def __init__(self, seed: bytes):
        self._torch = torch_generators()
        self._numpy = _get_bit_generator()
        self._python = random.getstate()
        _set_bit_generator(_SPARE.pop() if _SPARE else np.random.MT19937(0))
        self._mark: int | None = begin_random_numbers(seed)

    @property
    def was_seeded(self) -> bool:
        """Whether ``torch.manual_seed`` was called since."""
        return self._mark is not None and torch.initial_seed() != self._mark

    def begin(self, seed: bytes) -> None:
        """Begins anew."""
        self._mark = begin_random_numbers(seed)

    def close(self) -> None:
        """Puts the generators back; a second time it does nothing."""
        if self._mark is None:
            return
        self._mark = None
        for generator, state in self._torch:
            generator.set_state(state)
        _SPARE.append(_get_bit_generator())
        _set_bit_generator(self._numpy)
        random.setstate(self._python)


_SPARE: list[Any] = []  # numpy's generators that are free to be used again: a new one takes as long as a small layer


_UNWATCHED: ContextVar[bool] = ContextVar("unwatched", default=False)


@contextmanager
def unwatched() -> Iterator[None]:
    """The model runs on other data than the batch that a training has handed out, and for another purpose."""
    token = _UNWATCHED.set(True)
    try:
        yield
    finally:
        _UNWATCHED.reset(token)


def is_unwatched() -> bool:
    """Whether it does so now."""
    return _UNWATCHED.get()


@contextmanager
def frozen(parameters: Mapping[str, Tensor], *, but: Collection[str]) -> Iterator[None]:
    """The parameters without gradients, but some."""
    others = [p for name, p in parameters.items() if name not in but]
    for p in others:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in others:
            p.requires_grad_(True)


@contextmanager
def in_eval(modules: Collection[nn.Module]) -> Iterator[None]:
    """These modules, and not what is inside of them, in eval mode."""
    before = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same; undefined entries count as the same."""
    if torch.equal(a, b):
        return True
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
