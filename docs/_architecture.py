# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of architecture.md from the imports of the package: ``python docs/_architecture.py``."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from architecture import FLOOR, FLOORS, imports_of, modules, room_imports  # noqa: E402

IMAGES = Path(__file__).parent / "img"
ROLES = {  # a few words for each room
    "cli": "the command",
    "experiments": "what the commands train",
    "huggingface": "PrivateTrainer",
    "lightning": "PrivateFit",
    "opacus": "loops written for it",
    "sklearn": "estimators",
    "tables": "CSV and Parquet",
    "training": "PrivateTraining, the only join",
    "runs": "run folders, pages and plots",
    "mechanisms": "what one step releases; noise",
    "model_check": "do examples depend on others?",
    "jacobian": "per-example gradients of a batch",
    "ops": "one file for each family of ops",
    "privacy": "events, accounting, ledger",
    "data": "readers of data sets",
    "sampling": "Poisson batches",
    "support": "validation, random state, model state",
}
WAY = [  # (step, what happens, the modules that do it)
    ("1 record", "ops that meet\nparameters", ["jacobian.recording.recorder", "jacobian.recording.calls"]),
    ("2 layout", "which dimension\nholds the examples", ["jacobian.layouts.find", "jacobian.layouts.known"]),
    ("3 norms", "the cheapest\nexact method", ["jacobian.rows.norms", "jacobian.rows.plan"]),
    ("4 clip", "norms become\nfactors", ["mechanisms.clipping"]),
    ("5 sum", "one backward,\nblock by block", ["jacobian.rows.streamed_sum", "jacobian.rows.blocks"]),
    ("6 noise", "times the\nsensitivity", ["mechanisms.noise"]),
    ("7 ledger", "recorded\nbefore use", ["privacy.ledger"]),
]
JOINS = {  # module -> its place in the picture
    "training.loop": (6.3, 3.6),
    "training.step_run": (4.2, 2.75),
    "training.releaser": (9.4, 2.75),
    "jacobian.tape": (2.9, 1.55),
    "mechanisms.base": (8.8, 1.75),
    "mechanisms.sums": (5.9, 1.75),
    "training.release": (11.7, 1.75),
}
INK, PAPER, LINE, ACCENT, BAND = "#1f2430", "#ffffff", "#8d97ab", "#3f51b5", "#eef0f7"


def floors() -> plt.Figure:
    """Draws the rooms floor by floor, each with the rooms that it imports."""
    boxes, text, row = 3.3, 3.1, 0.86
    most = max(map(len, FLOORS))
    figure, axes = plt.subplots(figsize=(0.8 * (boxes * most + text + 2.3), 0.72 * len(FLOORS)))
    direct = room_imports()
    for number, rooms in enumerate(FLOORS):
        y = -number * row
        _band(axes, -0.15, y, boxes * most + text + 2.3, 0.74)
        for column, room in enumerate(rooms):
            _box(axes, column * boxes + boxes / 2, y, 3.1, 0.62, room, ROLES[room])
        words = imported_rooms(rooms, direct)
        axes.text(len(rooms) * boxes + 0.15, y, words, fontsize=8.5, va="center", color=INK, linespacing=1.3)
    axes.set_xlim(-0.3, boxes * most + text + 2.3)
    axes.set_ylim(-row * (len(FLOORS) - 1) - 0.5, 0.5)
    axes.axis("off")
    figure.tight_layout(pad=0.2)
    return figure


def imported_rooms(rooms: list[str], direct: dict[str, set[str]]) -> str:
    """Returns the rooms that those of one floor import, as text of a few lines."""
    used = sorted(set().union(*(direct[room] for room in rooms)), key=lambda room: (FLOOR[room], room))
    return _wrapped("imports " + ", ".join(used)) if used else "imports nothing of the package"


def way() -> plt.Figure:
    """Draws the way of a batch through the modules, and the modules that join the steps."""
    figure, axes = plt.subplots(figsize=(10.5, 5.2))
    places: dict[str, float] = {}
    for number, (step, text, names) in enumerate(WAY):
        x = number * 2.1
        _box(axes, x, 0, 1.75, 0.95, step, text)
        for k, name in enumerate(names):
            axes.text(
                x,
                -0.78 - 0.3 * k,
                _file(name).removeprefix("jacobian/"),
                ha="center",
                fontsize=7.4,
                family="monospace",
                color=INK,
            )
            places[name] = x
        if number:
            _arrow(axes, (x - 2.1 + 0.875, 0), (x - 0.875, 0), color=ACCENT, width=2.0)
    for name, (x, y) in JOINS.items():
        _box(axes, x, y, 2.7, 0.5, _file(name), "")
        for other in _imported(name):
            if other in JOINS:
                (x1, y1), side = JOINS[other], 1 if JOINS[other][0] > x else -1
                _arrow(axes, (x + side * 0.9, y - 0.25), (x1 - side * 0.4, y1 + 0.25))
        for target in sorted({places[other] for other in _imported(name) if other in places}):
            _arrow(axes, (x, y - 0.25), (target, 0.48))
    axes.set_xlim(-1.1, 13.7)
    axes.set_ylim(-1.3, 3.95)
    axes.axis("off")
    figure.tight_layout(pad=0.3)
    return figure


def _imported(module: str) -> set[str]:
    """Returns the modules that a module imports; the ledger's also where it comes through its package."""
    through_package = {"privacy.ledger"} if "privacy.Ledger" in modules()[module].read_text() else set()
    return set(imports_of(module)) | through_package


def _file(module: str) -> str:
    path = module.replace(".", "/")
    return f"{path}/" if (ROOT / "torch_privacy" / path).is_dir() else f"{path}.py"


def _wrapped(words: str, per_line: int = 5) -> str:
    parts = words.split(", ")
    return ",\n".join(", ".join(parts[k : k + per_line]) for k in range(0, len(parts), per_line))


def _band(axes: plt.Axes, x: float, y: float, width: float, height: float) -> None:
    axes.add_patch(plt.Rectangle((x, y - height / 2), width, height, facecolor=BAND, edgecolor="none", zorder=1))


def _box(axes: plt.Axes, x: float, y: float, width: float, height: float, title: str, text: str) -> None:
    shape = FancyBboxPatch(
        (x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0,rounding_size=0.08",
        facecolor=PAPER, edgecolor=ACCENT, linewidth=1.2, zorder=3,
    )  # fmt: skip
    axes.add_patch(shape)
    lines = text.count("\n") + 1 if text else 0
    axes.text(
        x, y + 0.12 * lines * height, title, ha="center", va="center", fontsize=10, weight="bold", color=INK, zorder=4
    )
    if text:
        axes.text(
            x, y - 0.15 * height, text, ha="center", va="center", fontsize=8, color=INK, zorder=4, linespacing=1.2
        )


def _arrow(axes: plt.Axes, start: tuple, end: tuple, color: str = LINE, width: float = 1.1) -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=10, color=color, linewidth=width, shrinkA=0,
                        shrinkB=0, zorder=2)
    )  # fmt: skip


def main(folder: Path = IMAGES, suffix: str = "svg") -> None:
    """Writes both pictures."""
    missing = [name for name in [*(name for _, _, names in WAY for name in names), *JOINS] if name not in modules()]
    if missing:
        raise SystemExit(f"the way of the data names modules that do not exist: {', '.join(missing)}")
    plt.rcParams |= {"svg.hashsalt": "architecture", "svg.fonttype": "none", "font.family": "sans-serif"}
    for name, draw in {"floors": floors, "way": way}.items():
        draw().savefig(folder / f"{name}.{suffix}", metadata={"Date": None} if suffix == "svg" else None,
                       facecolor=PAPER)  # fmt: skip


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]), *sys.argv[2:3])
