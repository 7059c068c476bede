# SPDX-License-Identifier: Apache-2.0
"""Measures how the cost of a step grows with batch size, sequence length and width, private and non-private.

    python benchmarks/growth.py docs/growth.svg --json growth.json    # measures (about 5 minutes) and draws
    python benchmarks/growth.py docs/growth.svg --from growth.json    # draws earlier measurements again
    python benchmarks/growth.py /tmp/growth.png --quick               # few sizes, for a quick check

Both axes are logarithmic, so that a price that does not grow shows as two parallel curves. A private step is all of
``PrivateTraining``; its batches vary, so that each point is a median over many.
"""

import argparse
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator
from models import Problem, gpt, mlp, mnist_cnn, place
from step import Clock, Place, clocks, keep_memory

COLORS = {"non-private": "#55606e", "ours": "#1f5fbf"}  # the contenders
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
    Panel("MLP, width 1000", "batch size (examples)", (16, 32, 64, 128, 256, 512, 1024), lambda n: mlp(batch=n)),
    Panel("MNIST CNN", "batch size (examples)", (16, 32, 64, 128, 256, 512, 1024), lambda n: mnist_cnn(batch=n)),
    Panel("GPT, 128 tokens, width 256", "batch size (examples)", (2, 4, 8, 16, 32), lambda n: gpt(batch=n)),
    Panel(
        "GPT, batch 8, width 128",
        "sequence length (tokens)",
        (32, 64, 128, 256, 512, 1024),
        lambda t: gpt(positions=t, width=128),
    ),
    Panel("MLP, batch 256", "width (units per layer)", (64, 128, 256, 512, 1024, 2048), lambda w: mlp(width=w)),
    Panel("GPT, batch 8, 128 tokens", "width (units)", (32, 64, 128, 256, 512), lambda w: gpt(width=w)),
)


def measure(panel: Panel, where: Place, seconds: float, *, quick: bool) -> list[dict[str, Any]]:
    """Returns median seconds of a step for every size and contender, without sizes at which a contender fails."""
    points = []
    for size in panel.sizes[:3] if quick else panel.sizes:
        found = clocks(lambda size=size: fixed(panel, size, where), COLORS, where, seconds)
        for contender, clock in found.items():
            if isinstance(clock, Clock):
                point = {"size": size, "contender": contender, "median_s": clock.median(), "rounds": len(clock.taken)}
                points.append({"panel": panel.title, **point})
            else:
                print(f"{panel.title}, {size}: {contender} fails: {clock}", flush=True)
    return points


def fixed(panel: Panel, size: int, where: Place) -> Problem:
    torch.manual_seed(0)
    return place(panel.problem(size), where.device, where.dtype)


def draw(measured: dict[str, Any], path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 6.4), layout="constrained", facecolor="white")
        figure.suptitle("Cost of one training step (both axes logarithmic)", x=0.01, ha="left", fontsize=13)
        figure.supxlabel(
            f"{measured['place']}; medians; numbers: private over non-private", x=0.01, ha="left", fontsize=9
        )
        axes = figure.subplots(2, 3)
        for i, (panel, ax) in enumerate(zip(PANELS, axes.flat, strict=True)):
            draw_panel(ax, panel, [p for p in measured["points"] if p["panel"] == panel.title])
            ax.set_ylabel("milliseconds" if i % 3 == 0 else "")
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_panel(ax: Axes, panel: Panel, points: list[dict[str, Any]]) -> None:
    """Draws both curves, labeled at their ends, with their ratio at the first and the last size."""
    ax.set(title=panel.title, xlabel=panel.size_name, xscale="log", yscale="log")
    curves = {c: {p["size"]: 1e3 * p["median_s"] for p in points if p["contender"] == c} for c in COLORS}
    for contender, curve in curves.items():
        ax.plot(list(curve), list(curve.values()), color=COLORS[contender], marker="o", markersize=4)
    both = sorted(set(curves["ours"]) & set(curves["non-private"]))
    if both:
        high, low = ([curves[c][size] for size in both] for c in ("ours", "non-private"))
        ax.fill_between(both, low, high, color=COLORS["ours"], alpha=0.12, linewidth=0)
        for size in both:
            ratio = curves["ours"][size] / curves["non-private"][size]
            above = {"xytext": (-4, 8), "textcoords": "offset points", "ha": "center", "fontsize": 9}
            ax.annotate(
                f"{ratio:.{1 if ratio >= 2 else 2}f}×", (size, curves["ours"][size]), color=COLORS["ours"], **above
            )
    ax.xaxis.set_major_locator(FixedLocator(sorted({p["size"] for p in points})))
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.margins(x=0.1, y=0.18)
    corner = {"transform": ax.transAxes, "fontweight": "bold"}  # costs grow, so these corners are empty
    ax.text(0.03, 0.97, "private", color=COLORS["ours"], va="top", **corner)
    ax.text(0.97, 0.04, "non-private", color=COLORS["non-private"], ha="right", **corner)
    ax.grid(axis="y", color="#e6e9ed", linewidth=0.8)
    ax.set_axisbelow(True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cost of a step against batch size, sequence length and width.")
    parser.add_argument("picture", type=Path, help="file to draw, PNG or SVG")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument(
        "--from", type=Path, dest="measured", metavar="JSON", help="draw these numbers, measure nothing"
    )
    parser.add_argument("--seconds", type=float, default=6, help="seconds of timing per size, after the warm-up")
    parser.add_argument("--quick", action="store_true", help="three sizes each, a few steps")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    warnings.simplefilter("ignore")
    if chosen.measured:
        draw(json.loads(chosen.measured.read_text()), chosen.picture)
        return
    keep_memory()
    where, points = Place(chosen.device), []
    for panel in PANELS:
        print(f"{panel.title}: {panel.size_name}", flush=True)
        points += measure(panel, where, 0.3 if chosen.quick else chosen.seconds, quick=chosen.quick)
    measured = {"place": where.describe(), "points": points}
    if chosen.json:
        chosen.json.write_text(json.dumps(measured, indent=1))
    draw(measured, chosen.picture)


if __name__ == "__main__":
    main()
