# SPDX-License-Identifier: Apache-2.0
"""The run folder: what a training run leaves behind, and the secret checkpoint that lets it go on."""

import csv
import io
import json
import os
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, BinaryIO

from torch_privacy.experiments.log import Metrics


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

    @property
    def is_complete(self) -> bool:
        """Whether training ended and every result is in place."""
        return self.results.exists() and not self.checkpoint.exists()

    def check_new(self) -> None:
        """Raise a ``ValueError`` if the folder already holds something."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path}: is not a folder. Name a new folder for this run.")
        if self.path.exists() and any(self.path.iterdir()):
            raise ValueError(
                f"{self.path}: is not empty. Name a new folder, or continue an unfinished run with --resume."
            )

    def create(self) -> None:
        """Make the folder."""
        self.path.mkdir(parents=True, exist_ok=True)

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
            return json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: cannot be read ({error}). Name a folder that train has made.") from None

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

    def write_model(self, content: bytes) -> None:
        """Write the model in the safetensors format."""
        self._write(self.model, lambda file: file.write(content))

    def write_report(self, page: str) -> None:
        """Write the report, one self-contained page."""
        self._write(self.report, lambda file: file.write(page.encode()))

    def _write(self, path: Path, save: Callable[[BinaryIO], object], mode: int = 0o644) -> None:
        """Write beside ``path``, flush to disk, then rename: a crash leaves the old file or the new one."""
        partial = path.with_name(path.name + ".partial")
        partial.unlink(missing_ok=True)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            save(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


def _metrics_from_text(row: dict[str, str]) -> Metrics:
    """A row of strings with its numbers read; an empty cell is None."""
    numbers: dict[str, Any] = {name: float(text) if text else None for name, text in row.items() if name != "training"}
    return Metrics(**(numbers | {"training": row["training"], "step": int(row["step"])}))
