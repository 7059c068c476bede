# SPDX-License-Identifier: Apache-2.0
"""Writes the model card of a private training for the Hugging Face Hub: a README.md with metadata at its head."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from torch_privacy.privacy.rounding import round_up, short
from torch_privacy.privacy.summary import attacker_lines, privacy_lines
from torch_privacy.runs.folder import RunFolder
from torch_privacy.runs.quality import quality_lines, warnings_of
from torch_privacy.runs.report import words
from torch_privacy.runs.report.table_sections import INTRODUCTION, declared_rows
from torch_privacy.runs.report.training_plots import Training
from torch_privacy.support.notebook import markdown_text as _text

TAG = "differential-privacy"


def model_card(run_folder: Path | str) -> str:
    """Returns the model card of a finished training, in Markdown, for ``README.md`` on the Hugging Face Hub.

    It says what the model is, the privacy guarantee (certified epsilon, delta, unit, number of examples, noise), what
    it means for one person, what is not covered, and how to verify it. Test scores are in its metadata
    (``model-index``) if the run has some. Exact statistics of the training data, such as training losses, are not in
    it. It names no license: add yours.

    Publish it with ``model.safetensors`` and ``privacy.json``, but not the whole run folder: docs/run-folder.md says
    what each file may be used for.

    Args:
        run_folder: folder of a finished training, of ``PrivateTraining(run_folder=...)`` or ``torch-privacy train``.

    Raises:
        ValueError: it is no finished training, or a file is damaged.
    """
    folder = RunFolder(Path(run_folder))
    if "privacy" not in folder.read_results():
        raise ValueError(f"{folder.path}: is no single training. Name the folder of one, such as one in its rows.")
    run = Training.read(folder, folder.path.absolute().name)
    sections = [
        _metadata(run),
        f"# {_text(_title(run))}",
        *([f"> **{_text(run.warning)}**"] if run.warning else []),
        _what_it_is(run),
        "## Privacy guarantee",
        *_guarantee(run),
        "## What this means for one person",
        *_for_one_person(run),
        "## What is not covered",
        _list(words.not_covered(run)),
        *_scores(run),
        *_declared(run),
        "## How to verify",
        *_verification(run),
        "## Versions",
        _list(f"{name} {version}" for name, version in run.statement["versions"].items()),
    ]
    text = "\n\n".join(sections) + "\n"
    return text.encode("utf-8", "replace").decode("utf-8")  # a name of a folder may hold bytes that are no text


def _metadata(run: Training) -> str:
    """Returns the head of the file, in YAML; a JSON text is a YAML text, too."""
    tags = ["pytorch", "safetensors"] + ([] if run.warning else [TAG])
    lines = [
        "---",
        "# license: (yours; the card needs one on the Hub)",
        "library_name: pytorch",
        "tags:",
        *(f"- {tag}" for tag in tags),
    ]
    finite = {score.measure.name: score.value for score in run.scores if score.value is not None}
    if finite:
        lines += [
            "model-index:",
            f"- name: {_yaml(_title(run))}",
            "  results:",
            "  - task:",
            "      type: other",
            "    dataset:",
            "      name: held-out examples",
            "      type: private",
            "    metrics:",
        ]
        for name, value in finite.items():
            lines += [
                f"    - type: {_yaml(name)}",
                f"      name: {_yaml(f'test {name}')}",
                f"      value: {_number(value)}",
            ]
    return "\n".join([*lines, "---"])


def _title(run: Training) -> str:
    return run.subject or run.name


def _what_it_is(run: Training) -> str:
    results, statement = run.results, run.statement
    network = f"a `{_code(results['model'])}`" if run.is_own else "a network"
    date = f" The training ended on {_text(statement['date'][:10])}." if "date" in statement else ""
    with_privacy = "" if run.warning else " with differential privacy"
    return (
        f"This is {network} in PyTorch, trained{with_privacy} on {_text(words.size_in_words(run))} by torch_privacy "
        f"{_text(statement['versions']['torch_privacy'])}. The weights are in `model.safetensors`.{date}"
    )


def _guarantee(run: Training) -> list[str]:
    summary, statement = run.summary, run.statement
    epsilon = round_up(summary.epsilon_high)
    lead = (
        f"The training is **not private** ({_text(run.warning)}). The numbers below are those that it would have if it "
        "were."
        if run.warning
        else f"The training is (ε, δ)-differentially private with **ε ≤ {epsilon}** at **δ = {short(summary.delta)}**, "
        "a certified upper bound."
    )
    rows = [
        ("epsilon, at most", f"{epsilon} at delta = {short(summary.delta)}"),
        ("unit of privacy", statement["unit"]),
        ("size of the data", words.size_in_words(run)),
        ("noise multiplier", f"{statement['noise_multiplier']:.6g}"),
        ("noise", statement["noise"]),
        ("clipping", words.rule_in_words(statement["clipping"])),
        *privacy_lines(summary)[1:4],
        *attacker_lines(summary.attacker),
    ]
    ended = words.how_it_ended(run)
    return [lead, *([_text(ended)] if ended else []), _table(("", ""), rows)]


def _for_one_person(run: Training) -> list[str]:
    if run.warning:
        return [_text("This training protects nobody, see above.")]
    rows = [(f"{100 * rate:g} %", words.recognized(run, rate)) for rate in words.RATES]
    heading = ("false alarms, and recognized by guessing", "recognized with the model")
    return [*map(_text, words.introduction(run)), _table(heading, rows), *map(_text, words.conclusion(run))]


def _scores(run: Training) -> list[str]:
    if more := quality_lines(run.results):
        held = [f"> **{_text(text)}**" for text in warnings_of(run.results)]
        heading = ("on held-out examples", "± standard error, beside a constant")
        return ["## Scores", *held, _table(heading, more), "Epsilon does not cover the held-out examples."]
    if not run.scores:
        return []
    rows = [
        (
            score.measure.name,
            score.measure.text(score.value, 2 if score.measure.percent else 4),
            score.measure.text(score.baseline, 2 if score.measure.percent else 4) if score.has_baseline else "-",
        )
        for score in run.scores
    ]
    heading = ("on held-out examples", "this model", "trained without privacy")
    return ["## Scores", _table(heading, rows), "Epsilon does not cover the held-out examples."]


def _declared(run: Training) -> list[str]:
    rows = declared_rows(run.results)
    return ["## Declared public", INTRODUCTION, _table(("column", "declared", "source"), rows)] if rows else []


def _verification(run: Training) -> list[str]:
    """Returns how to compute epsilon again, and who can compare the data."""
    parts = [
        "`privacy.json` lists all releases. This computes the bound again:",
        "```python\nimport json\nfrom pathlib import Path\n\nfrom torch_privacy import privacy\n\n"
        'stated = json.loads(Path("privacy.json").read_text())\n'
        'releases = [(privacy.event_from_dict(r["event"]), r["count"]) for r in stated["releases"]]\n'
        f"print(privacy.compose(releases).epsilon({run.summary.delta!r}))\n```",
        "With `ledger.jsonl` beside it, `torch-privacy verify .` compares both, and computes all numbers again by two "
        "engines.",
    ]
    if words.counts_planned_steps(run):
        parts.append("It is that of the steps made; the bound above counts all planned steps.")
    data = run.statement.get("data")
    if data and data.get("fingerprint"):
        parts.append(
            f"The owner of the data, who has its key, can show which data these were: fingerprint "
            f"`{_code(data['fingerprint'])}`, by `torch_privacy.matches_fingerprint`."
        )
    return parts


def _list(texts: Iterable[str]) -> str:
    return "\n".join(f"- {_text(text)}" for text in texts)


def _table(heading: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heading, tuple("---" for _ in heading), *(tuple(_text(cell) for cell in row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _code(text: str) -> str:
    """Returns plain text on one line for the inside of ``` `...` ```, where Markdown has no other marks."""
    return " ".join(str(text).replace("`", "'").split())


def _number(value: float) -> str:
    """Returns a number in YAML, where 1e-05 would be a text."""
    digits, _, exponent = repr(float(value)).partition("e")
    return f"{digits if '.' in digits else f'{digits}.0'}e{exponent}" if exponent else digits


def _yaml(text: str) -> str:
    return json.dumps(text, ensure_ascii=True)
