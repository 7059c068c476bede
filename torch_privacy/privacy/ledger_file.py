# SPDX-License-Identifier: Apache-2.0
"""The file behind a ledger: lines of JSON, chained by digests, appended completely or not at all by one writer."""

import errno
import hashlib
import json
import os
import secrets
import stat
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..support.file_lock import holder_of, lock, note_holder
from ..support.validate import Refused
from ..support.write_file import PARTIAL, PUBLIC, UNFOLLOWED, sync_directory

SECONDS_BETWEEN_SYNCS = 1.0
SECONDS_BETWEEN_TRIES = 0.01  # to lock a file
BLOCK, LONGEST_LINE = 2**20, 2**24  # bytes
DIGEST_BYTES = 8
CHECK = "check"  # the key of a line's digest
UNCHAINED_FORMAT, FORMAT = 1, 2  # the first is that of files from before there were digests
KNOWN_FORMATS = (UNCHAINED_FORMAT, FORMAT)
CHOOSE = "Continue it with Ledger.load, or choose another path."

Line = dict[str, Any]


class LedgerFile:
    """Appends lines to a file that this process alone writes.

    Every line carries the digest of itself and of the line before it, so that no changed bit, and no line that is lost
    in the middle, goes unnoticed.

    Args:
        path: the file.
        read_only: neither locks the file nor writes it; others may.
        create: makes a new file, which gets its name after `published`.
        patience: seconds to wait for another writer, in this process or another one, before it is refused. An older
            writer of this process is then waited for, too.

    Guarantees:
        - `append` either returns, and all of its lines are with the operating system, or raises, and none is in the
          file; if that cannot be undone, the file is closed for good.
        - After a failed `sync` the file is closed for good: what the disk holds is unknown.
        - A file that exists is changed by `mend`, `append` or not at all, and never through a symbolic link.
        - A second writer is refused: another process at once, an older writer of this process at its next `append`, a
          forked process too.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, create: bool = False, read_only: bool = False, patience: float = 0.0
    ):
        self.path = Path(path)
        self._failure = ""  # the reason why nothing can be appended any more
        self._chained = True
        self._attempt = b""  # what was appended last, perhaps in part
        self._lacks_end = False  # True for a whole last line without its line end
        self._unpublished = _unique_partial_of(self.path) if create else None  # its name until the first line is there
        self._file: int | None = _opened(self._unpublished or self.path, create, read_only)
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise Refused(f"Ledger: {str(self.path)!r} is no file. Name another path.")
            if not read_only:
                self._lock(patience)
            if not create and not read_only:
                sync_directory(self.path.absolute().parent)
            # size and last digest of the lines that are known to be complete, in one place: an interrupt splits nothing
            self._end = os.fstat(self._file).st_size, b""
        except BaseException:
            os.close(self._file)
            self._file = None
            if self._unpublished is not None:
                self._unpublished.unlink(missing_ok=True)
            raise
        self._last_sync = time.monotonic()
        self._close = weakref.finalize(self, os.close, self._file)
        self._close.atexit = False

    @property
    def size(self) -> int:
        """Returns the size of the complete lines, in bytes."""
        return self._end[0]

    @contextmanager
    def published(self) -> Iterator[None]:
        """Gives a new file its name after the ``with`` block, which writes its first line: none is found without.

        Raises:
            OSError: if the disk reports an error; no file was made.
            Refused: if the name is taken by now.
        """
        assert self._unpublished is not None
        assert self._file is not None
        try:
            yield
            os.fsync(self._file)
            _rename_to_new(self._unpublished, self.path)
            sync_directory(self.path.absolute().parent)
        except BaseException:
            self.lose("it was not made")
            raise
        finally:
            self._unpublished.unlink(missing_ok=True)

    def read(self) -> list[Line]:
        """Returns the lines, checked; writes nothing. `mend` then deals with a last line that has no end.

        Raises:
            Refused: if a line is damaged.
        """
        assert self._file is not None
        lines: list[Line] = []
        digest, rest, place = b"", b"", 0
        while place < self.size:  # block by block: a damaged file may be huge
            block = os.pread(self._file, min(BLOCK, self.size - place), place)
            place += len(block)
            *texts, rest = (rest + block).split(b"\n")
            for text in texts:
                line, digest = self._checked(len(lines) + 1, text, digest)
                lines.append(line)
            if len(rest) > LONGEST_LINE or not block:
                raise Refused(
                    f"Ledger.load: line {len(lines) + 1} of {str(self.path)!r} is longer than "
                    f"{LONGEST_LINE >> 20} MiB or is not terminated; the file is damaged."
                )
        self._lacks_end = False
        if rest:
            number = len(lines) + 1
            if self._is_whole(number, rest[:-1], digest):
                raise Refused(f"Ledger.load: line {number} of {str(self.path)!r} cannot be read: its end was changed.")
            if self._is_whole(number, rest, digest):  # only the end of the line is missing
                line, digest = self._checked(number, rest, digest)
                lines.append(line)
                self._lacks_end = True
        self._end = self.size - (0 if self._lacks_end else len(rest)), digest
        return lines

    def mend(self) -> None:
        """Gives a whole last line its end, or removes what was not written completely; the lines read are a ledger's.

        Raises:
            OSError: if it cannot be written.
        """
        assert self._file is not None
        os.ftruncate(self._file, self.size)
        if self._lacks_end:
            os.write(self._file, b"\n")
            self._end = self.size + 1, self._end[1]

    def encode(self, lines: Sequence[Line]) -> tuple[bytes, tuple[int, bytes]]:
        """Returns lines as bytes, and what size and digest are after them."""
        size, digest = self._end
        texts = []
        for line in lines:
            text = _compact(line)
            if self._chained:
                digest = _next_digest(digest, text)
                text = b'%s,"%s":"%s"}' % (text[:-1], CHECK.encode(), digest.hex().encode())  # the line's last key
            texts.append(text + b"\n")
        data = b"".join(texts)
        return data, (size + len(data), digest)

    def append(self, data: bytes, end: tuple[int, bytes]) -> None:
        """Appends encoded lines, all or none; from then on `size` is that of ``end``.

        Raises:
            OSError: if they could not be written; none of them is in the file.
            Refused: if the file is closed, was deleted or shortened, or another writer has taken it.
        """
        self._check_writable()
        assert self._file is not None
        self._attempt = data
        try:
            written = os.write(self._file, data)
            if written != len(data):
                raise OSError(f"Ledger: wrote only {written} of {len(data)} bytes of a line; the disk may be full.")
        except BaseException:
            self._undo()
            raise
        self._end = end

    @property
    def is_open(self) -> bool:
        """True unless the file failed or was closed."""
        return not self._failure

    @property
    def is_sync_due(self) -> bool:
        """True if the last sync was more than a second ago."""
        return not 0 <= time.monotonic() - self._last_sync <= SECONDS_BETWEEN_SYNCS  # also if the clock was set back

    def sync(self) -> None:
        """Returns when all lines are on the disk itself.

        Raises:
            Refused: if the disk reports an error; the file is closed for good.
        """
        self._check_open()
        assert self._file is not None
        try:
            os.fsync(self._file)
        except OSError as error:
            self.lose(f"its disk reported an error ({error}), so that the last releases may not be on it")
            self._check_open()
        self._last_sync = time.monotonic()

    def release(self) -> None:
        """Closes a file that was only read."""
        self.lose("it was only read")

    def close(self) -> None:
        """Syncs and closes the file."""
        if self._file is not None and not self._failure:
            self.sync()
        self.lose("it was closed")

    def check_open(self) -> None:
        """Raises ``Refused`` if the file failed or was closed."""
        self._check_open()

    def _lock(self, patience: float) -> None:
        assert self._file is not None
        older = holder_of(self._file)
        if older is not None and not patience:
            older.lose("it was opened anew in this process")
        end = time.monotonic() + patience
        while not self._is_locked(required=patience > 0):
            if time.monotonic() >= end:
                raise Refused(
                    f"Ledger: another process writes {str(self.path)!r}, and two would record different steps with the "
                    "same noise. Wait until it ends, or choose another run folder."
                )
            time.sleep(SECONDS_BETWEEN_TRIES)
        note_holder(self._file, self)

    def _is_locked(self, *, required: bool) -> bool:
        """Returns whether the file could be locked, or is on a file system without locks."""
        assert self._file is not None
        try:
            lock(self._file)
        except BlockingIOError:
            return False
        except OSError as error:  # a file system without locks
            if required:
                raise Refused(
                    f"Ledger: {str(self.path)!r} is on a file system without locks ({error}), so that two processes "
                    "could write it at once. Move it to another one."
                ) from None
        return True

    def _check_open(self) -> None:
        if self._failure:
            raise Refused(
                f"Ledger: {str(self.path)!r} takes no further release, because {self._failure}. Open it with "
                "Ledger.load."
            )

    def _check_writable(self) -> None:
        """Refuses a file that was changed by others; removes a line that an interrupt left behind."""
        self._check_open()
        assert self._file is not None
        status = os.fstat(self._file)
        if status.st_nlink == 0 or status.st_size < self.size:
            self.lose("it was deleted or shortened by another program")
            self._check_open()
        excess = status.st_size - self.size
        if excess and os.pread(self._file, excess, self.size) != self._attempt[:excess]:
            self.lose("another program wrote into it")
        elif excess:  # an interrupted append: its release was not used
            self._undo()
        self._check_open()

    def _undo(self) -> None:
        """Removes what was written beyond the known lines."""
        assert self._file is not None
        try:
            os.ftruncate(self._file, self.size)
        except OSError as error:
            self.lose(f"an incomplete line could not be removed ({error})")

    def lose(self, reason: str) -> None:
        """Closes the file for good; ``reason`` says why it takes no further line."""
        self._failure = self._failure or reason
        if self._file is not None:
            self._file = None
            self._close()

    def _checked(self, number: int, text: bytes, digest: bytes) -> tuple[Line, bytes]:
        """Returns a line that was read, without its digest, which must be right, and the digest for the next line."""
        try:
            line = json.loads(text)
            if not isinstance(line, dict):
                raise ValueError("it is not a JSON object")
            found = line.pop(CHECK, None)
            if number == 1:
                self._chained = line.get("ledger") != UNCHAINED_FORMAT
            if self._chained:
                digest = _next_digest(digest, _compact(line))
            known = number > 1 or line.get("ledger") in KNOWN_FORMATS  # else the ledger says what it cannot read
            if known and found != (digest.hex() if self._chained else None):
                raise ValueError("its digest does not fit, so that this line or one before it was changed")
        except (ValueError, TypeError, RecursionError) as error:
            raise Refused(f"Ledger.load: line {number} of {str(self.path)!r} cannot be read: {error}.") from error
        return line, digest

    def _is_whole(self, number: int, text: bytes, digest: bytes) -> bool:
        """True if a text without a line's end is a whole line."""
        try:
            self._checked(number, text, digest)
        except Refused:
            return False
        return True


def _unique_partial_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}{PARTIAL}")


def _rename_to_new(partial: Path, path: Path) -> None:
    """Gives a file a second name that is not taken, or its only one on a file system without hard links."""
    try:
        os.link(partial, path, follow_symlinks=False)
    except OSError as error:
        if isinstance(error, FileExistsError) or os.path.lexists(path):
            raise Refused(f"Ledger: {str(path)!r} exists by now. {CHOOSE}") from None
        partial.rename(path)


def _opened(path: Path, create: bool, read_only: bool) -> int:
    """Returns a descriptor of the file itself: a symbolic link may lead to a file that is no ledger."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) if read_only else os.O_RDWR | os.O_APPEND
    try:
        return os.open(path, flags | (os.O_CREAT | os.O_EXCL if create else 0) | UNFOLLOWED, PUBLIC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Refused(f"Ledger: {str(path)!r} is a symbolic link. Name the file itself.") from None
        if error.errno == errno.EISDIR:
            raise Refused(f"Ledger: {str(path)!r} is a folder. Name the file.") from None
        raise


_ENCODER = json.JSONEncoder(separators=(",", ":"))


def _compact(line: Line) -> bytes:
    return _ENCODER.encode(line).encode()


def _next_digest(digest: bytes, text: bytes) -> bytes:
    return hashlib.blake2b(digest + text, digest_size=DIGEST_BYTES).digest()
