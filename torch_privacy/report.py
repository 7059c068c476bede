# SPDX-License-Identifier: Apache-2.0
"""A run folder turned into one self-contained page: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from string import Template
from typing import TYPE_CHECKING, Any

from torch_privacy import _plots, privacy
from torch_privacy.experiments.log import Measure
from torch_privacy.summary import (
    FALSE_POSITIVES,
    RELATION,
    Summary,
    privacy_lines,
    releases_from_json,
    round_down,
    round_up,
    score_lines,
    summarize,
)

if TYPE_CHECKING:
    from torch_privacy.experiments.folder import RunFolder
    from torch_privacy.privacy import Profile

PAGE = Template("""\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
  :root { color-scheme: light dark; --paper: #ffffff; --ink: #1c2430; --faint: #8a94a3; --rule: #e3e7ec;
          --first: #0067a8; --second: #b84a00; --third: #00785a; }
  @media (prefers-color-scheme: dark) {
    :root { --paper: #14181f; --ink: #e6eaf0; --faint: #7d8796; --rule: #2b323d;
            --first: #5fb4ee; --second: #f59a5b; --third: #3fcfa4; } }
  body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 3rem; background: var(--paper); color: var(--ink);
         font: 1rem/1.5 system-ui, sans-serif; }
  h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; }
  h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
  .big { display: flex; flex-wrap: wrap; gap: .5rem 3rem; margin: 1.25rem 0; }
  .big div { font-size: .9rem; }
  .big b { display: block; font-size: 2rem; line-height: 1.2; color: var(--first); font-variant-numeric: tabular-nums; }
  .plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); gap: 1.5rem 2rem; }
  figure { margin: 0; }
  .plots svg { width: 100%; height: auto; }
  .plots svg text { font-family: system-ui, sans-serif !important; }
  table { border-collapse: collapse; width: 100%; }
  td, th { padding: .35rem .75rem .35rem 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top;
           font-weight: normal; }
  td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
  th { width: 45%; }
</style>
<h1>$title</h1>
<div class="big">$headline</div>
<p>$words</p>
<div class="plots">$plots</div>
<h2>In numbers</h2>
<table>$numbers</table>
<h2>Settings</h2>
<table>$settings</table>
<h2>What epsilon does not cover</h2>
<ul>$not_covered</ul>
</html>
""")


def render(folder: RunFolder) -> str:
    """The report on a finished run, as HTML; reads the folder's results, metrics, settings and privacy statement."""
    results, statement, settings = map(folder.read_json, (folder.results, folder.privacy, folder.settings))
    stated = results["privacy"]
    releases = releases_from_json(stated)
    summary, profile = summarize(releases, stated["delta"]), privacy.compose(releases)
    return PAGE.substitute(
        title=f"Private training: {escape(results['experiment'])}",
        headline=_headline(results, summary),
        words=escape(_words(results, summary)),
        plots="".join(
            f"<figure>{plot}</figure>" for plot in _draw(folder, Measure(**results["score"]), profile, summary)
        ),
        numbers=_table(score_lines(results) + privacy_lines(summary)),
        settings=_table(
            (name.replace("_", " "), _plain(value)) for name, value in settings.items() if value is not None
        ),
        not_covered="".join(f"<li>{escape(item)}</li>" for item in statement["not_covered"]),
    )


def _draw(folder: RunFolder, measure: Measure, profile: Profile, summary: Summary) -> list[str]:
    rows = folder.read_metrics()
    return [
        _plots.score_plot(rows, measure),
        _plots.epsilon_plot(rows, summary.delta),
        _plots.tradeoff_plot(profile, summary),
        _plots.profile_plot(profile, summary),
    ]


def _headline(results: dict[str, Any], summary: Summary) -> str:
    """The two numbers that matter, large."""
    bracket = f"certified to lie in [{round_down(summary.epsilon_low)}, {round_up(summary.epsilon_high)}]"
    measure = Measure(**results["score"])
    figures = [
        (measure.text(results["test_score"]), f"test {measure.name}"),
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


def _table(lines: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<tr><th scope=row>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in lines)


def _plain(value: Any) -> str:
    """A setting as a reader would write it."""
    return ("no", "yes")[value] if isinstance(value, bool) else f"{value}"
