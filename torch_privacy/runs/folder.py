# SPDX-License-Identifier: Apache-2.0
"""The run folder: what a training run leaves behind, and the secret checkpoint that lets it go on."""

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


class RunFolder:
    """Paths and files of one run; every file is written whole or not at all."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self.settings = self.path / "settings.json"
        self.ledger = self.path / "ledger.jsonl"
        self.metrics = self.path / "metrics.csv"
        self.model = self.path / "model.safetensors"
        self.privacy = self.path / "privacy.json"
        self.results = self.path / "results.json"
        self.report = self.path / "report.html"
        self.checkpoint = self.path / "checkpoint.pt"  # SECRET: holds the noise's past and future
        self._lock_file = self.path / "lock"  # whoever trains here holds it
        self._unlock: Callable[[], object] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether training ended and every result is in place."""
        return self.results.exists() and not self.checkpoint.exists()

    def check_new(self) -> None:
        """Raise a ``ValueError`` if the folder already holds something."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path}: is not a folder. Name a new folder for this run.")
        if self.path.exists() and any(path != self._lock_file for path in self.path.iterdir()):
            raise ValueError(
                f"{self.path}: is not empty. Name a new folder, or continue an unfinished run with --resume."
            )

    def create(self) -> None:
        """Make the folder, locked."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock()
        self.check_new()  # once more: another process may have been faster

    def lock(self) -> None:
        """Keep other processes out until ``unlock`` or the end of this process, even by ``kill -9``.

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
            raise ValueError(f"{self.path}: another process is training in this folder. Wait for its end.") from None
        self._unlock = weakref.finalize(self, os.close, descriptor)

    def unlock(self) -> None:
        """Let others in; of a complete run the lock file goes, too."""
        if self._unlock is None:
            return
        if self.is_complete:
            self._lock_file.unlink(missing_ok=True)
        self._unlock()
        self._unlock = None

    def check_resumable(self) -> None:
        """Raise a ``ValueError`` unless an unfinished run can go on from here."""
        if not self.settings.is_file():
            raise ValueError(
                f"{self.path}: is not a run folder (it has no settings.json). Name one that train has made."
            )
        if self.is_complete:
            raise ValueError(
                f"{self.path}: this run is complete, nothing is left to resume. Its report is {self.report}."
            )
        if not self.checkpoint.is_file():
            raise ValueError(f"{self.path}: has no checkpoint.pt, so it cannot go on. Start a new run.")

    def write_json(self, path: Path, content: dict[str, Any]) -> None:
        """Write one of the folder's JSON files."""
        self._write(path, lambda file: file.write((json.dumps(content, indent=2, allow_nan=False) + "\n").encode()))

    def read_json(self, path: Path) -> dict[str, Any]:
        """Read one of the folder's JSON files; a damaged one raises a ``ValueError``."""
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: cannot be read ({error}). Name a folder that train has made.") from None
        if not isinstance(content, dict):
            raise ValueError(f"{path}: cannot be read (not a JSON object). Name a folder that train has made.")
        return content

    def write_metrics(self, rows: list[Metrics]) -> None:
        """Write ``metrics.csv`` from all rows so far."""
        text = io.StringIO()
        writer = csv.DictWriter(text, [field.name for field in fields(Metrics)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
        self._write(self.metrics, lambda file: file.write(text.getvalue().encode()))

    def read_metrics(self) -> list[Metrics]:
        """The rows of ``metrics.csv``."""
        with self.metrics.open(newline="") as file:
            return [_metrics_from_text(row) for row in csv.DictReader(file)]

    def write_checkpoint(self, save: Callable[[BinaryIO], object]) -> None:
        """Write the checkpoint through ``save``, readable by its owner only."""
        self._write(self.checkpoint, save, mode=0o600)

    def read_checkpoint(self, load: Callable[[BinaryIO], dict[str, Any]], keys: set[str]) -> dict[str, Any]:
        """The checkpoint through ``load``; a damaged one, or one of other ``keys``, raises a ``ValueError``."""
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
        """Raise a ``ValueError`` unless ``settings.json`` still says what the run began with."""
        written = self.read_json(self.settings)
        changed = [key for key in {**settings, **written} if written.get(key, ...) != settings.get(key, ...)]
        if changed:
            raise ValueError(
                f"{self.settings}: differs from the settings that the run began with in {', '.join(changed)}. "
                "Restore the file; other settings need a new run."
            )

    def write_model(self, content: bytes) -> None:
        """Write the model in the safetensors format."""
        self._write(self.model, lambda file: file.write(content))

    def write_report(self, page: str) -> None:
        """Write the report, one self-contained page."""
        self._write(self.report, lambda file: file.write(page.encode()))

    def _write(self, path: Path, save: Callable[[BinaryIO], object], mode: int = 0o644) -> None:
        """Write beside ``path``, flush to disk, then rename: a crash leaves the old file or the new one."""
        partial = path.with_name(path.name + ".partial")
        try:
            partial.unlink(missing_ok=True)
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                save(file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error


def _metrics_from_text(row: dict[str, str]) -> Metrics:
    """A row of strings with its numbers read; an empty cell is None."""
    numbers: dict[str, Any] = {name: float(text) if text else None for name, text in row.items() if name != "training"}
    return Metrics(**(numbers | {"training": row["training"], "step": int(row["step"])}))
