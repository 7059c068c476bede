# SPDX-License-Identifier: Apache-2.0
"""Provides the run folder: the files of a training run, and the secret checkpoint for resuming it."""

import csv
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from torch_privacy.privacy.interop import statement_schema
from torch_privacy.privacy.summary import releases_from_json
from torch_privacy.runs import checkpoint, schemas
from torch_privacy.runs.metrics import Metrics
from torch_privacy.support.read_file import LARGEST_JSON, parse_json, read_bytes
from torch_privacy.support.schema import Schema, violation
from torch_privacy.support.write_file import OWN, PARTIAL, PUBLIC, UNFOLLOWED, partial_of, write_whole

LARGEST_METRICS = 2**25  # bytes
LARGEST_MODEL = 2**33
DAMAGED = "the file is damaged. Restore it from a copy, or name another folder."
NO_TRAINING = "it is no finished training, nor an experiment of reproduce, or it is damaged."
RUN_WANTED = "Name the folder of a finished training or experiment."
Digests = Mapping[str, str]  # file name -> SHA-256 of the content, in hexadecimal
NO_DIGESTS: Digests = {}
PATHS = tuple(schemas.PATHS["properties"])
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
        self.coupled = self.path / "coupled.json"  # which releases may leak, if a rehearsal found that examples depend
        self.schema = self.path / "schema.toml"  # of a training on the user's own table
        self.audit = self.path / "audit" / "audit.json"
        self.card = self.path / "README.md"
        self.paths = self.path / "paths.json"  # PRIVATE: where the user's files are, of which settings have the names
        self.fingerprint_key = self.path / "fingerprint.key"  # SECRET: with it guesses of the data can be tested
        self.checkpoint = self.path / "checkpoint.safetensors"  # SECRET: determines all noise, past and future
        self.former_checkpoint = self.path / "checkpoint.pt"  # of earlier versions, a pickle
        self._lock_file = self.path / "lock"  # held by the process that trains here
        self._unlock: Callable[[], object] | None = None

    @property
    def is_complete(self) -> bool:
        """True if training has ended and every result has been written."""
        return self.results.exists() and not self.checkpoint.exists() and not self.former_checkpoint.exists()

    def check_new(self) -> None:
        """Raises a ``ValueError`` if the folder is not empty."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path}: is not a folder. Name a new folder for this run.")
        if self.path.exists() and any(path != self._lock_file for path in self.path.iterdir()):
            self._check_begun()
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
        descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | UNFOLLOWED, 0o644)
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

    @property
    def is_locked(self) -> bool:
        """True if this object holds the lock."""
        return self._unlock is not None

    def abandon(self) -> None:
        """Unlocks the folder of a run that could not begin; removes it if nothing is in it."""
        self.unlock()
        self._lock_file.unlink(missing_ok=True)
        with suppress(OSError):
            self.path.rmdir()

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
            self._check_begun()
            raise ValueError(
                f"{self.path}: is not a run folder (it has no settings.json). Name one that train has made."
            )
        if self.is_complete:
            raise ValueError(
                f"{self.path}: this run is complete, nothing is left to resume. Its report is {self.report}."
            )
        if not self.checkpoint.exists() and self.former_checkpoint.exists():
            raise ValueError(f"{self.former_checkpoint}: {checkpoint.EARLIER}")
        if not self.checkpoint.is_file():
            raise ValueError(f"{self.path}: has no {self.checkpoint.name}, so it cannot be resumed. Start a new run.")

    def _check_begun(self) -> None:
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

    def with_paths(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Returns settings that were read with the paths of the user's files, where they are known here."""
        if not self.paths.exists():
            return settings
        found = self._read_json(self.paths, schemas.PATHS, NO_DIGESTS)
        return {**settings, **{name: path for name, path in found.items() if name in settings}}

    def write_checked(self, path: Path, content: dict[str, Any], *files: Path) -> None:
        """Writes one of the folder's JSON files with a digest of itself and of these other files, all closed."""
        digests = {file.name: _sha256(file) for file in files}
        whole = {"format": schemas.RESULTS_FORMAT, **content, **({"files": digests} if files else {})}
        self.write_json(path, {**whole, "check": _digest(whole)}, OWN)

    def read_settings(self, digests: Digests = NO_DIGESTS) -> dict[str, Any]:
        """Reads the settings of a training; raises a ``ValueError`` if the file is damaged.

        Those of an experiment have the key ``experiment``, those of a loop of one's own ``fixed``.
        """
        found = self._read_json(self.settings, schemas.SETTINGS, digests)
        if "experiment" not in found and "fixed" not in found:
            raise ValueError(f"{self.settings}: has no 'experiment'; {DAMAGED}")
        return found

    def read_coupled(self) -> dict[str, Any] | None:
        """Reads which releases may leak; None if no rehearsal found a dependence."""
        return self._read_json(self.coupled, schemas.COUPLED, NO_DIGESTS) if self.coupled.exists() else None

    def read_request(self) -> dict[str, Any] | None:
        """Reads the settings of an experiment, or returns None if the folder is that of a training."""
        content = self._self_checked(self.settings)
        if isinstance(content, dict) and ("experiment" in content or "fixed" in content):
            return None
        return self.with_paths(self._valid(self.settings, schemas.REQUEST, content))

    def read_statement(self, digests: Digests = NO_DIGESTS) -> dict[str, Any]:
        """Reads the privacy statement; raises a ``ValueError`` if the file is damaged or a release has no price."""
        statement = self._read_json(self.privacy, statement_schema(), digests)
        try:
            releases_from_json(statement)
        except ValueError as error:
            reason = str(error).rstrip(".")
            raise ValueError(f"{self.privacy}: states releases that cannot be priced ({reason}).") from None
        return statement

    def read_results(self) -> dict[str, Any]:
        """Reads the results of a training, an experiment (``reproduce`` is one of the keys) or a row (``numbers`` is).

        Those of a training in a loop of one's own have the key ``scores``.

        Raises:
            ValueError: If the file is damaged, or of none of these.
        """
        if not self.results.exists() and self.ledger.is_file():
            raise ValueError(
                f"{self.path}: this training is unfinished (it has no results.json). Resume it. One in a loop of "
                "your own writes what there is by training.write_run(), at any time."
            )
        content = self._self_checked(self.results)
        for mark, schema in schemas.RESULTS.items():
            if isinstance(content, dict) and mark in content:
                return self._valid(self.results, schema, content)
        return self._valid(self.results, schemas.OF_EXPERIMENT, content, NO_TRAINING)

    def read_audit(self) -> dict[str, Any] | None:
        """Reads the audit of the run, or returns None if there is none; raises a ``ValueError`` if it is damaged."""
        if not self.audit.exists():
            return None
        return self._valid(self.audit, schemas.AUDIT, self._self_checked(self.audit))

    def _read_json(self, path: Path, schema: Schema, digests: Digests) -> dict[str, Any]:
        return self._valid(path, schema, self._parsed(path, digests))

    def _parsed(self, path: Path, digests: Digests) -> Any:
        try:
            return parse_json(_read(path, LARGEST_JSON, digests))
        except ValueError as error:
            raise ValueError(f"{path}: cannot be read ({error}). {RUN_WANTED}") from None

    def _self_checked(self, path: Path) -> Any:
        """Returns the content of a file that `write_checked` wrote, without its own digest, which must be right."""
        content = self._parsed(path, NO_DIGESTS)
        if isinstance(content, dict) and ("check" in content or content.get("format") == schemas.RESULTS_FORMAT):
            if content.pop("check", None) != _digest(content):
                raise ValueError(f"{path}: its digest does not fit, so that something in it was changed; {DAMAGED}")
        return content

    def _valid(self, path: Path, schema: Schema, content: Any, otherwise: str = DAMAGED) -> dict[str, Any]:
        if not isinstance(content, dict):
            raise ValueError(f"{path}: cannot be read (not a JSON object). {RUN_WANTED}")
        if wrong := violation(schema, content):
            raise ValueError(f"{path}: {wrong}; {otherwise}")
        return content

    def write_metrics(self, rows: list[Metrics]) -> None:
        """Writes ``metrics.csv`` with all rows so far: exact losses, readable by their owner only."""
        text = io.StringIO()
        writer = csv.DictWriter(text, [field.name for field in fields(Metrics)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
        write_whole(self.metrics, lambda file: file.write(text.getvalue().encode()))

    def read_metrics(self, digests: Digests = NO_DIGESTS) -> list[Metrics]:
        """Returns the rows of ``metrics.csv``, at least one; raises a ``ValueError`` if the file is damaged.

        Cells of a loss or score may be empty.
        """
        names = list(schemas.METRICS)
        try:
            text = io.StringIO(_read(self.metrics, LARGEST_METRICS, digests).decode("utf-8"), newline="")
            lines = csv.reader(text, strict=True)
            if next(lines, None) != names:
                raise ValueError(f"its columns are not {', '.join(names)}")
            rows = [_metrics_from_cells(number, cells) for number, cells in enumerate(lines, 2)]
            if not rows or rows[0].training != "private":
                raise ValueError("it has no epoch of private training")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.metrics}: it is not UTF-8 from byte {error.start} on; {DAMAGED}") from None
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{self.metrics}: {error}; {DAMAGED}") from None
        return rows

    def write_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Writes the checkpoint, readable by its owner only."""
        checkpoint.save(self.checkpoint, state)

    def read_checkpoint(self) -> dict[str, Any]:
        """Returns the state in the checkpoint; raises a ``ValueError`` if it is damaged."""
        return checkpoint.load(self.checkpoint)

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

    def read_model(self, digests: Digests = NO_DIGESTS) -> bytes:
        """Returns the content of the model's file; raises a ``ValueError`` if it is damaged."""
        return self._read_own(self.model, LARGEST_MODEL, digests)

    def write_schema(self, text: str) -> None:
        """Writes the schema of the table that is trained on."""
        write_whole(self.schema, lambda file: file.write(text.encode()), PUBLIC)

    def read_schema(self, digests: Digests = NO_DIGESTS) -> str:
        """Returns the schema of the table that was trained on; raises a ``ValueError`` if the file is damaged."""
        return self._read_own(self.schema, LARGEST_JSON, digests).decode("utf-8", "replace")

    def _read_own(self, path: Path, at_most: int, digests: Digests) -> bytes:
        try:
            return _read(path, at_most, digests)
        except ValueError as error:
            raise ValueError(f"{path}: cannot be read ({error}). {RUN_WANTED}") from None

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


def _leave_to_parent() -> None:
    """Closes the lock files in a forked process: their locks shall end with the parent."""
    for folder in list(_LOCKED):
        if folder._unlock is not None:
            folder._unlock()
            folder._unlock = None
    _LOCKED.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _read(path: Path, at_most: int, digests: Digests) -> bytes:
    """Returns the content of a file, which must have its digest if there is one."""
    content = read_bytes(path, at_most)
    if digests.get(path.name, found := hashlib.sha256(content).hexdigest()) != found:
        raise ValueError("it was changed after the run: its digest is not that in results.json")
    return content


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(content: dict[str, Any]) -> str:
    """Returns the SHA-256 of JSON values, whatever their layout in a file."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _metrics_from_cells(number: int, cells: list[str]) -> Metrics:
    """Converts a line of texts to metrics; an empty cell becomes None."""
    if len(cells) != len(schemas.METRICS):
        raise ValueError(f"line {number} has {len(cells)} cells")
    row = {name: _value(name, text) for name, text in zip(schemas.METRICS, cells, strict=True)}
    if wrong := violation({"properties": schemas.METRICS}, row, f"line {number}"):
        raise ValueError(wrong)
    return Metrics(**row)


def _value(column: str, text: str) -> Any:
    if column == "training":
        return text
    if column == "step":
        return int(text) if re.fullmatch("[0-9]{1,15}", text) else text
    is_number = re.fullmatch(r"-?([0-9]{1,400}(\.[0-9]{0,400})?(e[-+]?[0-9]{1,4})?|inf)|nan", text)
    return None if not text else float(text) if is_number else text
