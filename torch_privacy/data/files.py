# SPDX-License-Identifier: Apache-2.0
"""Finds data files, unpacks them and verifies their checksums, for all readers."""

import bz2
import gzip
import hashlib
import io
import lzma
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from torch_privacy.support.read_file import read_at_most, read_bytes

FOLDER_VARIABLE = "TORCH_PRIVACY_DATA"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"  # beside a checkout of this project
LARGEST = 2**28  # bytes of unpacked content; that of the largest file is 182 million
PACKINGS = {
    ".gz": (b"\x1f\x8b", lambda packed: gzip.GzipFile(fileobj=packed)),
    ".xz": (b"\xfd7zXZ\0", lzma.LZMAFile),
    ".bz2": (b"BZh", bz2.BZ2File),
}


class DataError(ValueError):
    """Raised if a data file is missing or is not the published one; the message says where it belongs."""


@dataclass(frozen=True)
class File:
    """A file that was read: its path, the SHA-256 of the file on disk, and its unpacked content."""

    path: Path
    sha256: str
    content: bytes
    cure: str

    def refuse(self, what: str) -> NoReturn:
        """Raises a ``DataError`` that names the file, its defect and the cure."""
        raise DataError(f"{self.path}: {what}. {self.cure}")

    def check(self, is_right: bool, what: str) -> None:
        """Raises a ``DataError`` unless ``is_right``."""
        if not is_right:
            self.refuse(what)


@dataclass(frozen=True)
class Source:
    """A published data set: the names, origin and licence of its files.

    ``checksums`` gives each file's content, unpacked, as ``"sha256:..."`` or ``"md5:..."`` where it is known. So a file
    may be packed in any way; MD5 is what some publishers give: it finds accidents, not malice.
    """

    name: str
    folders: tuple[str, ...]  # where the files may lie in the folder of all data; the first is named in messages
    checksums: Mapping[str, str | None]  # name as published, with its packing if any -> checksum of the content
    origin: str
    licence: str
    shipped: Path | None = None  # the copy in this package

    def folder(self, named: str | Path | None, *, verify: bool = True) -> "Folder":
        """Returns the folder to read from: the caller's, else ``TORCH_PRIVACY_DATA``, else the shipped copy.

        Raises:
            DataError: If there is none; the message says where to get the data, and its licence.
        """
        named = named or os.environ.get(FOLDER_VARIABLE)
        if named:
            return Folder(self, Path(named).expanduser(), verify)
        shipped = self.shipped or SHARED
        if shipped.is_dir():
            return Folder(self, shipped, verify)
        names = ", ".join(self.checksums)
        raise DataError(
            f"{self.name}: no folder of data is named. Get {names} from {self.origin} (licence: {self.licence}), put "
            f"them into DIR/{self.folders[0]} and pass --data DIR, folder=DIR or {FOLDER_VARIABLE}=DIR."
        )


@dataclass(frozen=True)
class Folder:
    """A folder with the files of a source; with ``verify`` it reads only the published content."""

    source: Source
    path: Path
    verify: bool

    def has(self, name: str) -> bool:
        """True if the file exists, packed or not."""
        return self._find(name) is not None

    def path_of(self, name: str) -> Path:
        """Returns the path where the file or folder of this name belongs."""
        return self.path / self.source.folders[0] / name

    def read(self, name: str) -> File:
        """Reads the file of this name, packed or not, from the first place that has it.

        Raises:
            DataError: If it is missing, cannot be read or unpacked, or is not the published one.
        """
        cure = self.cure(name)
        path = self._find(name)
        if path is None and not os.path.isdir(self.path):
            raise DataError(f"{self.path}: no such folder. {cure}")
        if path is None:
            raise DataError(f"{self.path_of(name)}: no such file. {cure}")
        try:
            packed = read_bytes(path, LARGEST)
        except ValueError as error:
            raise DataError(f"{path}: cannot be read ({error}). {cure}") from None
        try:
            content = unpack(path.suffix, packed)
        except (EOFError, OSError, ValueError, lzma.LZMAError, zlib.error) as error:
            raise DataError(
                f"{path}: is truncated or damaged, it cannot be unpacked ({str(error).rstrip('.')}). {cure}"
            ) from None
        file = File(path, hashlib.sha256(packed).hexdigest(), content, cure)
        if self.verify:
            verify_content(file, self.source.checksums.get(name))
        return file

    def cure(self, name: str) -> str:
        """Returns the advice for a missing or wrong file."""
        shipped = ", or use the copy in the package" if self.source.shipped else ""
        return (
            f"Put the original {name} at {self.path_of(name)} (from {self.source.origin}; "
            f"licence: {self.source.licence}){shipped}."
        )

    def _find(self, name: str) -> Path | None:
        plain = name.removesuffix(Path(name).suffix) if Path(name).suffix in PACKINGS else name
        names = dict.fromkeys([name, plain, *(plain + packing for packing in PACKINGS)])
        folders = [self.path / folder for folder in (*self.source.folders, ".")]
        return next((path for folder in folders for one in names if os.path.isfile(path := folder / one)), None)


def unpack(suffix: str, packed: bytes) -> bytes:
    """Returns the unpacked content; a file that is not packed in spite of its suffix is returned unchanged.

    Raises:
        ValueError: If the content is larger than that of any published file; no more than that is unpacked.
    """
    magic, reader = PACKINGS.get(suffix, (None, None))
    if magic is None or reader is None or not packed.startswith(magic):
        return packed
    with reader(io.BytesIO(packed)) as file:
        try:
            return read_at_most(file, LARGEST)
        except ValueError:
            raise ValueError(f"its content is larger than {LARGEST} bytes") from None


def is_published(file: File, checksum: str | None) -> bool:
    """True if the content has this checksum, or none is known."""
    return checksum is None or _found(file, checksum) == checksum.partition(":")[2]


def _found(file: File, checksum: str) -> str:
    """Returns the content's checksum of the same kind."""
    return hashlib.new(checksum.partition(":")[0], file.content, usedforsecurity=False).hexdigest()


def verify_content(file: File, checksum: str | None) -> None:
    """Raises a ``DataError`` if the checksum is known and the content has another one."""
    if checksum is not None and not is_published(file, checksum):
        (kind, _, expected), found = checksum.partition(":"), _found(file, checksum)
        file.refuse(
            f"is {'truncated or changed' if file.content else 'empty'} ({len(file.content)} bytes of content, "
            f"{kind.upper()} {found[:12]}..., expected {expected[:12]}...; for data of your own in this format pass "
            "verify=False)"
        )


def digests(*files: File) -> dict[str, str]:
    """Returns name -> SHA-256 of each file on disk, for the privacy statement."""
    return {file.path.name: file.sha256 for file in files}
