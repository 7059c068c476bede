# SPDX-License-Identifier: Apache-2.0
"""Draws one figure for each paper into docs/img from docs/results/*.json: ``python docs/_papers.py``, some seconds.

Every claim is a hollow mark at the epsilon that the paper prints, joined to a full one at the certified epsilon of the
same setting. Our trainings stand at their certified epsilons.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from torch_privacy.runs.report import figures as plots
from torch_privacy.runs.report.style import FILE_COLORS, FILE_FAINT, FILE_INK, FILE_STYLE
from torch_privacy_papers.yu2021 import cifar10, mnist

HERE = Path(__file__).parent
KEPT, IMAGES = HERE / "results", HERE / "img"
OURS, HOLDS, FAILS = FILE_COLORS[0], FILE_COLORS[2], FILE_COLORS[5]
WIDTH = 4.7  # inches: text stays legible on a phone
VARIED = "."  # settings of a sweep
MARKS = {"GP": "^", "B-GEP": "v", "GEP": "o"}
ASIDE = {MARKS["GP"]: 0.96, MARKS["GEP"]: 1.04}  # of epsilon: the marks of GP and GEP would hide each other
FEATURES = {"scattering": "s", "convolutions": "^", "patches": "D", "made patches": "X"}
PLACES = {  # side -> offset in points, alignments
    "above": ((0, 6), "center", "bottom"),
    "below": ((0, -7), "center", "top"),
    "left": ((-8, 0), "right", "center"),
    "right": ((8, 0), "left", "center"),
}
SIDES = {
    "trained, exact": "left",
    "trained, exact, 3 epochs at rate 0.01": "right",
    "trained, JL(30), 3 epochs at rate 0.01": "right",
    "trained, JL(30)": "below",
    "trained, JL(5)": "right",
    "trained, micro-batches of 4": "right",
    "trained, micro-batches of 16": "right",
}
POWERS_FROM = 1e4  # epsilon from which on the axis has powers of ten


class Claim(NamedTuple):
    """A score that a paper prints, with the epsilon that it claims and the certified one, if that is known."""

    score: float
    claimed: float
    certified: float | None
    mark: str = "o"
    text: str = ""
    side: str = "above"  # where the text stands


class Ours(NamedTuple):
    """The score of a row of ours, its standard error over the seeds, and its certified epsilon."""

    score: float
    error: float
    epsilon: float
    mark: str = "s"
    text: str = ""
    side: str = "above"


class Panel(NamedTuple):
    """One plot: scores over epsilon."""

    title: str
    ylabel: str
    claims: Sequence[Claim]
    ours: Sequence[Ours]
    height: float = 2.6  # inches
    log: bool = True


def kept(name: str) -> dict[str, dict[str, Any]]:
    """The rows of an experiment's results, by name; none if there are no results."""
    path = KEPT / f"{name}.json"
    return {row["row"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}


def certified(row: dict[str, Any]) -> float | None:
    """The largest certified upper bound of a row's seeds."""
    bounds = [run["numbers"].get("epsilon") for run in row["runs"]]
    return max((bound["high"] for bound in bounds if bound), default=None)


def ours(
    row: dict[str, Any], *, mark: str = "s", text: str = "", side: str = "above", scale: float = 100.0
) -> list[Ours]:
    """The point of one row, if it has a score and an epsilon."""
    scores = [scale * run["numbers"]["score"] for run in row["runs"] if run["numbers"].get("score") is not None]
    epsilon = certified(row)
    if not scores or epsilon is None:
        return []
    error = stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else 0.0
    return [Ours(mean(scores), error, epsilon, mark, text, side)]


def claim_of(name: str) -> tuple[float, float | None]:
    """The claimed and the certified epsilon of a row of `claims`."""
    row = kept("claims")[name]
    return row["paper"].get("claim", row["runs"][0]["numbers"]["claim"]), certified(row)


def abadi2016() -> list[Panel]:
    """Digits behind private components, and the sweep of the settings."""
    rows = kept("abadi-mnist")
    claims = [
        Claim(100 * row["paper"]["score"], row["paper"]["epsilon_moments"], certified(row))
        for name, row in rows.items()
        if "epsilon_moments" in row["paper"] and "to epsilon" not in name
    ]
    found = [point for row in rows.values() for point in ours(row)]
    varied = [point for row in kept("abadi-sweep").values() for point in ours(row, mark=VARIED)]
    return [Panel("MNIST", "accuracy (%)", claims, [*varied, *found], height=3.2)]


def bu2020() -> list[Panel]:
    """Digits at six levels of noise, and the other data."""
    digits = kept("gdp-mnist")
    claims = [
        Claim(100 * row["paper"]["score"], row["paper"]["epsilon_clt"], certified(row))
        for row in digits.values()
        if "epsilon_clt" in row["paper"]
    ]
    shallow, points = [], []
    for data, name, claim in (("Adult", "gdp-adult", "CLT, Adult"), ("IMDb", "gdp-imdb", "CLT, IMDb")):
        rows = list(kept(name).values())
        side = "below" if data == "IMDb" else "above"
        shallow.append(Claim(100 * rows[0]["paper"]["score"], *claim_of(claim), text=data, side=side))
        points += ours(rows[0], text=data, side=side)
    films = next(iter(kept("gdp-movielens").values()))
    rating = Claim(films["paper"]["score"], *claim_of("CLT, MovieLens"))
    return [
        Panel("MNIST", "accuracy (%)", claims, [p for row in digits.values() for p in ours(row)], height=2.9),
        Panel("Adult and IMDb", "accuracy (%)", shallow, points, height=2.3, log=False),
        Panel("MovieLens (ours: a tenth of the data)", "RMSE", [rating], ours(films, scale=1.0), height=1.9, log=False),
    ]


def bu2021() -> list[Panel]:
    """Norms estimated from random projections."""
    printed = {"MNIST": 95.0, "CIFAR-10": 66.1, "IMDb": 83.2}
    claims = [Claim(score, *claim_of(f"JL(1), {data}"), text=f"JL(1), {data}") for data, score in printed.items()]
    trained = {
        data: [
            point
            for name, row in kept(experiment).items()
            if name.startswith("trained, ")
            for point in ours(row, text=name.removeprefix("trained, "), side=SIDES.get(name, "above"))
        ]
        for data, experiment in (("MNIST", "jl-mnist"), ("IMDb", "jl-imdb"))
    }
    photographs = ours(kept("jl-cifar10")["trained, exact"], text="ours, exact norms, CIFAR-10", side="right")
    return [
        Panel("What the paper claims, and CIFAR-10 trained by us", "accuracy (%)", claims, photographs, height=2.5),
        *(Panel(f"{data}, trained by us", "accuracy (%)", [], points, height=2.5) for data, points in trained.items()),
    ]


def yu2021() -> list[Panel]:
    """Plain perturbation, and embeddings without and with residual."""
    panels = []
    for data, name in (("MNIST", "gep-mnist"), ("CIFAR-10", "gep-cifar10"), ("SVHN", "gep-svhn")):
        claims = []
        for (method, target), score in PRINTED[data].paper.items():
            kind = "GEP" if method == "GEP" else "GP and B-GEP"
            claims.append(Claim(100 * score, *claim_of(f"{kind}, {data}, epsilon {target:g}"), MARKS[method]))
        points = [
            point._replace(epsilon=ASIDE.get(point.mark, 1) * point.epsilon)
            for row, content in kept(name).items()
            for point in ours(content, mark=MARKS.get(row.partition(",")[0], "s"))
        ]
        aside = "ours: 8 of 50 epochs, 4 % aside" if data == "CIFAR-10" else "our GP and GEP are drawn 4 % aside"
        title = f"{data} ({aside if points else 'not run by us'})"
        panels.append(Panel(title, "accuracy (%)", claims, points, height=2.5))
    return panels


PRINTED = {"MNIST": mnist.COMPARISON, "CIFAR-10": cifar10.ON_CIFAR10, "SVHN": cifar10.ON_SVHN}  # Table 1


def best() -> list[Panel]:
    """The best known: scattering coefficients, convolutions and patches."""
    panels = []
    for data, names in (("MNIST", ("best-mnist", "best-mnist-cnn")), ("CIFAR-10", ("best-cifar10",))):
        claims, points = [], []
        for row, content in ((row, content) for name in names for row, content in kept(name).items()):
            mark = [mark for kind, mark in FEATURES.items() if kind in row][-1]
            points += ours(content, mark=mark)
            if "score" in content["paper"]:
                by = FEATURES["convolutions"] if data == "CIFAR-10" else mark  # also beside our patches
                claims.append(Claim(100 * content["paper"]["score"], 3.0, None, by))
        panels.append(Panel(data, "accuracy (%)", claims, points))
    return panels


TITLES = {
    abadi2016: "Abadi et al. (2016)",
    bu2020: "Bu, Dong, Long & Su (2020)",
    bu2021: "Bu, Gopi et al. (2021): JL",
    yu2021: "Yu et al. (2021): GEP",
    best: "Tramèr & Boneh (2021): the best known",
}


def figure(title: str, panels: Sequence[Panel]) -> Figure:
    """The panels below each other, with one legend."""
    with matplotlib.rc_context(FILE_STYLE):
        heights = [panel.height for panel in panels]
        drawn = Figure(figsize=(WIDTH, sum(heights) + 1.1), layout="constrained")
        grid = drawn.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
        drawn.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        for axes, panel in zip(grid[:, 0], panels, strict=True):
            draw(axes, panel)
        grid[-1, 0].set_xlabel("epsilon")
        drawn.legend(handles=legend(panels), loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    return drawn


def draw(axes: Axes, panel: Panel) -> None:
    """One panel; a red line joins a claim to a larger truth, a green one to a smaller one."""
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_ylabel(panel.ylabel)
    if panel.log:
        axes.set_xscale("log")
    for claim in panel.claims:
        color = FILE_INK if claim.certified is None else HOLDS if claim.certified <= claim.claimed else FAILS
        if claim.certified is not None:
            axes.plot([claim.claimed, claim.certified], [claim.score] * 2, color=color, linewidth=1.4, zorder=2)
            axes.plot([claim.certified], [claim.score], claim.mark, color=color, markersize=6, zorder=3)
        axes.plot(
            [claim.claimed], [claim.score], claim.mark, color=color, markersize=6.5, markerfacecolor="white", zorder=4
        )
        middle = (claim.claimed * (claim.certified or claim.claimed)) ** 0.5
        note(axes, claim, middle, color)
    for point in panel.ours:
        axes.errorbar(
            [point.epsilon], [point.score], yerr=point.error or None, fmt=point.mark, color=OURS, markersize=6,
            markeredgecolor="white", markeredgewidth=0.6, elinewidth=1.4, zorder=5,
        )  # fmt: skip
        note(axes, point, point.epsilon, OURS)
    axes.margins(x=0.16, y=0.18)
    if panel.log:
        epsilons = [x for claim in panel.claims for x in (claim.claimed, claim.certified) if x]
        label_epsilons(axes, [*epsilons, *(point.epsilon for point in panel.ours)])


def label_epsilons(axes: Axes, epsilons: Sequence[float]) -> None:
    """Ticks at round numbers, or at powers of ten on a long axis."""
    if max(epsilons) > POWERS_FROM:
        axes.set_xticks([1.0, 1e3, 1e6, 1e9, 1e12], ["1", "1,000", "$10^6$", "$10^9$", "$10^{12}$"])
    else:
        low, high = axes.get_xlim()
        ticks = (0.3, 1, 3, 10, 30) if high > 20 * low else (0.5, 1, 2, 3, 5, 8)
        axes.set_xticks([x for x in ticks if low <= x <= high])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def note(axes: Axes, point: Claim | Ours, x: float, color: str) -> None:
    """A word at one side of a mark; to the left of one with an error bar."""
    side = "left" if isinstance(point, Ours) and point.error else point.side
    place, horizontal, vertical = PLACES[side]
    align: dict[str, Any] = {"ha": horizontal, "va": vertical}
    axes.annotate(point.text, (x, point.score), place, textcoords="offset points", fontsize=9, color=color, **align)


def legend(panels: Sequence[Panel]) -> list[Line2D]:
    """What the marks stand for, as far as the panels have them."""
    claims = [claim for panel in panels for claim in panel.claims]
    sizes = {"linestyle": "none", "markersize": 6}
    entries: list[tuple[bool, dict[str, Any]]] = [
        (bool(claims), {"marker": "o", "color": FILE_INK, "markerfacecolor": "white", "label": "paper, as claimed"}),
        (
            any(claim.certified is not None and claim.certified > claim.claimed for claim in claims),
            {"marker": "o", "color": FAILS, "label": "certified: more than claimed"},
        ),
        (
            any(claim.certified is not None and claim.certified <= claim.claimed for claim in claims),
            {"marker": "o", "color": HOLDS, "label": "certified: the claim holds"},
        ),
        (any(panel.ours for panel in panels), {"marker": "s", "color": OURS, "label": "ours, certified"}),
        (
            any(point.mark == VARIED for panel in panels for point in panel.ours),
            {"marker": VARIED, "color": OURS, "label": "ours, settings varied"},
        ),
    ]
    marks = {claim.mark for claim in claims}
    if set(MARKS.values()) <= marks:
        entries += [(True, {"marker": mark, "color": FILE_FAINT, "label": name}) for name, mark in MARKS.items()]
    elif "^" in marks:
        entries += [(True, {"marker": mark, "color": FILE_FAINT, "label": name}) for name, mark in FEATURES.items()]
    return [Line2D([], [], **{**sizes, **entry}) for shown, entry in entries if shown]


def main() -> None:
    """Draw all figures."""
    for paper, title in TITLES.items():
        plots.save(figure(title, paper()), IMAGES / f"{paper.__name__}.svg")


if __name__ == "__main__":
    main()
