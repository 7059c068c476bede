# SPDX-License-Identifier: Apache-2.0
"""Commands with odd arguments: right answers, or one sentence and exit code 2, never a traceback and never a wait."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from torch_privacy.cli import run as command

ROOT = Path(__file__).parents[2]
ALL = "TORCH_PRIVACY_ALL_FAULTS" in os.environ
SECONDS = 600  # until a command counts as a hang
SHARE = 15  # CI runs one trial in 15
NUMBERS = [
    "-1", "0", "nan", "inf", "-inf", "1e999", "1e-320", "1e300", "99999999999999999999999999", "0x10", "", " ", "１",
    "3.7", "1_000", "--", "1e-17", "1", "0.9999999999999999", "-0.0", "1\n2", "\x00", "\udcff", "2147483648",
]  # fmt: skip
SEEDS = [
    "0-99999999999",
    "5-3",
    "1,1",
    "-1",
    "1-2-3",
    "a",
    "",
    ",",
    "0-",
    "٣",
    "1.5",
    "9" * 5000,
    "18446744073709551616",
]
ACCOUNTING = {
    "epsilon": ["noise-multiplier", "sampling-probability", "steps", "delta"],
    "delta": ["noise-multiplier", "sampling-probability", "steps", "epsilon"],
    "calibrate": ["epsilon", "sampling-probability", "steps", "delta"],
    "tradeoff": ["noise-multiplier", "sampling-probability", "steps", "alpha"],
    "compare": ["noise-multiplier", "sampling-probability", "steps", "delta"],
}
USUAL = {
    "noise-multiplier": "1.1", "sampling-probability": "0.01", "steps": "100", "delta": "1e-5", "epsilon": "2",
    "alpha": "0.1", "learning-rate": "0.1", "clip-norm": "1", "batch-size": "500", "epochs": "0.02",
    "hidden-units": "4", "seed": "3",
}  # fmt: skip
TRAIN = [
    "noise-multiplier",
    "epsilon",
    "delta",
    "batch-size",
    "learning-rate",
    "clip-norm",
    "epochs",
    "hidden-units",
    "seed",
]
PATHS = [
    "", "/", ".", "..", "/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem", "FILE", "FIFO", "LOOP", "EMPTY",
    "FILE/below", "x" * 5000, "a\x00b", "\udcff\udcfe", "né\n", "-", "~nobody", "/proc/1/root", "new/" * 400,
]  # fmt: skip
NAMES = [
    "", " ", "nothing", "../x:y", "os:system", "os:getcwd", "os:path", "a.b:c", ":", "x:", ":y", "json:loads",
    "os.path:join",    "sys:exit", "this:x", "1:2", "a..b:c", "\x00:x", "é:é", "torch:nn", "adult:x", "x" * 5000,
]  # fmt: skip
WORDS = [
    [], ["--help", "x", "--nothing"], ["nothing"], ["--json"], ["train"], ["train", "nothing"], ["train", "--resume"],
    ["train", "adult", "--resume", "x"], ["train", "adult", "--epsilon", "1", "--noise-multiplier", "1"], ["report"],
    ["train", "adult", "adult"], ["reproduce", "nothing"], ["reproduce", "--quick"], ["reproduce", "--only", "x"],
    ["reproduce", "gdp-calibration", "--only", "["], ["reproduce", "gdp-calibration", "--skip", "*"],
    ["reproduce", "gdp-calibration", "--only", "\x00"], ["search"], ["search", "adult"], ["explain"], ["epsilon"],
    ["search", "nothing", "--clip-norm", "1"], ["search", "adult", "--on", "public", "--clip-norm", "1"],
    ["search", "adult", "--clip-norm", "nan"], ["search", "adult", "--tries", "0", "--clip-norm", "1"],
    ["search", "adult", "--tries", "99999999999999999999", "--clip-norm", "1", "--epochs", "0"],
    ["search", "adult", "--projections", "-1", "--clip-norm", "1"],
    ["search", "adult", "--seed", "-1", "--clip-norm", "1"], ["train", "adult", "--seed", "-1"],
    ["search", "adult", "--on", "private", "--mean-runs", "nan", "--clip-norm", "1"],
    ["search", "adult", "--on", "private", "--mean-runs", "1e300", "--clip-norm", "1"],
    ["search", "adult", "--on", "private", "--score-noise", "-1", "--clip-norm", "1"],
    ["search", "adult", "--on", "private", "--stopping", "x", "--clip-norm", "1"],
    ["epsilon", "--plot", "x.exe"], ["tradeoff", "--alpha"], ["calibrate", "--epsilon", "1", "--epsilon", "2"],
]  # fmt: skip


def trials() -> list[list[str]]:
    """Returns the command lines; PLACES stand for what the fixture ``places`` makes."""
    found = [list(words) for words in WORDS]
    for name, options in ACCOUNTING.items():
        for odd, number in product(options, NUMBERS):
            line = [name]
            for option in options:
                line += [f"--{option}", number if option == odd else USUAL[option]]
            found.append(line)
        usual = [part for option in options for part in (f"--{option}", USUAL[option])]
        found += [[name, *usual, "--plot", f"{path}.svg" if path else path] for path in PATHS[::3]]
    quick = ["--epochs", "0.01", "--batch-size", "500", "--no-baseline", "--quiet", "--run", "NEW"]
    for option, number in product(TRAIN, NUMBERS):
        if (option, number) in (("epochs", "1_000"), ("epochs", "3.7")):
            continue  # good numbers, which take a while
        found.append(["train", "adult", *quick, f"--{option}", number])
    for path in PATHS:
        found += [
            ["report", path, "--out", "OUT"], ["train", "--resume", path], ["reproduce", "--resume", path],
            ["train", "adult", *quick, "--run", path], ["train", "adult", *quick, "--data", path],
            ["reproduce", "gdp-mnist", "--data", path, "--run", "NEW"], ["report", "EMPTY", "--out", path],
            ["search", "adult", "--clip-norm", "1", "--on", "public", "--stand-in", path, "--run", "NEW"],
            ["train", path, "--target", "x", "--epsilon", "1", "--run", "NEW"], ["predict", path, "FILE"],
            ["train", "FILE", "--target", "a text", "--epsilon", "1", "--schema", path, "--run", "NEW"],
            ["schema", path, "--target", "x"], ["schema", "FILE", "--target", "a text", "--output", path],
        ]  # fmt: skip
    found += [["reproduce", "gdp-calibration", "--quick", "--seeds", seeds, "--only", "nothing"] for seeds in SEEDS]
    found += [["explain", name] for name in NAMES]
    return found


TRIALS = trials()
assert len(TRIALS) >= 400


class Hang(BaseException):
    """Raised in a trial that takes too long; no handler of errors catches it."""


def verdict(line: list[str]) -> str:
    """Runs a command in this process, and returns what is wrong with its answer, or ""."""

    def stop(*_):
        raise Hang

    out, err = io.StringIO(), io.StringIO()
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = command(line)
    except (Exception, Hang, SystemExit) as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return wrong(code, err.getvalue())


def wrong(code: int, err: str) -> str:
    if code == 0 or (code == 1 and "explain" in err):
        return ""
    sentence = re.fullmatch(r"(picture: [^\n]*\n)?torch-privacy: [^\n]{1,2000}\.\n", err)
    return "" if code == 2 and sentence and "Traceback" not in err else f"exit code {code}: {err[-300:]}"


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Folders and files that the odd commands name, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("a text")
    (tmp_path / "EMPTY").mkdir()
    os.mkfifo(tmp_path / "FIFO")
    (tmp_path / "LOOP").symlink_to("LOOP")


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(SHARE) if ALL else [0])
def test_odd_commands_end_in_one_sentence(first, places, tally, tmp_path):
    failed = []
    for number, line in list(enumerate(TRIALS))[first::SHARE]:
        new = [part.replace("NEW", f"new-{number}").replace("OUT", f"out-{number}.html") for part in line]
        if found := verdict(new):
            failed.append((new, found))
    tried = len(TRIALS[first::SHARE])
    tally("odd command", tried, tried - len(failed))
    assert not failed


@pytest.mark.thorough
def test_odd_commands_in_processes_of_their_own(places, tally):
    """With names that are not UTF-8, as the system passes them."""
    lines = [
        [b"report", b"\xff\xfe"], [b"report", b"FIFO"], [b"explain", b"\xff:x"],
        [b"train", b"adult", b"--epochs", b"0.01", b"--no-baseline", b"--run", b"run-\xff", b"--quiet"],
        [b"report", b"run-\xff", b"--out", b"page-\xff.html"],
    ]  # fmt: skip
    failed = []
    for line in lines:
        done = subprocess.run(
            [sys.executable.encode(), b"-m", b"torch_privacy.cli", *line],
            capture_output=True,
            check=False,
            timeout=SECONDS,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        if found := wrong(done.returncode, done.stderr.decode("utf-8", "replace")):
            failed.append((line, found))
    tally("odd command, own process", len(lines), len(lines) - len(failed))
    assert not failed
