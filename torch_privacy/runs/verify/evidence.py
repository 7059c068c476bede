# SPDX-License-Identifier: Apache-2.0
"""Reads what a run folder states, as far as it can be read: what cannot is a finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_privacy import privacy
from torch_privacy.privacy.summary import Releases, releases_from_json
from torch_privacy.runs.agreement import counted
from torch_privacy.runs.reading import FolderReader
from torch_privacy.runs.verify.finding import Finding, agrees, differs, unchecked

UNPUBLISHED = "the file is not in the folder"


@dataclass
class Evidence:
    """Files of a run folder that could be read, and the statements in them."""

    folder: FolderReader
    statement: dict[str, Any]
    made: Releases  # as the statement lists them
    priced: Releases  # those that its epsilon is of
    prior: Releases
    ledger: privacy.Ledger | None = None
    results: dict[str, Any] | None = None
    search: dict[str, Any] | None = None  # results of a private search
    settings: dict[str, Any] | None = None
    findings: list[Finding] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Evidence | list[Finding]:
        """Returns the evidence in a folder; the findings alone if there is no statement that can be read.

        Raises:
            ValueError: there is no statement in the folder.
        """
        folder = FolderReader(path)
        if not folder.privacy.exists():
            raise ValueError(f"{path}: has no {folder.privacy.name}. Name the run folder of a finished training.")
        subject = "schema of the statement, prices exist"
        try:
            statement = folder.read_statement()
            lists = [releases_from_json(statement)]
            lists += [_releases(statement.get(name)) for name in ("releases_priced", "prior_releases")]
        except (ValueError, KeyError, TypeError) as error:
            return [differs(subject, _reason(error, path))]
        made, priced, prior = lists
        found = cls(folder, statement, made, priced or made, prior)
        found.findings.append(agrees(subject, f"format {statement['format']}"))
        found.ledger = found._read("digests of the ledger's lines", folder.ledger, privacy.Ledger.read)
        subject = "digest of results.json itself"
        if found.is_search:
            found.search = found._read(subject, folder.results, lambda _: folder.read_search())
        else:
            found.results = found._read(subject, folder.results, lambda _: folder.read_results())
            if found.results is not None and "privacy" not in found.results:
                found.results = None
        found.settings = found._read("settings.json can be read", folder.settings, lambda _: folder.read_settings())
        return found

    def _read(self, subject: str, path: Path, read: Callable[[Path], Any]) -> Any:
        if not path.exists():
            self.findings.append(unchecked(subject, UNPUBLISHED))
            return None
        try:
            found = read(path)
        except (ValueError, OSError) as error:
            self.findings.append(differs(subject, _reason(error, self.folder.path)))
            return None
        self.findings.append(agrees(subject))
        return found

    @property
    def is_search(self) -> bool:
        """True if the statement is that of a private search, which is one release."""
        return any(isinstance(event, privacy.Repeated) for event, _ in self.made)

    def attempt(self, subject: str, path: Path, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
        """Returns the findings of a check that reads a file; one finding if it cannot be read."""
        if not path.exists():
            return [unchecked(subject, UNPUBLISHED)]
        try:
            return list(check())
        except (ValueError, OSError, KeyError) as error:
            return [differs(subject, _reason(error, self.folder.path))]


def _releases(listed: Any) -> Releases:
    return releases_from_json({"releases": listed}) if listed else []


def _reason(error: Exception, folder: Path) -> str:
    """Returns why a file cannot be read, without the folder's path."""
    return " ".join(str(error).replace(f"{folder}/", "").split())[:400]


def total(releases: Releases) -> int:
    """Returns the number of releases."""
    return sum(count for _, count in releases)


def lacking(fewer: Releases, more: Releases) -> Counter[str]:
    """Returns how often each release of the second list is not in the first, by its description."""
    return counted(more) - counted(fewer)
