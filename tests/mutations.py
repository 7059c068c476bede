# SPDX-License-Identifier: Apache-2.0
"""Damages files at random, by their structure: bytes, values of JSON, cells of CSV, entries of a checkpoint."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

HUGE = 2**30
HOSTILE = [  # texts of JSON values
    "null", "true", "false", "-1", "0", "1", "2", "0.5", "3.0", "-0.0", "1e999", "-1e999", "NaN", "Infinity",
    "-Infinity", "1e308", "5e-324", "1" + "0" * 400, "1" + "0" * 5000, "9007199254740993", "-9223372036854775809",
    '""', '"x"', '"0.55"', r'"\ud800"', r'"\u0000"', r'"\u001b[2J"', '"../../../etc/passwd"',
    '"<script>alert(1)</script>"', '"' + "a" * 1_000_000 + '"', "[]", "{}", "[[]]", "[null]", '{"a":1,"a":2}',
    '{"":{}}', "[" * 100_000 + "]" * 100_000,
    '{"a":' * 50_000 + "1" + "}" * 50_000, "[" + "0," * 100_000 + "0]", "'x'", "", "0x10", "1_000", "01", "+1", "nul",
    '{"type":"os.system"}', '{"type":"Gaussian","noise_multiplier":1e-300}', '"adult:x"', '"private"', "1e30", "1e6",
]  # fmt: skip
CELLS = [
    "", "nan", "inf", "-inf", "1e999", "-1", "x", "1_0", "0x1", "٣", "\x00", '"', "1" + "0" * 5000, "a" * 200_000,
    "private", "non-private", "3.5", "=cmd|' /C calc'!A0", "\ud800",
]  # fmt: skip
MARK = "d0a1f2e3"


@dataclass(frozen=True)
class Mutation:
    """One way of damaging a file; the numbers choose the place, whatever the file's content is."""

    how: str
    place: int
    value: int = 0

    def apply(self, path: Path) -> None:
        """Damages the file; does nothing if it has no such place."""
        HOW[self.how](path, self.place, self.value)


def _bytes(change: Callable[[bytes, int, int], bytes]) -> Callable[[Path, int, int], None]:
    def apply(path: Path, place: int, value: int) -> None:
        content = path.read_bytes()
        path.write_bytes(change(content, place % (len(content) + 1), value))

    return apply


def _flip(content: bytes, place: int, value: int) -> bytes:
    if not content:
        return b"x"
    place %= len(content)
    return content[:place] + bytes([content[place] ^ 1 << value % 8]) + content[place + 1 :]


def _insert(content: bytes, place: int, value: int) -> bytes:
    pieces = [
        b"\x00",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"\n",
        b'"',
        b"{",
        b",",
        b"\xed\xa0\x80",
        b"0" * 5000,
    ]
    return content[:place] + pieces[value % len(pieces)] + content[place:]


def _replaced(path: Path, place: int, value: int) -> None:
    """Puts something else in the file's place."""
    path.unlink()
    if value % 7 == 0:
        path.mkdir()
    elif value % 7 == 1:
        os.mkfifo(path)
    elif value % 7 == 2:
        path.symlink_to("/dev/zero")
    elif value % 7 == 3:
        with path.open("wb") as file:
            file.truncate(HUGE)
    elif value % 7 == 4:
        path.symlink_to(path.name)
    elif value % 7 == 5:
        path.write_bytes([b"", b"\xef\xbb\xbf{}", b"[1]", b"\x80\x02}q\x00.", b"PK\x03\x04", b"{}"][place % 6])


def _swapped(path: Path, place: int, value: int) -> None:
    """Puts the content of another file of the folder, or of another run's, in the file's place."""
    others = sorted(other for other in path.parent.glob("*") if other.is_file() and other != path)
    twin = path.parent.with_name(path.parent.name + "-twin") / path.name
    others += [twin] * 2 if twin.is_file() else []
    if others:
        shutil.copyfile(others[place % len(others)], path)


def _nodes(tree: Any) -> list[tuple[Any, Any]]:
    """Returns every (container, key) of a tree, from the outside in."""
    found, waiting = [], [tree]
    while waiting:
        node = waiting.pop(0)
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else []
        for key in keys:
            found.append((node, key))
            waiting.append(node[key])
    return found


def _json(path: Path, place: int, value: int) -> None:
    """Replaces, deletes, renames, wraps or doubles a value."""
    try:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        number = place % len(lines)
        tree = json.loads(lines[number])
        container, key = (nodes := _nodes(tree))[place // len(lines) % len(nodes)]
    except (ValueError, OSError, ZeroDivisionError):
        return
    raw = HOSTILE[value // 8 % len(HOSTILE)]
    if value % 8 == 0:
        del container[key]
    elif value % 8 == 1 and isinstance(container, dict):
        container[f"{key}x"] = container.pop(key)
    elif value % 8 == 2:
        container[key] = [container[key]]
    elif value % 8 == 3 and isinstance(container, dict):
        container["another"] = MARK
    elif value % 8 == 4 and isinstance(container[key], (int, float)):
        container[key] *= 0.5
    else:
        container[key] = MARK
    text = json.dumps(tree).replace(f'"{MARK}"', raw)
    if value % 8 == 5 and isinstance(container, dict):
        text = json.dumps(tree).replace(f'"{key}": "{MARK}"', f'"{key}": {raw}, "{key}": 1')
    lines[number] = text
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogatepass")


def _csv(path: Path, place: int, value: int) -> None:
    """Replaces a cell, or doubles or deletes a row or a column."""
    rows = list(csv.reader(io.StringIO(path.read_text())))
    cells = [(row, column) for row in range(len(rows)) for column in range(len(rows[row]))]
    if not cells:
        return
    row, column = cells[place % len(cells)]
    if value % 5 == 0:
        del rows[row]
    elif value % 5 == 1:
        rows.insert(row, rows[row])
    elif value % 5 == 2:
        rows = [cells[:column] + cells[column + 1 :] for cells in rows]
    else:
        rows[row][column] = CELLS[value // 5 % len(CELLS)]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    path.write_text(text.getvalue(), encoding="utf-8", errors="surrogatepass")


class _Runs:
    def __reduce__(self):
        return os.mkdir, ("/tmp/torch_privacy_was_here",)


class _Reserves:
    def __reduce__(self):
        return bytearray, (2**33,)


def _tensors(tensor: torch.Tensor) -> list[Any]:
    return [
        tensor[..., :0],
        tensor.reshape(-1),
        tensor[None],
        tensor.double() if tensor.dtype != torch.float64 else tensor.float(),
        torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else tensor.clone(),
        torch.zeros(1).expand(10**6, 10**5),
        tensor.to_sparse() if tensor.ndim else tensor.clone(),
        torch.zeros(3, dtype=torch.complex64),
        tensor.tolist(),
        None,
        0,
    ]


VALUES = [
    None, True, -1, 0, 1, 10**30, 1.5, float("nan"), float("inf"), "", "x", b"x", [], {}, (1,), {1: 2}, [[[]]],
    "ab" * 32, _Runs(), _Reserves(), torch.zeros(()), torch.Size([1]), torch.float32, set(), bytearray(3), 1j,
    [0] * 100_000,
]  # fmt: skip


def _checkpoint(path: Path, place: int, value: int) -> None:
    """Replaces, deletes or renames an entry of a checkpoint, or saves it in another format."""
    state = torch.load(path, weights_only=True)
    nodes = _nodes(state)
    container, key = nodes[place % len(nodes)]
    found = container[key]
    if value % 8 == 0:
        del container[key]
    elif value % 8 == 1 and isinstance(container, dict):
        container[f"{key}x"] = container.pop(key)
    elif value % 8 < 5 and isinstance(found, torch.Tensor):
        changed = _tensors(found)
        container[key] = changed[value // 8 % len(changed)]
    elif value % 8 == 5 and isinstance(found, (int, float)) and not isinstance(found, bool):
        container[key] = found + [1, -1, 1000, 0.5][value // 8 % 4]
    elif value % 8 != 6:
        container[key] = VALUES[value // 8 % len(VALUES)]
    if value % 8 == 6:
        _saved_otherwise(path, state, value // 8)
    else:
        torch.save(state, path)


def _saved_otherwise(path: Path, state: Any, value: int) -> None:
    if value % 3 == 0:
        torch.save(state, path, _use_new_zipfile_serialization=False)
    elif value % 3 == 1:
        path.write_bytes(pickle.dumps({"x": _Runs()}))
    else:  # packed, with a bomb
        content = path.read_bytes()
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
            for name in old.namelist():
                new.writestr(name, bytes(HUGE // 8) if name.endswith("data/0") else old.read(name))


HOW: dict[str, Callable[[Path, int, int], None]] = {
    "flip": _bytes(_flip),
    "truncate": _bytes(lambda content, place, _: content[:place]),
    "insert": _bytes(_insert),
    "cut": _bytes(lambda content, place, value: content[:place] + content[place + 1 + value % 40 :]),
    "replace": _replaced,
    "swap": _swapped,
    "json": _json,
    "csv": _csv,
    "checkpoint": _checkpoint,
}
OF_SUFFIX = {".json": "json", ".jsonl": "json", ".csv": "csv", ".pt": "checkpoint"}
NUMBERS = st.integers(0, 2**20)


@st.composite
def mutations(draw: Callable[..., Any], files: list[str]) -> tuple[str, list[Mutation]]:
    """Draws the name of a file and one to three mutations of it; half of them by its structure."""
    name = draw(st.sampled_from(files))
    special = OF_SUFFIX.get(Path(name).suffix)
    hows = ["flip", "truncate", "insert", "cut", "replace", "swap"]
    count = draw(st.sampled_from([1, 1, 1, 2, 3]))
    found = []
    for _ in range(count):
        how = special if special and draw(st.booleans()) else draw(st.sampled_from(hows))
        found.append(Mutation(how, draw(NUMBERS), draw(NUMBERS)))
        if how == "replace":
            break
    return name, found[:1] if found[0].how == "replace" else [m for m in found if m.how != "replace"]
