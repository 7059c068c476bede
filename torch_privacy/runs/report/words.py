# SPDX-License-Identifier: Apache-2.0
"""Explains a training's guarantee to readers who are no engineers, with numbers of its certified trade-off function."""

from __future__ import annotations

import json
import math

from torch_privacy.privacy.rounding import round_up, short
from torch_privacy.privacy.summary import percent
from torch_privacy.runs.report import html
from torch_privacy.runs.report.training_plots import Training
from torch_privacy.support.units import ONE_EXAMPLE, plural

RATES = (0.0001, 0.001, 0.01, 0.05, 0.1, 0.5)  # of false alarms
LOSSES_ARE_EXACT = (
    "These are exact means over the training data. Epsilon does not cover them: do not publish this plot or "
    "metrics.csv if the data must stay private."
)
MEANINGLESS = 99.95  # percent recognized from which there is no protection at that rate


def for_one_person(run: Training) -> str:
    """Returns the section on what the guarantee means for one person, as HTML."""
    heading = "<h2>What this means for one person</h2>"
    if run.warning:
        text = (
            f"This training protects nobody: {run.warning}. The numbers on this page are those that it would have if "
            "it were private."
        )
        return heading + html.paragraphs([text])
    rows = [(f"{100 * rate:g} %", f"{100 * rate:g} %", recognized(run, rate)) for rate in RATES]
    headings = ("false alarms", "recognized by guessing", "recognized with the model")
    lines = (("ours", row) for row in rows)
    parts = [html.paragraphs(introduction(run)), f'<div class="rates">{html.table(headings, lines)}</div>']
    return heading + "".join(parts) + html.paragraphs(conclusion(run))


def introduction(run: Training) -> list[str]:
    """Returns what is protected against whom, in sentences."""
    unit = run.unit
    return [
        f"The model was trained on {size_in_words(run)}. Protected is {unit}: whether it was used at all, and "
        "everything it says. The table shows how well.",
        f"Suppose somebody knows all the data but {unit}, sees the finished model and every step of the training, and "
        "must say whether that one was used. Guessing without the model recognizes as many of those who were used as "
        "it gives false alarms about those who were not. The last column is the most that any method can reach with "
        "the model, a proven bound.",
    ]


def size_in_words(run: Training) -> str:
    """Returns the number of examples, or of owners where they are protected, with the unit."""
    owner = run.statement.get("owner")
    return f"{run.results['num_examples']:,} {plural(ONE_EXAMPLE if owner is None else owner)}"


def conclusion(run: Training) -> list[str]:
    """Returns the bound for a fair coin and what the numbers do not mean, in sentences."""
    right = 50 * (1 + min(1.0, float(run.profile.advantage().high)))
    chance = round_up(min(right, 100.0), 1)
    texts = [
        f"If it is as likely as not that somebody was used, the best guess is right in at most {chance} % of the "
        "cases. Without the model it is right in 50 %."
    ]
    if run.unit == "one example":
        texts.append(
            "Somebody with several examples in the data is protected less: these numbers are about one of them."
        )
    texts.append(
        "This is about what the model reveals about one person beyond what it would reveal without their data. What "
        "it shows of people in general, and so of someone who is like them, is the purpose of the training and is not "
        "hidden."
    )
    return [text.replace(" %", "\u00a0%") for text in texts]


def recognized(run: Training, rate: float) -> str:
    """Returns the largest share of those who were used that any method recognizes, as text."""
    share = 100 * min(1.0, float(run.profile.true_positive_rate(rate).high))
    return "up to all" if share >= MEANINGLESS else f"at most {percent(share / 100)}"


def not_protected(run: Training) -> str:
    """Returns the section on what the guarantee does not cover, as HTML."""
    heading = "<h2>What was not protected</h2>"
    return heading + html.paragraphs(["Epsilon does not cover the following."]) + html.items(not_covered(run))


def not_covered(run: Training) -> list[str]:
    """Returns what the guarantee does not cover, in words."""
    public = ", ".join(run.statement["treated_as_public"])
    return [
        *run.statement["not_covered"],
        *([f"what was treated as public: {public}"] if public else []),
        *assumptions(run),
        "what somebody learns who has secret files of the training: its checkpoint, with keys of noise and batches, "
        "or fingerprint.key; they belong to the owner of the data alone",
    ]


def assumptions(run: Training) -> list[str]:
    """Returns what was taken for granted, in words."""
    independence = run.statement.get("independence") or {}
    assumed = independence.get("assumed_because")
    found = [f"what holds only if {text}" for text in run.profile.assumptions]
    if assumed:
        found.append(f"examples that depend on each other: it was not tested, but assumed that they do not ({assumed})")
    return found + [f"what rehearsals could not compare: {text}" for text in independence.get("not_compared", [])]


def how_it_ended(run: Training) -> str:
    """Returns how the training ended, in words; "" if it made all of its steps."""
    results = run.results
    made, planned = results.get("num_steps_made"), results.get("num_steps")
    if made is None or made >= planned:
        return ""
    stop = run.statement.get("stop") or {}
    if stop.get("independent_of_data"):
        return (
            f"The training ended after {made:,} of {planned:,} steps, for a reason that was declared to be independent "
            f"of the data: {stop['reason']}. The numbers are those of the steps made."
        )
    if not counts_planned_steps(run):
        return f"The training ended after {made:,} of {planned:,} steps, when its privacy budget was spent."
    return (
        f"The training ended after {made:,} of {planned:,} steps. Epsilon and the numbers below count all planned "
        "steps, because the stop may depend on what was released; the plot of epsilon shows the steps made."
    )


def counts_planned_steps(run: Training) -> bool:
    """True if the numbers are those of steps that were planned and not made, too."""
    stated = run.statement["releases"]
    made = sum(release["count"] for release in stated)
    return bool(stated) and sum(release["count"] for release in run.results["privacy"]["releases"]) > made


def statement_lines(run: Training) -> list[tuple[str, str]]:
    """Returns the privacy statement as lines of a table."""
    statement, data = run.statement, run.statement.get("data")
    lines = [("date", statement.get("date", "not stated"))] if "date" in statement else []
    lines += [
        ("unit of privacy", statement["unit"]),
        ("size of the data", size_in_words(run)),
        ("clipping", rule_in_words(statement["clipping"])),
        ("noise", statement["noise"]),
    ]
    if data is not None:
        lines.append(("fingerprint of the data", _fingerprint(data)))
    if "data_budget" in statement:
        lines.append(("budget of the data", budget_in_words(statement["data_budget"])))
    versions = ", ".join(f"{name} {version}" for name, version in statement["versions"].items())
    return [*lines, ("versions", versions)]


def budget_in_words(budget: dict) -> str:
    """Returns the state of the budget of the data when the statement was made, in one line."""
    open_runs = budget["num_unsettled"]
    unsettled = f", of which {open_runs} had not ended" if open_runs else ""
    number = budget.get("num_not_private", 0)
    broken = f"; {number} of them said NOT PRIVATE, for which what was drawn says nothing" if number else ""
    return (
        f"epsilon {budget['epsilon']:g} at delta = {short(budget['delta'])} for all runs on these data together; "
        f"{budget['num_runs']} had drawn at most {round_up(budget['epsilon_drawn'])} when this one ended{unsettled}"
        f"{broken}"
    )


def _fingerprint(data: dict) -> str:
    if data["fingerprint"] is None:
        return f"none, because {data.get('not_made_because', 'it could not be made')}"
    of_all = f" of {data['num_examples']:,}" if "num_examples" in data else ""
    return (
        f"{data['fingerprint']} (of {data['num_items']:,}{of_all} examples, under a key that the "
        "owner of the data has; it reveals nothing without the key)"
    )


def rule_in_words(settings: dict) -> str:
    """Returns a rule and its settings in one line."""
    others = ", ".join(
        f"{name}={value if isinstance(value, str) else _plain(value)}"
        for name, value in settings.items()
        if name != "rule"
    )
    return f"{settings['rule']}({others})"


def _plain(value: object) -> str:
    text = json.dumps(value) if not (isinstance(value, float) and not math.isfinite(value)) else str(value)
    return text if len(text) <= 300 else f"{text[:300]} ..."
