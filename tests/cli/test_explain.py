# SPDX-License-Identifier: Apache-2.0
import json
import re
import sys

import pytest

from torch_privacy.cli import run

MODELS = """
from collections import OrderedDict

import torch
from torch import nn

def good():
    return nn.Linear(3, 2), lambda model, x: model(x).square().sum(1), torch.randn(4, 3)

def classifier():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), (torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))

def with_batch_norm():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8)), (torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))

def named():
    block = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    model = nn.Sequential(OrderedDict(a_block_with_a_name_that_is_rather_long=block))
    return model, (torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))

def nothing():
    return nn.Linear(3, 2)

def unlabeled():
    return nn.Linear(3, 2), torch.randn(4, 3)

number = 3
"""
NO_MODELS = {
    "unknown": ("adlut", "'adlut' must be one of 'adult', "),
    "no factory": ("models:", "'models:' must be one of 'adult', "),
    "a path": ("../models:make", "'../models:make' must be one of 'adult', "),
    "a factory with arguments": ("os:getenv", "'os:getenv' must be a function without arguments"),
    "unknown module": ("nowhere.models:make", "'nowhere.models:make' names no module 'nowhere'"),
    "unknown submodule": ("torch.nowhere:make", "'torch.nowhere:make' names no module 'torch.nowhere'"),
    "unknown factory": ("models_of_test:bad", "models_of_test has none called 'bad'"),
    "not a function": ("models_of_test:number", "must name a function"),
    "no batch": ("models_of_test:nothing", "gave (Linear): must be (model, loss_fn, batch)"),
    "no losses": ("models_of_test:unlabeled", "gave a batch without a loss_fn: must be (x, labels)"),
}


@pytest.fixture
def models(tmp_path, monkeypatch):
    (tmp_path / "models_of_test.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "models_of_test", raising=False)
    return "models_of_test"


def test_explain_shows_the_plan_of_an_experiment(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["explain", "adult"]) == 0
    shown = capsys.readouterr().out
    heading, *rows = shown.splitlines()[:5]
    assert re.split(r"  +", heading.rstrip()) == [
        *("parameter", "op", "output", "norms by", "sum from", "flops", "memory", "verdict")
    ]
    assert [row.split()[0] for row in rows] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(row.split()[1] == "linear" and row.split()[-1] == "exact" for row in rows)
    assert "4 parameters, a batch of 256 examples: no problem found" in shown


def test_explain_json_has_every_verdict_and_problem(models, capsys):
    assert run(["explain", f"{models}:good", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] is True
    assert [verdict["name"] for verdict in shown["verdicts"]] == ["weight", "bias"]
    assert shown["verdicts"][0]["meetings"][0]["layout"] == "(n, 2)"
    assert shown["verdicts"][0]["plan"][0]["norms_by"] == "outer product"
    assert run(["explain", f"{models}:with_batch_norm", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] is False
    assert shown["problems"][0]["names"] == ["1.weight", "1.bias"]


def test_explain_scores_a_classifier_without_losses_of_its_own(models, capsys):
    assert run(["explain", f"{models}:classifier"]) == 0
    assert "no problem found" in capsys.readouterr().out


@pytest.mark.parametrize("width", [60, 80, 140])
def test_explain_cuts_nothing_off(models, width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    assert run(["explain", f"{models}:named"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width and "…" not in line for line in lines)
    for name in ("0.weight", "0.bias", "1.weight"):
        name = f"a_block_with_a_name_that_is_rather_long.{name}"
        assert sum(name in line for line in lines) == 1
    words = " ".join(" ".join(lines).split())
    assert words.count("layer_norm") == 2
    assert words.count("outer product") == 1


@pytest.mark.parametrize(("name", "words"), NO_MODELS.values(), ids=NO_MODELS)
def test_explain_answers_a_wrong_name_with_one_sentence_and_code_2(name, words, models, capsys):
    assert run(["explain", name]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err
    assert re.fullmatch(r"torch-privacy: [^\n]+\.\n", shown.err)


def test_explain_passes_on_the_error_of_a_failing_import(tmp_path, monkeypatch):
    (tmp_path / "broken_models_of_test.py").write_text("import a_module_that_nobody_has")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        run(["explain", "broken_models_of_test:make"])
