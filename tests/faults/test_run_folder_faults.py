# SPDX-License-Identifier: Apache-2.0
"""Checks that a finished run folder holds no keys, and that a report runs no scripts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torch_privacy.runs.folder import RunFolder
from torch_privacy.runs.report import html

ROOT = Path(__file__).parents[2]

KILLED = """
import os, signal, sys
from pathlib import Path
from torch_privacy.runs.folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.create()
folder.write_checkpoint({"keys": "of step 1"})
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
folder.write_checkpoint({"keys": "of step 2"})
"""


@pytest.mark.thorough
def test_keys_of_a_checkpoint_that_was_killed_do_not_stay(tmp_path):
    path = tmp_path / "run"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert b"of step 2" in (path / "checkpoint.safetensors.partial").read_bytes()
    folder = RunFolder(path)
    folder.lock()  # as a resumed run does
    assert sorted(os.listdir(path)) == ["checkpoint.safetensors", "lock"]
    assert folder.read_checkpoint() == {"keys": "of step 1"}
    folder.write_checkpoint({"keys": "of step 3"})
    (path / "checkpoint.safetensors.partial").write_bytes(b"keys")
    folder.delete_checkpoint()
    assert not [name for name in os.listdir(path) if "checkpoint" in name]
    folder.unlock()


HOSTILE = {
    "script": "<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>",
    "event": "<svg onload='alert(1)'></svg>",
    "breaking out": '<svg></svg>"><script>alert(1)</script>',
    "no drawing": "<script>alert(1)</script>",
}


@pytest.mark.parametrize("drawing", HOSTILE)
def test_a_drawing_in_a_folder_is_shown_as_an_image_only(drawing):
    """In an ``<img>`` browsers run no script of an SVG file and fetch nothing for it."""
    shown = html.figures([HOSTILE[drawing]], "cards")
    assert "script" not in shown
    assert "alert" not in shown
    assert "onload" not in shown
    assert shown.count("<img ") == 1


@pytest.mark.thorough
def test_the_command_works_in_a_locale_without_utf_8(tmp_path):
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    run = tmp_path / "run"
    for arguments in (
        ["reproduce"],
        ["train", "adult", "--epochs", "0.01", "--no-baseline", "--run", str(run)],
        ["report", str(run), "--out", str(tmp_path / "page.html")],
        ["report", str(run)],
    ):
        command = [sys.executable, "-m", "torch_privacy.cli", *arguments]
        done = subprocess.run(command, capture_output=True, cwd=tmp_path, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        assert b"codec" not in done.stderr
    assert "\u03b5" in (tmp_path / "page.html").read_text(encoding="utf-8")
