# SPDX-License-Identifier: Apache-2.0
"""Run folders turned into one self-contained page: a training, an experiment of a paper, or several of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_privacy import privacy
from torch_privacy.privacy.summary import (
    FALSE_POSITIVES,
    RELATION,
    Summary,
    privacy_lines,
    releases_from_json,
    round_down,
    round_up,
    summarize,
)
from torch_privacy.report import html as _page
from torch_privacy.report import overlays as _overlays
from torch_privacy.report import training_plots as _plots
from torch_privacy.runs import table
from torch_privacy.runs.metrics import Measure, Metrics
from torch_privacy.runs.rows import folder_name, rows_folder

if TYPE_CHECKING:
    from torch_privacy.runs.folder import RunFolder

NOT_PRIVATE = "NOT PRIVATE"


@dataclass(frozen=True)
class Training:
    """A finished training as its folder tells it."""

    name: str
    results: dict[str, Any]
    measure: Measure
    rows: list[Metrics]
    summary: Summary
    profile: privacy.Profile
    warning: str  # NOT PRIVATE, and why; empty for a private one

    @classmethod
    def read(cls, folder: RunFolder, name: str | None = None) -> Training:
        """What ``folder`` holds; a damaged file raises a ``ValueError``."""
        results = folder.read_json(folder.results)
        if lacking := [key for key in ("experiment", "privacy", "score", "test_score") if key not in results]:
            raise ValueError(
                f"{folder.results}: has no {', '.join(map(repr, lacking))}: it is no finished training, nor an "
                "experiment of reproduce."
            )
        stated = results["privacy"]
        releases = releases_from_json(stated)
        summary = summarize(releases, stated["delta"])
        rows, measure = folder.read_metrics(), Measure(**results["score"])
        warning = folder.read_json(folder.privacy).get("warning") or ""
        name = (name or folder.path.name) + (f", {NOT_PRIVATE}" if warning else "")
        return cls(name, results, measure, rows, summary, privacy.compose(releases), warning)


def render(folders: Sequence[RunFolder]) -> str:
    """The report on finished runs, as HTML; a training alone has a page with all its settings.

    Raises:
        ValueError: a folder is no finished run, or a file of it is damaged.
    """
    contents = [folder.read_json(folder.results) for folder in folders]
    if len(folders) == 1 and "reproduce" not in contents[0]:
        return _page_of_training(folders[0])
    names = _told_apart(
        content.get("reproduce", folder.path.name) for folder, content in zip(folders, contents, strict=True)
    )
    sections, trainings = [], []
    for name, folder, content in zip(names, folders, contents, strict=True):
        if "reproduce" in content:
            if lacking := [key for key in ("place", "paper", "rows", "columns", "notes") if key not in content]:
                raise ValueError(f"{folder.results}: has no {', '.join(map(repr, lacking))}; the file is damaged.")
            sections.append(_section(name, folder, content))
            trainings += _trainings_of(folder, content)
        else:
            trainings.append(Training.read(folder))
    shown = zip(trainings, _told_apart(run.name for run in trainings), strict=True)
    trainings = [replace(run, name=name) for run, name in shown]
    return _page.page(_in_words(names), "".join(sections) + (_comparison(trainings) if trainings else ""))


def _told_apart(names: Iterable[str]) -> list[str]:
    """The names, with (2), (3), ... behind those that were there before."""
    times = Counter[str]()
    told = []
    for name in names:
        times[name] += 1
        told.append(f"{name} ({times[name]})" if times[name] > 1 else name)
    return told


def _in_words(names: Sequence[str]) -> str:
    """``a, b and c``."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _trainings_of(folder: RunFolder, results: dict[str, Any]) -> list[Training]:
    """The trainings among an experiment's rows, of the first seed."""
    inside, (seed, *others) = rows_folder(folder.path), results["seeds"]
    which = f", seed {seed}" if others else ""
    found = [(row["row"] + which, type(folder)(inside / folder_name(row["row"], seed))) for row in results["rows"]]
    return [Training.read(inner, name) for name, inner in found if inner.metrics.is_file()]


def _section(name: str, folder: RunFolder, results: dict[str, Any]) -> str:
    """An experiment under this name: its table, pictures and notes."""
    lines = (
        (line.source, (line.row if line.source == "ours" else "", line.source, *line.cells))
        for line in table.lines(results)
    )
    pictures = [_svg(path) for path in sorted(folder.path.glob("*.svg"))]
    return "".join(
        (
            f"<h2>{escape(table.title(results | {'reproduce': name}))}</h2>",
            f"<p>{escape(table.what(results))}. {escape(table.summary(results))}.</p>",
            _page.table(["", "", *table.headings(results)], lines),
            "".join(f"<p>{_with_code(note)}</p>" for note in results["notes"]),
            _page.figures(pictures, "cards") if pictures else "",
        )
    )


def _with_code(note: str) -> str:
    """A note as HTML: what stands between backticks is code."""
    return re.sub("`(.+?)`", r"<code>\1</code>", escape(note))


def _svg(path: Path) -> str:
    text = path.read_text()
    return text[text.index("<svg") :]


def _comparison(trainings: Sequence[Training]) -> str:
    """Several trainings over one another, and their numbers."""
    lines = []
    for run in trainings:
        baseline = run.results["baseline_test_score"]
        cells = (
            run.name,
            f"{run.measure.name} {run.measure.text(run.results['test_score'])}",
            table.MISSING if baseline is None else run.measure.text(baseline),
            f"{round_up(run.summary.epsilon_high)} at {run.summary.delta:g}",
            f"{round_up(100 * run.summary.true_positive_rate_high, 1)} %",
        )
        lines.append(("ours", cells))
    headings = (
        "training", "test", "without privacy", "epsilon at delta, at most",
        f"recognized at {FALSE_POSITIVES} false alarms, at most",
    )  # fmt: skip
    return "<h2>Trainings</h2>" + _page.figures(_overlays.draw(trainings)) + _page.table(headings, lines)


def _page_of_training(folder: RunFolder) -> str:
    """One training in full: results, metrics, settings and privacy statement."""
    run = Training.read(folder)
    statement, settings = map(folder.read_json, (folder.privacy, folder.settings))
    results, summary = run.results, run.summary
    plots = (
        _plots.score_plot(run.rows, run.measure),
        _plots.epsilon_plot(run.rows, summary.delta),
        _plots.tradeoff_plot(run.profile, summary),
        _plots.profile_plot(run.profile, summary),
    )
    shown = [(name.replace("_", " "), _plain(value)) for name, value in settings.items() if value is not None]
    body = (
        f'<p class="warning">{escape(run.warning)}</p>' if run.warning else "",
        f'<div class="big">{_headline(run)}</div>',
        f"<p>{escape(_words(results, summary))}</p>",
        _page.figures(plots),
        "<h2>In numbers</h2>",
        _page.pairs(table.score_lines(results) + privacy_lines(summary)),
        "<h2>Settings</h2>",
        _page.pairs(shown),
        "<h2>What epsilon does not cover</h2>",
        "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in statement["not_covered"]) + "</ul>",
    )
    kind = f"Training, {NOT_PRIVATE}" if run.warning else "Private training"
    return _page.page(f"{kind}: {results['experiment']}", "\n".join(body))


def _headline(run: Training) -> str:
    """The two numbers that matter, large."""
    summary = run.summary
    bracket = f"certified to lie in [{round_down(summary.epsilon_low)}, {round_up(summary.epsilon_high)}]"
    figures = [
        (run.measure.text(run.results["test_score"]), f"test {run.measure.name}"),
        (f"\u03b5 \u2264 {round_up(summary.epsilon_high)}", f"at \u03b4 = {summary.delta:g}; {bracket}"),
    ]
    return "".join(f"<div><b>{escape(figure)}</b>{escape(caption)}</div>" for figure, caption in figures)


def _words(results: dict[str, Any], summary: Summary) -> str:
    """The same in words, for a reader who has never met an epsilon."""
    examples, power = results["num_examples"], round_up(100 * summary.true_positive_rate_high, 1)
    words = (
        f"The model was trained on {examples:,} examples. Suppose somebody knows all of them but one, sees the "
        f"finished model, and wants to tell whether that one was used ({RELATION}). If false alarms may happen in "
        f"{FALSE_POSITIVES} of the cases, no method recognizes more than {power} % of those who were used."
    )
    return words.replace(" %", "\u00a0%")  # a number and its unit stay together


def _plain(value: Any) -> str:
    """A setting as a reader would write it."""
    return ("no", "yes")[value] if isinstance(value, bool) else f"{value}"
