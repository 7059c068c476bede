# SPDX-License-Identifier: Apache-2.0
"""Folders that version 0.1.0 finished before it had one checkpoint, one log and one schema are read as ever.

They are those of ``torch-privacy train adult --epochs 0.05`` and of a loop of six steps, without their pages.
"""

import json
import shutil
from pathlib import Path

import pytest

from torch_privacy.cli import run as command
from torch_privacy.privacy import Ledger
from torch_privacy.runs.folder import RunFolder

FORMER = Path(__file__).parent / "former"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["experiment", "loop"])
def test_former_folders_are_read(kind, tmp_path, capsys):
    shutil.copytree(FORMER / kind, tmp_path / kind)
    folder = RunFolder(tmp_path / kind)
    results = folder.read_results()
    digests = results["files"]
    assert folder.is_complete
    assert ("fixed" in folder.read_settings(digests)) == (kind == "loop")
    *_, row = (row for row in folder.read_metrics(digests) if row.training == "private" and row.epsilon_high)
    assert row.epsilon_high == pytest.approx(results["privacy"]["epsilon"]["high"])
    delta = results["privacy"]["delta"]
    assert Ledger.read(folder.ledger).profile().epsilon_high(delta) == results["privacy"]["epsilon"]["high"]
    assert folder.read_statement(digests)["releases"] == results["privacy"]["releases"]
    card = tmp_path / "card.md"
    page = ["--out", str(tmp_path / "page.html"), "--model-card", str(card), "--json"]
    assert command(["report", str(folder.path), *page]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == [str(folder.path)]
    assert "epsilon" in card.read_text()
