# SPDX-License-Identifier: Apache-2.0
"""Provides the ledger: an append-only list of releases, on disk before any release is used."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..support.validate import Refused, whole
from .compose import Profile, compose
from .events.base import Event, event_from_dict, event_to_dict

FORMAT = 1
SECONDS_BETWEEN_SYNCS = 1.0


@dataclass(frozen=True)
class Release:
    """One release made outside of a training, for the ledger of the training that builds on it.

    Args:
        event: the release's description.
        fingerprint: distinguishes it from other releases of the same event, such as a digest of what was released.
        warning: the reason why it is not private; "" if it is.
    """

    event: Event
    fingerprint: str
    warning: str = ""


class Ledger:
    """An append-only list of releases, one per step.

    With a path, each release is a line of JSON in a file. These releases survive a crash:

    - if the process is killed: every release for which `record` has returned, as the operating system has its line;
    - if the power fails: every release recorded before the last `sync` returned. `record` syncs when more than a
      second has passed since the last sync, `close` always does, and a checkpoint should come after a `sync`. Later
      releases may be lost until the next `record` or `sync`: no timer runs in the background;
    - if the power fails early: the file and its header exist once ``Ledger(path)`` has returned, because the directory
      is flushed, too (not on systems that cannot open a directory, such as Windows).

    ``{"ledger": 1}`` is the first line, ``{"define": 0, "event": {...}}`` introduces an event, and
    ``{"step": 17, "event": 0, "fingerprint": "9f..."}`` is a release.

    Args:
        path: a file that does not exist yet; None keeps the ledger in memory.

    Guarantees:
        - steps are 0, 1, 2, ... without gaps, and no step is ever recorded with two different releases;
        - `record` of a release that is there already (a replay after a crash) changes nothing and costs nothing;
        - a line torn by a crash is dropped by `load`: `record` had not returned, so that release was not used.

    One process writes a ledger at a time; two at once are not detected.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None):
        self._events: list[Event] = []  # each distinct event once
        self._releases: list[tuple[int, str]] = []  # index into events, fingerprint
        self._runs: list[tuple[Event, int]] = []  # the same events in order, equal neighbors merged
        self._file: int | None = None
        self._closed = False
        self._last_sync = time.monotonic()
        if path is not None:
            if Path(path).exists():
                raise Refused(f"Ledger: {str(path)!r} exists. Continue it with Ledger.load, or choose another path.")
            self._open(path, os.O_CREAT | os.O_EXCL)
            self._write({"ledger": FORMAT})
            self.sync()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Ledger":
        """Returns the ledger in a file, ready to record more. An incomplete last line is removed.

        Raises:
            Refused: if another line cannot be read, or steps are not 0, 1, 2, ...
            FileNotFoundError: if there is no such file.
        """
        content = Path(path).read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        ledger = cls()
        for number, line in enumerate(complete.splitlines(), start=1):
            try:
                ledger._read(number, json.loads(line))
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise Refused(f"Ledger.load: line {number} of {str(path)!r} cannot be read: {error}.") from error
        ledger._open(path, 0)
        if len(complete) < len(content):
            os.truncate(path, len(complete))
        if not complete:  # killed before the header was written
            ledger._write({"ledger": FORMAT})
        return ledger

    def record(self, event: Event, step: int, fingerprint: str) -> None:
        """Records a release *before* it is used.

        Args:
            event: the release's description.
            step: number of the release, counted from 0; the next one, or an earlier one that is being replayed.
            fingerprint: digest of what determines the release's noise and sample, such as the generator's state.

        Raises:
            Refused: if the step leaves a gap, or belongs to a different release, which would share its noise.
        """
        whole("Ledger.record", step=step)
        if not isinstance(fingerprint, str):
            raise ValueError(f"Ledger.record: fingerprint={fingerprint!r} must be a string.")
        if step < len(self._releases):
            self._check_replay(event, step, fingerprint)
            return
        if step > len(self._releases):
            raise Refused(f"Ledger.record: step={step} comes after step {len(self) - 1}; steps must not leave gaps.")
        if self._closed:
            raise Refused(f"Ledger.record: step {step} comes after the ledger was closed. Open it with Ledger.load.")
        index = self._define(event)
        self._write({"step": step, "event": index, "fingerprint": fingerprint})
        self._append(index, fingerprint)

    def __len__(self) -> int:
        return len(self._releases)

    @property
    def events(self) -> list[tuple[Event, int]]:
        """All releases in order, as pairs (event, how many in a row)."""
        return list(self._runs)

    def profile(self) -> Profile:
        """Returns the privacy profile of all releases so far."""
        return compose(self.events)

    def state_dict(self) -> dict[str, Any]:
        """Returns the ledger as plain JSON, for a checkpoint. Call `sync` first if there is a file."""
        return {
            "ledger": FORMAT,
            "events": [event_to_dict(event) for event in self._events],
            "releases": [list(release) for release in self._releases],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Adds the checkpoint's releases to those that are here already.

        Releases beyond the checkpoint stay: they happened, and replaying them must give the same ones.

        Raises:
            Refused: if the checkpoint and this ledger differ at a step, or the format is unknown.
        """
        self._check_format(state.get("ledger"))
        events = [event_from_dict(description) for description in state["events"]]
        for step, (index, fingerprint) in enumerate(state["releases"]):
            self.record(events[index], step, fingerprint)

    def sync(self) -> None:
        """Returns when all releases are on the disk itself, safe from power failure."""
        if self._file is not None:
            os.fsync(self._file)
        self._last_sync = time.monotonic()

    def close(self) -> None:
        """Syncs and closes the file; the ledger can still be read."""
        if self._file is not None:
            self.sync()
            os.close(self._file)
            self._file, self._closed = None, True

    def _check_replay(self, event: Event, step: int, fingerprint: str) -> None:
        index, known = self._releases[step]
        if (self._events[index], known) != (event, fingerprint):
            raise Refused(
                f"Ledger.record: step {step} was {self._events[index]!r} with fingerprint {known!r}, and now is "
                f"{event!r} with {fingerprint!r}. Two different releases would share one step's noise. Resume from a "
                "checkpoint of the same run, or start a new ledger."
            )

    def _append(self, index: int, fingerprint: str) -> None:
        event = self._events[index]
        if self._runs and self._runs[-1][0] == event:
            self._runs[-1] = (event, self._runs[-1][1] + 1)
        else:
            self._runs.append((event, 1))
        self._releases.append((index, fingerprint))

    def _define(self, event: Event) -> int:
        """Returns the index of the event; writes a new event to the file first."""
        if event not in self._events:
            self._write({"define": len(self._events), "event": event_to_dict(event)})
            self._events.append(event)
        return self._events.index(event)

    def _read(self, number: int, line: dict[str, Any]) -> None:
        if number == 1:
            self._check_format(line["ledger"])
        elif "define" in line:
            self._events.append(event_from_dict(line["event"]))
        else:
            if line["step"] != len(self._releases):
                raise ValueError(f"step {line['step']} follows step {len(self) - 1}")
            self._append(line["event"], line["fingerprint"])

    @staticmethod
    def _check_format(found: Any) -> None:
        if found != FORMAT:
            raise Refused(f"Ledger: format {found!r} is unknown; this version reads format {FORMAT}.")

    def _open(self, path: str | os.PathLike[str], flags: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | flags, 0o644)
        _sync_directory(Path(path).absolute().parent)

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        data = (json.dumps(line, separators=(",", ":")) + "\n").encode()
        written = os.write(self._file, data)
        if written != len(data):
            os.ftruncate(
                self._file, os.fstat(self._file).st_size - written
            )  # no later line may join the incomplete one
            raise OSError(f"Ledger: wrote only {written} of {len(data)} bytes of a line; the disk may be full.")
        if time.monotonic() - self._last_sync > SECONDS_BETWEEN_SYNCS:
            self.sync()


def _sync_directory(directory: Path) -> None:
    """Returns when the names of the files in a directory are on the disk."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows cannot
        return
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
