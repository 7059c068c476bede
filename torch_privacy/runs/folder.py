# SPDX-License-Identifier: Apache-2.0
"""Provides the run folder: the files of a training run, and the secret checkpoint for resuming it."""

import csv
import errno
import fcntl
import io
import json
import os
import pickle
import weakref
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, BinaryIO

from torch_privacy.runs.metrics import Metrics

PARTIAL = ".partial"
_LOCKED: "weakref.WeakSet[RunFolder]" = weakref.WeakSet()  # by this process


class RunFolder:
    """The files of one run; every file is written completely or not at all."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self.settings = self.path / "settings.json"
        self.ledger = self.path / "ledger.jsonl"
        self.metrics = self.path / "metrics.csv"
        self.model = self.path / "model.safetensors"
        self.privacy = self.path / "privacy.json"
        self.results = self.path / "results.json"
        self.report = self.path / "report.html"
        self.checkpoint = self.path / "checkpoint.pt"  # SECRET: determines all noise, past and future
        self._lock_file = self.path / "lock"  # held by the process that trains here
        self._unlock: Callable[[], object] | None = None

    @property
    def is_complete(self) -> bool:
        """True if training has ended and every result has been written."""
        return self.results.exists() and not self.checkpoint.exists()

    def check_new(self) -> None:
        """Raises a ``ValueError`` if the folder is not empty."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path}: is not a folder. Name a new folder for this run.")
        if self.path.exists() and any(path != self._lock_file for path in self.path.iterdir()):
            raise ValueError(
                f"{self.path}: is not empty. Name a new folder, or continue an unfinished run with --resume."
            )

    def create(self) -> None:
        """Creates the folder and locks it."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock()
        self.check_new()  # again: another process may have been faster

    def lock(self) -> None:
        """Locks the folder against other runs until ``unlock`` or the end of this process, even by ``kill -9``.

        Raises:
            ValueError: If another run, in this process or another, has the folder.
        """
        descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise OSError(error.errno, error.strerror, str(self._lock_file)) from None
            raise ValueError(f"{self.path}: another process is training in this folder. Wait until it ends.") from None
        self._unlock = weakref.finalize(self, os.close, descriptor)
        _LOCKED.add(self)
        for left in self.path.glob(f"*{PARTIAL}"):  # by a process that was killed; that of a checkpoint holds its keys
            left.unlink()

    def unlock(self) -> None:
        """Unlocks the folder, and deletes the lock file of a complete run."""
        if self._unlock is None:
            return
        if self.is_complete:
            self._lock_file.unlink(missing_ok=True)
        self._unlock()
        self._unlock = None
        _LOCKED.discard(self)

    def check_resumable(self) -> None:
        """Raises a ``ValueError`` unless the folder holds an unfinished run that can be resumed."""
        if not self.settings.is_file():
            raise ValueError(
                f"{self.path}: is not a run folder (it has no settings.json). Name one that train has made."
            )
        if self.is_complete:
            raise ValueError(
                f"{self.path}: this run is complete, nothing is left to resume. Its report is {self.report}."
            )
        if not self.checkpoint.is_file():
            raise ValueError(f"{self.path}: has no checkpoint.pt, so it cannot be resumed. Start a new run.")

    def write_json(self, path: Path, content: dict[str, Any]) -> None:
        """Writes one of the folder's JSON files."""
        self._write(path, lambda file: file.write((json.dumps(content, indent=2, allow_nan=False) + "\n").encode()))

    def read_json(self, path: Path) -> dict[str, Any]:
        """Reads one of the folder's JSON files; raises a ``ValueError`` if it is damaged."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: cannot be read ({error}). Name a folder that train has made.") from None
        if not isinstance(content, dict):
            raise ValueError(f"{path}: cannot be read (not a JSON object). Name a folder that train has made.")
        return content

    def write_metrics(self, rows: list[Metrics]) -> None:
        """Writes ``metrics.csv`` with all rows so far."""
        text = io.StringIO()
        writer = csv.DictWriter(text, [field.name for field in fields(Metrics)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
        self._write(self.metrics, lambda file: file.write(text.getvalue().encode()))

    def read_metrics(self) -> list[Metrics]:
        """Returns the rows of ``metrics.csv``."""
        with self.metrics.open(newline="", encoding="utf-8") as file:
            return [_metrics_from_text(row) for row in csv.DictReader(file)]

    def write_checkpoint(self, save: Callable[[BinaryIO], object]) -> None:
        """Writes the checkpoint with ``save``, readable by its owner only."""
        self._write(self.checkpoint, save, mode=0o600)

    def delete_checkpoint(self) -> None:
        """Deletes the checkpoint of a complete run, with anything of it that a crash left behind."""
        self.checkpoint.unlink()
        _partial(self.checkpoint).unlink(missing_ok=True)

    def read_checkpoint(self, load: Callable[[BinaryIO], dict[str, Any]], keys: set[str]) -> dict[str, Any]:
        """Reads the checkpoint with ``load``; raises a ``ValueError`` if it is damaged or its keys are not ``keys``."""
        damaged = ValueError(
            f"{self.checkpoint}: cannot be read (damaged, or of another version?). Start a new run in a new folder."
        )
        try:
            with self.checkpoint.open("rb") as file:
                state = load(file)
        except (
            OSError,
            EOFError,
            pickle.UnpicklingError,
            ValueError,
            RuntimeError,
            LookupError,
            TypeError,
            AttributeError,
        ):
            raise damaged from None
        if not isinstance(state, dict) or state.keys() != keys:
            raise damaged
        return state

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Raises a ``ValueError`` if ``settings.json`` was changed since the run was started."""
        written = self.read_json(self.settings)
        changed = [key for key in {**settings, **written} if written.get(key, ...) != settings.get(key, ...)]
        if changed:
            raise ValueError(
                f"{self.settings}: differs from the settings that the run was started with in {', '.join(changed)}. "
                "Restore the file; other settings need a new run."
            )

    def write_model(self, content: bytes) -> None:
        """Writes the model in the safetensors format."""
        self._write(self.model, lambda file: file.write(content))

    def write_report(self, page: str) -> None:
        """Writes the report, one self-contained page."""
        self._write(self.report, lambda file: file.write(page.encode()))

    def _write(self, path: Path, save: Callable[[BinaryIO], object], mode: int = 0o644) -> None:
        """Writes a temporary file, flushes it to disk and renames it: a crash leaves the old file or the new one."""
        partial = _partial(path)
        try:
            partial.unlink(missing_ok=True)
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                save(file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error


def _leave_to_parent() -> None:
    """Closes the lock files in a forked process: their locks shall end with the parent."""
    for folder in list(_LOCKED):
        if folder._unlock is not None:
            folder._unlock()
            folder._unlock = None
    _LOCKED.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _partial(path: Path) -> Path:
    """Returns the name under which a file is written before it is complete."""
    return path.with_name(path.name + PARTIAL)


def _metrics_from_text(row: dict[str, str]) -> Metrics:
    """Converts a row of strings to metrics; an empty cell becomes None."""
    numbers: dict[str, Any] = {name: float(text) if text else None for name, text in row.items() if name != "training"}
    return Metrics(**(numbers | {"training": row["training"], "step": int(row["step"])}))
