# SPDX-License-Identifier: Apache-2.0
"""Verifies a run folder as a stranger can: from its statement, its ledger and the files beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch_privacy.runs.verify import files, pages, prices, settings
from torch_privacy.runs.verify.evidence import Evidence
from torch_privacy.runs.verify.finding import Finding as Finding
from torch_privacy.runs.verify.finding import Outcome as Outcome
from torch_privacy.runs.verify.finding import Verification as Verification
from torch_privacy.runs.verify.finding import differs, unchecked

NEVER_CHECKED = {  # what no file can show, with the reason
    "the weights come from these releases": "to repeat the steps takes the data and the secret keys",
    "the noise was drawn, and the gradients clipped, as stated": "that depends on the code that ran",
    "examples were drawn as stated, and do not depend on each other": "only who has data and model can test it",
    "the size of the data, and the unit": "only the owner of the data knows them",
    "no other release was made from these data": "a folder knows its own ledger; epsilons of several trainings add up",
    "all files were not changed together": "digests have no signature: who rewrites every file leaves no trace",
}


def verify(run_folder: Path | str) -> Verification:
    """Computes again what a run folder states, and compares all of its files with each other.

    Takes the folder of a finished training, or what its owner has published of it: the statement ``privacy.json`` is
    needed, ``ledger.jsonl`` and the others are checked where they are there. Checked are: the schema of the statement;
    digests of the ledger's lines and of the files; that statement, ledger, results and settings have the same releases,
    with the noise and the sampling that are stated; epsilon, μ, regret and true positive rates, computed again by this
    version's engine, by each of two engines alone, and by dp-accounting if it is installed; target and budget; unit,
    relation, and what every statement says of what is public and not covered; the numbers on the report and the model
    card; that secret files are for their owner alone.

    It reads the folder and changes nothing. No data, no model and no torch is needed.

    Args:
        run_folder: folder of a finished training, of ``PrivateTraining(run_folder=...)`` or ``torch-privacy train``.

    Returns:
        The findings: each says what agrees, what differs and by how much, or what cannot be checked and why.
        ``is_false`` is True if something that is stated is false.

    Guarantees:
        - An epsilon, μ or true positive rate that is stated below the truth of the stated releases is found.
        - What cannot be checked is always listed: the weights, the code, the data.

    Raises:
        ValueError: the folder has no statement.
    """
    evidence = Evidence.read(Path(run_folder))
    never = [unchecked(subject, reason) for subject, reason in NEVER_CHECKED.items()]
    if not isinstance(evidence, Evidence):
        return Verification(Path(run_folder), (*evidence, *never))
    found = [*evidence.findings]
    for check in (files.findings, settings.findings, prices.findings, pages.findings):
        found += _until_error(check(evidence))
    return Verification(Path(run_folder), (*found, *never))


def _until_error(check: Iterator[Finding]) -> Iterator[Finding]:
    """Yields the findings; statements that keep to their schema may still have values with which no check can work."""
    try:
        yield from check
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        yield differs("values that can be checked", f"a check ended early ({type(error).__name__}: {error})"[:400])
