# SPDX-License-Identifier: Apache-2.0
"""Renders an audit: its lower bound beside the certified upper bound, the attack beside the trade-off function."""

from html import escape
from typing import Any

import numpy as np

from torch_privacy.privacy.rounding import round_down, round_up, short
from torch_privacy.runs.report import html
from torch_privacy.runs.report.training_plots import FIRST, SECOND, as_svg, tradeoff_axes, write_along

WORDS = (
    "Fair coins put the canaries into the data of one training, or left them out; an attack guessed the coins. "
    "The lower bound holds for this data, this run and this attack: one run finds only a part of epsilon, so compare "
    "it with what the ideal attack would show. A small bound shows nothing; a rejected claim shows a mistake."
)


def render(content: dict[str, Any]) -> str:
    """Returns a page on one audit, from what ``Audit.as_json`` returned."""
    return html.page("Audit in one run", section(content, heading=False))


def section(content: dict[str, Any], *, heading: bool = True) -> str:
    """Returns a section on one audit."""
    parts = (
        "<h2>Audit in one run</h2>" if heading else "",
        f'<p class="warning">{escape(_verdict(content))}</p>' if content["rejected"] else "",
        f'<div class="big">{_headline(content)}</div>',
        f"<p>{escape(WORDS)}</p>",
        html.figures([attack_plot(content)]),
        html.pairs(lines(content)),
        "".join(f"<p>{escape(note)}</p>" for note in content["notes"]),
    )
    return "\n".join(parts)


def lines(content: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the numbers of an audit with their names."""
    confidence = f"{100 * (1 - content['significance']):g} %"
    shown = [
        ("claim", _verdict(content)),
        ("p-value of the claim", f"{content['p_value']:.2g}"),
        ("certified epsilon, at most", f"{_up(content['epsilon_claimed'])} at {short(content['delta'])}"),
        (f"epsilon, at least ({confidence})", _down(content["epsilon_low"])),
        ("the ideal attack would show", _down(content["epsilon_low_ideal"])),
        ("at least, for any mechanism", _down(content["epsilon_low_any_mechanism"])),
        ("canaries", f"{content['num_canaries']}, of which {content['num_inside']} were in"),
        ("guesses", _counts(content["outcome"])),
        ("guesses of the ideal attack", _counts(content["outcome_ideal"])),
        ("area under the curve", f"{content['area_under_curve']:.3f}"),
    ]
    if "sums" in content:
        shown[4:4] = [("at least, by sums of scores", _down(content["epsilon_low_sums"]))]
        shown.append(
            ("blocks of canaries", f"{_blocks(content['sums'])}; no attack beats {_blocks(content['sums_ideal'])}")
        )
    return shown


def _blocks(counts: dict[str, int]) -> str:
    return f"{counts['num_right']} of {counts['num_blocks']} right"


def _up(epsilon: float | None) -> str:
    return "infinity" if epsilon is None else round_up(epsilon)


def _down(epsilon: float | None) -> str:
    return "infinity" if epsilon is None else round_down(epsilon)


def _verdict(content: dict[str, Any]) -> str:
    return "REJECTED: less private than its ledger says" if content["rejected"] else "not contradicted"


def _counts(outcome: dict[str, int]) -> str:
    if "num_guesses" in outcome:
        return f"{outcome['num_correct']} of {outcome['num_guesses']} right"
    alarms = f"{outcome['num_false_alarms']} false alarms in {outcome['num_outside']}"
    return f"{alarms}, {outcome['num_missed']} missed of {outcome['num_inside']}"


def _headline(content: dict[str, Any]) -> str:
    at = f"at \u03b4 = {short(content['delta'])}"
    figures = [
        (f"\u03b5 \u2265 {_down(content['epsilon_low'])}", f"{at}, found by the attack"),
        (f"\u03b5 \u2264 {_up(content['epsilon_claimed'])}", f"{at}, certified by the ledger"),
    ]
    return "".join(f"<div><b>{escape(figure)}</b>{escape(caption)}</div>" for figure, caption in figures)


def attack_plot(content: dict[str, Any]) -> str:
    """Draws false alarms and missed canaries of the attack at every threshold, beside the certified curve."""
    figure, axes = tradeoff_axes("The attack, and what no attack can beat", "false alarms (%)", "canaries missed (%)")
    false, true = (100 * np.asarray(side, float) for side in content["roc"])
    rates, claimed = (100 * np.asarray(side, float) for side in content["claimed_curve"])
    write_along(axes, "blind guessing")
    axes.plot(rates, 100 - claimed, color=FIRST, label="certified: no attack is below")
    axes.fill_between(rates, 0, 100 - claimed, color=FIRST, alpha=0.12, linewidth=0)
    axes.step(false, 100 - true, where="post", color=SECOND, label="this attack")
    axes.legend(frameon=False, loc="upper right")
    return as_svg(figure)
