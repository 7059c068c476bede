# SPDX-License-Identifier: Apache-2.0
"""Provides the ledger: an append-only list of releases, on disk before any release is used."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..support.read_file import shown
from ..support.schema import violation
from ..support.validate import Refused, plain_number, whole
from .compose import Profile, compose
from .events.banded import of_own_run
from .events.base import Event, check_event, event_from_dict, event_to_dict
from .ledger_file import CHOOSE, FORMAT, KNOWN_FORMATS, LedgerFile, Line
from .release import PendingRelease, Reason, Release, is_same_sum

STATE = {  # of a ledger, in a checkpoint
    "type": "object",
    "required": ["ledger", "events", "releases"],
    "properties": {
        "warning": {"type": "string"},
        "events": {"type": "array", "items": {"type": "object", "required": ["type"]}},
        "releases": {
            "type": "array",
            "maxItems": 10**9,
            "items": {"type": "array", "minItems": 2, "maxItems": 2, "items": {"type": ["integer", "string"]}},
        },
    },
}


class Ledger:
    """An append-only list of releases, one per step.

    With a path, each release is a line of JSON in a file. These releases survive a crash:

    - if the process is killed: every release for which `record` has returned, as the operating system has its line;
    - if the power fails: every release recorded before the last `sync` returned. `record` syncs when more than a
      second has passed since the last sync, `close` always does, and a checkpoint should come after a `sync`. Later
      releases may be lost until the next `record` or `sync`: no timer runs in the background;
    - if the power fails early: the file and its header exist once ``Ledger(path)`` has returned, because the directory
      is flushed, too (not on systems that cannot open a directory, such as Windows).

    ``{"ledger": 2}`` is the first line, ``{"define": 0, "event": {...}}`` introduces an event, and
    ``{"step": 17, "event": 0, "fingerprint": "9f..."}`` is a release. ``{"warning": "NOT PRIVATE ..."}`` is the reason
    why the releases before it are not private. Each line also has ``"check"``, a digest of itself and of the line
    before it. Files of format 1, without digests, can be read and continued.

    Args:
        path: a file that does not exist yet; None keeps the ledger in memory.
        purpose: a word on what the releases are for, such as "audit"; part of the first line.
        run: under which name the releases are drawn from a `DataBudget`; part of the first line.

    Guarantees:
        - steps are 0, 1, 2, ... without gaps, and no step is ever recorded with two different releases;
        - `record` of a release that is there already (a replay after a crash) changes nothing and costs nothing;
        - a line torn by a crash is dropped by `load`: `record` had not returned, so that release was not used;
        - when `record` returns, the release is in memory and in the file; when it raises, in both or in neither. If
          that cannot be kept, the ledger takes no further release and says why;
        - one writer at a time: another process is refused, even a forked one, and so is an older ledger of this process
          on the same file;
        - `load` refuses a file of which a bit was changed, or a line in the middle is missing.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, purpose: str = "", run: str = ""):
        self.purpose, self.run = purpose, run
        self.reason = Reason()  # why the releases are not private
        self._events: list[Event] = []  # each distinct event once
        self._indices: dict[Event, int] = {}  # of the events
        self._releases: list[tuple[int, str]] = []  # index into events, fingerprint
        self._merged: tuple[list[tuple[Event, int]], int] = [], 0  # equal neighbors merged, and the number of releases
        self._pending: PendingRelease | None = None  # what is being recorded
        self._file: LedgerFile | None = None
        if path is not None:
            if os.path.lexists(path):
                raise Refused(f"Ledger: {str(path)!r} exists. {CHOOSE}")
            self._file = LedgerFile(path, create=True)
            self._write_header()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Ledger":
        """Returns the ledger in a file, ready to record more. An incomplete last line of a ledger is removed.

        Raises:
            Refused: if another line cannot be read, or steps are not 0, 1, 2, ...; the file is unchanged. So is one
                without a first line of a ledger, and a symbolic link.
            FileNotFoundError: if there is no such file.
        """
        ledger = cls()
        ledger._file = LedgerFile(path)
        try:
            ledger._take(ledger._file)
            ledger._file.mend()
        except BaseException:
            ledger._file.close()
            raise
        return ledger

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Ledger":
        """Returns the releases in a ledger's file, to look at them: the file is neither locked nor changed.

        Raises:
            Refused: as `load`.
            FileNotFoundError: if there is no such file.
        """
        ledger, file = cls(), LedgerFile(path, read_only=True)
        try:
            ledger._take(file)
        finally:
            file.release()
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
        step = plain_number(step)
        whole("Ledger.record", step=step)
        if not isinstance(fingerprint, str):
            raise ValueError(f"Ledger.record: fingerprint={fingerprint!r} must be a string.")
        self._settle()
        if self._file is not None:
            self._file.check_open()
        if step < len(self._releases):
            self._check_replay(event, step, fingerprint)
            return
        if step > len(self._releases):
            raise Refused(f"Ledger.record: step={step} comes after step {len(self) - 1}; steps must not leave gaps.")
        if not self._releases or event is not self._events[self._releases[-1][0]]:  # else checked a step ago
            check_event("Ledger.record", event)
        index, lines = self._indices.get(event, len(self._events)), list[Line]()
        if index == len(self._events):
            lines.append({"define": index, "event": event_to_dict(event)})
        lines.append({"step": step, "event": index, "fingerprint": fingerprint})
        if self._file is None:
            self._pending = PendingRelease(0, event, index, step, fingerprint)
        else:
            data, end = self._file.encode(lines)
            self._pending = PendingRelease(end[0], event, index, step, fingerprint)
            self._file.append(data, end)
        self._settle()
        if self._file is not None and self._file.is_sync_due:
            self.sync()

    def differs(self, event: Event, step: int, fingerprint: str) -> bool:
        """True if this step was recorded with another release, so that `record` would refuse this one."""
        self._settle()
        if step >= len(self._releases):
            return False
        index, known = self._releases[step]
        return known != fingerprint or not is_same_sum(self._events[index], event)

    def _settle(self) -> None:
        """Takes the pending release into memory if its lines are in the file; else forgets it.

        An interrupt may come at any place of `record`. Here everything can be done twice.
        """
        pending = self._pending
        if pending is None:
            return
        if self._file is None or self._file.size == pending.size:
            if len(self._events) == pending.index:
                self._events.append(pending.event)
            self._indices.setdefault(pending.event, pending.index)
            if len(self._releases) == pending.step:
                self._releases.append((pending.index, pending.fingerprint))
        self._pending = None

    def __len__(self) -> int:
        self._settle()
        return len(self._releases)

    def __iter__(self) -> Iterator[Release]:
        """Goes through `releases`, so that a ledger may be ``prior_releases`` itself."""
        return iter(self.releases)

    @property
    def path(self) -> Path | None:
        """Returns the path of the file, if there is one."""
        return None if self._file is None else self._file.path

    @property
    def events(self) -> list[tuple[Event, int]]:
        """All releases in order, as pairs (event, how many in a row)."""
        self._settle()
        if self._merged[1] < len(self._releases):
            self._merged = self._merged_until(len(self._releases))
        return list(self._merged[0])

    @property
    def releases(self) -> list[Release]:
        """All releases in order, as ``prior_releases`` of another training on the same data.

        Runs with banded noise are numbered by their first release, as runs of several ledgers may have one number.
        """
        made, runs = self.made, dict[Event, Event]()
        for release in made:
            runs.setdefault(release.event, of_own_run(release.event, release.fingerprint))
        return [replace(release, event=runs[release.event]) for release in made]

    @property
    def made(self) -> list[Release]:
        """All releases in order, as they were recorded."""
        self._settle()
        warning = self.warning
        return [Release(self._events[index], fingerprint, warning) for index, fingerprint in self._releases]

    @property
    def warning(self) -> str:
        """Returns the reason why the releases are not private; "" if they are."""
        return self.reason.now()

    def note_warning(self) -> None:
        """Writes the reason why the releases are not private into the file, if there is one that it has not."""
        self.reason.note(len(self), self._file)

    def _merged_until(self, number: int) -> tuple[list[tuple[Event, int]], int]:
        """Returns the first releases with equal neighbors merged, and their number."""
        merged, count = (list(self._merged[0]), self._merged[1]) if self._merged[1] <= number else ([], 0)
        for index, _ in self._releases[count:number]:
            event = self._events[index]
            if merged and merged[-1][0] == event:
                merged[-1] = event, merged[-1][1] + 1
            else:
                merged.append((event, 1))
        return merged, number

    def profile(self, *, first: int | None = None) -> Profile:
        """Returns the privacy profile of all releases so far, or of the first ones."""
        return compose(self.events if first is None or first >= len(self) else self._merged_until(first)[0])

    def state_dict(self) -> dict[str, Any]:
        """Returns the ledger as plain JSON, for a checkpoint. Call `sync` first if there is a file."""
        self._settle()
        return {
            "ledger": FORMAT,
            **({"warning": self.warning} if self.warning else {}),
            "events": [event_to_dict(event) for event in self._events],
            "releases": [list(release) for release in self._releases],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Adds the checkpoint's releases to those that are here already.

        Releases beyond the checkpoint stay: they happened, and replaying them must give the same ones.

        Raises:
            Refused: if the checkpoint and this ledger differ at a step, or the format is unknown.
        """
        if not isinstance(state, dict):
            raise Refused(f"Ledger.load_state_dict: the state is {shown(state)}: must be that of a ledger.")
        self._check_format(state.get("ledger"))
        if wrong := violation(STATE, state):
            raise Refused(f"Ledger.load_state_dict: {wrong}. Load what state_dict returned.")
        try:
            events = [event_from_dict(description) for description in state["events"]]
        except (ValueError, RecursionError) as error:
            raise Refused(f"Ledger.load_state_dict: an event is not valid: {error}") from error
        releases = [(index, fingerprint) for index, fingerprint in state["releases"]]
        for index, fingerprint in releases:
            if type(index) is not int or not 0 <= index < len(events) or not isinstance(fingerprint, str):
                raise Refused(
                    f"Ledger.load_state_dict: a release is of event {shown(index)}, which is not in the state."
                )
        for step, (index, fingerprint) in enumerate(releases[: len(self)]):
            self._check_replay(events[index], step, fingerprint)  # all of them, before any release is added
        for step in range(len(self), len(releases)):
            index, fingerprint = releases[step]
            self.record(events[index], step, fingerprint)
        self.reason.known = state.get("warning", "") or self.reason.known
        # without asking: weights that are loaded first are not those of these releases
        self.reason.write(self._file)

    def sync(self) -> None:
        """Returns when all releases are on the disk itself, safe from power failure.

        Raises:
            Refused: if the disk reports an error; the ledger then takes no further release.
        """
        if self._file is not None:
            self.reason.note_if_new(len(self), self._file)
            self._file.sync()

    def close(self) -> None:
        """Syncs and closes the file; the ledger can still be read."""
        if self._file is not None:
            try:
                self.reason.note_if_new(len(self), self._file)
            finally:
                self._file.close()

    def _check_replay(self, event: Event, step: int, fingerprint: str) -> None:
        if self.differs(event, step, fingerprint):
            index, known = self._releases[step]
            raise Refused(
                f"Ledger.record: step {step} was {self._events[index]!r} with fingerprint {known!r}, and now is "
                f"{event!r} with {fingerprint!r}. Two different releases would share one step's noise. Load the run's "
                "saved state before the loop, as tp.load_secret does, or take a new ledger, in another run_folder; "
                "epsilon is then the sum of both."
            )

    def _write_header(self) -> None:
        assert self._file is not None
        words = {"purpose": self.purpose, "run": self.run}
        header: Line = {"ledger": FORMAT, **{name: word for name, word in words.items() if word}}
        with self._file.published():
            self._file.append(*self._file.encode([header]))

    def _take(self, file: LedgerFile) -> None:
        """Takes in all lines of a file, which must be those of a ledger."""
        lines = file.read()
        for number, line in enumerate(lines, start=1):
            try:
                self._read(number, line)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                if isinstance(error, Refused):
                    raise
                raise Refused(f"Ledger.load: line {number} of {str(file.path)!r} cannot be read: {error}.") from error
        if not lines:
            raise Refused(
                f"Ledger.load: {str(file.path)!r} holds no whole line, so it is no ledger, or damaged; it was not "
                "changed. Name the ledger, or restore it from a copy: without it, the releases made are not priced."
            )

    def _read(self, number: int, line: Line) -> None:
        """Takes in a line of the file; all of its values must have the right type."""
        if number == 1:
            self._check_format(line["ledger"])
            self.purpose, self.run = line.get("purpose", ""), line.get("run", "")
            if not isinstance(self.purpose, str) or not isinstance(self.run, str):
                raise ValueError(f"purpose {self.purpose!r} or run {self.run!r} is not a string")
        elif "define" in line:
            _check_whole(line["define"], len(self._events), "events are defined in order")
            event = event_from_dict(line["event"])
            self._indices.setdefault(event, len(self._events))
            self._events.append(event)
        elif "warning" in line:
            self.reason.take(line["warning"])
        else:
            index, fingerprint = line["event"], line["fingerprint"]
            _check_whole(index, None, "an event is named by its number")
            if not 0 <= index < len(self._events):
                raise ValueError(f"event {index} is not defined")
            if not isinstance(fingerprint, str):
                raise ValueError(f"fingerprint {fingerprint!r} is not a string")
            if (
                self._releases
                and line["step"] == len(self._releases) - 1
                and self._releases[-1] == (index, fingerprint)
            ):
                return  # a line that was written twice
            _check_whole(line["step"], len(self._releases), "steps leave no gaps")
            self._releases.append((index, fingerprint))

    @staticmethod
    def _check_format(found: Any) -> None:
        if found not in KNOWN_FORMATS or isinstance(found, bool):
            raise Refused(f"Ledger: format {found!r} is unknown; this version reads formats 1 and {FORMAT}.")


def _check_whole(value: Any, expected: int | None, why: str) -> None:
    if type(value) is not int or (expected is not None and value != expected):
        raise ValueError(f"{value!r} is no valid number here: {why}")
