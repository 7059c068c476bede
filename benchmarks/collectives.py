# SPDX-License-Identifier: Apache-2.0
"""Counts the collectives of one step, ordinary and private, and their bytes: the table of docs/scaling.md.

    python benchmarks/collectives.py              # two ranks: FSDP2 by layer and at the root, DDP
    python benchmarks/collectives.py --ranks 4    # with HSDP, two replicas of two shards

Everything is counted, nothing is measured: the table is the same on every machine. An ordinary step is forward and
backward with float32; a private one is all of ``PrivateTraining``, with the messages in which ranks agree. The bytes
are those of the whole vector that a collective gathers or scatters, and twice those of one that it reduces everywhere:
in a ring each of N ranks sends (N - 1)/N of them. ``settled`` is a step without rehearsals, ``first`` the very first;
the last column has their bytes over those of the ordinary one.

Opacus 1.6 needs 1.67 times FSDP2's bytes on the network with 1,699 parameters, sharded by layer (two backwards; 9
all-gathers and 6 reduce-scatters instead of 6 and 3): counted in the same way, not printed here.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1] / "tests")  # instead of this file's folder, which has another `collectives`

from collectives import NETWORKS, Collective, Counted, counted, num_bytes, numbers_of_calls  # noqa: E402
from gloo_pool import Launcher  # noqa: E402

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "message")
HEAD = ("network", "wrapped in", "step", *KINDS, "bytes", "ratio")


def rows(name: str, how: str, found: Counted) -> Iterator[tuple[str, ...]]:
    """Yields a row for the ordinary step, a settled one and the first."""
    steps = {"ordinary": found.ordinary, "settled": found.settled(), "first": found.private[0]}
    for title, step in steps.items():
        yield name, how, title, *cells(step), f"{found.ratio(step):.3f}"


def cells(step: list[Collective]) -> list[str]:
    found = numbers_of_calls(step)
    return [*(str(found[kind]) for kind in KINDS), f"{num_bytes(step):,}"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Collectives of a private step and their bytes.")
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    wrappers = ["layers", "root", "ddp", *(["hsdp"] if ranks % 2 == 0 and ranks > 2 else [])]
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    with Launcher() as launcher, launcher.pool(ranks) as pool:
        for name in NETWORKS:
            for how in wrappers:
                for row in rows(name, how, pool.run(counted, name, how, timeout=120)[0]):
                    print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
