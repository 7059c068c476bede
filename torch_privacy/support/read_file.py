# SPDX-License-Identifier: Apache-2.0
"""Reads files that may be damaged or hostile: never waits, never reads beyond a limit, refuses unusual JSON."""

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
BLOCK = 2**20  # bytes read at once
LARGEST_JSON = 2**23  # bytes; a table of results has some thousand
DEEPEST = 64  # levels of nesting
LARGEST_INTEGER = 2**64


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a regular file for reading; the content may be as large as the file.

    Raises:
        ValueError: if there is no such file, it cannot be opened, or it is a folder, a pipe or a device. The message is
            the reason alone, to which the caller adds the path and the cure.
    """
    try:  # O_NONBLOCK: the opening of a pipe does not wait for a writer
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise ValueError(error.strerror or errno.errorcode.get(error.errno or 0, "unknown error")) from None
    except ValueError as error:  # a NUL in the name
        raise ValueError(f"its name is not a valid file name, {error}") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise ValueError(f"it is {KINDS.get(stat.S_IFMT(mode), 'something else')}, not a file")
    with open(descriptor, "rb") as file:
        yield file


def read_bytes(path: str | os.PathLike[str], at_most: int) -> bytes:
    """Returns the content of a regular file.

    Raises:
        ValueError: with the reason, if it cannot be read or is larger than ``at_most`` bytes.
    """
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size > at_most:
            raise ValueError(f"it has more than {at_most} bytes")
        try:
            return read_at_most(file, at_most)
        except OSError as error:
            raise ValueError(error.strerror or "it cannot be read") from None


def read_at_most(file: BinaryIO, at_most: int) -> bytes:
    """Returns what an open file holds, in memory for as much as it holds: ``file.read(at_most)`` reserves all of it.

    Raises:
        ValueError: it holds more than ``at_most`` bytes.
    """
    parts, size = [], 0
    while part := file.read(min(BLOCK, at_most + 1 - size)):
        parts.append(part)
        size += len(part)
        if size > at_most:
            raise ValueError(f"it has more than {at_most} bytes")
    return b"".join(parts)


def read_json(path: str | os.PathLike[str]) -> Any:
    """Returns the content of a JSON file; see `parse_json`."""
    return parse_json(read_bytes(path, LARGEST_JSON))


def parse_json(content: bytes) -> Any:
    """Returns parsed JSON with finite numbers, single keys, at most 64 levels and no half characters.

    Characters that Python uses for bytes of a file's name that are not UTF-8 (U+DC80 to U+DCFF) are allowed.

    Raises:
        ValueError: with the reason, if the content is anything else.
    """
    try:
        found = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=_integer,
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 from byte {error.start} on") from None
    except RecursionError:
        raise ValueError(f"it has more than {DEEPEST} levels of nesting") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    _check_depth_and_texts(found)
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"it has the key {shown(twice)} twice")
    return found


def _constant(text: str) -> float:
    raise ValueError(f"it has {text} in place of a finite number")


def _float(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"it has {shown(text)} in place of a finite number")
    return number


def _integer(text: str) -> int:
    if len(text) > 20 or abs(int(text)) > LARGEST_INTEGER:
        raise ValueError(f"it has an integer of {len(text)} digits")
    return int(text)


def _check_depth_and_texts(tree: Any) -> None:
    level, depth = [tree], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"it has more than {DEEPEST} levels of nesting")
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                below += node
                below += node.values()
            elif isinstance(node, list):
                below += node
            elif isinstance(node, str) and not is_text(node):
                raise ValueError("it has half a character in a text")
        level = below


def is_text(text: str) -> bool:
    """True if `parse_json` allows the text: it has no half characters but those of bytes of a file's name."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def shown(value: Any) -> str:
    """Returns a value as printable ASCII in at most 60 letters, for a message."""
    if isinstance(value, (dict, list, tuple, set)):
        return f"{type(value).__name__} of {len(value)}"
    text = ascii(value if not isinstance(value, (str, bytes)) else value[:60])
    return text if len(text) <= 60 else f"{text[:57]}..."
