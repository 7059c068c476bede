# SPDX-License-Identifier: Apache-2.0
"""Fixes seeds, dtype and threads, and what the library draws from the system, for tests and for ranks of a pool."""

import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from torch_privacy.support.every_step import AFTER_EVERY_STEP, BEFORE_EVERY_STEP


@contextmanager
def fixed_state(name: str, device: Any = None) -> Iterator[None]:
    """Makes what runs within a function of its name: float64, seed 0, one thread, and keys drawn by the name.

    Every name gets its own keys, because the library remembers the keys with which it has released something.
    """
    if device is None:
        torch.default_generator.manual_seed(0)  # torch.manual_seed also formats the stack for each kind of device: 2 ms
    else:
        torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device(device)
    drawn_by_system = random.Random(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "token_bytes", drawn_by_system.randbytes)
        patch.setattr(secrets, "randbits", drawn_by_system.getrandbits)
        patch.setattr("torch_privacy.jacobian.layouts.codes.system_seed", lambda: drawn_by_system.getrandbits(53))
        yield
    for steps in (BEFORE_EVERY_STEP, AFTER_EVERY_STEP):
        steps._hooks.clear()  # of a training that was left within its loop, and is not collected yet
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
