# SPDX-License-Identifier: Apache-2.0
"""Prints the widest bracket and the slowest answer of the accountant on a grid of trainings.

    python benchmarks/accounting_grid.py            # noise, sampling, steps and delta, 5 by 5 by 5 by 3
    python benchmarks/accounting_grid.py --quick    # 3 by 3 by 4 by 2
    python benchmarks/accounting_grid.py --all      # 8 by 8 by 8 by 4

Widths are relative to the upper bound. Where it is below 1e-6, or epsilon is 0, any width is fine. Times are of a
single question with empty caches.
"""

import itertools
import sys
import time

import numpy as np

from torch_privacy import privacy
from torch_privacy.privacy.engines import lattice, tilt
from torch_privacy.privacy.pairs import mixture

NEGLIGIBLE = 1e-6  # ε
WORST = 12


def cold(noise: float, q: float, steps: int, delta: float) -> tuple[privacy.Bracket[float], float]:
    """Returns the bracket and the seconds, with empty caches."""
    for cache in (tilt._nodes, tilt.term, mixture.base_densities, lattice.pessimistic, lattice.optimistic):
        cache.cache_clear()
    profile = privacy.Profile([(privacy.SubsampledGaussian(noise, q), steps)])
    start = time.perf_counter()
    answer = profile.epsilon(delta)
    return answer, time.perf_counter() - start


def main() -> None:
    sizes = (3, 3, 4, 2) if "--quick" in sys.argv else (8, 8, 8, 4) if "--all" in sys.argv else (5, 5, 5, 3)
    noises = np.geomspace(0.3, 100, sizes[0])
    probabilities = np.geomspace(1e-7, 1, sizes[1])
    numbers = np.geomspace(1, 1e7, sizes[2])
    deltas = np.geomspace(1e-2, 1e-15, sizes[3])
    rows = []
    cold(1.0, 0.01, 3, 1e-5)  # imports
    for noise, q, steps, delta in itertools.product(noises, probabilities, numbers, deltas):
        setting = float(noise), float(q), round(steps), float(delta)
        (low, high), seconds = cold(*setting)
        width = (high - low) / high if high > NEGLIGIBLE and np.isfinite(high) else 0.0
        rows.append((width, seconds, setting, low, high))
    for name, column, limit in (("width", 0, 1e-3), ("seconds", 1, 0.1)):
        rows.sort(key=lambda row: -row[column])
        over = sum(row[column] > limit for row in rows)
        print(f"\n{name}: worst {rows[0][column]:.2g}; {over} of {len(rows)} above {limit:g}")
        for width, seconds, (noise, q, steps, delta), low, high in rows[:WORST]:
            setting = f"noise {noise:<7.3g} q {q:<8.2g} steps {steps:<9d} delta {delta:<8.1e}"
            print(f"  {setting} [{low:.8g}, {high:.8g}] width {width:.1e}, {1e3 * seconds:.0f} ms")
    infinite = sum(not np.isfinite(row[4]) for row in rows)
    print(f"\nmedian {1e3 * float(np.median([row[1] for row in rows])):.1f} ms; {infinite} infinite")


if __name__ == "__main__":
    main()
