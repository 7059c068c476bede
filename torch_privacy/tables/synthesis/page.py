# SPDX-License-Identifier: Apache-2.0
"""Renders what is known of a generator on one page, for the owner of the data and for readers who train no models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...privacy import Profile
from ...privacy.rounding import round_up, short
from ...runs.quality import number
from ...runs.report import audit as audit_section
from ...runs.report import html
from ...runs.report.training_plots import FIRST, SECOND, as_svg, new_axes, page_style, whole_numbers
from .judge import Judgement

WORST = 10  # pairs in the table
MOST_NAMES = 8  # of lost categories
FOR_THE_OWNER = (
    "This page is for the owner of the data, not for release. Its distances, scores and lost categories are exact "
    "statistics of real rows, which no epsilon covers. What may be published: the synthetic rows, and of this folder "
    "generator.safetensors, schema.toml, privacy.json, ledger.jsonl and settings.json."
)
DISTANCES = (
    "How near synthetic rows come to single real rows is not shown. Such distances are exact statistics of the rows, "
    "and small ones prove nothing: common rows occur in both tables. What the generator reveals of a row is bounded by "
    "epsilon, for every attack, and tested by the audit."
)
ROWS = (
    "Any number of rows may be drawn, now or later, without further cost: they follow from what was released already. "
    "Rows resemble people in general; a row that looks like someone is not that person's row. Numbers are drawn within "
    "bins, and categories that few rows have are joined to other."
)


def render(
    name: str,
    generator: str,
    unit: str,
    profile: Profile,
    delta: float,
    found: Judgement,
    audited: Mapping[str, Any] | None,
    budget: Mapping[str, Any] | None = None,
) -> str:
    """Returns the page.

    Args:
        name: of the table.
        generator: its kind.
        unit: what is protected, in words.
        profile: the price of all releases.
        delta: at which epsilon is shown.
        found: the comparison with real rows.
        audited: what ``Audit.as_json`` returned, if there was an audit.
        budget: that of the data, as in statements, if the run draws from one.
    """
    epsilon, right = round_up(profile.epsilon_high(delta)), 50 * (1 + min(1.0, float(profile.advantage().high)))
    pairs = list(found.two_way.values())
    mean = 100 * float(np.mean(pairs)) if pairs else 0.0
    big = [
        (f"ε ≤ {epsilon}", f"at δ = {short(delta)}, certified"),
        (
            f"{round_up(min(right, 100.0), 1)} %",
            "of fair coins on one person are guessed at best; 50 % without the rows",
        ),
        (f"{mean:.1f} %", f"mean distance of two columns; chance alone makes {100 * found.sampling:.1f} %"),
    ]
    parts = [
        f'<p class="warning">{FOR_THE_OWNER}</p>',
        '<div class="big">' + "".join(f"<div><b>{figure}</b>{caption}</div>" for figure, caption in big) + "</div>",
        "<h2>What is protected</h2>",
        html.paragraphs([f"Protected is {unit}: whether it was used at all, and everything it says.", ROWS]),
        "" if budget is None else html.paragraphs([_drawn(budget)]),
        *_scores(found),
        "<h2>How like are the rows?</h2>",
        html.paragraphs(
            [
                "A distance of 3 % means: to make the synthetic table like the real one in these columns, three of a "
                "hundred rows must change. The broken line is the mean distance between two sets of real rows, those "
                "that were used and those that were held out."
            ]
        ),
        html.figures([_columns_plot(found), _pairs_plot(found)]),
        html.table(("pair of columns", "distance"), [("ours", row) for row in _worst(found)]),
        "<h2>Rare categories that were lost</h2>",
        html.items(_lost(found)),
        "<h2>What an attacker could find</h2>",
        html.paragraphs([DISTANCES]),
        html.paragraphs(["There was no audit. Ask for one with --audit 1000."]) if audited is None else "",
        "" if audited is None else audit_section.section(dict(audited)),
    ]
    return html.page(f"Synthetic rows of {name}, by {generator}", "\n".join(parts))


def _drawn(budget: Mapping[str, Any]) -> str:
    return (
        f"All runs on these data together may spend epsilon {budget['epsilon']:g} at delta = {short(budget['delta'])}: "
        f"{budget['num_runs']} draw at most {round_up(budget['epsilon_drawn'])}, this one included."
    )


def _scores(found: Judgement) -> list[str]:
    if not found.scores:
        return []
    text = (
        f"The same model was trained on each of these, and then tested on {found.num_test:,} real rows that were held "
        "out. Trained on synthetic rows alone, it shows what they are good for. Trained on the real rows with the same "
        "epsilon, it shows what a private model for this one purpose would reach; synthetic rows serve others, too."
    )
    return [
        "<h2>What can be learnt from the rows</h2>",
        html.paragraphs([text]),
        html.pairs(
            [
                (f"{measure}, trained on {name}", number(measure, score, found.errors[measure][name]))
                for measure, scores in ((found.measure, found.scores), ("AUC", found.areas))
                for name, score in scores.items()
            ]
        ),
        html.figures([_scores_plot(found)]),
    ]


def _lost(found: Judgement) -> list[str]:
    lines = []
    for column, lost in found.lost.items():
        shown = [f"{text} ({count:,} rows)" for text, count in list(lost.items())[:MOST_NAMES]]
        more = f" and {len(lost) - len(shown):,} more" if len(lost) > len(shown) else ""
        lines.append(f"{column}: {', '.join(shown)}{more}")
    return lines or ["none: every category of the real rows occurs"]


def _worst(found: Judgement) -> list[tuple[str, str]]:
    worst = sorted(found.two_way.items(), key=lambda item: -item[1])[:WORST]
    return [(f"{first} and {second}", f"{100 * value:.1f} %") for (first, second), value in worst]


def _columns_plot(found: Judgement) -> str:
    figure, axes = new_axes("Single columns", "distance (%)", "")
    names = sorted(found.one_way, key=lambda name: found.one_way[name])
    with page_style():
        figure.set_size_inches(4.6, max(1.6, 0.24 * len(names) + 0.9))
        axes.barh([_short(name) for name in names], [100 * found.one_way[name] for name in names], color=FIRST)
        axes.set_xlim(left=0)
    return as_svg(figure)


def _pairs_plot(found: Judgement) -> str:
    figure, axes = new_axes("Pairs of columns", "distance (%)", "pairs")
    with page_style():
        axes.hist([100 * value for value in found.two_way.values()], bins=20, color=FIRST)
        axes.axvline(100 * found.sampling, color="#020202", linestyle="--", linewidth=1.2)
        whole_numbers(axes.yaxis)
        axes.set_xlim(left=0)
    return as_svg(figure)


def _scores_plot(found: Judgement) -> str:
    """Draws the AUC where there is one: with a rare class all accuracies are nearly equal."""
    measure, scores = ("AUC", found.areas) if found.areas else (found.measure, found.scores)
    is_share = measure == "accuracy"
    figure, axes = new_axes("Test on real rows", f"{measure}{' (%)' if is_share else ''}", "")
    names = list(scores)[::-1]
    values = [scores[name] * (100 if is_share else 1) for name in names]
    with page_style():
        figure.set_size_inches(6.4, 2.0)
        bars = axes.barh(names, values, color=[SECOND if name == "synthetic rows" else FIRST for name in names])
        axes.bar_label(bars, labels=[number(measure, scores[name]).removesuffix(" %") for name in names], padding=4)
        axes.set_xlim(0, max(values) * 1.15)
    return as_svg(figure)


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:23]}…"
