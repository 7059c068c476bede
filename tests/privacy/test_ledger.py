# SPDX-License-Identifier: Apache-2.0
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from torch_privacy import Refused, privacy

A, B = privacy.SubsampledGaussian(1.0, 0.01), privacy.Gaussian(4.0)
RELEASES = [(A, "a0"), (A, "a1"), (B, "b"), (A, "a2")]


def filled(path=None) -> privacy.Ledger:
    ledger = privacy.Ledger(path)
    for step, (event, fingerprint) in enumerate(RELEASES):
        ledger.record(event, step, fingerprint)
    return ledger


def test_ledger_merges_equal_neighbors_and_prices_them():
    ledger = filled()
    assert len(ledger) == 4
    assert ledger.events == [(A, 2), (B, 1), (A, 1)]
    assert ledger.profile().epsilon(1e-5) == privacy.compose([(A, 3), (B, 1)]).epsilon(1e-5)
    assert privacy.Ledger().profile().epsilon(1e-5) == (0, 0)


def test_file_has_header_event_definitions_and_a_line_per_release(tmp_path):
    filled(tmp_path / "ledger").close()
    lines = [json.loads(line) for line in (tmp_path / "ledger").read_text().splitlines()]
    assert len({line.pop("check") for line in lines}) == len(lines)
    assert lines[0] == {"ledger": 2}
    assert lines[1] == {"define": 0, "event": privacy.event_to_dict(A)}
    assert lines[2] == {"step": 0, "event": 0, "fingerprint": "a0"}
    assert [line["define"] for line in lines if "define" in line] == [0, 1]
    assert len(lines) == 1 + 2 + 4


def test_release_is_in_the_file_when_record_returns(tmp_path):
    path = tmp_path / "ledger"
    ledger = privacy.Ledger(path)
    for step, (event, fingerprint) in enumerate(RELEASES):
        ledger.record(event, step, fingerprint)
        assert json.loads(path.read_text().splitlines()[-1])["step"] == step


def test_releases_survive_kill_9(tmp_path):
    program = (
        "import os, signal, sys; from torch_privacy import privacy\n"
        "ledger = privacy.Ledger(sys.argv[1])\n"
        "for step in range(100): ledger.record(privacy.Gaussian(1.0), step, str(step))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = tmp_path / "ledger"
    root = Path(privacy.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=False, cwd=root)
    assert done.returncode == -signal.SIGKILL
    assert privacy.Ledger.load(path).events == [(privacy.Gaussian(1.0), 100)]


@pytest.mark.parametrize("cut", range(1, 40))
def test_load_drops_a_torn_last_line_and_goes_on(tmp_path, cut):
    path = tmp_path / "ledger"
    filled(path).close()
    os.truncate(path, path.stat().st_size - cut)
    ledger = privacy.Ledger.load(path)
    assert len(ledger) == (4 if cut == 1 else 3)  # without its end alone the line is whole
    ledger.record(A, 3, "a2")
    ledger.close()
    assert privacy.Ledger.load(path).state_dict() == ledger.state_dict()


FOREIGN = {  # what is no ledger, in whole or in part
    "empty": b"",
    "torn header": b'{"led',
    "one line without its end": b"notes on the meeting",
    "binary": bytes(range(256)),
    "other lines of JSON, the last one torn": b'{"a": 1}\n{"b": 2}\n{"c"',
    "a line of JSON without its end": b'{"a": 1}',
    "another format, the last one torn": b'{"ledger": 99}\n{"step"',
    "blank lines": b"\n\n",
    "a wrong first digest": b'{"ledger":2,"check":"00"}\n{"ste',
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_load_leaves_a_file_that_is_no_ledger_as_it_is(tmp_path, content):
    path = tmp_path / "ledger"
    path.write_bytes(content)
    with pytest.raises(Refused, match="Ledger"):
        privacy.Ledger.load(path)
    assert path.read_bytes() == content


def test_load_and_the_constructor_follow_no_link(tmp_path):
    filled(tmp_path / "there").close()
    before = (tmp_path / "there").read_bytes()
    for target in ("there", "nowhere"):
        path = tmp_path / f"link to {target}"
        path.symlink_to(tmp_path / target)
        with pytest.raises(Refused, match="symbolic link"):
            privacy.Ledger.load(path)
        with pytest.raises(Refused, match="exists"):
            privacy.Ledger(path)
    assert (tmp_path / "there").read_bytes() == before
    assert not (tmp_path / "nowhere").exists()


def test_a_new_ledger_has_its_first_line_before_its_name(tmp_path, monkeypatch):
    path = tmp_path / "ledger"

    def stopped(*_):
        assert not path.exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", stopped)
        with pytest.raises(KeyboardInterrupt):
            privacy.Ledger(path)
    assert list(tmp_path.iterdir()) == []
    privacy.Ledger(path).close()
    assert [found.name for found in tmp_path.iterdir()] == ["ledger"]
    assert len(privacy.Ledger.load(path)) == 0


def test_load_refuses_damage_before_the_last_line(tmp_path):
    path = tmp_path / "ledger"
    filled(path).close()
    lines = path.read_text().splitlines(keepends=True)
    for broken in ("{broken\n", '{"step": 7, "event": 0, "fingerprint": ""}\n', '{"step": 0, "event": 5}\n', "[]\n"):
        path.write_text("".join([*lines[:2], broken, *lines[3:]]))
        with pytest.raises(Refused, match=r"line 3 of .*ledger.* cannot be read"):
            privacy.Ledger.load(path)
    path.write_text('{"ledger": 99}\n')
    with pytest.raises(Refused, match="format 99 is unknown"):
        privacy.Ledger.load(path)


def test_new_ledger_refuses_an_existing_file(tmp_path):
    filled(tmp_path / "ledger").close()
    with pytest.raises(Refused, match=r"exists\. Continue it with Ledger\.load"):
        privacy.Ledger(tmp_path / "ledger")


def test_replay_of_the_same_release_changes_nothing(tmp_path):
    path = tmp_path / "ledger"
    ledger = filled(path)
    before = path.read_bytes()
    for step, (event, fingerprint) in enumerate(RELEASES):
        ledger.record(event, step, fingerprint)
    assert len(ledger) == 4
    assert path.read_bytes() == before


@pytest.mark.parametrize(("event", "fingerprint"), [(A, "other"), (B, "a1")])
def test_different_release_under_a_taken_step_is_refused(event, fingerprint):
    ledger = filled()
    with pytest.raises(Refused, match=r"step 1 was .* share one step's noise"):
        ledger.record(event, 1, fingerprint)
    assert len(ledger) == 4


def test_recording_compares_no_event_with_all_before_it(monkeypatch):
    compared, equal = [], type(A).__eq__
    monkeypatch.setattr(type(A), "__eq__", lambda *pair: compared.append(1) or equal(*pair))
    ledger = privacy.Ledger()
    for step in range(200):  # as under a noise_schedule
        ledger.record(privacy.SubsampledGaussian(1 + step / 1000, 0.1), step, "a")
    assert len(compared) <= 200


def test_gap_and_hostile_steps_are_refused():
    ledger = filled()
    with pytest.raises(Refused, match="step=5 comes after step 3"):
        ledger.record(A, 5, "x")
    for step in (-1, 4.0, True):
        with pytest.raises(ValueError, match="step="):
            ledger.record(A, step, "x")
    with pytest.raises(ValueError, match="fingerprint=7 must be a string"):
        ledger.record(A, 4, 7)


def test_state_dict_survives_json_and_continues():
    state = json.loads(json.dumps(filled().state_dict()))
    ledger = privacy.Ledger()
    ledger.load_state_dict(state)
    ledger.record(A, 4, "next")
    assert ledger.events == [(A, 2), (B, 1), (A, 2)]


def test_an_older_ledger_goes_on_under_zero_out():
    """Steps of older runs were recorded under add/remove; replayed, they are the same sums at the same price."""
    zero_out = privacy.NeighboringRelation.REPLACE_SPECIAL
    old, new = privacy.SubsampledGaussian(1.0, 0.1), privacy.SubsampledGaussian(1.0, 0.1, zero_out)
    ledger = privacy.Ledger()
    for step in range(2):
        ledger.record(old, step, f"{step}")
    ledger.record(new, 1, "1")
    ledger.record(new, 2, "2")
    assert ledger.events == [(old, 2), (new, 1)]
    assert ledger.profile().neighboring_relation is zero_out
    for other in (privacy.SubsampledGaussian(0.9, 0.1, zero_out), privacy.SubsampledGEP(1.0, 0.1, zero_out)):
        with pytest.raises(Refused, match="step 1 was"):
            ledger.record(other, 1, "1")


def test_load_state_dict_keeps_later_releases_and_refuses_conflicts(tmp_path):
    early = privacy.Ledger()
    early.record(A, 0, "a0")
    ledger = filled(tmp_path / "ledger")
    ledger.load_state_dict(early.state_dict())
    assert len(ledger) == 4
    other = privacy.Ledger()
    other.record(A, 0, "different")
    with pytest.raises(Refused, match="step 0 was"):
        ledger.load_state_dict(other.state_dict())
    with pytest.raises(Refused, match="format None"):
        ledger.load_state_dict({})


def test_full_disk_leaves_no_torn_line(tmp_path, monkeypatch):
    path = tmp_path / "ledger"
    ledger, write = filled(path), os.write
    before = path.read_bytes()
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:5]))
    with pytest.raises(OSError, match="wrote only 5 of"):
        ledger.record(A, 4, "lost")
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert len(ledger) == 4
    ledger.record(A, 4, "kept")
    assert len(privacy.Ledger.load(path)) == 5


def test_closed_ledger_refuses_to_record_into_nowhere(tmp_path):
    ledger = filled(tmp_path / "ledger")
    ledger.close()
    with pytest.raises(Refused, match="closed"):
        ledger.record(A, 4, "lost")
    assert len(ledger) == 4


@pytest.fixture
def synced(monkeypatch):
    """Whether each fsync so far went to a directory."""
    calls, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: calls.append(stat.S_ISDIR(os.fstat(file).st_mode)) or fsync(file))
    return calls


def test_new_and_loaded_ledgers_reach_the_disk_with_their_directory_entry(tmp_path, synced):
    privacy.Ledger(tmp_path / "ledger")
    assert sorted(synced) == [False, True]
    synced.clear()
    privacy.Ledger.load(tmp_path / "ledger")
    assert True in synced


def test_sync_and_close_reach_the_disk(tmp_path, synced):
    ledger = filled(tmp_path / "ledger")
    synced.clear()
    ledger.sync()
    assert synced == [False]
    ledger.close()
    assert synced == [False, False]


def test_record_reaches_the_disk_when_a_second_has_passed(tmp_path, synced, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    ledger = privacy.Ledger(tmp_path / "ledger")
    synced.clear()
    ledger.record(A, 0, "a")
    assert synced == []
    now[0] += 1.01
    ledger.record(A, 1, "b")
    assert synced == [False]
    ledger.record(A, 2, "c")
    assert synced == [False]


def test_a_ledger_is_closed_where_the_reason_cannot_be_found(tmp_path):
    def fails():
        raise OSError("no answer")

    ledger = privacy.Ledger(tmp_path / "ledger.jsonl")
    ledger.record(privacy.Gaussian(1.0), 0, "a")
    ledger.reason.ask = fails
    with pytest.raises(OSError, match="no answer"):
        ledger.close()
    with pytest.raises(Refused, match="was closed"):
        ledger.record(privacy.Gaussian(1.0), 1, "b")


def test_a_ledger_is_the_sequence_of_its_releases():
    """So that ``prior_releases=training.ledger`` counts all of them."""
    ledger = privacy.Ledger()
    for step, stddev in enumerate([1.0, 2.0, 1.0]):
        ledger.record(privacy.Gaussian(stddev), step, f"{step}")
    assert [*ledger] == ledger.releases
    assert len([*ledger]) == len(ledger) == 3
