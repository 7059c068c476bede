# SPDX-License-Identifier: Apache-2.0
"""Several ranks leave one run folder, which rank 0 writes: all weights, and the losses of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from ranked import CASES, go, start, whole_weights

from torch_privacy.runs.folder import RunFolder
from torch_privacy.runs.report import render as report

pytestmark = [pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")]


def files_of(rank: int | None, name: str, how: str | None, folder: Path) -> dict[str, Any]:
    """Trains to the end, writes again with a score, and goes on a step after a stop."""
    report.render = lambda folders: "a page"
    case = CASES[name]
    settings = {"noise_multiplier": 1e-6, "delta": 1e-3, "run_folder": folder / str(rank), "num_steps": 6}
    training = start(case, how, optimizer="sgd", **settings)
    go(training, case.losses, steps=4)
    training.write_run()
    stopped = [row.step for row in RunFolder(folder / str(rank)).read_metrics()] if not rank else []
    go(training, case.losses)
    training.write_run({"accuracy": 0.5})
    return {"weights": whole_weights(training.model), "stopped": stopped}


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "how"), [("uneven", "layers"), ("uneven", "ddp"), ("GPT-2", "layers")])
def test_rank_0_writes_all_weights_and_the_losses_of_all_ranks(ranks2, tmp_path, name, how):
    before = report.render
    alone = files_of(None, name, None, tmp_path)
    first, second = ranks2.run(files_of, name, how, tmp_path)
    report.render = before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "None"]
    folder, reference = RunFolder(tmp_path / "0"), RunFolder(tmp_path / "None")
    weights = safetensors.torch.load_file(folder.model)
    assert weights.keys() == safetensors.torch.load_file(reference.model).keys()
    assert all(torch.equal(value, first["weights"][name]) for name, value in weights.items())
    rows, expected = folder.read_metrics(), reference.read_metrics()
    assert [row.step for row in rows] == [row.step for row in expected]
    assert [row.loss for row in rows] == pytest.approx([row.loss for row in expected], rel=1e-6)
    assert first["stopped"] == alone["stopped"]
    assert second["stopped"] == []
    results, statement = folder.read_results(), folder.read_statement()
    assert (results["ranks"], statement["ranks"], results["scores"]) == (2, 2, {"accuracy": 0.5})
    assert results["privacy"] == reference.read_results()["privacy"]


def refusals(rank: int | None, folder: Path) -> str:
    case = CASES["uneven"]
    training = start(case, "ddp", run_folder=folder if rank == 0 else None, delta=1e-3, num_steps=2)
    assert training._resuming.files is not None
    assert (training._resuming.files.folder is None) == (rank != 0)
    with pytest.raises(ValueError, match="must be numbers by name"):
        training.write_run({"accuracy": "much"})
    with pytest.raises(ValueError, match="no step was made") as refused:
        training.write_run()
    return str(refused.value)


def test_what_one_rank_refuses_all_refuse_and_rank_0_alone_needs_the_folder(ranks2, tmp_path):
    first, second = ranks2.run(refusals, tmp_path)
    assert "no step was made" in first
    assert "no step was made" in second


def full_disk(rank: int | None, folder: Path) -> str:
    case = CASES["uneven"]
    training = start(case, "layers", run_folder=folder, delta=1e-3, num_steps=2, optimizer="sgd")
    if rank == 0:
        (folder / "model.safetensors.partial").mkdir()
    with pytest.raises((OSError, ValueError)) as refused:
        go(training, case.losses)
    if rank == 0:
        (folder / "model.safetensors.partial").rmdir()
    report.render = lambda folders: "a page"
    training.write_run()
    return str(refused.value)


@pytest.mark.thorough
def test_a_file_that_rank_0_cannot_write_is_an_error_on_all_ranks_and_is_written_later(ranks2, tmp_path):
    first, second = ranks2.run(full_disk, tmp_path)
    assert "model.safetensors" in first
    assert "model.safetensors" in second
    assert RunFolder(tmp_path).read_results()["num_steps_made"] == 2
