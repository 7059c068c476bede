# SPDX-License-Identifier: Apache-2.0
"""Checks the files of a run folder: their digests, who may read those with secrets, and that no other file has one."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from torch_privacy.runs.checkpoint import MARK
from torch_privacy.runs.reading import sha256
from torch_privacy.runs.verify.evidence import UNPUBLISHED, Evidence
from torch_privacy.runs.verify.finding import Finding, differs, judged, unchecked
from torch_privacy.support.read_file import opened, read_bytes

LARGEST_SEARCHED = 2**26  # bytes of a file that is searched for secrets
SMALLEST_SECRET = 16  # bytes


def findings(evidence: Evidence) -> Iterator[Finding]:
    """Yields what is found out about the files."""
    yield from _digests(evidence)
    yield from _secrets(evidence)


def _digests(evidence: Evidence) -> Iterator[Finding]:
    if evidence.results is None:
        return
    folder, digests = evidence.folder, evidence.results.get("files")
    if digests is None:
        yield unchecked("digests of the files", "results.json is of an earlier format, and has none")
        return
    expected = (folder.settings, folder.ledger, folder.metrics, folder.model, folder.privacy)
    for name in dict.fromkeys([*(path.name for path in expected), *digests]):
        subject, path = f"digest of {name}", folder.path / Path(name).name
        if name not in digests:
            yield differs(subject, "results.json has no digest of this file")
        elif not path.exists():
            yield unchecked(subject, UNPUBLISHED)
        else:
            try:
                same = sha256(path) == digests[name]
            except ValueError as error:
                yield differs(subject, f"it cannot be read ({error})")
                continue
            yield judged(subject, same, "", "the file was changed after the run")


def _secrets(evidence: Evidence) -> Iterator[Finding]:
    """Yields whether secret files are for their owner alone, and whether a public file holds a secret."""
    folder = evidence.folder
    secret = {folder.fingerprint_key, folder.checkpoint, folder.former_checkpoint}
    files = sorted(path for path in folder.path.rglob("*") if path.is_file() and not path.is_symlink())
    there = [path for path in files if path in secret or path.is_relative_to(folder.path / "secret") or _is_state(path)]
    open_ones = [f"{_name(path, folder.path)} (mode {_mode(path):04o})" for path in there if _mode(path) & 0o077]
    names = ", ".join(_name(path, folder.path) for path in there) or "there are none"
    wrong = f"others can read {', '.join(open_ones)}"
    yield judged("secret files are for their owner alone", not open_ones, names, wrong)
    secrets = {path: _content(path).strip() for path in there if path.stat().st_size <= LARGEST_SEARCHED}
    found = [
        f"{_name(path, folder.path)} holds {_name(key, folder.path)}"
        for path in files
        if path not in there
        for content in [_content(path)]
        for key, text in secrets.items()
        if len(text) >= SMALLEST_SECRET and text in content
    ]
    yield judged("no secret in the other files", not found, "", "; ".join(found))


def _is_state(path: Path) -> bool:
    """True for the secret state of a training, whatever its name."""
    try:
        with opened(path) as file:
            return MARK in file.read(4096)
    except ValueError:
        return False


def _content(path: Path) -> bytes:
    try:
        return read_bytes(path, LARGEST_SEARCHED)
    except ValueError:
        return b""


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _name(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder))
