# SPDX-License-Identifier: Apache-2.0
"""Peak of the memory that tensors take in a step: non-private, ours on the first batches, and ours from then on.

    python benchmarks/memory.py                     # the networks of docs/benchmarks.md
    python benchmarks/memory.py gpt cifar_cnn       # some
    python benchmarks/memory.py gpt --budget 1.5    # with another ``memory_budget``

Counted is what torch allocates and frees, as its profiler reports it, above the loaded model and its batch: the same
on every run, whatever malloc makes of it. The first two batches are those on which layouts are measured and proved.
"""

import argparse
import warnings
from collections.abc import Callable

import step
from models import MODELS

from torch_privacy.experiments.papers.bu2021.measure import peak_bytes
from torch_privacy.jacobian.tape import MEMORY_BUDGET

NETWORKS = ["adult", "mlp", "mnist_cnn", "cifar_cnn", "resnet20_gn", "gpt", "bilstm_imdb", "gpt2_small"]


def peak(make_step: Callable[[], object]) -> float:
    """MiB that one step takes at most beyond what it began with."""
    return peak_bytes(make_step) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of one training step.")
    parser.add_argument("networks", nargs="*", metavar="network", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--budget", type=float, default=MEMORY_BUDGET, help="memory_budget of ours")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{'':14}{'non-private':>12}{'ours':>9}{'ratio':>7}{'first batches':>15}{'ratio':>7}   MiB")
    for network in chosen.networks or NETWORKS:
        plain = step.non_private(step.Place().load(network))
        plain()
        base = peak(plain)
        ours = step.ours_without_noise(step.Place().load(network), chosen.budget)
        first = max(peak(ours) for _ in range(2))
        settled = sorted(peak(ours) for _ in range(3))[1]  # a spot check may fall on one
        ratios = settled / base, first / base
        print(f"{network:14}{base:12.1f}{settled:9.1f}{ratios[0]:7.2f}{first:15.1f}{ratios[1]:7.2f}", flush=True)


if __name__ == "__main__":
    main()
