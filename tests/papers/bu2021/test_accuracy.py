# SPDX-License-Identifier: Apache-2.0
"""Few projections against exact norms: runs are compared in pairs, on the first digits alone."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import TensorDataset

from torch_privacy.cli import run as command
from torch_privacy.experiments.task import Task
from torch_privacy.runs.report import render as report
from torch_privacy_papers.bu2021 import accuracy as jl_accuracy
from torch_privacy_papers.bu2021 import tables as jl_mnist

NUMBER = r"[+-]\d+\.\d+"


def results(**scores):
    runs = {f"1,000 digits, {jl_accuracy.jl.method_name(int(r[1:]))}": found for r, found in scores.items()}
    rows = [{"row": row, "runs": [{"numbers": {"score": s}} for s in found]} for row, found in runs.items()]
    return {"quick": True, "seeds": list(range(len(scores["r0"]))), "rows": rows}


def test_findings_compare_runs_of_the_same_seed():
    exact = np.array([0.80, 0.85, 0.90, 0.84])
    few = exact - np.array([0.010, 0.012, 0.008, 0.014])  # a shift that only pairs can tell
    lines = list(jl_accuracy.findings(results(r0=exact, r1=few[::-1], r3=few, r20=exact)))
    assert [line.partition(":")[0] for line in lines] == [f"1,000 digits, JL({r})" for r in (1, 3, 20)]
    mean, low, high = (float(number) for number in re.findall(NUMBER, lines[1])[:3])
    reach = 3.182 * np.std([1.0, 1.2, 0.8, 1.4], ddof=1) / 2  # 3.182: the quantile of Student's law of 3 degrees
    assert (mean, low, high) == pytest.approx((-1.1, -1.1 - reach, -1.1 + reach), abs=0.006)
    chances = [float(re.findall(r"p = ([\d.e-]+),", line)[0]) for line in lines]
    assert chances[1] < 0.01 < 0.1 < chances[0]
    assert chances[2] == 1


def test_intervals_hold_the_mean_as_often_as_they_say():
    drawn = np.random.default_rng(0).normal(3.0, 2.0, (6, 10_000))
    low, _, high = jl_accuracy.paired(drawn)
    inside = int(((low <= 3.0) & (high >= 3.0)).sum())
    assert stats.binomtest(inside, 10_000, 0.95).pvalue > 1e-3


def test_one_seed_compares_nothing():
    assert list(jl_accuracy.findings(results(r0=[0.8], r1=[0.7], r3=[0.8], r20=[0.8]))) == []


@pytest.fixture
def few_digits(monkeypatch):
    """In the place of MNIST: numbers that tell where they come from."""
    x = torch.arange(5000, dtype=torch.float32)[:, None, None, None].expand(-1, 1, 28, 28) / 5000
    y = torch.arange(5000) % 10

    class Data:
        train, test, files, not_covered = TensorDataset(x, y), TensorDataset(-x, y), {}, ()

    monkeypatch.setattr(jl_accuracy, "ON_MNIST", replace(jl_mnist.ON_MNIST, load=lambda folder: Data))


def test_trainings_see_the_first_digits_alone(few_digits):
    task: Task = jl_accuracy.build_task(replace(jl_accuracy.DEFAULTS, num_examples=1500))
    (train, _), (test, _) = task.train[:], task.test[:]
    assert (len(train), len(test)) == (1500, jl_accuracy.TESTED)
    assert float(train.max()) < 0.3
    assert float(test.max()) <= 0


@pytest.mark.parametrize(("projections", "not_for_release"), [(1, True), (3, True), (20, False)])
def test_few_projections_are_not_private(projections, not_for_release, few_digits):
    task = jl_accuracy.build_task(replace(jl_accuracy.DEFAULTS, num_projections=projections))
    assert task.private(task.new_model())["clipping"].not_for_release is not_for_release


@pytest.mark.thorough
def test_every_number_of_projections_is_trained_and_drawn(few_digits, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(jl_accuracy, "QUICK_SIZE", 128)
    monkeypatch.setattr(jl_accuracy, "PROJECTIONS", (0, 16))  # fewer take longer to price
    monkeypatch.setattr(jl_accuracy, "TESTED", 50)
    monkeypatch.setattr(report, "render", lambda folders: "")
    folder = tmp_path / "r"
    assert command(["reproduce", "jl-accuracy", "--quick", "--seeds", "0-1", "--run", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["row"] for row in found["rows"]] == ["128 digits, exact", "128 digits, JL(16)"]
    exact, estimated = (row["runs"][1]["numbers"]["epsilon"] for row in found["rows"])
    assert estimated["low"] > exact["high"]
    assert found["notes"][:-1] == list(jl_accuracy.NOTES)
    assert {path.stem for path in folder.glob("*.svg")} == {"accuracy-128", "difference-128"}
