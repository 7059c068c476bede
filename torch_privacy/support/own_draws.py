# SPDX-License-Identifier: Apache-2.0
"""Draws random numbers of ours on the processor: those of the user's code may be replaced, as in a rehearsal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

are_ours: ContextVar[bool] = ContextVar("are_ours", default=False)  # the numbers that are drawn now


@contextmanager
def _ours() -> Iterator[None]:
    token = are_ours.set(True)
    try:
        yield
    finally:
        are_ours.reset(token)


def randn(*size: Any, generator: torch.Generator, dtype: torch.dtype | None = None) -> Tensor:
    """Returns standard normal numbers, as ``torch.randn``."""
    with _ours():
        return torch.randn(*size, generator=generator, dtype=dtype, device="cpu")


def randint(*limits_and_size: Any, generator: torch.Generator) -> Tensor:
    """Returns whole numbers, as ``torch.randint``."""
    with _ours():
        return torch.randint(*limits_and_size, generator=generator, device="cpu")


def randperm(n: int, *, generator: torch.Generator) -> Tensor:
    """Returns a permutation (n,), as ``torch.randperm``."""
    with _ours():
        return torch.randperm(n, generator=generator, device="cpu")
