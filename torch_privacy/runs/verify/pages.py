# SPDX-License-Identifier: Apache-2.0
"""Checks the numbers that the report and the model card of a run print, and those of its metrics and its audit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from html import unescape
from pathlib import Path

from torch_privacy import privacy
from torch_privacy.privacy.rounding import round_up
from torch_privacy.privacy.summary import Summary, percent, privacy_lines, summarize
from torch_privacy.runs.verify.evidence import Evidence
from torch_privacy.runs.verify.finding import Finding, agrees, bracketed, differs, equal, unchecked
from torch_privacy.support.read_file import read_bytes

LARGEST_PAGE = 2**25  # bytes
RATE = re.compile(r"([0-9.e-]+) %")


def findings(evidence: Evidence) -> Iterator[Finding]:
    """Yields how the numbers for people compare with those computed again."""
    folder = evidence.folder
    for name, path in (("report.html", folder.report), ("README.md", folder.card)):
        yield from evidence.attempt(
            f"{name}: its numbers", path, lambda name=name, path=path: _page(name, path, evidence)
        )
    yield from evidence.attempt("metrics.csv: epsilon at the end", folder.metrics, lambda: _metrics(evidence))
    if folder.audit.exists():
        yield from evidence.attempt("audit: its claim", folder.audit, lambda: _audit(evidence))


def _page(name: str, path: Path, evidence: Evidence) -> Iterator[Finding]:
    """Yields whether each number of the page that is known here is the one computed again."""
    text = read_bytes(path, LARGEST_PAGE).decode("utf-8", "replace")
    delta = (evidence.results or {"privacy": {}})["privacy"].get("delta", evidence.statement["delta"])
    if delta is None:
        yield unchecked(f"{name}: its numbers", "no delta is stated")
        return
    summary, profile = _summary(tuple(evidence.priced), delta), privacy.compose(evidence.priced)
    rows = _rows(text)
    known = dict([*privacy_lines(summary), ("unit of privacy", evidence.statement["unit"])])
    known["noise multiplier"] = f"{evidence.statement['noise_multiplier']:.6g}"
    wrong, right = [], 0
    for label, *cells in rows:
        if label in known and len(cells) == 1:
            wanted = known[label]
            right += cells[0] == wanted
            if cells[0] != wanted and label != "noise multiplier":
                wrong.append(f"{label}: {cells[0]!r}, not {wanted!r}")
        elif (rate := RATE.fullmatch(label)) and cells and re.fullmatch("up to all|at most .*", cells[-1]):
            share = min(1.0, float(profile.true_positive_rate(float(rate[1]) / 100).high))
            wanted = {f"at most {percent(share)}", f"at most {round_up(100 * share, 1)} %", "up to all"}
            right += cells[-1] in wanted
            if cells[-1] not in wanted:
                wrong.append(f"recognized at {label}: {cells[-1]!r}, not at most {percent(share)}")
    high = round_up(summary.epsilon_high)
    for found in re.findall(r"ε ≤ ([0-9.]+(?:e[0-9]+)?|inf)", _plain(text)):
        right += found == high
        if found != high:
            wrong.append(f"ε ≤ {found}, not {high}")
    if wrong:
        yield differs(f"{name}: its numbers", "; ".join(wrong[:3]))
    elif not right:
        yield unchecked(f"{name}: its numbers", "none of them is in a place that is known here")
    else:
        yield agrees(f"{name}: its numbers", f"{right} are those computed again")


@lru_cache(maxsize=4)  # report and card ask for the same
def _summary(releases: tuple[tuple[privacy.Event, int], ...], delta: float) -> Summary:
    return summarize(releases, delta)


def _rows(text: str) -> list[list[str]]:
    """Returns the cells of each row of the tables in HTML or Markdown."""
    html = re.findall(r"<tr[^>]*>(.*?)</tr>", text, re.DOTALL)
    rows = [[_plain(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)] for row in html]
    if not html:
        lines = [line for line in text.splitlines() if line.startswith("| ")]
        rows = [[_plain(cell) for cell in line.strip("| ").split(" | ")] for line in lines]
    return [row for row in rows if row]


def _plain(text: str) -> str:
    """Returns the text of HTML without drawings, or of Markdown."""
    text = re.sub(r"<(svg|style)\b.*?</\1>", " ", text, flags=re.DOTALL)
    text = unescape(re.sub(r"<[^>]+>", "", text)).replace("\u00a0", " ")
    return " ".join(re.sub(r"\\(.)", r"\1", text).split())


def _metrics(evidence: Evidence) -> Iterator[Finding]:
    subject, stated = "metrics.csv: epsilon at the end", evidence.statement
    rows = [row for row in evidence.folder.read_metrics() if row.training == "private" and row.epsilon_high is not None]
    if not rows or evidence.is_search or not stated["releases"]:
        yield unchecked(subject, "it has no epsilon that is known here")
        return
    delta = (evidence.results or {"privacy": {}})["privacy"].get("delta", stated["delta"])
    last = rows[-1]
    if delta is None or last.step != stated.get("num_steps_made"):
        yield unchecked(subject, f"it is that of step {last.step}")
        return
    of_steps = privacy.compose(evidence.made).epsilon(delta)
    yield bracketed(subject, {"low": last.epsilon_low, "high": last.epsilon_high}, of_steps)


def _audit(evidence: Evidence) -> Iterator[Finding]:
    audit, ledger = evidence.folder.read_audit(), evidence.folder.audit.with_name("ledger.jsonl")
    assert audit is not None
    refuted = audit["p_value"] < audit["significance"]
    yield equal("audit: rejects the claim", audit["rejected"], refuted, "its p-value")
    if not ledger.exists():
        yield unchecked("audit: its claim", "the ledger of the audit is not in the folder")
        return
    found = privacy.Ledger.read(ledger)
    high = found.profile().epsilon(audit["delta"]).high
    yield equal("audit: its claim", audit["epsilon_claimed"], high, "the ledger of the audit")
    detail = f"{len(found)} releases on the same data: their epsilon adds up with that of the statement"
    yield unchecked("audit: is not part of the statement", detail)
