# SPDX-License-Identifier: Apache-2.0
"""Provides what a resumed training needs to repeat the steps after its last checkpoint bit for bit."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..mechanisms.noise import generators


class NotRepeated(Exception):
    """Raised inside of the library if a step that is repeated after a crash differs from its recorded release."""


@dataclass(frozen=True)
class Machine:
    """Holds what may change a release: the number of torch's threads, its version, the processor, and the noise.

    The first three may change the last bits of a sum. Another generator makes other noise from the same key.
    """

    threads: int
    torch: str
    processor: str
    generator: str

    @classmethod
    def here(cls, tensors: Iterable[Tensor]) -> Machine:
        """Returns the machine on which this process runs, with the generators of these tensors' noise."""
        processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        return cls(torch.get_num_threads(), str(torch.__version__), processor, generators(tensors))

    def state(self) -> dict[str, Any]:
        """Returns the machine as plain data."""
        return asdict(self)

    def differences(self, other: Machine) -> str:
        """Returns in words how the other machine differs from this one."""
        names = {
            "threads": "torch's number of threads",
            "torch": "torch",
            "processor": "the processor",
            "generator": "the noise's generator",
        }
        pairs = [(text, getattr(self, name), getattr(other, name)) for name, text in names.items()]
        return ", ".join(f"{text} was {before} and is {now}" for text, before, now in pairs if before != now)


@contextmanager
def number_of_threads(number: int | None) -> Iterator[None]:
    """Sets torch's number of threads within the ``with`` block; None leaves it unchanged."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
