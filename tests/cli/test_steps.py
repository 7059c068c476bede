# SPDX-License-Identifier: Apache-2.0
"""Steps given by batch size, number of examples and epochs."""

import json
import re

import pytest

from torch_privacy import privacy
from torch_privacy.cli import run
from torch_privacy.experiments import load_trainable
from torch_privacy.experiments.task import number_of_steps

ADULT = ["--batch-size", "256", "--num-examples", "29305", "--epochs", "12"]
COMMANDS = {
    "epsilon": ["--noise-multiplier", "1.1"],
    "delta": ["--noise-multiplier", "1.1", "--epsilon", "1"],
    "calibrate": ["--epsilon", "2"],
    "tradeoff": ["--noise-multiplier", "1.1"],
    "compare": ["--noise-multiplier", "1.1"],
}


def answer(capsys, *arguments):
    assert run([*arguments, "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return json.loads(shown.out)


@pytest.mark.parametrize("command", COMMANDS)
def test_batch_size_and_epochs_say_the_same_as_probability_and_steps(command, capsys, monkeypatch):
    if command == "compare":
        monkeypatch.setattr("torch_privacy.privacy.comparison.compare", lambda *setting: [])
    delta = [] if command in ("delta", "tradeoff") else ["--delta", "1e-5"]
    by_size = answer(capsys, command, *COMMANDS[command], *ADULT, *delta)
    same = ["--sampling-probability", repr(256 / 29305), "--steps", "1374"]
    assert by_size == answer(capsys, command, *COMMANDS[command], *same, *delta)
    assert (by_size["sampling_probability"], by_size["num_steps"]) == (256 / 29305, 1374)


def test_steps_are_those_of_a_training(capsys):
    settings = load_trainable("adult").settings()
    assert answer(capsys, "epsilon", "--noise-multiplier", "1", *ADULT)["num_steps"] == number_of_steps(settings, 29305)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        (["--sampling-probability", "0.01", "--epochs", "3"], 300),
        (["--sampling-probability", "0.5", "--epochs", "0.1"], 1),
        (["--batch-size", "100", "--num-examples", "1000", "--steps", "7"], 7),
        (["--batch-size", "3", "--num-examples", "10", "--epochs", "1"], 4),
    ],
)
def test_the_two_forms_may_be_mixed(arguments, steps, capsys):
    assert answer(capsys, "epsilon", "--noise-multiplier", "2", *arguments)["num_steps"] == steps


def test_output_shows_how_the_steps_follow(capsys):
    assert run(["epsilon", "--noise-multiplier", "1", *ADULT]) == 0
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "steps 1,374 = 12 x 29,305 / 256, rounded up" in shown
    assert "sampling probability 0.00873571 = 256 / 29,305" in shown
    assert "delta 3.412e-06 = 1 / (10 x 29,305)" in shown


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(
    ("n", "given", "delta"),
    [(500, [], 1e-5), (29305, [], 1 / 293050), (29305, ["--delta", "3e-5"], 3e-5)],
)
def test_delta_is_at_most_a_tenth_of_one_over_n_unless_given(n, given, delta, capsys):
    arguments = ["--batch-size", "100", "--num-examples", str(n), "--steps", "10", *given]
    answered = answer(capsys, "calibrate", "--epsilon", "1", *arguments)
    assert answered["delta"] == delta
    assert answered["noise_multiplier"] == privacy.calibrate(1.0, delta, sampling_probability=100 / n, num_steps=10)


NOISE = ["epsilon", "--noise-multiplier", "1"]
MISTAKES = {
    "nothing": ([], "give --sampling-probability, or --batch-size with --num-examples"),
    "batch size alone": (["--batch-size", "3", "--epochs", "2"], "--batch-size alone says too little"),
    "examples alone": (["--num-examples", "3", "--steps", "2"], "--num-examples alone says too little"),
    "two probabilities": (
        ["--sampling-probability", "0.1", "--batch-size", "2", "--steps", "3"],
        "--sampling-probability and --batch-size exclude each other",
    ),
    "two numbers of steps": (
        ["--sampling-probability", "0.1", "--epochs", "2", "--steps", "3"],
        "--steps and --epochs exclude each other",
    ),
    "no steps": (["--sampling-probability", "0.1"], "give --steps or --epochs"),
    "large batch": (["--batch-size", "11", "--num-examples", "10", "--epochs", "1"], "--batch-size 11 must lie in"),
    "no examples": (["--batch-size", "1", "--num-examples", "0", "--epochs", "1"], "--num-examples 0 must be"),
    "no epochs": (["--batch-size", "1", "--num-examples", "9", "--epochs", "0"], "--epochs 0.0 must be greater"),
    "endless epochs": (["--batch-size", "1", "--num-examples", "9", "--epochs", "nan"], "--epochs nan must be"),
    "large delta": ([*ADULT, "--delta", "0.001"], "--delta 0.001 must lie in (0, 3.41239e-05)"),
}


@pytest.mark.parametrize(("arguments", "words"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_sentence(arguments, words, capsys):
    assert run([*NOISE, *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err
    assert shown.err.endswith("Try 'torch-privacy epsilon --help'.\n")
    assert shown.err.count("--help") == 1
    assert re.fullmatch(r"torch-privacy: [^\n]+\.\n", shown.err)


@pytest.mark.parametrize("delta", ["0", "1"])
def test_a_delta_that_is_none_is_refused_in_the_name_of_the_command(delta, capsys):
    described = ["--noise-multiplier", "1", "--sampling-probability", "0.01", "--steps", "10"]
    assert run(["epsilon", *described, "--delta", delta]) == 2
    assert f"epsilon: --delta {float(delta)} must lie in (0, 1)" in capsys.readouterr().err
