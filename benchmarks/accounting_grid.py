# SPDX-License-Identifier: Apache-2.0
"""Prints the widest brackets and the slowest answers of the accountant, on a grid of trainings or at random.

    python benchmarks/accounting_grid.py                # noise, sampling, steps and delta, 5 by 5 by 5 by 3
    python benchmarks/accounting_grid.py --quick        # 3 by 3 by 4 by 2
    python benchmarks/accounting_grid.py --all          # 8 by 8 by 8 by 4
    python benchmarks/accounting_grid.py --random 3000  # random releases of every kind, alone and several together
    python benchmarks/accounting_grid.py --random 500 --seed 7 --kind sketched
    python benchmarks/accounting_grid.py --random 3000 --log FILE   # one line for each answer; goes on where FILE ends

The width of a bracket is ``(high - low) / max(high, SMALL)``: relative, and absolute where epsilon is small. Times are
processor times of a single question with empty caches. Random releases have delta between 1e-2 and 1e-15; events with
known bounds only (`FixedSizeGaussian`, `KnownProfile`, `Repeated`, `ZeroConcentrated`) are left out: nobody knows their
epsilon.
"""

import argparse
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from torch_privacy import privacy
from torch_privacy.privacy.engines import lattice, tilt
from torch_privacy.privacy.pairs import mixture

SMALL = 1e-2  # ε below which a width counts as absolute, a hundredth of it
WIDE, SLOW = 1e-3, 0.1
WORST = 12

Releases = list[tuple[privacy.Event, int]]
Setting = tuple[str, Releases, float]


def cold(releases: Releases, delta: float) -> tuple[privacy.Bracket[float], float]:
    """Returns the bracket and the seconds of processor time, with empty caches."""
    for cache in (tilt._nodes, tilt.term, mixture.base_densities, lattice.pessimistic, lattice.optimistic):
        cache.cache_clear()
    profile = privacy.Profile(releases)
    start = time.process_time()
    answer = profile.epsilon(delta)
    return answer, time.process_time() - start


def grid(sizes: tuple[int, int, int, int]) -> Iterator[Setting]:
    """Yields trainings with equal steps: noise, sampling probability, number of steps and delta."""
    noises, probabilities = np.geomspace(0.3, 100, sizes[0]), np.geomspace(1e-7, 1, sizes[1])
    numbers, deltas = np.geomspace(1, 1e7, sizes[2]), np.geomspace(1e-2, 1e-15, sizes[3])
    for noise, q, steps, delta in itertools.product(noises, probabilities, numbers, deltas):
        yield "grid", [(privacy.SubsampledGaussian(float(noise), float(q)), round(steps))], float(delta)


class Draws:
    """Draws random releases of each kind."""

    def __init__(self, seed: int):
        self._generator = np.random.default_rng(seed)
        replaced = privacy.NeighboringRelation.REPLACE_ONE
        self.kinds: dict[str, Callable[[], Releases]] = {
            "subsampled": self._sampled(lambda noise, q: privacy.SubsampledGaussian(noise, q), 1e6),
            "rare": self._rare,
            "replaced": self._sampled(lambda noise, q: privacy.SubsampledGaussian(noise, q, replaced), 1e5),
            "gaussian": lambda: [(privacy.Gaussian(self._between(0.3, 50)), self._count(1000))],
            "gep": self._sampled(lambda noise, q: privacy.SubsampledGEP(noise, q), 1e5),
            "blocks": self._sampled(lambda noise, q: privacy.SubsampledBlocks((noise, 2 * noise, 7.0), q), 1e5),
            "sketched": self._sketched,
            "group": self._group,
            "pure": self._pure,
            "several": self._several,
        }

    def settings(self, number: int, kinds: list[str]) -> Iterator[Setting]:
        """Yields that many settings, each kind in turn."""
        for kind in itertools.islice(itertools.cycle(kinds), number):
            yield kind, self.kinds[kind](), self._between(1e-15, 1e-2)

    def _between(self, low: float, high: float) -> float:
        return float(np.exp(self._generator.uniform(np.log(low), np.log(high))))

    def _count(self, most: float) -> int:
        return round(self._between(1, most))

    def _sampled(self, make: Callable[[float, float], privacy.Event], most: float) -> Callable[[], Releases]:
        return lambda: [(make(self._between(0.4, 20), self._between(1e-5, 1)), self._count(most))]

    def _rare(self) -> Releases:
        event = privacy.SubsampledGaussian(self._between(0.4, 5), self._between(1e-8, 1e-4))
        return [(event, self._count(1e7))]

    def _sketched(self) -> Releases:
        noise, r, q = self._between(0.5, 15), self._count(500) + 15, self._between(1e-5, 0.3)
        return [(privacy.SubsampledJL(noise, r, q), self._count(1e4))]

    def _group(self) -> Releases:
        size = 1 + self._count(30)
        return [(privacy.SubsampledGroup(self._between(0.6, 20), self._between(1e-5, 0.3), size), self._count(1e5))]

    def _pure(self) -> Releases:
        share = float(self._generator.uniform(0.05, 0.95))
        kinds = [
            privacy.Laplace(self._between(0.3, 100)),
            privacy.RandomizedResponse(self._between(0.01, 3), int(self._generator.integers(2, 9))),
            privacy.FinitePair((share, 1 - share), (share**2, 1 - share**2)),
        ]
        return [(kinds[self._generator.integers(3)], self._count(1000))]

    def _several(self) -> Releases:
        alone = [kind for kind in self.kinds if kind not in ("replaced", "group", "several")]
        return [self.kinds[kind]()[0] for kind in self._generator.choice(alone, self._generator.integers(2, 5))]


def described(releases: Releases) -> str:
    """Returns the releases in one line."""
    return " + ".join(f"{event!r} x {count}" for event, count in releases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--random", type=int, metavar="NUMBER")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append")
    parser.add_argument("--log", type=Path)
    given = parser.parse_args()
    draws = Draws(given.seed)
    sizes = (3, 3, 4, 2) if given.quick else (8, 8, 8, 4) if given.all else (5, 5, 5, 3)
    settings = (
        partial(draws.settings, given.random, given.kind or list(draws.kinds)) if given.random else lambda: grid(sizes)
    )
    cold([(privacy.SubsampledGaussian(1.0, 0.01), 3)], 1e-5)  # imports
    known = dict(map(json.loads, given.log.read_text().splitlines())) if given.log and given.log.exists() else {}
    rows, wide = [], defaultdict(list)
    for kind, releases, delta in settings():
        setting = f"{described(releases)}, delta {delta:.17g}"
        if setting not in known:
            (low, high), seconds = cold(releases, delta)
            known[setting] = low, high, seconds
            if given.log:
                with given.log.open("a") as log:
                    log.write(json.dumps([setting, known[setting]]) + "\n")
        low, high, seconds = known[setting]
        width = (high - low) / max(high, SMALL) if np.isfinite(high) else float(np.isfinite(low))
        rows.append((width, seconds, setting, low, high))
        wide[kind].append(width > WIDE)
    for kind, over in wide.items():
        print(f"{kind}: {sum(over)} of {len(over)} brackets wider than {WIDE:g}")
    for name, column, limit in (("width", 0, WIDE), ("seconds", 1, SLOW)):
        rows.sort(key=lambda row: -row[column])
        over = sum(row[column] > limit for row in rows)
        print(f"\n{name}: worst {rows[0][column]:.2g}; {over} of {len(rows)} ({over / len(rows):.2%}) above {limit:g}")
        for width, seconds, setting, low, high in rows[:WORST]:
            print(f"  [{low:.8g}, {high:.8g}] width {width:.1e}, {1e3 * seconds:.0f} ms: {setting}")
    infinite = sum(not np.isfinite(row[4]) for row in rows)
    print(f"\nmedian {1e3 * float(np.median([row[1] for row in rows])):.1f} ms; {infinite} infinite")


if __name__ == "__main__":
    main()
