# SPDX-License-Identifier: Apache-2.0
"""Compares time and tightness of ε and of calibration with other accountants, at q = 256 / 60000 and δ = 1e-5.

    OMP_NUM_THREADS=1 python benchmarks/accounting.py [--quick] [--all]

Prints markdown. Ours are medians with empty caches; peers have one run after a warm-up. A peer's cell: its
milliseconds, their ratio to ours, and the excess of its ε (or of its noise multiplier, to 1e-4 like ours) over
ours. prv-accountant and Opacus's PRV use ε_error = 0.01 and stop at 10^4 steps (--quick: 10^3; --all: 10^5, where
prv-accountant takes half a minute and gigabytes). dp-accounting calibrates by PLD only for 10^4 steps (--quick: never;
--all: always). Takes about a minute and a half, with --quick half a minute.
"""

import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from dp_accounting import calibrate_dp_mechanism, dp_event
from dp_accounting.mechanism_calibration import ExplicitBracketInterval
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from opacus import accountants as opacus
from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

from torch_privacy import privacy
from torch_privacy.privacy.engines import lattice, tilt
from torch_privacy.privacy.pairs import mixture

Q, DELTA = 256 / 60000, 1e-5
Events = list[tuple[privacy.Event, int]]
Peer = Callable[[float, int], float]
IMPORT = "import time; start = time.perf_counter(); import torch_privacy.privacy; print(time.perf_counter() - start)"


def timed(run: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """Returns the result and the median milliseconds, each run with empty caches."""
    times, result = [], None
    for _ in range(repeats):
        for cache in (tilt._nodes, tilt.term, mixture.base_densities, lattice.pessimistic, lattice.optimistic):
            cache.cache_clear()
        start = time.perf_counter()
        result = run()
        times.append(1e3 * (time.perf_counter() - start))
    return result, statistics.median(times)


def table(*columns: str) -> None:
    """Prints the first two lines of a table."""
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)


def row(*cells: object) -> None:
    print(f"| {' | '.join(str(cell) for cell in cells)} |", flush=True)


def ours(events: Events, method: str = "auto") -> Callable[[], privacy.Bracket[float]]:
    return lambda: privacy.Profile(events, method).epsilon(DELTA)


def dp_accounting(kind: type[PLDAccountant] | type[RdpAccountant]) -> Peer:
    def epsilon(noise: float, steps: int) -> float:
        accountant = kind()
        accountant.compose(dp_event.PoissonSampledDpEvent(Q, dp_event.GaussianDpEvent(noise)), steps)
        return accountant.get_epsilon(DELTA)

    return epsilon


def prv_accountant(noise: float, steps: int) -> float:
    mechanism = PoissonSubsampledGaussianMechanism(noise_multiplier=noise, sampling_probability=Q)
    accountant = PRVAccountant([mechanism], max_self_compositions=[steps], eps_error=0.01, delta_error=DELTA / 1000)
    return accountant.compute_epsilon(delta=DELTA, num_self_compositions=[steps])[2]


def of_opacus(kind: type[opacus.accountant.IAccountant], **settings: float) -> Peer:
    def epsilon(noise: float, steps: int) -> float:
        accountant = kind()
        accountant.history = [(noise, Q, steps)]
        return accountant.get_epsilon(DELTA, **settings)

    return epsilon


PEERS: dict[str, Peer] = {
    "dp-accounting PLD": dp_accounting(PLDAccountant),
    "dp-accounting RDP": dp_accounting(RdpAccountant),
    "prv-accountant": prv_accountant,
    "Opacus PRV": of_opacus(opacus.PRVAccountant, eps_error=0.01, delta_error=DELTA / 1000),
    "Opacus RDP": of_opacus(opacus.RDPAccountant),
    "Opacus GDP (CLT, no bound)": of_opacus(opacus.GaussianAccountant),
}
SLOW = ("prv-accountant", "Opacus PRV")


def compared(theirs: float, milliseconds: float, ours: float, our_milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms, {milliseconds / our_milliseconds:.0f}x, {theirs - ours:+.1e}"


def epsilons(most_steps: int) -> None:
    table("noise", "steps", "ε", "contour ms (width)", "lattice ms (width)", *PEERS)
    for peer in PEERS.values():
        peer(2.0, 10)  # warm-up: imports and preparations
    medians = []
    for noise, steps in [(noise, 10**k) for noise in (0.6, 1.1, 2.0) for k in (3, 4, 5, 6)]:
        events: Events = [(privacy.SubsampledGaussian(noise, Q), steps)]
        exact, own = timed(ours(events), 31)
        rough, by_lattice = timed(ours(events, "lattice"), 3)
        medians.append(own)
        cells = []
        for name, peer in PEERS.items():
            if name in SLOW and steps > most_steps:
                cells.append("-")
                continue
            theirs, milliseconds = timed(lambda: peer(noise, steps), 1)  # noqa: B023
            cells.append(compared(theirs, milliseconds, exact.high, own))
        widths = [f"{(answer.high - answer.low) / answer.high:.0e}" for answer in (exact, rough)]
        own_cells = f"{own:.2f} ({widths[0]})", f"{by_lattice:.0f} ({widths[1]})"
        row(noise, f"{steps:.0e}", f"{exact.high:.9f}", *own_cells, *cells)
    print(f"\nMedian of the contour's times: {statistics.median(medians):.2f} ms (to reach: 1.5 ms).")


def questions() -> None:
    table("question", "ms", "to reach")
    for projections in (16, 32, 64, 256):
        events: Events = [(privacy.SubsampledJL(1.0, projections, 0.01), 2000)]
        row(f"JL({projections}), 2000 steps", f"{timed(ours(events), 9)[1]:.1f}", 6)
    levels: Events = [(privacy.SubsampledGaussian(1 + i / 100, 0.01), 200) for i in range(100)]
    row("100 noise levels, 200 steps each", f"{timed(ours(levels), 5)[1]:.1f}", 50)
    few: Events = [(privacy.SubsampledGaussian(noise, 0.01), 1) for noise in (0.8, 1.0, 1.2)]
    row("few steps, by lattice: one each of 3 noise levels", f"{timed(ours(few), 9)[1]:.1f}", 50)
    ten: Events = [(privacy.SubsampledGaussian(0.8, 0.01), 10)]
    row("few steps, by lattice: 10 equal ones", f"{timed(ours(ten), 9)[1]:.1f}", 50)
    imports = [float(subprocess.check_output([sys.executable, "-c", IMPORT])) for _ in range(5)]
    row("import of torch_privacy.privacy", f"{1e3 * statistics.median(imports):.0f}", 400)


def calibrated(kind: type[PLDAccountant] | type[RdpAccountant], target: float, steps: int) -> float:
    def event(noise: float) -> dp_event.DpEvent:
        step = dp_event.PoissonSampledDpEvent(Q, dp_event.GaussianDpEvent(noise))
        return dp_event.SelfComposedDpEvent(step, steps)

    return calibrate_dp_mechanism(kind, event, target, DELTA, ExplicitBracketInterval(0.3, 20), tol=1e-4)


def calibration(pld_steps: tuple[int, ...]) -> None:
    table("target ε", "steps", "noise multiplier", "ms (to reach: 15)", "dp-accounting PLD", "dp-accounting RDP")
    medians = []
    for target in (1, 3, 8):
        for steps in (1000, 10_000, 100_000):

            def run() -> float:
                return privacy.calibrate(target, DELTA, sampling_probability=Q, num_steps=steps)  # noqa: B023

            noise, own = timed(run, 5)
            medians.append(own)
            cells = []
            for kind in (PLDAccountant, RdpAccountant):
                if kind is PLDAccountant and steps not in pld_steps:
                    cells.append("-")
                    continue
                theirs, milliseconds = timed(lambda: calibrated(kind, target, steps), 1)  # noqa: B023
                cells.append(compared(theirs, milliseconds, noise, own))
            row(target, f"{steps:.0e}", f"{noise:.5f}", f"{own:.1f}", *cells)
    print(f"\nMedian of ours: {statistics.median(medians):.1f} ms.")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    quick, everything = "--quick" in sys.argv, "--all" in sys.argv
    epsilons(1000 if quick else 100_000 if everything else 10_000)
    questions()
    calibration(() if quick else (1000, 10_000, 100_000) if everything else (10_000,))
