# SPDX-License-Identifier: Apache-2.0
import csv
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import scipy
import torch

from torch_privacy.cli import run as command
from torch_privacy.data.adult import load_adult
from torch_privacy.experiments import runner
from torch_privacy.experiments.runner import Run
from torch_privacy.experiments.task import seeded
from torch_privacy.runs.folder import RunFolder
from torch_privacy_papers.bu2020 import adult
from torch_privacy_papers.models.networks import adult_perceptron

FILES = {
    "settings.json",
    "ledger.jsonl",
    "metrics.csv",
    "model.safetensors",
    "privacy.json",
    "results.json",
    "report.html",
}
TINY = {"epochs": 0.1, "baseline": False}  # 11 steps
STEPS = 11


def drain(run, at_most=10**9):
    for _, progress in zip(range(at_most), run.steps(), strict=False):
        assert progress.step <= progress.num_steps


def assert_equal_weights(model, other):
    assert model.keys() == other.keys()
    assert all(torch.equal(model[name], other[name]) for name in model)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a short run with its baseline, made by the command."""
    path = tmp_path_factory.mktemp("runs") / "tiny"
    assert command(["train", "adult", "--run", str(path), "--epochs", "1.5", "--batch-size", "2000", "--quiet"]) == 0
    return RunFolder(path)


def test_seeded_network_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    seeded(adult_perceptron, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_finished_run_has_every_file_and_no_checkpoint(finished):
    assert {path.name for path in finished.path.iterdir()} == FILES
    assert finished.is_complete


def test_finished_run_has_one_release_per_step(finished):
    results = json.loads(finished.results.read_text())
    num_steps = round(1.5 * 29305 / 2000)
    assert results["privacy"]["num_steps"] == num_steps
    assert sum("step" in json.loads(line) for line in finished.ledger.read_text().splitlines()) == num_steps


def test_finished_run_has_metrics_for_every_epoch_of_both_trainings(finished):
    rows = list(csv.DictReader(finished.metrics.read_text().splitlines()))
    assert [(row["training"], row["epoch"], row["step"]) for row in rows] == [
        ("private", "1.0", "15"),
        ("private", "1.5", "22"),
        ("non-private", "1.0", "15"),
        ("non-private", "1.5", "22"),
    ]
    assert all(0.5 < float(row["test_score"]) <= 1 for row in rows)
    assert float(rows[0]["epsilon_high"]) < float(rows[1]["epsilon_high"])
    assert rows[2]["epsilon_high"] == ""


def test_finished_run_states_its_privacy(finished):
    statement, results = json.loads(finished.privacy.read_text()), json.loads(finished.results.read_text())
    assert statement["private"] is True
    assert statement["target_epsilon"] == 2.0
    assert sum(release["count"] for release in statement["releases"]) == results["privacy"]["num_steps"]
    assert statement["run"]["settings"]["seed"] == 0
    assert statement["run"]["versions"] == {"scipy": scipy.__version__}
    packed = (Path(load_adult.__code__.co_filename).parent / "adult_files" / "a9a.xz").read_bytes()
    assert statement["run"]["data_files_sha256"] == {"a9a.xz": hashlib.sha256(packed).hexdigest()}
    assert any("non-private baseline" in item for item in statement["not_covered"])
    assert results["privacy"]["epsilon"]["low"] <= results["privacy"]["epsilon"]["high"]


def test_finished_run_saved_the_model_whose_accuracy_it_reports(finished):
    task = adult.build_task(adult.DEFAULTS)
    model = task.new_model()
    model.load_state_dict(safetensors.torch.load_file(finished.model))
    inputs, targets = task.test.tensors
    accuracy = float(task.score.of_each(model(inputs), targets).mean())
    assert accuracy == pytest.approx(json.loads(finished.results.read_text())["test_score"], abs=1e-6)


def test_finished_run_cannot_be_resumed(finished, capsys):
    assert command(["train", "--resume", str(finished.path)]) == 2
    assert "this run is complete, nothing is left to resume" in capsys.readouterr().err


@pytest.mark.thorough
def test_json_output_is_one_object(tmp_path, capfd):
    arguments = ["train", "adult", "--run", str(tmp_path / "r"), "--epochs", "0.1", "--no-baseline", "--json"]
    assert command(arguments) == 0
    shown = capfd.readouterr()
    assert shown.err == ""
    results = json.loads(shown.out)
    assert results["baseline_test_score"] is None
    assert results["run"] == str(tmp_path / "r")


@pytest.mark.thorough
def test_output_elsewhere_than_a_terminal_is_one_line_per_epoch(tmp_path, capfd):
    arguments = ["train", "adult", "--run", str(tmp_path / "r"), "--epochs", "2", "--batch-size", "3000"]
    assert command(arguments) == 0
    shown = capfd.readouterr()
    assert len(shown.err.splitlines()) == 4
    assert "\x1b" not in shown.err + shown.out
    assert "epsilon <= " in shown.err.splitlines()[0]
    for words in (
        "certified",
        "zero out one example",
        "Poisson",
        "not a bound",
        "moments",
        "mu",
        "true positives",
    ):
        assert words in shown.out


def test_target_epsilon_is_never_exceeded(tmp_path):
    run = Run.start(tmp_path / "run", "adult", target_epsilon=2.0, **TINY)
    drain(run)
    assert 1.9 < run.summary().epsilon_high <= 2.0


def test_checkpoint_is_for_the_owner_only(tmp_path):
    run = Run.start(tmp_path / "run", "adult", **TINY)
    assert stat.S_IMODE(os.stat(run.folder.checkpoint).st_mode) == 0o600
    run.checkpoint()
    assert stat.S_IMODE(os.stat(run.folder.checkpoint).st_mode) == 0o600


@pytest.mark.thorough
def test_checkpoint_is_renewed_at_the_end_of_each_epoch(tmp_path):
    run = Run.start(tmp_path / "run", "adult", epochs=2, expected_batch_size=5000, baseline=False)
    for steps_before, saved in [(0, 0), (5, 0), (1, 6), (5, 6), (1, 12)]:  # 12 steps in all, 6 to an epoch
        drain(run, at_most=steps_before)
        assert run.folder.read_checkpoint()["training"]["step_count"] == saved


@pytest.mark.thorough
def test_run_ends_when_its_last_steps_draw_nobody(tmp_path):
    for attempt in range(4):  # one step in e is empty at a mean of one example
        run = Run.start(tmp_path / f"{attempt}", "adult", epochs=1e-4, expected_batch_size=1, baseline=False)
        drain(run)
        assert run.training.step_count == run.training.settings.num_steps == 3
        assert [row.step for row in run.private.rows] == [3]


@pytest.mark.thorough
@pytest.mark.parametrize("stop", [0, 1, 5, STEPS])
@pytest.mark.parametrize("saved", [True, False], ids=["saved", "killed"])
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, stop, saved):
    run = Run.start(tmp_path / "stopped", "adult", **TINY)
    shutil.copytree(tmp_path / "stopped", tmp_path / "whole")  # the same secret keys
    drain(run, at_most=stop)
    if saved:
        run.checkpoint()
    run.close()
    stopped, whole = Run.resume(tmp_path / "stopped"), Run.resume(tmp_path / "whole")
    drain(stopped)
    drain(whole)
    assert stopped.folder.ledger.read_text() == whole.folder.ledger.read_text()  # it names each batch and noise
    assert stopped.private.rows == whole.private.rows
    assert_equal_weights(stopped.model.state_dict(), whole.model.state_dict())


@pytest.mark.thorough
def test_runs_do_not_share_their_noise(tmp_path):
    one, other = (Run.start(tmp_path / name, "adult", **TINY) for name in ("one", "other"))
    drain(one)
    drain(other)
    assert not torch.equal(one.model[0].weight, other.model[0].weight)


@pytest.mark.thorough
def test_baseline_depends_on_the_public_seed_alone(tmp_path):
    one, other = (Run.start(tmp_path / name, "adult", epochs=0.1) for name in ("one", "other"))
    drain(one)
    drain(other)
    assert one.baseline.rows == other.baseline.rows
    assert len(one.baseline.rows) == 1


# The command, which waits in the middle of its training until it is told to go on: so a signal finds it there.
WAITING = """
import pathlib, sys, time
from torch_privacy.cli import main
from torch_privacy.privacy import Ledger

folder, record = pathlib.Path(sys.argv.pop(1)), Ledger.record

def record_and_wait(self, event, step, fingerprint):
    record(self, event, step, fingerprint)
    if step == 50:
        folder.joinpath("waits").touch()
        while not folder.joinpath("go on").exists():
            time.sleep(0.01)

Ledger.record = record_and_wait
main()
"""


def start_in_a_process(path):
    """A run of the command in a process of its own, some steps into its training."""
    arguments = ["train", "adult", "--run", str(path), "--epochs", "1.2", "--no-baseline"]
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, str(path.parent), *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    while not path.with_name("waits").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    return process


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_stopped_command_can_be_resumed(tmp_path, number, code):
    path = tmp_path / "run"
    process = start_in_a_process(path)
    process.send_signal(number)
    path.with_name("go on").touch()
    _, shown = process.communicate()
    assert process.returncode == code
    assert "Traceback" not in shown
    if number != signal.SIGKILL:
        assert re.search(
            rf"stopped after step 51 of 138; continue with\n  torch-privacy train --resume {path}\n", shown
        )
    before = path.joinpath("ledger.jsonl").read_text().splitlines()
    shutil.copytree(path, tmp_path / "twin")
    for folder in (path, tmp_path / "twin"):
        assert command(["train", "--resume", str(folder), "--quiet"]) == 0
    after = path.joinpath("ledger.jsonl").read_text().splitlines()
    whole = before if before[-1].endswith("}") else before[:-1]
    assert after[: len(whole)] == whole
    assert json.loads((path / "results.json").read_text())["privacy"]["num_steps"] == 138
    twin = RunFolder(tmp_path / "twin")
    assert twin.ledger.read_text().splitlines() == after
    assert_equal_weights(*map(safetensors.torch.load_file, (path / "model.safetensors", twin.model)))


@pytest.fixture
def stopped(tmp_path):
    """The folder of a run that was left after a few steps."""
    run = Run.start(tmp_path / "run", "adult", **TINY)
    drain(run, at_most=3)
    run.checkpoint()
    run.close()
    return run.folder


def assert_refused(arguments, words, capfd):
    assert command(arguments) == 2
    shown = capfd.readouterr().err
    assert words in shown
    assert re.fullmatch(r"torch-privacy: [^\n]+\.\n", shown)


BUSY = "another process is training in this folder"


@pytest.mark.thorough
def test_second_process_is_kept_out_of_a_run(tmp_path, capfd):
    path = tmp_path / "run"
    process = start_in_a_process(path)
    try:
        assert_refused(["train", "--resume", str(path)], BUSY, capfd)
    finally:
        process.kill()
        process.communicate()
    assert command(["train", "--resume", str(path), "--quiet"]) == 0  # the kernel has let go of the lock
    assert {file.name for file in path.iterdir()} == FILES


def test_second_start_in_a_folder_is_kept_out(tmp_path, capfd):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    assert_refused(["train", "adult", "--run", str(folder.path)], BUSY, capfd)
    folder.unlock()
    Run.start(folder.path, "adult", **TINY).close()


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("content", [b"garbage", b""], ids=["garbage", "empty"])
def test_damaged_checkpoint_is_refused(stopped, content, capfd):
    stopped.checkpoint.write_bytes(content)
    assert_refused(
        ["train", "--resume", str(stopped.path)],
        "checkpoint.safetensors: cannot be read (it is no checkpoint of this version, or damaged)",
        capfd,
    )


def test_former_checkpoint_is_refused_and_what_to_do_is_said(stopped, capfd):
    torch.save({}, stopped.path / "checkpoint.pt")
    stopped.checkpoint.unlink()
    words = "checkpoint.pt: is of an earlier version, in a format that this one does not read: finish the run with the"
    assert_refused(["train", "--resume", str(stopped.path)], words, capfd)


def test_checkpoint_of_another_network_is_refused_before_anything_is_loaded(stopped):
    state = stopped.read_checkpoint()
    state["parts"]["model"]["0.weight"] = torch.zeros(3, 4)
    stopped.write_checkpoint(state)
    with pytest.raises(ValueError, match=r"checkpoint.safetensors: its model differs from this one in '0.weight'"):
        Run.resume(stopped.path)


def test_truncated_checkpoint_is_refused(stopped, capfd):
    stopped.checkpoint.write_bytes(stopped.checkpoint.read_bytes()[:-100])
    assert_refused(
        ["train", "--resume", str(stopped.path)],
        "checkpoint.safetensors: cannot be read (it is damaged: its digest does not fit its content)",
        capfd,
    )


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(
    ("edit", "words"),
    {
        "learning rate": (lambda old: {**old, "learning_rate": 0.3}, "was started with in learning_rate."),
        "empty": (lambda old: {}, "has no 'experiment'"),
        "unknown key": (lambda old: {**old, "momentum": 0.9}, "was started with in momentum."),
        "missing key": (lambda old: {key: old[key] for key in old if key != "data"}, "was started with in data."),
        "list": (lambda old: [1], "not a JSON object"),
    }.values(),
    ids=["learning rate", "empty", "unknown key", "missing key", "list"],
)
def test_edited_settings_are_refused(stopped, edit, words, capfd):
    stopped.settings.write_text(json.dumps(edit(json.loads(stopped.settings.read_text()))))
    assert_refused(["train", "--resume", str(stopped.path)], words, capfd)


def test_full_disk_is_one_sentence_with_the_path(tmp_path, stopped, capfd, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    path = tmp_path / "other"
    assert_refused(["train", "adult", "--run", str(path)], f"{path}: No space left on device", capfd)
    assert command(["train", "--resume", str(stopped.path)]) == 2
    shown = capfd.readouterr().err
    assert (
        f"No space left on device. Once there is room, torch-privacy train --resume {stopped.path} continues" in shown
    )
    path.mkdir(exist_ok=True)
    with pytest.raises(OSError, match="No space left") as raised:
        RunFolder(path).write_json(path / "settings.json", {})
    assert raised.value.filename == str(path / "settings.json")


def test_full_disk_under_the_ledger_names_the_folder(tmp_path, capfd, monkeypatch):
    def full(*_):
        raise OSError("Ledger: wrote only 3 of 100 bytes of a line; the disk may be full.")

    monkeypatch.setattr("torch_privacy.privacy.Ledger.record", full)
    arguments = ["train", "adult", "--run", str(tmp_path / "run"), "--epochs", "0.1", "--quiet"]
    assert_refused(arguments, f"{tmp_path / 'run'}: Ledger: wrote only 3", capfd)


@pytest.mark.thorough
def test_a_loss_that_is_not_finite_is_on_the_page_alone(tmp_path, capfd, monkeypatch):
    end_epoch = runner.Log.end_epoch

    def diverge(log, *arguments, **more):
        log.loss_sum = float("nan") if log.training == "private" else 1.0
        return end_epoch(log, *arguments, **more)

    monkeypatch.setattr(runner.Log, "end_epoch", diverge)
    arguments = ["train", "adult", "--run", str(tmp_path / "run"), "--epochs", "0.1", "--quiet"]
    assert command(arguments) == 0
    assert "DIVERGED" not in capfd.readouterr().out + (tmp_path / "run" / "results.json").read_text()
    assert "DIVERGED" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.thorough
def test_failing_summary_does_not_lose_the_model(tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("no summary today")

    run = Run.start(tmp_path / "run", "adult", **TINY)
    drain(run)
    with monkeypatch.context() as broken:
        broken.setattr(runner, "summarize", fail)
        with pytest.raises(ValueError, match="no summary today"):
            run.finish()
    assert_equal_weights(safetensors.torch.load_file(run.folder.model), run.model.state_dict())
    run.close()
    again = Run.resume(tmp_path / "run")
    again.finish()
    assert again.folder.is_complete


@pytest.mark.thorough
def test_epsilon_high_is_what_the_ledger_says(tmp_path):
    run = Run.start(tmp_path / "run", "adult", **TINY)
    drain(run, at_most=4)
    assert run.epsilon_high(4) == run.training.spent().epsilon.high < run.epsilon_high(5)


@pytest.mark.thorough
def test_a_score_that_is_not_finite_does_not_lose_the_run(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(runner, "test_score", lambda task, model: float("nan"))
    path = tmp_path / "run"
    assert command(["train", "adult", "--run", str(path), "--epochs", "0.1", "--quiet"]) == 0
    assert "not finite" in capfd.readouterr().out
    results = RunFolder(path).read_results()
    assert results["test_score"] is None
    assert results["diverged"] == ["private", "non-private"]
    assert command(["report", str(path), "--out", str(tmp_path / "page.html")]) == 0
    assert "not finite" in (tmp_path / "page.html").read_text()
