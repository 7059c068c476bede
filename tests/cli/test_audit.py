# SPDX-License-Identifier: Apache-2.0
"""Runs the command audit: on an experiment, on a run's folder, on own scores; and what it refuses."""

import json
import re

import numpy as np
import pytest
from safetensors.torch import save_file

from torch_privacy.cli import run
from torch_privacy.cli.audit import _make_room as make_room
from torch_privacy.data.adult import load_adult
from torch_privacy.privacy import Gaussian, Ledger

QUICK = ("--epochs", "0.1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "adult"
    assert run(["train", "adult", *QUICK, "--no-baseline", "--quiet", "--run", str(folder)]) == 0
    return folder


def own_ledger(folder):
    return (folder / "ledger.jsonl").read_text()


def audited(capsys, *arguments):
    """Returns the exit code and the JSON that audit prints."""
    spends = [] if {"--loop", "--scores"} & set(arguments) else ["--spend"]
    code = run(["audit", *map(str, arguments), *spends, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("subject", ["adult", "own_training:make", "run"])
def test_an_audit_spends_nothing_without_the_flag(subject, trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    assert run(["audit", str(trained) if subject == "run" else subject]) == 2
    error = capsys.readouterr().err
    assert "nothing was trained" in error
    assert "add --spend" in error
    if subject == "run":
        (high,) = re.findall(r"spends epsilon ([0-9.]+) at delta = 1e-05 once more", error)
        assert float(high) >= json.loads((trained / "results.json").read_text())["privacy"]["epsilon"]["high"]
    assert not [*tmp_path.iterdir()]
    assert before == {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}


@pytest.mark.thorough
def test_a_run_is_audited_with_its_own_settings(trained, capsys):
    code, content = audited(capsys, trained, "--canaries", 500)
    assert code == 0
    assert content["num_canaries"] == 500
    assert not content["rejected"]
    ledger = (trained / "audit" / "ledger.jsonl").read_text()
    assert json.loads(ledger.splitlines()[0])["purpose"] == "audit"
    noise = [json.loads(text.splitlines()[1])["event"]["noise_multiplier"] for text in (ledger, own_ledger(trained))]
    assert noise[0] == noise[1]
    page = (trained / "audit" / "report.html").read_text()
    assert "certified by the ledger" in page
    assert "<script" not in page
    assert run(["report", str(trained), "--out", str(trained / "all.html")]) == 0
    assert "found by the attack" in (trained / "all.html").read_text()
    capsys.readouterr()
    assert run(["audit", str(trained), "--spend"]) == 2
    assert "exists already" in capsys.readouterr().err


def test_an_audit_that_was_killed_can_be_repeated_and_its_releases_stay(tmp_path, capsys):
    out = tmp_path / "out"
    make_room(out)
    for number in (1, 2):
        out.mkdir(exist_ok=True)
        ledger = Ledger(out / "ledger.jsonl")
        ledger.record(Gaussian(float(number)), 0, "x")
        ledger.close()
        make_room(out)
        kept = out / f"stopped-{number}.jsonl"
        assert f"stopped here after 1 releases, which {kept} has" in capsys.readouterr().err
        assert Ledger.read(kept).events == [(Gaussian(float(number)), 1)]
    assert sorted(path.name for path in out.iterdir()) == ["stopped-1.jsonl", "stopped-2.jsonl"]
    (out / "audit.json").touch()
    with pytest.raises(ValueError, match="exists already"):
        make_room(out)


@pytest.mark.thorough
@pytest.mark.parametrize("ending", ["npz", "safetensors"])
@pytest.mark.parametrize("score", ["loss", "gradient"])
def test_canaries_come_from_a_file(tmp_path, capsys, ending, score):
    inputs, labels = load_adult().train[:40]
    path = tmp_path / f"canaries.{ending}"
    if ending == "npz":
        np.savez(path, inputs.numpy(), 1 - labels.numpy())
    else:
        save_file({"0": inputs.contiguous(), "1": 1 - labels}, path)
    out = tmp_path / "out"
    code, content = audited(capsys, "adult", *QUICK, "--canaries", path, "--score", score, "--out", out)
    assert code == 0
    assert content["num_canaries"] == 40


@pytest.mark.thorough
def test_own_scores_test_the_ledger_of_a_run(trained, tmp_path, capsys):
    normal = np.random.default_rng(0).normal
    path = tmp_path / "scores.json"
    path.write_text(json.dumps({"inside": normal(9, 1, 500).tolist(), "outside": normal(0, 1, 500).tolist()}))
    code, content = audited(capsys, trained, "--scores", path)
    assert code == 1
    assert content["rejected"]
    assert content["epsilon_low"] > content["epsilon_claimed"]


def test_own_scores_are_judged_at_the_delta_of_the_run_or_at_the_one_given(tmp_path, capsys):
    folder, path = tmp_path / "run", tmp_path / "scores.json"
    folder.mkdir()
    path.write_text(json.dumps({"inside": [1.0, 2.0], "outside": [0.0, 1.0]}))
    ledger = Ledger(folder / "ledger.jsonl")
    ledger.record(Gaussian(2.0), 0, "x")
    ledger.close()
    assert audited(capsys, folder, "--scores", path)[1]["delta"] == 1e-5
    (folder / "settings.json").write_text(json.dumps({"experiment": "adult", "delta": 1e-4}))
    assert audited(capsys, folder, "--scores", path)[1]["delta"] == 1e-4
    assert audited(capsys, folder, "--scores", path, "--delta", 1e-3)[1]["delta"] == 1e-3
    assert run(["audit", str(folder), "--scores", str(path), "--delta", "0"]) == 2
    assert "--delta 0.0 must lie in (0, 1)" in capsys.readouterr().err


OWN = """
import torch
import torch_privacy as tp

def make():
    data = torch.utils.data.TensorDataset(torch.randn(200, 30), torch.randint(2, (200,)))
    def train(dataset):
        model = torch.nn.Linear(30, 10)
        training = tp.PrivateTraining(
            model, torch.optim.SGD(model.parameters(), lr=0.1), dataset,
            expected_batch_size=50, num_steps=4, clipping=tp.Flat(1.0), noise_multiplier=1.0,
        )
        for x, y in training:
            training.step(torch.nn.functional.cross_entropy(model(x), y, reduction="none"))
        return training
    return train, data

def three():
    return 1, 2, 3
"""


@pytest.mark.thorough
def test_own_training_is_audited(tmp_path, capsys, monkeypatch):
    (tmp_path / "own_training.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    code, content = audited(capsys, "own_training:make", "--canaries", 200)
    assert code == 0
    assert content["num_canaries"] == 200
    (folder,) = (tmp_path / "audits").iterdir()
    assert (folder / "report.html").is_file()
    assert run(["audit", "own_training:three", "--spend"]) == 2
    assert "(train, dataset)" in capsys.readouterr().err


@pytest.mark.thorough(but=4)
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nothing-here"], "no experiment"),
        (["adult", "--canaries", "0"], "count"),
        (["adult", "--canaries", "many"], "--canaries many"),
        (["adult", "--canaries", "missing.npz"], "missing.npz"),
        (["adult", "--canaries", "empty.npz"], "empty.npz"),
        (["adult", "--canaries", "uneven.npz"], "lengths"),
        (["adult", "--canaries", "objects.npz"], "objects.npz"),
        (["adult", "--score", "luck"], "score"),
        (["adult", "--significance", "2"], "significance"),
        (["adult", "--scores", "list.json"], "adult"),
        (["ledger.jsonl", "--scores", "list.json"], "inside and outside"),
        (["ledger.jsonl", "--scores", "list.json", "--canaries", "5", "--spend"], "Leave out --canaries, --spend"),
        (["ledger.jsonl", "--scores", "strings.json"], "inside"),
        (["ledger.jsonl", "--scores", "missing.json"], "missing.json"),
    ],
)
def test_mistakes_are_named_in_one_sentence(arguments, named, trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.npz").write_bytes(b"")
    np.savez(tmp_path / "uneven.npz", np.zeros((3, 2)), np.zeros(4))
    np.savez(tmp_path / "objects.npz", np.array([{}, None], dtype=object))
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "strings.json").write_text('{"inside": ["a"], "outside": [1]}')
    (tmp_path / "ledger.jsonl").write_bytes((trained / "ledger.jsonl").read_bytes())
    assert run(["audit", *arguments, *([] if "--scores" in arguments else [*QUICK, "--spend"])]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert "Traceback" not in error


@pytest.mark.thorough
def test_numbers_of_an_audit_that_was_changed_are_refused(trained, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    for path in trained.iterdir():
        if path.is_file():
            (tmp_path / "run" / path.name).write_bytes(path.read_bytes())
    assert run(["audit", str(tmp_path / "run"), "--canaries", "100", "--spend"]) == 0
    path = tmp_path / "run" / "audit" / "audit.json"
    path.write_text(path.read_text().replace('"rejected": false', '"rejected": true'))
    capsys.readouterr()
    assert run(["report", str(tmp_path / "run"), "--out", str(tmp_path / "all.html")]) == 2
    assert "audit.json" in capsys.readouterr().err


LOOPS = """
import torch

def right(trial, divisor=None):
    generator, released = torch.Generator().manual_seed(trial.seed), []
    for _ in range(trial.num_steps):
        joined = torch.rand(trial.num_examples, generator=generator) < trial.sampling_probability
        noise = trial.noise_multiplier * torch.randn(trial.num_examples, generator=generator)
        released.append((joined + noise) / (divisor or (lambda _: trial.expected_batch_size))(joined))
    return released

def wrong(trial):
    return right(trial, divisor=lambda joined: joined.sum())

number = 3
"""


def test_a_loop_of_any_library_is_audited(tmp_path, capsys, monkeypatch):
    (tmp_path / "foreign_loops.py").write_text(LOOPS)
    monkeypatch.chdir(tmp_path)
    code, content = audited(capsys, "--loop", "foreign_loops:right")
    assert (code, content["rejected"], content["significance"]) == (0, False, 1e-6)
    assert run(["audit", "--loop", "foreign_loops:wrong"]) == 1
    shown = capsys.readouterr().out
    assert "REJECTED" in shown
    assert "expected batch size" in shown
    assert not (tmp_path / "audits").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--loop"),
        (["--loop", "foreign_loops"], "package.module:function"),
        (["--loop", "foreign_loops:number"], "must name a function"),
        (["adult", "--loop", "foreign_loops:right", "--canaries", "3"], "Leave out RUN, --canaries"),
    ],
)
def test_odd_loops_are_refused(arguments, named, tmp_path, capsys, monkeypatch):
    (tmp_path / "foreign_loops.py").write_text(LOOPS)
    monkeypatch.chdir(tmp_path)
    assert run(["audit", *arguments]) == 2
    assert named in " ".join(capsys.readouterr().err.split())
