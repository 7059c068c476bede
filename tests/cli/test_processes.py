# SPDX-License-Identifier: Apache-2.0
"""What the command does where a launcher started several processes of it."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError, HashStore

from torch_privacy.cli import processes, run
from torch_privacy.cli.signals import DeferredSignals

EPSILON = ["epsilon", "--noise-multiplier", "1.1", "--sampling-probability", "0.01", "--steps", "100"]


@pytest.fixture
def launched(monkeypatch):
    """Returns a function that pretends that torchrun started this process as a rank."""

    def launch(rank: int, size: int = 2, **more: str) -> None:
        settings = {"RANK": str(rank), "WORLD_SIZE": str(size)}
        for name, value in (settings | more).items():
            monkeypatch.setenv(name, value)

    return launch


@pytest.mark.parametrize(("size", "number"), [("2", 2), ("1", 1), ("0", 1), ("", 1), ("two", 1)])
def test_number_of_processes_is_the_launchers(size, number, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.delenv("RANK", raising=False)
    assert processes.num_launched() == 1
    monkeypatch.setenv("RANK", "0")
    assert processes.num_launched() == number


class _Runs:
    def __reduce__(self):
        return os.abort, ()


class _Gone:
    """A store that has ended."""

    def __getattr__(self, name):
        raise DistNetworkError("connection refused")


def words_in(store):
    found = processes.Processes()
    found._store = store
    return found


WORDS = [3, ["runs/one", None, {}], ["runs/\udc80", "table", {"hidden_units": [64], "epochs": 2.5, "baseline": True}]]


@pytest.mark.parametrize("word", WORDS)
def test_words_of_rank_0_arrive_as_they_were_said(word):
    store = HashStore()
    words_in(store)._say(word)
    assert words_in(store)._next_word(DeferredSignals()) == word


@pytest.mark.parametrize(
    "content", [pickle.dumps(_Runs()), pickle.dumps(_Runs()).hex(), '["a", 7, {}]', "null", "[" * 9999]
)
def test_a_word_that_no_rank_says_is_refused_and_runs_nothing(content, monkeypatch):
    store = HashStore()
    store.set("word 0", content)
    store.set("word 1", "[[]]")
    monkeypatch.setattr(processes, "LAST_WORDS", 0.01)
    with pytest.raises(ValueError, match="what no rank says"):
        words_in(store).follow()


def test_a_rank_that_is_lost_during_set_up_is_said_in_a_sentence(launched, monkeypatch, capsys):
    launched(1)
    monkeypatch.setattr(processes.Processes, "_store", _Gone())
    monkeypatch.setattr(processes, "LAST_WORDS", 0.01)
    assert run(["train", "adult"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("torch-privacy: set-up: another rank ended")
    assert shown.count("\n") == 1
    launched(0)
    assert run(["train", "adult", "--run", "somewhere"]) == 1


def test_rank_0_alone_answers_what_is_no_training(launched, capsys):
    launched(1)
    assert run(EPSILON) == 0
    assert run(["epsilon"]) == 0
    shown = capsys.readouterr()
    assert shown.out + shown.err == ""
    launched(0)
    assert run(EPSILON) == 0
    assert "certified" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["audit", "search"])
def test_commands_of_one_process_are_refused_once(command, launched, capsys):
    codes = []
    for rank in (0, 1):
        launched(rank)
        codes.append(run([command, "adult"]))
    assert codes == [2, 0]
    shown = capsys.readouterr()
    assert (
        shown.err == f"torch-privacy: {command}: works in one process, and 2 were started. Start it without torchrun.\n"
    )


def test_stopped_run_is_continued_with_as_many_processes(launched):
    assert processes.again() == "torch-privacy"
    launched(0, 8, LOCAL_WORLD_SIZE="4")
    assert processes.again() == "torchrun --nnodes 2 --nproc-per-node 4 --no-python -- torch-privacy"
    launched(0, 4, LOCAL_WORLD_SIZE="4")
    assert processes.again() == "torchrun --nproc-per-node 4 --no-python -- torch-privacy"


def test_restarted_processes_continue_the_run_that_they_began(launched, tmp_path):
    assert not processes.to_resume("train", None)
    launched(0, TORCHELASTIC_RESTART_COUNT="1")
    assert not processes.to_resume("train", tmp_path)
    (tmp_path / "settings.json").touch()
    assert processes.to_resume("train", tmp_path)
    with pytest.raises(ValueError, match="has no given name"):
        processes.to_resume("train", None)


def torchrun(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "--"]
    paths = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [*command, "torch_privacy.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        timeout=180,
    )


@pytest.mark.thorough
def test_torchrun_trains_and_says_everything_once(tmp_path):
    options = ["--epochs", "0.2", "--batch-size", "1000", "--run", "run"]
    done = torchrun("train", "adult", *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epsilon at delta") == 1
    lines = [line for line in done.stderr.splitlines() if "epoch" in line]
    assert [line.split()[0] for line in lines] == ["private", "non-private"]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["ranks"] == 2
    assert 0.5 < results["test_score"] < 1
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


@pytest.mark.thorough
def test_torchrun_refuses_in_one_sentence(tmp_path):
    done = torchrun("train", "adult", "--delta", "1", folder=tmp_path)
    assert done.returncode != 0
    assert [line for line in done.stderr.splitlines() if "torch-privacy:" in line] == [
        "torch-privacy: train: --delta 1.0 must lie in (0, 3.41239e-05). From 1/n on (n = 29305 examples) it would "
        "allow publishing a whole record; try 1e-5. Try 'torch-privacy train --help'."
    ]
    assert "exitcode: 2" in done.stderr
    assert "Refused" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_ranks_wait_for_the_rows_that_rank_0_computes(tmp_path):
    options = ["--quick", "--only", "naive*", "--run", "run"]
    done = torchrun("reproduce", "gdp-adult", *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "results.json").read_text())["ranks"] == 2
