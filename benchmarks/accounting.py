# SPDX-License-Identifier: Apache-2.0
"""Time and tightness of ε beside other accountants, at q = 256 / 60000 and δ = 1e-5, and of calibration.

    python benchmarks/accounting.py [--quick]

Each row: our ε and the relative width of its bracket; our milliseconds (median, nothing cached); then for each peer its
milliseconds, how many times ours that is, and its over-estimate ``ε - ours``. prv-accountant and Opacus are asked for
ε_error = 0.01 and stop at 1e4 steps (with --quick at 1e3), for they take seconds to minutes beyond. One thread is
fair: OMP_NUM_THREADS=1.
"""

import statistics
import sys
import time
import warnings
from collections.abc import Callable

from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from torch_privacy import privacy
from torch_privacy.privacy import lattice, mixture, tilt

Q, DELTA = 256 / 60000, 1e-5
Row = tuple[float, int]


def timed(run: Callable[[], float], repeats: int) -> tuple[float, float]:
    """Result and median milliseconds."""
    times, result = [], float("nan")
    for _ in range(repeats):
        start = time.perf_counter()
        result = run()
        times.append(1e3 * (time.perf_counter() - start))
    return result, statistics.median(times)


def ours(events: list[tuple[privacy.Event, int]]) -> privacy.Bracket[float]:
    for cache in (tilt._nodes, tilt.term, mixture.base, lattice.pessimistic, lattice.optimistic):
        cache.cache_clear()
    return privacy.Profile(events).epsilon(DELTA)


def from_dp_accounting(kind: type[PLDAccountant] | type[RdpAccountant], noise: float, steps: int) -> float:
    accountant = kind()
    accountant.compose(dp_event.PoissonSampledDpEvent(Q, dp_event.GaussianDpEvent(noise)), steps)
    return accountant.get_epsilon(DELTA)


def prv(noise: float, steps: int) -> float:
    from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

    mechanism = PoissonSubsampledGaussianMechanism(noise_multiplier=noise, sampling_probability=Q)
    accountant = PRVAccountant(
        prvs=[mechanism], max_self_compositions=[steps], eps_error=0.01, delta_error=DELTA / 1000
    )
    return accountant.compute_epsilon(delta=DELTA, num_self_compositions=[steps])[2]


def opacus(noise: float, steps: int) -> float:
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(noise, Q, steps)]
    return accountant.get_epsilon(DELTA, eps_error=0.01, delta_error=DELTA / 1000)


PEERS = {
    "PLD": lambda noise, steps: from_dp_accounting(PLDAccountant, noise, steps),
    "RDP": lambda noise, steps: from_dp_accounting(RdpAccountant, noise, steps),
    "prv": prv,
    "Opacus": opacus,
}


def table(settings: list[Row], most_steps: int) -> None:
    print(f"{'noise':>5} {'steps':>8} {'ε':>15} {'width':>7} {'ours ms':>8}", end="")
    print("".join(f" | {name + ' ms':>9} {'ratio':>7} {'over':>9}" for name in PEERS))
    medians = []
    for noise, steps in settings:
        epsilon, own = timed(lambda: ours([(privacy.SubsampledGaussian(noise, Q), steps)]), 31)  # noqa: B023
        medians.append(own)
        print(
            f"{noise:>5} {steps:>8} {epsilon.high:>15.10f} {epsilon.high / epsilon.low - 1:>7.0e} {own:>8.2f}", end=""
        )
        for name, peer in PEERS.items():
            if name in ("prv", "Opacus") and steps > most_steps:
                print(f" | {'-':>9} {'-':>7} {'-':>9}", end="")
                continue
            theirs, milliseconds = timed(lambda: peer(noise, steps), 1)  # noqa: B023
            print(f" | {milliseconds:>9.1f} {milliseconds / own:>7.0f} {theirs - epsilon.high:>9.1e}", end="")
        print(flush=True)
    print(f"median of ours: {statistics.median(medians):.2f} ms")


def others() -> None:
    print("\nother events                     milliseconds")
    for projections in (16, 64, 256):
        _, own = timed(lambda: ours([(privacy.SubsampledJL(1.0, projections, 0.01), 2000)]).high, 9)  # noqa: B023
        print(f"JL({projections}), 2000 steps{'':<12} {own:8.2f}")
    schedule = [(privacy.SubsampledGaussian(1 + i / 100, 0.01), 200) for i in range(100)]
    print(f"100 noise levels, 20000 steps    {timed(lambda: ours(schedule).high, 5)[1]:8.2f}")
    print(f"one step of each of 3 laws       {timed(few_steps, 9)[1]:8.2f}")


def few_steps() -> float:
    return ours([(privacy.SubsampledGaussian(noise, 0.01), 1) for noise in (0.8, 1.0, 1.2)]).high


def calibration() -> None:
    print("\ntarget  steps  noise multiplier   milliseconds")
    for target in (1, 3, 8):
        for steps in (1000, 10_000, 100_000):

            def run() -> float:
                tilt._nodes.cache_clear(), tilt.term.cache_clear()
                return privacy.calibrate(target, DELTA, sampling_probability=Q, num_steps=steps)  # noqa: B023

            noise, own = timed(run, 5)
            print(f"{target:>6} {steps:>6}  {noise:>16.10f}   {own:8.1f}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    quick = "--quick" in sys.argv
    table([(noise, 10**k) for noise in (0.6, 1.1, 2.0) for k in (3, 4, 5, 6)], 1000 if quick else 10_000)
    others()
    calibration()
