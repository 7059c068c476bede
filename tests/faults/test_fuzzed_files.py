# SPDX-License-Identifier: Apache-2.0
"""Damaged and hostile files of a run: a command answers rightly or with one sentence and exit code 2, never else.

A report of a damaged run is that of the run itself; a resumed run never states a smaller epsilon.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import shutil
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from mutations import mutations

from torch_privacy.cli import run as command
from torch_privacy.experiments.runner import Run
from torch_privacy.training import release

ALL = "TORCH_PRIVACY_ALL_FAULTS" in os.environ
SECONDS = 120  # longer is a hang; a trial takes about half a second
MEBIBYTES = 700  # that a trial may add to the process's peak
TINY = {"expected_batch_size": 2000, "epochs": 0.5, "baseline": False, "seed": 1}
EXPERIMENT = "gdp-calibration"  # computes its rows in a second


class Hang(BaseException):
    """Raised in a trial that takes too long; no handler of errors catches it."""


class Outcome(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def survived(self) -> bool:
        """True for success, or for one sentence and the exit code of a user's mistake."""
        sentence = re.fullmatch(r"torch-privacy: [^\n]{1,2000}\.\n", self.err)
        return self.code == 0 or (self.code == 2 and sentence is not None and "Traceback" not in self.err)


def outcome_of(*arguments: str) -> Outcome:
    """Runs a command in this process; a traceback becomes the exit code 1."""

    def stop(*_):
        raise Hang

    out, err = io.StringIO(), io.StringIO()
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    release._RELEASED.clear()  # as in a new process
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = command(list(arguments))
    except (Exception, Hang, SystemExit) as error:
        return Outcome(1, out.getvalue(), f"Traceback: {type(error).__name__}: {str(error)[:500]}")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return Outcome(code, out.getvalue(), err.getvalue())


def examples(few: int, many: int) -> settings:
    """Returns the number of trials, in CI and by ``make faults``."""
    return settings(
        max_examples=many if ALL else few,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished training and an interrupted one, a finished experiment and an interrupted one, each with a twin."""
    path = tmp_path_factory.mktemp("fuzzed")
    for name, changed in (("finished", {"baseline": True}), ("finished-twin", {"seed": 2, "epochs": 0.2})):
        job = Run.start(path / name, "adult", **{**TINY, **changed})
        assert len(list(job.steps())) > 2
        job.finish()
    for name in ("stopped", "stopped-twin"):
        job = Run.start(path / name, "adult", **TINY)
        steps = job.steps()
        for number, _ in enumerate(steps, 1):
            if number == 3:
                job.checkpoint()
            if number == 5:  # killed two steps after its checkpoint
                break
        job.close()
    assert command(["reproduce", EXPERIMENT, "--quick", "--quiet", "--run", str(path / "experiment")]) == 0
    shutil.copytree(path / "experiment", path / "begun")
    for left in ("results.json", "report.html", "rows/sigma-0.7-70-epochs"):  # as if it were stopped
        shutil.rmtree(path / "begun" / left) if "rows" in left else (path / "begun" / left).unlink()
    return path


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != "lock")


def damaged(runs: Path, name: str, chosen: tuple[str, list]) -> Path:
    """Returns a damaged copy of a run folder."""
    copy = runs / "copies" / name
    if copy.exists():
        shutil.rmtree(copy)
    shutil.copytree(runs / name, copy)
    twin = copy.with_name(f"{name}-twin")
    if not twin.exists() and (runs / twin.name).exists():
        shutil.copytree(runs / twin.name, twin)
    file, changes = chosen
    for change in changes:
        with contextlib.suppress(Exception):  # the file is no longer of its format
            change.apply(copy / file)
    return copy


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def report(folder: Path) -> tuple[Outcome, str]:
    page = folder.parent / "page.html"
    page.unlink(missing_ok=True)
    found = outcome_of("report", str(folder), "--out", str(page))
    return found, page.read_text() if page.exists() else ""


@pytest.fixture(scope="module")
def pages(runs):
    """The reports of the folders without damage."""
    return {name: report(runs / name)[1] for name in ("finished", "experiment")}


FINISHED = ["settings.json", "results.json", "privacy.json", "metrics.csv", "ledger.jsonl", "model.safetensors"]


def check(tally, kind: str, found: Outcome, right: bool, what: object) -> None:
    tally(kind, 1, int(found.survived), int(found.survived and right))
    assert found.survived, (what, found)
    assert right, (what, found)


@pytest.mark.thorough
@examples(12, 2500)
@given(chosen=mutations(FINISHED))
def test_report_of_a_damaged_training(chosen, runs, pages, tally):
    before = peak()
    found, page = report(damaged(runs, "finished", chosen))
    check(tally, "damaged training, report", found, found.code == 2 or page == pages["finished"], chosen)
    assert peak() - before < MEBIBYTES


EXPERIMENT_FILES = ["results.json", "settings.json", "figure-4-sigma-1.3.svg"]


@pytest.mark.thorough
@examples(12, 1000)
@given(chosen=mutations(EXPERIMENT_FILES))
def test_report_of_a_damaged_experiment(chosen, runs, pages, tally):
    before = peak()
    found, page = report(damaged(runs, "experiment", chosen))
    right = found.code == 2 or without_images(page) == without_images(pages["experiment"])
    check(tally, "damaged experiment, report", found, right, chosen)
    assert "<script" not in page
    assert peak() - before < MEBIBYTES


def without_images(page: str) -> str:
    """A drawing is shown as it is in its file, in an image without scripts."""
    return re.sub(r"<figure.*?</figure>", "", page, flags=re.DOTALL)


@pytest.fixture(scope="module")
def truth(runs):
    """The results of the interrupted training, resumed without damage."""
    folder = damaged(runs, "stopped", ("settings.json", []))
    assert outcome_of("train", "--resume", str(folder), "--quiet", "--json").code == 0
    return json.loads((folder / "results.json").read_text())


STOPPED = ["settings.json", "ledger.jsonl", "checkpoint.safetensors"]


@pytest.mark.thorough
@pytest.mark.filterwarnings("default:PrivateTraining.load_state_dict. no ledger on disk")  # it has lost releases
@examples(15, 2500)
@given(chosen=mutations([*STOPPED, "checkpoint.safetensors", "checkpoint.safetensors"]))
def test_resume_of_a_damaged_training(chosen, runs, truth, tally):
    before = peak()
    folder = damaged(runs, "stopped", chosen)
    found = outcome_of("train", "--resume", str(folder), "--quiet", "--json")
    right = found.code == 2
    if found.code == 0:
        results = json.loads((folder / "results.json").read_text())
        right = results["privacy"]["epsilon"]["high"] >= truth["privacy"]["epsilon"]["high"]
        right = right and results["privacy"]["num_steps"] == truth["privacy"]["num_steps"]
    check(tally, "damaged training, resume", found, right, chosen)
    assert not Path("/tmp/torch_privacy_was_here").exists()
    assert peak() - before < MEBIBYTES


BEGUN = ["settings.json", "rows/sigma-1.3-20-epochs/results.json"]


@pytest.mark.thorough
@examples(8, 400)
@given(chosen=mutations(BEGUN))
def test_resume_of_a_damaged_experiment(chosen, runs, tally):
    folder = damaged(runs, "begun", chosen)
    found = outcome_of("reproduce", "--resume", str(folder), "--quiet")
    right = found.code == 2 or (found.code == 0 and table(folder) == table(runs / "experiment"))
    check(tally, "damaged experiment, resume", found, right, chosen)


def table(folder: Path) -> list[object]:
    """Returns the numbers of an experiment, without their running times."""
    rows = json.loads((folder / "results.json").read_text())["rows"]
    return [row | {"runs": [run | {"seconds": 0} for run in row["runs"]]} for row in rows]
