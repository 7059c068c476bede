# SPDX-License-Identifier: Apache-2.0
"""Compares the time of a step's noise with ``torch.randn`` for as many numbers.

    python benchmarks/noise.py

Prints milliseconds, the smallest of 30 rounds each, for the parameters of the Adult network and of the MLP.
"""

import time
from collections.abc import Callable

import torch

from torch_privacy.noise import Noise

SIZES = {"adult": 2_018, "mlp": 1_796_010}


def best(run: Callable[[], object]) -> float:
    times = []
    for _ in range(30):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


if __name__ == "__main__":
    noise = Noise()
    for name, size in SIZES.items():
        total = torch.zeros(size)
        ours = best(lambda total=total: noise.add_to(0, {"w": total}, stddev=0.1))
        theirs = best(lambda total=total: total.add_(torch.randn(len(total)), alpha=0.1))
        print(f"{name}: {size} numbers, ours {ours:.2f} ms, torch.randn {theirs:.2f} ms")
