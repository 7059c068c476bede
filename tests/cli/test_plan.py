# SPDX-License-Identifier: Apache-2.0
"""The command ``plan``: a table from public numbers, and a simulation on data that need no protection."""

import json

import pytest

from torch_privacy import privacy
from torch_privacy.cli import run
from torch_privacy.experiments import search

PLAN = ["plan", "--examples", "20000", "--epsilon", "2", "--steps", "100"]


def test_plan_prints_that_of_the_library(capsys):
    assert run([*PLAN, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    found = privacy.plan(20_000, 2.0, 1 / 200_000, num_steps=(100,))
    assert shown["chosen"]["noise_multiplier"] == found.chosen.noise_multiplier
    assert len(shown["rows"]) == len(found.rows)
    assert shown["advice"] == found.advice()
    assert run(PLAN) == 0
    assert f"{found.chosen.noise_multiplier:.3f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--examples", "0", "--epsilon", "2"], "plan: --examples 0 must be an integer of at least 1"),
        ([*PLAN, "--delta", "0.1"], "--delta 0.1 must lie in (0, 5e-05)"),
        ([*PLAN, "--learning-rate", "1"], "need --simulate EXPERIMENT"),
        ([*PLAN, "--batch-size", "64"], "need --simulate EXPERIMENT"),
        ([*PLAN, "--simulate", "best-mnist"], "plan: best-mnist has no synthetic data"),
        ([*PLAN, "--simulate", "adult", "--batch-size", "0"], "--batch-size 0 must be an integer of at least 1"),
        ([*PLAN, "--signal", "0"], "--signal 0.0 must lie in (0, 1]"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, words, capsys):
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert words in " ".join(shown.err.split())
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.thorough
def test_a_simulation_has_the_planned_steps_and_total_noise_on_no_private_data(monkeypatch, capsys):
    seen = []
    make = search.new_training
    monkeypatch.setattr(search, "new_training", lambda *parts: seen.append(make(*parts)) or seen[-1])
    monkeypatch.setattr("torch_privacy_papers.bu2020.adult.load_adult", None)
    options = ["--simulate", "adult", "--batch-size", "32", "--learning-rate", "0.5", "--json"]
    assert run([*PLAN[:-1], "20", *options]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [step for step, _ in shown["curve"]] == list(range(2, 21, 2))
    assert all(0 < score <= 1 for _, score in shown["curve"])
    (settings,) = [training.settings for training in seen]
    chosen = shown["chosen"]
    assert settings.num_steps == chosen["num_steps"] == 20
    assert settings.expected_batch_size == 32
    planned = chosen["noise_multiplier"] / chosen["expected_batch_size"]
    assert settings.noise_multiplier / 32 == pytest.approx(planned, rel=1e-12)
