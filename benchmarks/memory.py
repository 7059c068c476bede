# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a step once layouts are known: ours, without noise, and non-private training, on a CPU under Linux.

    python benchmarks/memory.py                # the networks of docs/benchmarks.md
    python benchmarks/memory.py gpt cifar_cnn  # some

Four steps come first, two of which measure where the examples sit and keep everything; what they left is given back to
the system (``malloc_trim`` of glibc). Printed is the peak of three more steps above the loaded model, in MiB, each
contender in a process of its own.
"""

import ctypes
import multiprocessing
import sys

import step

NETWORKS = ["mlp", "mnist_cnn", "cifar_cnn", "resnet20_gn", "gpt"]
CONTENDERS = ["non-private", "ours-no-noise"]


def settled_peak(network: str, contender: str) -> float:
    place = step.Place()
    make_step = step.CONTENDERS[contender](place.load(network))
    loaded = step._status("VmRSS")
    for _ in range(4):
        make_step()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    step._reset_peak(place)
    for _ in range(3):
        make_step()
    return (step._peak(place) - loaded) / 2**20


def main(networks: list[str]) -> None:
    context = multiprocessing.get_context("spawn")
    print(f"{'':16}" + "".join(f"{name:>16}" for name in CONTENDERS) + f"{'ratio':>8}")
    for network in networks:
        peaks = []
        for contender in CONTENDERS:
            with context.Pool(1) as pool:
                peaks.append(pool.apply(settled_peak, (network, contender)))
        print(f"{network:16}" + "".join(f"{peak:16.0f}" for peak in peaks) + f"{peaks[1] / peaks[0]:8.2f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or NETWORKS)
