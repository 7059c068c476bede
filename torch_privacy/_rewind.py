# SPDX-License-Identifier: Apache-2.0
"""Running a model as often as one likes without leaving a trace: its tensors, modes and random numbers are put back."""

from __future__ import annotations

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


def seed_everything(seed: int) -> None:
    """Begin the random numbers of torch, numpy and Python anew."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class RandomState:
    """Where the random generators of torch, numpy and Python stand now."""

    def __init__(self) -> None:
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        self._torch = (torch.get_rng_state(), *devices)
        self._numpy: Any = np.random.get_state()
        self._python = random.getstate()

    def restore(self) -> None:
        """Put them back."""
        first, *devices = self._torch
        torch.set_rng_state(first)
        if devices:
            torch.cuda.set_rng_state_all(devices)
        np.random.set_state(self._numpy)
        random.setstate(self._python)

    def moved(self) -> bool:
        """Whether random numbers were drawn since."""
        now = RandomState()
        same = all(torch.equal(a, b) for a, b in zip(self._torch, now._torch, strict=True))
        same = same and all(np.array_equal(a, b) for a, b in zip(self._numpy, now._numpy, strict=True))
        return not same or self._python != now._python


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
