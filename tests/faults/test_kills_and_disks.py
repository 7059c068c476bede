# SPDX-License-Identifier: Apache-2.0
"""Kills, full disks and failing syncs at every write of library and command; two writers; clocks that jump."""

import io
import json
import os
import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from torch_privacy import privacy
from torch_privacy.cli import progress
from torch_privacy.experiments import runner
from torch_privacy.privacy import ledger_file
from torch_privacy.runs import metrics
from torch_privacy.runs.folder import RunFolder
from torch_privacy.training import release

ROOT, VICTIM = Path(__file__).parents[2], Path(__file__).with_name("victim.py")
ALL = "TORCH_PRIVACY_ALL_FAULTS" in os.environ  # set by ``make faults``
NAMES = {
    "kill": "kill -9 at a write or sync",
    "half": "kill -9 in the middle of a write",
    "full": "disk full at a write",
    "sync": "sync that fails",
}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}


def trials(workload: str, folder: Path) -> dict[str, dict]:
    """Returns for each kind of fault what became of the trainings that met it."""
    arguments = [workload, str(folder), *([] if ALL else ["2"])]
    done = subprocess.run([sys.executable, str(VICTIM), *arguments], capture_output=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return trials("library", tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    return trials("command", tmp_path_factory.mktemp("command"))


@pytest.mark.thorough
@pytest.mark.parametrize("fault", NAMES)
def test_faults_at_the_writes_of_the_library_lose_nothing(library, tally, fault):
    """After a resume, model, ledger and folder are those of an undisturbed run bit for bit."""
    found = library[fault]
    tally(f"library: {NAMES[fault]}", found["tried"], found["right"])
    assert found["places"] >= 15
    assert found["failures"] == {}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", NAMES)
def test_faults_at_the_writes_of_the_command_lose_nothing(command, tally, fault):
    found = command[fault]
    tally(f"command: {NAMES[fault]}", found["tried"], found["right"])
    assert found["places"] >= 10
    assert found["failures"] == {}


@pytest.mark.thorough
def test_killed_workers_lose_no_step(tmp_path, tally):
    found = trials("workers", tmp_path)["kill"]
    tally("workers killed", found["tried"], found["right"])
    assert found["failures"] == {}


@pytest.mark.thorough
def test_two_processes_with_one_folder_never_train_at_once(tmp_path, tally):
    """One is refused in one sentence; what the other makes is that of a single process."""
    count, right = (20 if ALL else 1), 0
    command = [sys.executable, "-m", "torch_privacy.cli", "train", "adult", "--epochs", "0.1", "--no-baseline"]
    waits = random.Random(2)
    for trial in range(count):
        run, started = tmp_path / str(trial), []
        for _ in range(2):
            started.append(
                subprocess.Popen([*command, "--run", str(run)], stderr=subprocess.PIPE, env=ENVIRONMENT, text=True)
            )
            time.sleep(waits.random())
        said = [process.communicate()[1] for process in started]
        codes = sorted(process.returncode for process in started)
        refusal = next((text for text, process in zip(said, started, strict=True) if process.returncode), "")
        ledger = privacy.Ledger.load(run / "ledger.jsonl")
        steps = json.loads((run / "privacy.json").read_text())["num_steps_made"]
        right += (
            codes == [0, 2]
            and len(refusal.strip().splitlines()) == 1
            and ("another process is training" in refusal or "is not empty" in refusal)
            and len(ledger) == steps
        )
        ledger.close()
    tally("two writers of one folder", count, right)
    assert right == count, said


class JumpingClock:
    """A clock that jumps by years, forwards and backwards, at every seventh look."""

    def __init__(self, seed: int):
        self._jumps, self._looks, self._offset = random.Random(seed), 0, 0.0

    def __call__(self) -> float:
        self._looks += 1
        if self._looks % 7 == 0:
            self._offset += self._jumps.uniform(-1, 1) * 3e8
        return time.perf_counter() + self._offset


@pytest.mark.thorough
def test_a_clock_that_jumps_changes_no_number(tmp_path, monkeypatch, tally):
    """Nor does the epsilon that is shown ever fall below the certified one."""

    def trained(folder: Path) -> dict:
        with monkeypatch.context() as patch:
            patch.setattr(release.secrets, "token_bytes", random.Random(4).randbytes)
            run = runner.Run.start(folder, "adult", epochs=0.3, baseline=False)
            console = Console(force_terminal=True, file=io.StringIO())
            with progress.TrainingDisplay(console, silent=False) as display:
                for step in run.steps():
                    display.show(step, run.epsilon_high)
                    shown = display._epsilon.bound(step.step, step.num_steps, run.epsilon_high)
                    assert shown >= run.epsilon_high(step.step)
            run.finish()
        results = json.loads((folder / "results.json").read_text())
        assert 0 <= results.pop("seconds")["private"] < float("inf")
        del results["check"], results["files"]["privacy.json"], results["files"]["metrics.csv"]  # of times, and of salt
        files, rows = ("ledger.jsonl", "model.safetensors"), {"metrics.csv": RunFolder(folder).read_metrics()}
        return {name: (folder / name).read_bytes() for name in files} | rows | results

    expected, count, right = trained(tmp_path / "whole"), (10 if ALL else 1), 0
    for seed in range(count):
        clock = JumpingClock(seed)
        with monkeypatch.context() as patch:
            patch.setattr(release, "_RELEASED", {})
            for module, name in ((ledger_file.time, "monotonic"), (time, "time"), (progress, "monotonic")):
                patch.setattr(module, name, clock)
            patch.setattr(metrics, "perf_counter", clock)
            right += trained(tmp_path / str(seed)) == expected
    tally("clock that jumps by years", count, right)
    assert right == count


@pytest.mark.parametrize("jump", [-1e9, 1e9])
def test_a_clock_that_was_set_back_delays_no_sync(tmp_path, monkeypatch, jump):
    syncs, now = [], [1000.0]
    monkeypatch.setattr(ledger_file.time, "monotonic", lambda: now[0])
    ledger = privacy.Ledger(tmp_path / "ledger")
    monkeypatch.setattr(os, "fsync", syncs.append)
    for step in range(4):
        ledger.record(privacy.Gaussian(1.0), step, "a")
        now[0] += 0.1 if step != 1 else jump
    assert len(syncs) == 1


@pytest.mark.parametrize("times", [(5.0, 4.0, 3.0, 2.0), (0.0, 1e9, -1e9, 5.0)])
def test_no_epsilon_is_shown_for_fewer_steps_than_were_made(monkeypatch, times):
    looks = [time for _ in range(20) for time in times]
    monkeypatch.setattr(progress, "monotonic", lambda: looks.pop() if looks else 0.0)
    ahead = progress.EpsilonAhead()
    bounds = [ahead.bound(step, 1000, float) for step in range(1, 200, 7)]
    assert all(bound >= step for bound, step in zip(bounds, range(1, 200, 7), strict=True))
    assert all(first <= second for first, second in pairwise(bounds))
