# SPDX-License-Identifier: Apache-2.0
"""Sets and restores the random state, so that the user's code can be run repeatedly."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .validate import Refused

LONGEST_WAIT = 600.0  # seconds until a thread gives up to wait for another one's batch


def seed_random_numbers(seed: bytes) -> int:
    """Seeds the random numbers of torch (every device in use), numpy and Python with a secret seed.

    Torch's CPU generator gets its full state: ``manual_seed`` uses only 32 bits, which an attacker can enumerate.

    Returns:
        The value that ``torch.initial_seed()`` returns from now on, until a seed is set.
    """
    stream = hashlib.shake_256(seed).digest(8 * (_STATE_WORDS // 2) + 72)
    mark = int.from_bytes(stream[:7], "little")
    _SEED[0], _WORDS[:] = mark, np.frombuffer(stream, np.uint32, _STATE_WORDS, offset=72)
    torch.default_generator.set_state(_STATE)
    for generator in _device_generators():
        generator.manual_seed(int.from_bytes(stream[8:16], "little") >> 1)
    np.random.seed(np.frombuffer(stream, np.uint32, 8, offset=8))
    random.seed(stream[40:72])
    return mark


# In numpy since 1.24, but missing from its type stubs.
numpy_generator: Any = vars(np.random)["get_bit_generator"]
set_numpy_generator: Any = vars(np.random)["set_bit_generator"]
_numpy_bytes, _python_bits = np.random.bytes, random.getrandbits  # rehearsals replace those of the modules
_STATE_WORDS = 624  # size of the state of a Mersenne Twister
_STATE = torch.Generator().manual_seed(0).get_state()  # nothing has been drawn yet; seeds write into it
_SEED = _STATE[:8].numpy().view(np.int64)
_WORDS = _STATE[24 : 24 + 8 * _STATE_WORDS].numpy().view(np.int64)


def _device_generators() -> list[torch.Generator]:
    """Returns torch's global generators of the accelerators in use."""
    found: list[torch.Generator] = []
    for device in (torch.cuda, torch.xpu, vars(torch).get(torch._C._get_privateuse1_backend_name())):
        if device is not None and device.is_initialized() and device.is_available():
            found += device.default_generators
    if torch.backends.mps.is_available():
        found.append(torch.mps._get_default_mps_generator())
    return found


def torch_generators() -> list[tuple[torch.Generator, Tensor]]:
    """Returns torch's global generators with their states."""
    return [(g, g.get_state()) for g in (torch.default_generator, *_device_generators())]


class RandomState:
    """Keeps the present state of the random generators of torch, numpy and Python."""

    def __init__(self) -> None:
        self._torch = torch_generators()
        self._numpy: Any = np.random.get_state()
        self._python = random.getstate()

    def restore(self) -> None:
        """Restores the generators."""
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


def random_position() -> tuple[Any, ...]:
    """Returns a value that identifies the generators' positions; draws from those of numpy and Python."""
    states = [state.numpy().tobytes() for _, state in torch_generators()]
    return *states, _numpy_bytes(8), _python_bits(64)


class _OneThread:
    """Lets one thread at a time replace the random state, which torch, numpy and Python have once for all threads.

    A user is a `SeededRandomNumbers`, from its first numbers to its end.

    Attributes:
        spare: numpy's generators, to be reused: making one takes as long as the forward of a small layer.
    """

    def __init__(self) -> None:
        self.spare: list[Any] = []
        self.reset()

    def reset(self) -> None:
        """Forgets all threads, as in a forked process, which has one."""
        self._changed = threading.Condition()
        self._users: weakref.WeakKeyDictionary[Any, threading.Thread] = weakref.WeakKeyDictionary()

    def enter(self, user: Any) -> None:
        """Returns when no other living thread has a user.

        Raises:
            Refused: another thread has kept its batch for ten minutes.
        """
        thread = threading.current_thread()
        with self._changed:
            free, waited = not self._others(thread), 0.0
            while not free:
                if waited >= LONGEST_WAIT:
                    raise Refused(
                        f"PrivateTraining: a batch of another training has waited for its step for {LONGEST_WAIT:g} "
                        f"seconds, in thread {self._others(thread)[0].name!r}. Random numbers are set up for that one, "
                        "and all threads share them. Call its step, end its loop, or train in separate processes."
                    )
                free = self._changed.wait_for(lambda: not self._others(thread), timeout=1.0)
                waited += 1.0
            self._users[user] = thread

    def leave(self, user: Any) -> None:
        """Lets other threads go on."""
        with self._changed:
            self._users.pop(user, None)
            self._changed.notify_all()

    def after(self, user: Any) -> Any:
        """Returns the user that entered next after this one, and has not left; None if there is none."""
        with self._changed:
            users = [*self._users]
            return next(iter(users[users.index(user) + 1 :]), None) if user in users else None

    def users_here(self) -> list[Any]:
        """Returns the users of this thread."""
        if not self._users:
            return []
        with self._changed:
            return [user for user, thread in self._users.items() if thread is threading.current_thread()]

    def _others(self, thread: threading.Thread) -> list[threading.Thread]:
        if not self._users:
            return []
        return [user for user in self._users.values() if user is not thread and user.is_alive()]


_ONE_THREAD = _OneThread()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ONE_THREAD.reset)


class SeededRandomNumbers:
    """Makes random numbers a function of a secret seed until ``close``, which restores the earlier random state.

    Dropout and augmentation then draw numbers that cannot be predicted, and repeat if the seed is the same. Another
    thread that makes one waits until this one is closed.

    Args:
        seed: secret.
        owner: what makes them; no other owner in this thread may, see `owned_by_another`.
    """

    def __init__(self, seed: bytes, owner: object = None):
        self.owner = None if owner is None else weakref.ref(owner)
        _ONE_THREAD.enter(self)
        self._torch = torch_generators()
        self._numpy = numpy_generator()
        self._python = random.getstate()
        set_numpy_generator(_ONE_THREAD.spare.pop() if _ONE_THREAD.spare else np.random.MT19937(0))
        self._mark: int | None = seed_random_numbers(seed)

    @property
    def was_seeded(self) -> bool:
        """True if ``torch.manual_seed`` was called since."""
        return self._mark is not None and torch.initial_seed() != self._mark

    def begin(self, seed: bytes) -> None:
        """Starts again with this seed."""
        self._mark = seed_random_numbers(seed)

    def close(self) -> None:
        """Restores the generators; a second call does nothing.

        If a later one is open, because this one's loop was left behind by a thread that has ended, that one restores
        them when it is closed.
        """
        if self._mark is None:
            return
        self._mark = None
        later = _ONE_THREAD.after(self)
        if later is not None:
            _ONE_THREAD.spare.append(later._numpy)
            later._torch, later._numpy, later._python = self._torch, self._numpy, self._python
        else:
            for generator, state in self._torch:
                generator.set_state(state)
            _ONE_THREAD.spare.append(numpy_generator())
            set_numpy_generator(self._numpy)
            random.setstate(self._python)
        _ONE_THREAD.leave(self)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Makes random numbers a function of a public seed inside of the ``with`` block; other threads wait meanwhile.

    Torch draws what it draws after ``torch.manual_seed(seed)``.
    """
    numbers = SeededRandomNumbers(f"public seed {seed}".encode())
    try:
        torch.manual_seed(seed)
        yield
    finally:
        numbers.close()


def owned_by_another(owner: object) -> bool:
    """True if another owner has made random numbers in this thread, and has not closed them."""
    if not _has_other_owner(owner):
        return False
    gc.collect()  # closes those of a loop that was left, and that a cycle of references keeps
    return _has_other_owner(owner)


def _has_other_owner(owner: object) -> bool:
    for user in _ONE_THREAD.users_here():
        if user.owner is not None and user.owner() not in (None, owner):
            return True
    return False


_RECORDING_DISABLED: ContextVar[bool] = ContextVar("recording_disabled", default=False)


@contextmanager
def recording_disabled() -> Iterator[None]:
    """Lets the model run on other data than the pending batch of a training, without being recorded."""
    token = _RECORDING_DISABLED.set(True)
    try:
        yield
    finally:
        _RECORDING_DISABLED.reset(token)


def is_recording_disabled() -> bool:
    """True inside of ``recording_disabled``."""
    return _RECORDING_DISABLED.get()


@contextmanager
def frozen(parameters: Mapping[str, Tensor], *, except_for: Collection[str]) -> Iterator[None]:
    """Freezes all parameters except for those with these names."""
    others = [p for name, p in parameters.items() if name not in except_for]
    for p in others:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in others:
            p.requires_grad_(True)


@contextmanager
def in_eval(modules: Collection[nn.Module]) -> Iterator[None]:
    """Puts these modules, but not their children, in eval mode."""
    before = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training
