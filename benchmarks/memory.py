# SPDX-License-Identifier: Apache-2.0
"""Measures the peak memory of tensors in a step: non-private, ours on the first batches, and ours afterwards.

    python benchmarks/memory.py                     # the networks of docs/benchmarks.md
    python benchmarks/memory.py gpt cifar_cnn       # some
    python benchmarks/memory.py gpt --budget 1.5    # with another ``memory_budget``
    python benchmarks/memory.py gpt2_small encoder --checkpointed   # each layer under activation checkpointing

Counts torch's allocations as reported by its profiler, above the loaded model and its batch: the same
on every run, independent of malloc. On the first two batches layouts are measured and checked.
"""

import argparse
import warnings
from collections.abc import Callable

import step
from models import MODELS, Problem, checkpointed

from torch_privacy.jacobian.tape import MEMORY_BUDGET
from torch_privacy_papers.bu2021.measure import peak_bytes

NETWORKS = ["adult", "mlp", "mnist_cnn", "cifar_cnn", "resnet20_gn", "gpt", "bilstm_imdb", "gpt2_small"]


def peak(make_step: Callable[[], object]) -> float:
    """Returns the peak MiB of one step above its start."""
    return peak_bytes(make_step) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of one training step.")
    parser.add_argument("networks", nargs="*", metavar="network", help=f"one of {', '.join(MODELS)}")
    parser.add_argument("--budget", type=float, default=MEMORY_BUDGET, help="memory_budget of ours")
    parser.add_argument("--checkpointed", action="store_true", help="with activation checkpointing of each layer")
    chosen = parser.parse_args()

    def load(network: str) -> Problem:
        problem = step.Place().load(network)
        return checkpointed(problem) if chosen.checkpointed else problem

    warnings.simplefilter("ignore")
    print(f"{'':14}{'non-private':>12}{'ours':>9}{'ratio':>7}{'first batches':>15}{'ratio':>7}   MiB")
    for network in chosen.networks or NETWORKS:
        plain = step.non_private(load(network))
        plain()
        base = peak(plain)
        ours = step.ours_without_noise(load(network), chosen.budget)
        first = max(peak(ours) for _ in range(2))
        settled = sorted(peak(ours) for _ in range(3))[1]  # one of them may include a spot check
        ratios = settled / base, first / base
        print(f"{network:14}{base:12.1f}{settled:9.1f}{ratios[0]:7.2f}{first:15.1f}{ratios[1]:7.2f}", flush=True)


if __name__ == "__main__":
    main()
