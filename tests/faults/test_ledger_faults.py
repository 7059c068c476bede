# SPDX-License-Identifier: Apache-2.0
"""A ledger loses and invents nothing: interrupts at every line, failing disks, flipped bits, a second writer."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from torch_privacy import Refused, privacy
from torch_privacy.privacy import ledger, ledger_file

A, B = privacy.SubsampledGaussian(1.0, 0.01), privacy.Gaussian(4.0)
PLAN = [(A, "a0"), (A, "a1"), (B, "b2"), (A, "a3"), (B, "b4"), (privacy.Laplace(3.0), "c5")]
ROOT = Path(__file__).parents[2]
ALL = "TORCH_PRIVACY_ALL_FAULTS" in os.environ  # set by `make faults`: every place, not a few drawn at random


def some(places: Sequence[Any], count: int) -> Sequence[Any]:
    """Returns all places, or ``count`` drawn at random, with a fixed seed."""
    return places if ALL or len(places) <= count else random.Random(1).sample(places, count)


def filled(path: Path, count: int = len(PLAN)) -> privacy.Ledger:
    found = privacy.Ledger(path)
    for step, (event, fingerprint) in enumerate(PLAN[:count]):
        found.record(event, step, fingerprint)
    return found


def record_all(found: privacy.Ledger) -> None:
    for step, (event, fingerprint) in enumerate(PLAN):
        found.record(event, step, fingerprint)


def assert_complete(found: privacy.Ledger, path: Path) -> None:
    """Memory and file hold the plan, each release once."""
    assert found.events == [(A, 2), (B, 1), (A, 1), (B, 1), (privacy.Laplace(3.0), 1)]
    found.close()
    assert privacy.Ledger.load(path).state_dict() == found.state_dict()


class InterruptAt:
    """Raises KeyboardInterrupt before the n-th line that the ledger's own code runs."""

    def __init__(self, number: int):
        self.left, self.raised = number, False

    def __enter__(self) -> "InterruptAt":
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename in (ledger.__file__, ledger_file.__file__) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.raised = True
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


def count_lines(path: Path) -> int:
    """Returns how many lines the ledger's own code runs while the rest of the plan is recorded."""
    found, never = filled(path, 2), InterruptAt(0)
    with never:
        record_all(found)
    return -never.left


def test_an_interrupt_at_any_line_of_record_loses_and_doubles_nothing(tmp_path):
    lines = count_lines(tmp_path / "whole")
    assert lines > 150
    for number in some(range(1, lines + 1), 60):
        path = tmp_path / str(number)
        found = filled(path, 2)
        interrupt = InterruptAt(number)
        try:
            with interrupt:
                record_all(found)
        except KeyboardInterrupt:
            pass
        assert interrupt.raised
        assert len(found) <= len(PLAN)
        record_all(found)  # the user tries again
        assert_complete(found, path)


def test_the_file_that_an_interrupt_leaves_can_be_continued(tmp_path):
    """The process ends right after the interrupt: what `record` confirmed is in the file."""
    for number in some(range(1, 400), 40):
        path = tmp_path / str(number)
        found, confirmed = filled(path, 2), 2
        try:
            with InterruptAt(number):
                for step, (event, fingerprint) in enumerate(PLAN[2:], start=2):
                    found.record(event, step, fingerprint)
                    confirmed = step + 1
        except KeyboardInterrupt:
            pass
        again = privacy.Ledger.load(path)
        assert len(again) >= confirmed
        record_all(again)
        assert_complete(again, path)


@pytest.mark.parametrize("written", [0, 1, 30, None])
@pytest.mark.parametrize("number", range(6))
def test_a_write_that_fails_leaves_neither_memory_nor_file_ahead(tmp_path, monkeypatch, written, number):
    path, write, calls = tmp_path / "ledger", os.write, [0]
    found = privacy.Ledger(path)

    def failing(file: int, data: bytes) -> int:
        calls[0] += 1
        if calls[0] == number + 1:
            if written is None:
                raise OSError(errno.EIO, "input/output error")
            return write(file, data[:written])
        return write(file, data)

    monkeypatch.setattr(os, "write", failing)
    with pytest.raises(OSError, match=r"input/output error|wrote only"):
        record_all(found)
    assert len(privacy.Ledger.load(path)) == number  # the ledger in the file is the one in memory
    again = privacy.Ledger.load(path)
    record_all(again)
    assert_complete(again, path)


def test_a_full_disk_that_cannot_be_cleaned_closes_the_ledger(tmp_path, monkeypatch):
    path, write = tmp_path / "ledger", os.write
    found = filled(path, 3)
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    monkeypatch.setattr(os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "i/o error")))
    with pytest.raises(OSError, match="wrote only 7"):
        found.record(*(PLAN[3][0], 3, PLAN[3][1]))
    monkeypatch.undo()
    with pytest.raises(Refused, match="takes no further release, because an incomplete line could not be removed"):
        found.record(PLAN[3][0], 3, PLAN[3][1])
    assert len(privacy.Ledger.load(path)) == 3


@pytest.mark.parametrize("number", range(1, 5))
def test_a_sync_that_fails_closes_the_ledger_for_good(tmp_path, monkeypatch, number):
    """The kernel may have dropped the pages: a second sync would succeed and prove nothing."""
    path, calls = tmp_path / "ledger", [0]
    found, fsync = filled(path, 1), os.fsync

    def failing(file: int) -> None:
        calls[0] += 1
        if calls[0] == number:
            raise OSError(errno.EIO, "input/output error")
        fsync(file)

    monkeypatch.setattr(os, "fsync", failing)
    monkeypatch.setattr(ledger_file, "SECONDS_BETWEEN_SYNCS", -1.0)  # at every release
    with pytest.raises(Refused, match="its disk reported an error"):
        record_all(found)
    monkeypatch.undo()
    made = len(found)
    assert 1 < made <= len(PLAN)
    for step in (made - 1, made):
        with pytest.raises(Refused, match="takes no further release"):
            found.record(PLAN[step][0], step, PLAN[step][1])
    again = privacy.Ledger.load(path)
    assert len(again) == made
    record_all(again)
    assert_complete(again, path)


@pytest.mark.parametrize("old", [False, True])
def test_no_single_flipped_bit_lowers_a_price_unseen(tmp_path, old):
    path = tmp_path / "ledger"
    filled(path).close()
    if old:  # format 1, without digests: damage to the JSON is seen, other damage is not
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            del line["check"]
        lines[0]["ledger"] = 1
        path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    content, accepted = path.read_bytes(), 0
    places = [(k, bit) for k in range(len(content)) for bit in range(8)]
    for k, bit in some(places, 300):
        path.write_bytes(content[:k] + bytes([content[k] ^ 1 << bit]) + content[k + 1 :])
        try:
            found = privacy.Ledger.load(path)
        except (Refused, UnicodeDecodeError):
            continue
        accepted += 1
        found.close()
    assert old or accepted == 0


def test_lines_that_are_missing_or_were_exchanged_are_refused(tmp_path):
    path = tmp_path / "ledger"
    filled(path).close()
    lines = path.read_bytes().splitlines(keepends=True)
    for k in range(len(lines) - 1):
        for changed in (lines[:k] + lines[k + 1 :], [*lines[:k], lines[k + 1], lines[k], *lines[k + 2 :]]):
            path.write_bytes(b"".join(changed))
            with pytest.raises(Refused):
                privacy.Ledger.load(path)


HOSTILE = {
    "an event of another type": '{"step":0,"event":"0","fingerprint":"a"}',
    "an event from the end": '{"step":0,"event":-1,"fingerprint":"a"}',
    "a truth value": '{"step":0,"event":false,"fingerprint":"a"}',
    "a fingerprint of another type": '{"step":0,"event":0,"fingerprint":7}',
    "a step of another type": '{"step":0.0,"event":0,"fingerprint":"a"}',
    "no fingerprint": '{"step":0,"event":0}',
    "an event out of order": '{"define":7,"event":{}}',
    "an unknown event": '{"define":1,"event":{"type":"os.system","command":"true"}}',
    "deep nesting": '{"define":1,"event":' + "[" * 100_000 + "]" * 100_000 + "}",
    "a huge number": '{"define":1,"event":{"type":"Gaussian","noise_multiplier":1' + "0" * 5000 + "}}",
    "not a number": '{"define":1,"event":{"type":"Gaussian","noise_multiplier":NaN}}',
}


@pytest.mark.parametrize("line", HOSTILE)
def test_hostile_lines_are_refused_with_one_sentence(tmp_path, line):
    """Checks files of format 1, which have no digests."""
    path = tmp_path / "ledger"
    event = json.dumps(privacy.event_to_dict(A))
    path.write_text(f'{{"ledger":1}}\n{{"define":0,"event":{event}}}\n{HOSTILE[line]}\n')
    with pytest.raises(Refused, match=r"line 3 of .* cannot be read"):
        privacy.Ledger.load(path)


def test_a_ledger_that_is_deleted_or_shortened_while_it_is_written_is_refused(tmp_path):
    for damage in (os.unlink, lambda path: os.truncate(path, 20)):
        path = tmp_path / "ledger"
        found = filled(path, 3)
        damage(path)
        with pytest.raises(Refused, match="deleted or shortened by another program"):
            found.record(PLAN[3][0], 3, PLAN[3][1])
        path.unlink(missing_ok=True)


def test_lines_of_another_writer_are_never_removed(tmp_path):
    """As on a file system without locks, where a second writer is not refused at once."""
    path = tmp_path / "ledger"
    found = filled(path, 3)
    with path.open("ab") as other:
        other.write(b'{"step":3,"event":0,"fingerprint":"theirs"}\n')
    before = path.read_bytes()
    with pytest.raises(Refused, match="another program wrote into it"):
        found.record(PLAN[3][0], 3, PLAN[3][1])
    assert path.read_bytes() == before


SECOND = """
import sys
from torch_privacy import Refused, privacy
try:
    privacy.Ledger.load(sys.argv[1])
except Refused as error:
    sys.exit(str(error))
"""


@pytest.mark.thorough
def test_a_second_process_is_refused_until_the_first_ends(tmp_path):
    path = tmp_path / "ledger"
    found = filled(path, 3)
    command = [sys.executable, "-c", SECOND, str(path)]
    second = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert second.returncode == 1
    assert "another process writes" in second.stderr
    found.close()
    assert subprocess.run(command, check=False, cwd=ROOT).returncode == 0


def test_a_newer_ledger_of_the_same_process_takes_the_file_over(tmp_path):
    path = tmp_path / "ledger"
    older = filled(path, 3)
    newer = privacy.Ledger.load(path)
    with pytest.raises(Refused, match="was opened anew in this process"):
        older.record(PLAN[3][0], 3, PLAN[3][1])
    assert len(older) == 3
    record_all(newer)
    assert_complete(newer, path)


KILLED = """
import os, sys, threading, time
from torch_privacy import privacy
ledger = privacy.Ledger.load(sys.argv[1]) if os.path.exists(sys.argv[1]) else privacy.Ledger(sys.argv[1])
threading.Thread(target=lambda: (time.sleep(float(sys.argv[2])), os.kill(os.getpid(), 9)), daemon=True).start()
for step in range(len(ledger), 10**9):
    ledger.record(privacy.SubsampledGaussian(1 + step % 3, 0.01), step, str(step))
    os.write(1, b"%d\\n" % step)
"""


@pytest.mark.thorough
def test_releases_that_were_confirmed_survive_kills(tmp_path):
    path, random_times = tmp_path / "ledger", random.Random(7)
    for _ in range(5):
        delay = str(0.02 + 0.1 * random_times.random())
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(path), delay], capture_output=True, check=False, cwd=ROOT
        )
        assert done.returncode == -signal.SIGKILL
        confirmed = done.stdout.split(b"\n")[-2] if b"\n" in done.stdout else b"-1"
        found = privacy.Ledger.load(path)
        assert len(found) > int(confirmed)
        assert [fingerprint for _, fingerprint in found.state_dict()["releases"]] == list(map(str, range(len(found))))
        found.close()
