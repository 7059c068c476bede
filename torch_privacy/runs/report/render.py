# SPDX-License-Identifier: Apache-2.0
"""Renders run folders as one self-contained page: a training, an experiment of a paper, or several of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_privacy.privacy.rounding import round_down, round_up, short
from torch_privacy.privacy.summary import FALSE_POSITIVES, privacy_lines
from torch_privacy.runs import table
from torch_privacy.runs.folder import NO_DIGESTS
from torch_privacy.runs.metrics import has_diverged
from torch_privacy.runs.quality import headlines, warnings_of
from torch_privacy.runs.report import audit, html, table_sections, training_plots, words
from torch_privacy.runs.report.training_plots import NOT_PRIVATE, Training
from torch_privacy.runs.rows import folder_name, rows_folder
from torch_privacy.support.read_file import read_bytes

if TYPE_CHECKING:
    from torch_privacy.runs.folder import RunFolder
from collections.abc import Mapping

from torch_privacy.runs.report.style import PAGE_FAINT
from torch_privacy.runs.report.training_plots import FIRST, as_svg, new_axes

LARGEST_DRAWING = 2**24  # bytes
MOST_HEADLINES = 3  # scores shown large


def render(folders: Sequence[RunFolder]) -> str:
    """Renders finished runs as HTML; a single training gets a page with all its settings.

    Raises:
        ValueError: if a folder is not a finished run, or one of its files is damaged.
    """
    contents = [folder.read_results() for folder in folders]
    if len(folders) == 1 and "reproduce" not in contents[0]:
        return _page_of_training(folders[0])
    names = _unique(
        content.get("reproduce", folder.path.name) for folder, content in zip(folders, contents, strict=True)
    )
    sections, trainings = [], []
    for name, folder, content in zip(names, folders, contents, strict=True):
        if "reproduce" in content:
            sections.append(_section(name, folder, content))
            trainings += _trainings_of(folder, content)
        else:
            trainings.append(Training.read(folder))
    shown = zip(trainings, _unique(run.name for run in trainings), strict=True)
    trainings = [replace(run, name=name) for run, name in shown]
    return html.page(_in_words(names), "".join(sections) + (_comparison(trainings) if trainings else ""))


def _unique(names: Iterable[str]) -> list[str]:
    """Returns the names, with (2), (3), ... after repeated ones."""
    times = Counter[str]()
    unique = []
    for name in names:
        times[name] += 1
        unique.append(f"{name} ({times[name]})" if times[name] > 1 else name)
    return unique


def _in_words(names: Sequence[str]) -> str:
    """Joins names as in ``a, b and c``."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _trainings_of(folder: RunFolder, results: dict[str, Any]) -> list[Training]:
    """Reads the trainings among an experiment's rows, for the first seed."""
    inside, (seed, *others) = rows_folder(folder.path), results["seeds"]
    which = f", seed {seed}" if others else ""
    found = [(row["row"] + which, type(folder)(inside / folder_name(row["row"], seed))) for row in results["rows"]]
    return [Training.read(inner, name) for name, inner in found if inner.metrics.is_file()]


def _section(name: str, folder: RunFolder, results: dict[str, Any]) -> str:
    """Renders an experiment under this name: its table, figures and notes."""
    lines = (
        (line.source, (line.row if line.source == "ours" else "", line.source, *line.cells))
        for line in table.lines(results)
    )
    pictures = [_svg(path) for path in sorted(folder.path.glob("*.svg"))]
    return "".join(
        (
            f"<h2>{escape(table.title(results | {'reproduce': name}))}</h2>",
            f"<p>{escape(table.what(results))}. {escape(table.summary(results))}.</p>",
            html.table(["", "", *table.headings(results)], lines),
            "".join(f"<p>{_with_code(note)}</p>" for note in results["notes"]),
            html.figures(pictures, "cards") if pictures else "",
        )
    )


def _with_code(note: str) -> str:
    """Returns a note as HTML; text between backticks becomes code."""
    return re.sub("`(.+?)`", r"<code>\1</code>", escape(note))


def _svg(path: Path) -> str:
    """Returns the drawing in a file, from its first tag on."""
    try:
        text = read_bytes(path, LARGEST_DRAWING).decode("utf-8", "replace")
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read ({error}). Delete it, or restore it from a copy.") from None
    return text[max(0, text.find("<svg")) :]


def _comparison(trainings: Sequence[Training]) -> str:
    """Renders several trainings in the same plots, and their numbers."""
    lines = []
    for run in trainings:
        without = [score.measure.text(score.baseline) for score in run.scores if score.has_baseline]
        cells = (
            run.name,
            ", ".join(f"{score.measure.name} {score.measure.text(score.value)}" for score in run.scores)
            or table.MISSING,
            ", ".join(without) or table.MISSING,
            f"{round_up(run.summary.epsilon_high)} at {short(run.summary.delta)}",
            f"{round_up(100 * run.summary.true_positive_rate_high, 1)} %",
        )
        lines.append(("ours", cells))
    headings = (
        "training", "test", "without privacy", "epsilon at delta, at most",
        f"recognized at {FALSE_POSITIVES} false alarms, at most",
    )  # fmt: skip
    return "<h2>Trainings</h2>" + html.figures(training_plots.overlay_plots(trainings)) + html.table(headings, lines)


def _page_of_training(folder: RunFolder) -> str:
    """Renders one training in full: results, what they mean, metrics, settings and privacy statement."""
    run = Training.read(folder)
    results, summary = run.results, run.summary
    digests = results.get("files", NO_DIGESTS)
    settings = folder.read_settings(digests)
    measure = run.measure
    plots = (
        training_plots.loss_plot(run.rows) if measure is None else training_plots.score_plot(run.rows, measure),
        training_plots.epsilon_plot(run.rows, summary.delta),
        training_plots.tradeoff_plot(run.profile, summary),
        training_plots.profile_plot(run.profile, summary),
        *calibration_plots(results),
    )
    shown = [
        (name.replace("_", " "), f"{value:.6g}" if name == "epochs" and isinstance(value, float) else _plain(value))
        for name, value in settings.items()
        if value is not None and not isinstance(value, dict)
    ]
    ended = words.how_it_ended(run)
    body = (
        f'<p class="warning">{escape(run.warning)}</p>' if run.warning else "",
        f'<div class="big">{_headline(run)}</div>',
        f"<p>{escape(ended)}</p>" if ended else "",
        *(f'<p class="warning">{escape(text)}</p>' for text in warnings_of(results)),
        words.for_one_person(run),
        words.not_protected(run),
        "<h2>The course of the training</h2>",
        html.figures(plots, captions=(words.LOSSES_ARE_EXACT,) if run.is_own else ()),
        "<h2>In numbers</h2>",
        html.pairs(_score_lines(run) + privacy_lines(summary)),
        "" if (audited := folder.read_audit()) is None else audit.section(audited),
        table_sections.sections(results),
        "<h2>Settings</h2>",
        html.pairs(shown),
        "<h2>The privacy statement</h2>",
        html.pairs(words.statement_lines(run)),
    )
    kind = f"Training, {NOT_PRIVATE}" if run.warning else "Private training"
    return html.page(f"{kind}: {run.subject or folder.path.absolute().name}", "\n".join(body))


def _score_lines(run: Training) -> list[tuple[str, str]]:
    """Returns the scores as lines of a table."""
    by_loss = {row.training for row in run.rows if has_diverged([row])}  # exact: the results do not say it
    if not run.is_own:
        diverged = sorted(by_loss.union(run.results.get("diverged", ())), reverse=True)
        return table.score_lines(run.results | {"diverged": diverged})
    count = run.results.get("num_test_examples")
    of = "" if count is None else f" of {count:,} held-out examples"
    lines = []
    for score in run.scores:
        digits = 2 if score.measure.percent else 4
        lines.append((f"test {score.measure.name}, private", score.measure.text(score.value, digits) + of))
        if score.has_baseline:
            name = f"test {score.measure.name}, same network, not private"
            lines.append((name, score.measure.text(score.baseline, digits)))
    if run.results["diverged"] or by_loss:
        lines.append(("DIVERGED", "a loss or score is not a finite number; try a smaller learning rate"))
    return lines


def _headline(run: Training) -> str:
    """Renders the scores and epsilon, large."""
    summary = run.summary
    bracket = f"certified to lie in [{round_down(summary.epsilon_low)}, {round_up(summary.epsilon_high)}]"
    scores = headlines(run.results) if run.results.get("quality") else None
    if scores is None:
        scores = [(one.measure.text(one.value), f"test {one.measure.name}") for one in run.scores[:MOST_HEADLINES]]
    figures = [
        *scores,
        (f"\u03b5 \u2264 {round_up(summary.epsilon_high)}", f"at \u03b4 = {short(summary.delta)}; {bracket}"),
    ]
    return "".join(f"<div><b>{escape(figure)}</b>{escape(caption)}</div>" for figure, caption in figures)


def _plain(value: Any) -> str:
    """Returns a setting as plain text."""
    return ("no", "yes")[value] if isinstance(value, bool) else f"{value}"


def calibration_plots(results: Mapping[str, Any]) -> list[str]:
    """Returns the calibration curve as SVG: observed over predicted shares, with standard errors; [] if it has none."""
    quality = results.get("quality", {})
    curve = quality.get("calibration")
    if not curve:
        return []
    positive = quality.get("positive")
    what = "of the predicted class" if positive is None else f"of {positive!r}"
    figure, axes = new_axes("Calibration on the test rows", f"predicted probability {what}, %", "observed, %")
    predicted, observed, error = ([100 * one[name] for one in curve] for name in ("predicted", "observed", "error"))
    end = 1.08 * max(*predicted, *observed, 1e-6)
    axes.plot([0, end], [0, end], color=PAGE_FAINT, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.errorbar(predicted, observed, error, color=FIRST, marker="o", markersize=5, linewidth=1.2, capsize=2)
    axes.set(xlim=(0, end), ylim=(0, end))
    return [as_svg(figure)]
