# SPDX-License-Identifier: Apache-2.0
"""Measures how the time of a step grows with batch size, sequence length and width: ordinary, ours, and the peers'.

    python benchmarks/growth.py docs/growth.svg --json growth.json    # measures (about 8 minutes) and draws
    python benchmarks/growth.py docs/growth.svg --from growth.json    # draws earlier measurements again
    python benchmarks/growth.py /tmp/growth.png --quick               # few sizes, for a quick check

``ours`` is all of ``PrivateTraining``: sampling, gathering, noise, ledger. So is Opacus: its loader with Poisson
sampling over the same data set, noise, its accountant; with rows by hooks, or ghost clipping. vmap clips and sums a
fixed batch only. Contenders take turns at each size. A point is the median of its rounds; where batches are drawn, of
the time per example in the rounds with 3/4 to 4/3 of the expected batch, times that batch. A point is left out if a
step takes more than ``--limit`` seconds, or if rows and their copies would take more than 12 GiB; larger sizes are then
not tried. The script says in words where ours crosses the line of each other contender.
"""

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator
from models import Problem, gpt, mlp, place
from peers import VMAP_COPIES
from step import CONTENDERS, Clock, Place, keep_memory, reason

# contender -> name in the picture, color
LINES = {
    "non-private": ("ordinary step", "#55606e"),
    "ours": ("ours, everything", "#1f5fbf"),
    "vmap": ("vmap", "#c4741a"),
    "opacus-all": ("Opacus, hooks", "#b03a48"),
    "opacus-all-ghost": ("Opacus, ghost", "#3f8f4f"),
}
HOLDS_ROWS = ("opacus-all",)  # vmap divides its batch
MOST_BYTES = 12 * 2**30
FIRST = 4  # first steps of ours, which measure layouts and rehearse; of the others one suffices
LEAST, MOST = 3, 60  # rounds
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "torch_privacy",
    "font.size": 10,
    "axes.edgecolor": "#9aa3ad",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "lines.linewidth": 2,
    "xtick.color": "#9aa3ad",
    "xtick.labelcolor": "black",
    "ytick.color": "#9aa3ad",
    "ytick.labelcolor": "black",
}


@dataclass(frozen=True)
class Panel:
    """One network with one growing size; the other sizes are fixed."""

    title: str
    size_name: str
    sizes: tuple[int, ...]
    problem: Callable[[int], Problem]


PANELS = (
    Panel(
        "MLP, width 256",
        "batch size (examples)",
        (16, 64, 256, 1024, 4096, 16384, 32768),
        lambda n: mlp(batch=n, width=256),
    ),
    Panel(
        "GPT, one layer, width 64, batch 4",
        "sequence length (tokens)",
        (32, 128, 512, 1024, 2048, 4096),
        lambda t: gpt(batch=4, positions=t, width=64, layers=1),
    ),
    Panel(
        "MLP, batch 64",
        "width (units per layer)",
        (64, 128, 256, 512, 1024, 2048, 4096),
        lambda w: mlp(batch=64, width=w),
    ),
)
Point = dict[str, Any]


def measure(panel: Panel, where: Place, seconds: float, limit: float, *, quick: bool) -> Iterator[Point]:
    """Yields the median seconds of a step for every size and contender, or why it was left out."""
    left = list(LINES)
    for size in panel.sizes[:3] if quick else panel.sizes:
        problem = partial(fixed, panel, size, where)
        running: dict[str, Clock] = {}
        for name in list(left):
            clock = started(problem, name, where, limit)
            if isinstance(clock, Clock):
                running[name] = clock
                continue
            left.remove(name)
            print(f"  {panel.title}, from {panel.size_name} {size}: {name} is left out: {clock}", flush=True)
            yield {"panel": panel.title, "size": size, "contender": name, "left_out": clock}
        batch = len(problem().x)
        for name, taken in rounds(running, batch, seconds).items():
            point = {"size": size, "contender": name, "median_s": statistics.median(taken), "rounds": len(taken)}
            yield {"panel": panel.title, **point}


def started(problem: Callable[[], Problem], name: str, where: Place, limit: float) -> Clock | str:
    """Returns the contender's clock after its first steps, or why it is left out."""
    model, x, _ = problem()
    rows = len(x) * sum(p.nbytes for p in model.parameters())
    if name in HOLDS_ROWS and VMAP_COPIES * rows > MOST_BYTES:
        return f"its rows take {rows / 2**30:.0f} GiB, and more for their copies"
    try:
        clock = Clock(CONTENDERS[name](problem()), where, [])
        for _ in range(FIRST if name == "ours" else 1):
            clock.run()
        clock.taken.clear()
        for _ in range(2):  # the first may wait for fresh memory
            clock.run()
    except Exception as error:
        return reason(error)
    took = min(seconds for seconds, _ in clock.taken)
    clock.taken.clear()
    return f"a step takes {took:.1f} s" if took > limit else clock


def rounds(running: dict[str, Clock], batch: int, seconds: float) -> dict[str, list[float]]:
    """Returns the seconds of steps of the expected batch size, measured in turns."""
    end, found = time.perf_counter() + seconds, {name: [] for name in running}
    for _ in range(MOST):
        for name, clock in running.items():
            clock.run()
            took, examples = clock.taken.pop()
            if 3 * batch <= 4 * examples and 3 * examples <= 4 * batch:
                found[name].append(took * batch / examples)
        if time.perf_counter() > end and min(map(len, found.values())) >= LEAST:
            break
    return {name: taken for name, taken in found.items() if taken}


def fixed(panel: Panel, size: int, where: Place) -> Problem:
    torch.manual_seed(0)
    return place(panel.problem(size), where.device, where.dtype)


def curves(panel: Panel, points: list[Point]) -> dict[str, dict[int, float]]:
    """Returns milliseconds by size for every contender."""
    here = [p for p in points if p["panel"] == panel.title and "median_s" in p]
    return {c: {p["size"]: 1e3 * p["median_s"] for p in here if p["contender"] == c} for c in LINES}


def crossings(panel: Panel, points: list[Point]) -> Iterator[str]:
    """Yields, for each other contender, where ours crosses its line: sizes by interpolation of logarithms."""
    found = curves(panel, points)
    for name in LINES:
        sizes = sorted(set(found[name]) & set(found["ours"]))
        if name == "ours" or not sizes:
            continue
        ratios = [found["ours"][size] / found[name][size] for size in sizes]
        turns = [
            f"{'falls below' if a > 1 else 'rises above'} it at about {_crossing(sizes[i : i + 2], a, b):.0f}"
            for i, (a, b) in enumerate(pairwise(ratios))
            if (a > 1) != (b > 1)
        ]
        side = "above" if ratios[0] > 1 else "below"
        text = "; ".join([f"starts {side}", *turns]) if turns else f"is {side} it at all sizes"
        left_out = [
            p["size"] for p in points if p["panel"] == panel.title and p["contender"] == name and "left_out" in p
        ]
        beyond = f"; from {left_out[0]} the other is left out" if left_out else ""
        yield (
            f"{panel.title}, {LINES[name][0]}: ours {text} (ours over it: {ratios[0]:.2f} at {sizes[0]}, "
            f"{ratios[-1]:.2f} at {sizes[-1]}{beyond})"
        )


def _crossing(sizes: list[int], before: float, after: float) -> float:
    """Returns the size at which the ratio is 1, on the straight line between two points with logarithmic axes."""
    share = math.log(before) / (math.log(before) - math.log(after))
    return sizes[0] * (sizes[1] / sizes[0]) ** share


def draw(measured: dict[str, Any], path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.4), layout="constrained", facecolor="white")
        figure.suptitle("Time of one training step", x=0.01, ha="left", fontsize=13)
        figure.supxlabel(
            f"{measured['place']}; medians of rounds in turns; both axes are logarithmic", x=0.01, ha="left", fontsize=9
        )
        axes = figure.subplots(1, 3)
        for i, (panel, ax) in enumerate(zip(PANELS, axes.flat, strict=True)):
            draw_panel(ax, panel, measured["points"])
            ax.set_ylabel("milliseconds" if i == 0 else "")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=len(LINES), frameon=False, fontsize=9)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_panel(ax: Axes, panel: Panel, points: list[Point]) -> None:
    """Draws all curves."""
    ax.set(xlabel=panel.size_name, xscale="log", yscale="log")
    ax.set_title(panel.title)
    for name, curve in curves(panel, points).items():
        label, color = LINES[name]
        front = {"zorder": 3, "linewidth": 2.6} if name == "ours" else {}
        ax.plot(list(curve), list(curve.values()), color=color, marker="o", markersize=4, label=label, **front)
    ax.xaxis.set_major_locator(FixedLocator(sorted({p["size"] for p in points if p["panel"] == panel.title})))
    ax.yaxis.set_major_locator(LogLocator())
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.tick_params(axis="x", rotation=45)
    ax.margins(x=0.05, y=0.08)
    ax.grid(axis="y", color="#e6e9ed", linewidth=0.8)
    ax.set_axisbelow(True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time of a step against batch size, sequence length and width.")
    parser.add_argument("picture", type=Path, help="file to draw, PNG or SVG")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument(
        "--from", type=Path, dest="measured", metavar="JSON", help="draw these numbers, measure nothing"
    )
    parser.add_argument("--seconds", type=float, default=4, help="seconds of timing per size, after the first steps")
    parser.add_argument("--limit", type=float, default=4, help="seconds of a step above which it is left out")
    parser.add_argument("--quick", action="store_true", help="three sizes each, a few steps")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    warnings.simplefilter("ignore")
    if chosen.measured:
        measured = json.loads(chosen.measured.read_text())
    else:
        keep_memory()
        where, points = Place(chosen.device), []
        for panel in PANELS:
            print(f"{panel.title}: {panel.size_name}", flush=True)
            seconds = 0.3 if chosen.quick else chosen.seconds
            points += measure(panel, where, seconds, chosen.limit, quick=chosen.quick)
        measured = {"place": where.describe(), "points": points}
        if chosen.json:
            chosen.json.write_text(json.dumps(measured, indent=1))
    for panel in PANELS:
        print(*crossings(panel, measured["points"]), sep="\n")
    draw(measured, chosen.picture)


if __name__ == "__main__":
    main()
