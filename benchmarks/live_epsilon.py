# SPDX-License-Identifier: Apache-2.0
"""Measures the share of a training's time that the epsilon next to the terminal's progress bar takes.

    OMP_NUM_THREADS=1 python benchmarks/live_epsilon.py [--experiments adult gdp-mnist] [--seconds 20]

Each experiment trains in a temporary folder and reports its epsilon in every step, as on a terminal. Prints
the medians of a step's time and of a price's, how many prices were computed, and their share of the time, in total and
without the first, which is computed while nothing is cached. Other programs on the machine hardly change a share.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from torch_privacy.cli.progress import SHARE, EpsilonAhead
from torch_privacy.experiments.runner import Run


def measure(experiment: str, seconds: float) -> tuple[list[float], list[float]]:
    """Returns the seconds of each step, including the live epsilon, and of each price."""
    steps: list[float] = []
    prices: list[float] = []
    ahead = EpsilonAhead()
    with tempfile.TemporaryDirectory() as folder:
        run = Run.start(Path(folder) / "run", experiment)

        def price(num_steps: int) -> float:
            start = time.perf_counter()
            epsilon = run.epsilon_high(num_steps)
            prices.append(time.perf_counter() - start)
            return epsilon

        start = last = time.perf_counter()
        for progress in run.steps():
            if progress.training != "private" or last - start > seconds:
                break
            ahead.bound(progress.step, progress.num_steps, price)
            now = time.perf_counter()
            steps.append(now - last)
            last = now
        run.close()
    return steps, prices


def main() -> None:
    parser = argparse.ArgumentParser(description="Share of a training's time that the live epsilon takes.")
    parser.add_argument("--experiments", nargs="+", default=["adult", "gdp-mnist", "gdp-imdb"])
    parser.add_argument("--seconds", type=float, default=20.0)
    chosen = parser.parse_args()
    print(f"| experiment | step, ms | price, ms | prices | share of the time | without the first | aim: {SHARE:.0%} |")
    print("|---|---|---|---|---|---|---|")
    for experiment in chosen.experiments:
        steps, prices = measure(experiment, chosen.seconds)
        total, later = sum(prices) / sum(steps), sum(prices[1:]) / sum(steps)
        verdict = "reached" if later < SHARE else "missed"
        print(
            f"| {experiment} | {1e3 * statistics.median(steps):.2f} | {1e3 * statistics.median(prices):.2f} | "
            f"{len(prices)} in {len(steps)} steps | {total:.2%} | {later:.2%} | {verdict} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
