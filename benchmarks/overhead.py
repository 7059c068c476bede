# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of recording per call of a torch function: a tiny forward with and without ``tp.record``.

    python benchmarks/overhead.py            # exits with 1 if a chain is above the target
    python benchmarks/overhead.py --rounds 20

Prints microseconds per call: of the plain forward, and those added by ``tp.record``; for comparison, those added by
a mode that only forwards every call, a lower bound for any recording in Python. The time to create and enter the
tape, once per step, is printed separately. Ops are so small that their arithmetic is negligible. All are minima
over rounds in which the modes take turns, of processor time in one thread, which other programs hardly disturb.
"""

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import torch_privacy as tp

TARGET = 15.0  # microseconds per call


class Sums(nn.Module):
    """Computes one product with a parameter, then ``x + 1`` many times: calls without parameters."""

    def __init__(self, calls: int):
        super().__init__()
        self.scale, self.calls = nn.Parameter(torch.ones(4)), calls

    def forward(self, x: Tensor) -> Tensor:
        x = self.scale * x
        for _ in range(self.calls - 1):
            x = x + 1
        return x


class PassAll(TorchFunctionMode):
    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*args, **(kwargs or {}))


CHAINS: dict[str, tuple[nn.Module, int]] = {
    "200 sums x + 1": (Sums(200), 200),
    "100 linear layers 4 x 4": (nn.Sequential(*(nn.Linear(4, 4) for _ in range(100))), 100),
}
MODES: dict[str, Callable[[nn.Module], AbstractContextManager]] = {
    "plain": lambda model: nullcontext(),
    "empty mode": lambda model: PassAll(),
    "tp.record": tp.record,
}


def seconds(mode: AbstractContextManager, model: nn.Module, x: Tensor) -> float:
    """Returns the seconds of only the forward, inside the mode."""
    with mode:
        start = time.process_time()
        model(x)
        return time.process_time() - start


def entering_seconds(model: nn.Module) -> float:
    start = time.process_time()
    with tp.record(model):
        return time.process_time() - start


def least(model: nn.Module, rounds: int) -> dict[str, float]:
    """Returns the shortest microseconds of one forward in each mode, and of entering the tape."""
    x = torch.ones(2, 4)
    taken: dict[str, list[float]] = {name: [] for name in (*MODES, "entering")}
    for _ in range(rounds):
        for name, mode in MODES.items():
            taken[name].append(seconds(mode(model), model, x))
        taken["entering"].append(entering_seconds(model))
    return {name: 1e6 * min(values) for name, values in taken.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Recording overhead per call of a torch function.")
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}; microseconds per call; target for recording: below {TARGET:g}")
    print(f"{'':24} {'plain':>7} {'empty mode adds':>16} {'tp.record adds':>15} {'entering, per step':>19}")
    worst = 0.0
    for name, (model, calls) in CHAINS.items():
        taken = least(model, rounds)
        plain, empty, recorded = (taken[mode] / calls for mode in MODES)
        print(f"{name:24} {plain:7.2f} {empty - plain:16.2f} {recorded - plain:15.2f} {taken['entering']:19.0f}")
        worst = max(worst, recorded - plain)
    return int(worst >= TARGET)


if __name__ == "__main__":
    sys.exit(main())
