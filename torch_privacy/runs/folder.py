# SPDX-License-Identifier: Apache-2.0
"""Provides the run folder: the files of a training run, the secret checkpoint for resuming it, and a lock."""

import csv
import errno
import io
import json
import os
import secrets
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch_privacy.runs import checkpoint, schemas
from torch_privacy.runs.metrics import Metrics
from torch_privacy.runs.reading import NO_DIGESTS as NO_DIGESTS
from torch_privacy.runs.reading import Digests as Digests
from torch_privacy.runs.reading import FolderReader, digest_of, sha256
from torch_privacy.support.file_lock import lock, note_holder
from torch_privacy.support.write_file import OWN, PARTIAL, PUBLIC, UNFOLLOWED, partial_of, write_whole


class FolderLock:
    """The lock of a folder, a file in it; it ends with the process, even by ``kill -9``."""

    def __init__(self, folder: Path):
        self.file = folder / "lock"
        self._close: Callable[[], object] | None = None

    @property
    def is_held(self) -> bool:
        """True if this object holds the lock."""
        return self._close is not None

    def take(self) -> None:
        """Takes the lock; raises a ``ValueError`` if another run, in this process or another, has it."""
        descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | UNFOLLOWED, 0o644)
        try:
            lock(descriptor)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise OSError(error.errno, error.strerror, str(self.file)) from None
            raise ValueError(
                f"{self.file.parent}: another process is training in this folder. Wait until it ends."
            ) from None
        self._close = weakref.finalize(self, os.close, descriptor)
        note_holder(descriptor, self)

    def release(self) -> None:
        """Gives the lock back, if it is held."""
        if self._close is not None:
            self._close()
        self._close = None

    def lose(self, reason: str) -> None:
        """Gives the lock up in a forked process, which does not have it."""
        self.release()


PATHS = tuple(schemas.PATHS["properties"])


class RunFolder(FolderReader):
    """The files of one run; every file is written completely or not at all."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._lock = FolderLock(self.path)

    def check_new(self) -> None:
        """Raises a ``ValueError`` if the folder is not empty."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path}: is not a folder. Name a new folder for this run.")
        if self.path.exists() and any(path != self._lock.file for path in self.path.iterdir()):
            self.check_begun()
            raise ValueError(
                f"{self.path}: is not empty. Name a new folder, or continue an unfinished run with --resume."
            )

    def create(self) -> None:
        """Creates the folder and locks it."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock()
        self.check_new()  # again: another process may have been faster

    @property
    def is_locked(self) -> bool:
        """True if this object holds the lock."""
        return self._lock.is_held

    def lock(self) -> None:
        """Locks the folder against other runs until ``unlock`` or the end of this process, even by ``kill -9``.

        Raises:
            ValueError: If another run, in this process or another, has the folder.
        """
        self._lock.take()
        for left in self.path.glob(f"*{PARTIAL}"):  # by a process that was killed; that of a checkpoint holds its keys
            left.unlink()

    def unlock(self) -> None:
        """Unlocks the folder, and deletes the lock file of a complete run."""
        if self.is_locked and self.is_complete:
            self._lock.file.unlink(missing_ok=True)
        self._lock.release()

    def abandon(self) -> None:
        """Unlocks the folder of a run that could not begin; removes it if nothing is in it."""
        self.unlock()
        self._lock.file.unlink(missing_ok=True)
        with suppress(OSError):
            self.path.rmdir()

    def check_resumable(self) -> None:
        """Raises a ``ValueError`` unless the folder holds an unfinished run that can be resumed."""
        if not self.settings.is_file():
            self.check_begun()
            raise ValueError(
                f"{self.path}: is not a run folder (it has no settings.json). Name one that train has made."
            )
        if self.is_complete:
            page = f" Its report is {self.report}." if self.report.exists() else ""
            raise ValueError(f"{self.path}: this run is complete, nothing is left to resume.{page}")
        if not self.checkpoint.exists() and self.former_checkpoint.exists():
            raise ValueError(f"{self.former_checkpoint}: {checkpoint.EARLIER}")
        if not self.checkpoint.is_file():
            raise ValueError(f"{self.path}: has no {self.checkpoint.name}, so it cannot be resumed. Start a new run.")

    def check_begun(self) -> None:
        """Refuses a folder with the ledger of a run that ended, or still is, before its first step."""
        if self.ledger.is_file() and not self.settings.exists():
            raise ValueError(
                f"{self.path}: is not empty, and cannot be resumed: a run ended here before its first step, or another "
                f"process still prepares it. {self.ledger} has what was released. Keep it and name a new folder; "
                "another try costs as much again, and the epsilons add up."
            )

    def write_json(self, path: Path, content: dict[str, Any], mode: int = PUBLIC) -> None:
        """Writes one of the folder's JSON files."""
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
        write_whole(path, lambda file: file.write(text.encode()), mode)

    def write_settings(self, settings: dict[str, Any], write: Callable[[Path, dict[str, Any]], None]) -> None:
        """Writes settings by ``write``, with the names alone of files of the user; their paths are for the owner.

        ``write`` is `write_json` or `write_checked`.
        """
        found = {name: value for name, value in settings.items() if name in PATHS and value is not None}
        if found:
            self.write_json(self.paths, found, OWN)
        write(self.settings, published(settings))

    def write_checked(self, path: Path, content: dict[str, Any], *files: Path) -> None:
        """Writes one of the folder's JSON files with a digest of itself and of these other files, all closed."""
        digests = {file.name: sha256(file) for file in files}
        whole = {"format": schemas.RESULTS_FORMAT, **content, **({"files": digests} if files else {})}
        self.write_json(path, {**whole, "check": digest_of(whole)}, OWN)

    def write_metrics(self, rows: list[Metrics]) -> None:
        """Writes ``metrics.csv`` with all rows so far: exact losses, readable by their owner only.

        Its digest is in ``results.json``, which may be published: with a secret salt it confirms no guess of a loss.
        """
        text, salt = io.StringIO(), secrets.token_hex(schemas.SALT_BYTES)
        writer = csv.DictWriter(text, [*schemas.METRICS, schemas.SALT], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**asdict(row), schemas.SALT: salt} for row in rows)
        write_whole(self.metrics, lambda file: file.write(text.getvalue().encode()))

    def write_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Writes the checkpoint, readable by its owner only."""
        checkpoint.save(self.checkpoint, state)

    def delete_checkpoint(self) -> None:
        """Deletes the checkpoint of a complete run, with anything of it that a crash left behind."""
        self.checkpoint.unlink()
        partial_of(self.checkpoint).unlink(missing_ok=True)

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Raises a ``ValueError`` if ``settings.json`` was changed since the run was started."""
        written, settings = self.read_settings(), published(settings)
        changed = [key for key in {**settings, **written} if written.get(key, ...) != settings.get(key, ...)]
        if changed:
            raise ValueError(
                f"{self.settings}: differs from the settings that the run was started with in {', '.join(changed)}. "
                "Restore the file; other settings need a new run."
            )

    def write_model(self, content: bytes) -> None:
        """Writes the model, in the safetensors format."""
        write_whole(self.model, lambda file: file.write(content), PUBLIC)

    def write_schema(self, text: str) -> None:
        """Writes the schema of the table that is trained on."""
        write_whole(self.schema, lambda file: file.write(text.encode()), PUBLIC)

    def write_fingerprint_key(self, key: bytes) -> None:
        """Writes the key of the data's fingerprint, readable by its owner only."""
        write_whole(self.fingerprint_key, lambda file: file.write(key.hex().encode() + b"\n"))

    def write_report(self, page: str) -> None:
        """Writes the report, one self-contained page with exact losses, readable by its owner only."""
        write_whole(self.report, lambda file: file.write(page.encode()))


def published(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with the name alone of each file or folder of the user: its path says more of the owner."""
    return {
        name: Path(value).name if name in PATHS and value is not None else value for name, value in settings.items()
    }
