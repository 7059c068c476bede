# SPDX-License-Identifier: Apache-2.0
"""Provides the names of a run folder's files, and reads them: each is checked, and damage is named."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_privacy.privacy.interop import statement_schema
from torch_privacy.privacy.summary import releases_from_json
from torch_privacy.runs import checkpoint, schemas
from torch_privacy.runs.metrics import Metrics
from torch_privacy.support.read_file import LARGEST_JSON, opened, parse_json, read_bytes
from torch_privacy.support.schema import Schema, violation

LARGEST_METRICS = 2**25  # bytes
LARGEST_MODEL = 2**33
DAMAGED = "the file is damaged. Restore it from a copy, or name another folder."
NO_TRAINING = "it is no finished training, nor an experiment of reproduce, or it is damaged."
RUN_WANTED = "Name the folder of a finished training or experiment."
Digests = Mapping[str, str]  # file name -> SHA-256 of the content, in hexadecimal
NO_DIGESTS: Digests = {}


class FileName:
    """Names a file of a run folder: ``folder.settings`` is its path."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, folder: FolderReader, owner: type | None = None) -> Path:
        return folder.path / self._name


class FolderReader:
    """Reads the files of one run; the base of `RunFolder`, which writes them."""

    settings = FileName("settings.json")
    ledger = FileName("ledger.jsonl")
    metrics = FileName("metrics.csv")
    model = FileName("model.safetensors")
    privacy = FileName("privacy.json")
    results = FileName("results.json")
    report = FileName("report.html")
    schema = FileName("schema.toml")  # of a training on the user's own table
    generator = FileName("generator.safetensors")  # of synthetic rows, with its page
    synthesis = FileName("synthesis.html")  # PRIVATE: compares synthetic rows with real ones
    audit = FileName("audit/audit.json")
    card = FileName("README.md")
    paths = FileName("paths.json")  # PRIVATE: where the user's files are, of which settings have the names
    fingerprint_key = FileName("fingerprint.key")  # SECRET: with it guesses of the data can be tested
    checkpoint = FileName("checkpoint.safetensors")  # SECRET: determines all noise, past and future
    former_checkpoint = FileName("checkpoint.pt")  # of earlier versions, a pickle

    def __init__(self, path: Path):
        self.path = Path(path)

    @property
    def is_complete(self) -> bool:
        """True if training has ended and every result has been written."""
        return self.results.exists() and not self.checkpoint.exists() and not self.former_checkpoint.exists()

    def check_not_own(self, where: str, file: Path | None) -> None:
        """Refuses to write over a file that the run consists of."""
        own = [name.__get__(self) for name in vars(FolderReader).values() if isinstance(name, FileName)]
        if file is not None and file.resolve() in [path.resolve() for path in own]:
            raise ValueError(f"{where}: {file} is a file of the run itself. Name another file.")

    def with_paths(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Returns settings that were read with the paths of the user's files, where they are known here."""
        if not self.paths.exists():
            return settings
        found = self._read_json(self.paths, schemas.PATHS, NO_DIGESTS)
        return {**settings, **{name: path for name, path in found.items() if name in settings}}

    def read_settings(self, digests: Digests = NO_DIGESTS) -> dict[str, Any]:
        """Reads the settings of a training; raises a ``ValueError`` if the file is damaged.

        Those of an experiment have the key ``experiment``, those of a loop of one's own ``fixed``.
        """
        found = self._read_json(self.settings, schemas.SETTINGS, digests)
        if "experiment" not in found and "fixed" not in found:
            raise ValueError(f"{self.settings}: has no 'experiment'; {DAMAGED}")
        return found

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

    def read_finished(self) -> dict[str, Any]:
        """Reads the results of a training by the command; the error for one that was stopped says how to go on."""
        if self.checkpoint.is_file() and not self.results.is_file():
            again = f"torch-privacy train --resume {shlex.quote(str(self.path))}"
            raise ValueError(f"{self.path}: this run is unfinished. Continue it with {again}.")
        return self.read_results()

    def read_results(self) -> dict[str, Any]:
        """Reads the results of a training, an experiment (``reproduce`` is one of the keys) or a row (``numbers`` is).

        Those of a training in a loop of one's own have the key ``scores``.

        Raises:
            ValueError: If the file is damaged, or of none of these.
        """
        if self.generator.is_file():
            raise ValueError(f"{self.path}: holds a generator of synthetic rows. Its page is {self.synthesis}.")
        if not self.results.exists() and self.ledger.is_file():
            if not self.settings.exists():
                raise ValueError(
                    f"{self.path}: has no results, as a run ended here before its first step. Leave it out."
                )
            raise ValueError(
                f"{self.path}: this training is unfinished (it has no results.json). Resume it. One in a loop of "
                "your own writes what there is by training.write_run(), at any time."
            )
        content = self._self_checked(self.results)
        for mark, schema in schemas.RESULTS.items():
            if isinstance(content, dict) and mark in content:
                return self._valid(self.results, schema, content)
        if isinstance(content, dict) and "noisy_score" in content:
            check = f"torch-privacy verify {shlex.quote(str(self.path))}"
            raise ValueError(
                f"{self.path}: holds a private search, of which model and statement are released. It has no test "
                f"scores, and so no report. {check} checks its numbers."
            )
        return self._valid(self.results, schemas.OF_EXPERIMENT, content, NO_TRAINING)

    def read_search(self) -> dict[str, Any]:
        """Reads the results of a private search; raises a ``ValueError`` if the file is damaged."""
        return self._valid(self.results, schemas.OF_SEARCH, self._self_checked(self.results))

    def read_audit(self) -> dict[str, Any] | None:
        """Reads the audit of the run, or returns None if there is none; raises a ``ValueError`` if it is damaged."""
        if not self.audit.exists():
            return None
        return self._valid(self.audit, schemas.AUDIT, self._self_checked(self.audit))

    def read_metrics(self, digests: Digests = NO_DIGESTS) -> list[Metrics]:
        """Returns the rows of ``metrics.csv``, at least one; raises a ``ValueError`` if the file is damaged.

        Cells of a loss or score may be empty.
        """
        names = list(schemas.METRICS)
        salted = [*names, schemas.SALT]
        try:
            text = io.StringIO(_read(self.metrics, LARGEST_METRICS, digests).decode("utf-8"), newline="")
            lines = csv.reader(text, strict=True)
            if (found := next(lines, None)) not in (names, salted):
                raise ValueError(f"its columns are not {', '.join(salted)}")
            rows = [_metrics_from_cells(number, cells, found) for number, cells in enumerate(lines, 2)]
            if not rows or rows[0].training != "private":
                raise ValueError("it has no epoch of private training")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.metrics}: it is not UTF-8 from byte {error.start} on; {DAMAGED}") from None
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{self.metrics}: {error}; {DAMAGED}") from None
        return rows

    def read_checkpoint(self) -> dict[str, Any]:
        """Returns the state in the checkpoint; raises a ``ValueError`` if it is damaged."""
        return checkpoint.load(self.checkpoint)

    def read_model(self, digests: Digests = NO_DIGESTS) -> bytes:
        """Returns the content of the model's file; raises a ``ValueError`` if it is damaged."""
        return self._read_own(self.model, LARGEST_MODEL, digests)

    def read_schema(self, digests: Digests = NO_DIGESTS) -> str:
        """Returns the schema of the table that was trained on; raises a ``ValueError`` if the file is damaged."""
        return self._read_own(self.schema, LARGEST_JSON, digests).decode("utf-8", "replace")

    def _read_own(self, path: Path, at_most: int, digests: Digests) -> bytes:
        try:
            return _read(path, at_most, digests)
        except ValueError as error:
            raise ValueError(f"{path}: cannot be read ({error}). {RUN_WANTED}") from None

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
            if content.pop("check", None) != digest_of(content):
                raise ValueError(f"{path}: its digest does not fit, so that something in it was changed; {DAMAGED}")
        return content

    def _valid(self, path: Path, schema: Schema, content: Any, otherwise: str = DAMAGED) -> dict[str, Any]:
        if not isinstance(content, dict):
            raise ValueError(f"{path}: cannot be read (not a JSON object). {RUN_WANTED}")
        if wrong := violation(schema, content):
            raise ValueError(f"{path}: {wrong}; {otherwise}")
        return content


def digest_of(content: dict[str, Any]) -> str:
    """Returns the SHA-256 of JSON values, whatever their layout in a file."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's content; a ``ValueError`` with the reason if it is no regular file."""
    digest = hashlib.sha256()
    with opened(path) as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _read(path: Path, at_most: int, digests: Digests) -> bytes:
    """Returns the content of a file, which must have its digest if there is one."""
    content = read_bytes(path, at_most)
    if digests.get(path.name, found := hashlib.sha256(content).hexdigest()) != found:
        raise ValueError("it was changed after the run: its digest is not that in results.json")
    return content


def _metrics_from_cells(number: int, cells: list[str], names: list[str]) -> Metrics:
    """Converts a line of texts to metrics; an empty cell becomes None."""
    if len(cells) != len(names):
        raise ValueError(f"line {number} has {len(cells)} cells")
    row = {name: _value(name, text) for name, text in zip(names, cells, strict=True) if name != schemas.SALT}
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
