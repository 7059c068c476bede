# SPDX-License-Identifier: Apache-2.0
"""A run on two ranks is that of one process up to rounding; rank 0 alone writes, and what it refuses all refuse."""

import csv
import random
import secrets
import signal
import stat
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from gloo_pool import RanksFailed
from torch.utils.data import TensorDataset

from torch_privacy.experiments.baseline import shuffled_batches
from torch_privacy.experiments.runner import Run
from torch_privacy.privacy import Budget
from torch_privacy.runs.folder import RunFolder

SMALL = {"epochs": 0.2, "expected_batch_size": 1000}  # 6 steps


def begin(path: Any, **settings: Any) -> Run:
    """Returns a new run, whose keys are the same in every call of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "token_bytes", random.Random(path.parent.name).randbytes)
        return Run.start(path, "adult", **(SMALL | settings))


def steps_of(run: Run, at_most: int = 10**9) -> int:
    return sum(1 for _ in zip(range(at_most), run.steps(), strict=False))


def whole(rank: int, path: Any) -> Any:
    run = begin(path)
    steps_of(run)
    return run.finish()


def first_half(rank: int, path: Any) -> None:
    run = begin(path, baseline=False)
    steps_of(run, 3)
    run.checkpoint()
    run.close()


def second_half(rank: int, path: Any) -> int:
    run = Run.resume(path)
    steps = steps_of(run)
    run.finish()
    return steps


def with_budget(rank: int, path: Any, budget: str, noise: float) -> None:
    run = begin(path, budget=budget, noise_multiplier=noise, delta=1e-6, baseline=False)
    steps_of(run)
    run.finish()


def rows_of(folder: RunFolder) -> list[list[float]]:
    rows = csv.DictReader(folder.metrics.read_text().splitlines())
    return [[float(value or "nan") for name, value in row.items() if name not in ("training", "salt")] for row in rows]


def weights_of(folder: RunFolder) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder.model)


@pytest.mark.thorough
def test_run_on_two_ranks_has_the_metrics_and_weights_of_one_process(ranks2, tmp_path):
    results, none = ranks2.run(whole, tmp_path / "two")
    alone = whole(0, tmp_path / "one")
    assert none == {}
    assert results["ranks"] == 2
    assert "ranks" not in alone
    assert results["test_score"] == pytest.approx(alone["test_score"], abs=1e-6)
    assert results["privacy"] == alone["privacy"]
    two, one = RunFolder(tmp_path / "two"), RunFolder(tmp_path / "one")
    torch.testing.assert_close(rows_of(two), rows_of(one), rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(weights_of(two), weights_of(one), rtol=0, atol=1e-6)
    assert two.read_statement()["ranks"] == 2
    assert two.read_results()["ranks"] == 2


@pytest.mark.thorough
def test_run_on_two_ranks_draws_once_from_the_budget_and_is_refused_on_both(ranks2, tmp_path):
    budget = Budget.open(tmp_path / "adult.budget", epsilon=2, delta=1e-6)
    with pytest.raises(RanksFailed) as failed:
        ranks2.run(with_budget, tmp_path / "1", str(budget.path), 0.4)
    assert all("does not fit into" in outcome.text for outcome in failed.value.outcomes)
    assert not budget.state.runs
    ranks2.run(with_budget, tmp_path / "2", str(budget.path), 3.0)
    (drawn,) = budget.state.runs
    assert (drawn.status, [count for _, count in drawn.releases]) == ("settled", [6])


@pytest.mark.thorough
def test_stopped_run_goes_on_on_all_ranks_and_keeps_its_keys_in_one_secret_file(ranks2, tmp_path):
    stopped = RunFolder(tmp_path / "stopped")
    ranks2.run(first_half, stopped.path)
    assert stat.S_IMODE(stopped.checkpoint.stat().st_mode) == 0o600
    keys = stopped.read_checkpoint()["training"]
    for key in (keys["noise_key"], keys["sampler_key"]):
        for file in {*stopped.path.iterdir()} - {stopped.checkpoint}:
            assert key.encode() not in file.read_bytes()
            assert bytes.fromhex(key) not in file.read_bytes()
    assert ranks2.run(second_half, stopped.path) == [3, 3]
    ranks2.run(unstopped, tmp_path / "unstopped")
    through = RunFolder(tmp_path / "unstopped")
    torch.testing.assert_close(weights_of(stopped), weights_of(through), rtol=0, atol=0)
    assert rows_of(stopped) == rows_of(through)
    assert stopped.ledger.read_bytes() == through.ledger.read_bytes()


def unstopped(rank: int, path: Any) -> None:
    run = begin(path, baseline=False)
    steps_of(run)
    run.finish()


@pytest.mark.thorough
def test_run_of_two_ranks_can_go_on_in_one_process(ranks2, tmp_path):
    ranks2.run(first_half, tmp_path / "run")
    assert second_half(0, tmp_path / "run") == 3
    assert RunFolder(tmp_path / "run").read_results()["privacy"]["num_steps"] == 6


def test_folder_in_use_is_refused_on_all_ranks(ranks2, tmp_path):
    (tmp_path / "notes").touch()
    first, second = ranks2.outcomes(whole, tmp_path)
    assert first.kind == "ValueError"
    assert f"{tmp_path}: is not empty" in first.text
    assert first.text in second.text
    assert {path.name for path in tmp_path.iterdir()} == {"notes"}


def unwritable(rank: int, path: Any) -> None:
    run = begin(path, baseline=False)
    if rank == 0:
        (path / "metrics.csv.partial").mkdir()
    steps_of(run)


@pytest.mark.thorough
def test_file_that_rank_0_cannot_write_is_an_error_on_all_ranks(ranks2, tmp_path):
    first, second = ranks2.outcomes(unwritable, tmp_path / "run")
    assert first.kind == "IsADirectoryError"
    assert "metrics.csv" in first.text
    assert second.kind == "RefusedTogether"
    assert "rank 0 failed with IsADirectoryError" in second.text


def changed_checkpoint(rank: int, path: Any) -> None:
    Run.resume(path)


@pytest.mark.thorough
def test_damaged_checkpoint_is_refused_on_all_ranks(ranks2, tmp_path):
    ranks2.run(first_half, tmp_path / "run")
    (tmp_path / "run" / "checkpoint.safetensors").write_bytes(b"nothing")
    first, second = ranks2.outcomes(changed_checkpoint, tmp_path / "run")
    assert "checkpoint.safetensors: cannot be read" in first.text
    assert second.kind == "RefusedTogether"


def stops(rank: int, path: Any) -> Any:
    run = begin(path, baseline=False)
    found = run.agreed(None), run.agreed(signal.SIGTERM if rank else None)
    run.close()
    return found


def test_signal_of_one_rank_stops_all(ranks2, tmp_path):
    assert ranks2.run(stops, tmp_path / "run") == [(None, signal.SIGTERM), (None, signal.SIGTERM)]


@pytest.mark.parametrize("size", [1, 4, 5])
def test_weighted_means_of_two_ranks_are_the_mean_of_the_batch(size):
    """A batch smaller than the number of ranks is computed by all of them."""
    train, settings = TensorDataset(torch.arange(9.0)), SimpleNamespace(seed=3, expected_batch_size=size)
    of_rank = [
        shuffled_batches(train, settings, SimpleNamespace(rank=k, size=n))  # type: ignore[arg-type]
        for k, n in ((0, 1), (0, 2), (1, 2))
    ]
    for _, ((whole,), one), ((first,), left), ((second,), right) in zip(range(12), *of_rank, strict=False):
        assert one == 1
        assert (first.mean() * left + second.mean() * right) / 2 == pytest.approx(whole.mean())
        assert len(whole) == 1 or sorted([*first.tolist(), *second.tolist()]) == sorted(whole.tolist())
