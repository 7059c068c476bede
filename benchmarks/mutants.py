# SPDX-License-Identifier: Apache-2.0
"""Breaks the code at many places, one at a time, and counts which of these mutants the tests notice.

    python benchmarks/mutants.py run --log mutants.jsonl --count 150
    python benchmarks/mutants.py table --log mutants.jsonl
    python benchmarks/mutants.py run --log one.jsonl --count 5 --modules ops/norm.py --tests ops/test_contract.py

A mutant swaps a comparison, an operator, ``and`` and ``or``, a condition and its opposite, changes a number by one, or
drops a statement that raises. The draw gives each room its share of lines. A mutant runs in a copy of the repository,
until a test fails or the time is over: all cases of the test file with the name of its own, of files of the same room
and of others that name what its module defines, and of these the cases of `make test` first. Some mutants cannot be
noticed, because they change speed or a message only, so what counts is the share of those that `make thorough` notices
and `make test` does not. With ``--modules`` and ``--tests`` the mutants are of these modules and run on these test
files alone: what a file that became shorter still notices. The log names the tests that failed; see that they pass
without.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "torch_privacy"
SECONDS = 240  # for the tests of one mutant
FILES = 12
FOLDERS = {"sklearn": "estimators", "opacus": "opacus_migration"}  # of the tests of a room, if not named like it
SWAPPED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Pow: "*", ast.Mod: "*",
    ast.BitAnd: "|", ast.BitOr: "&", ast.And: "or", ast.Or: "and",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of the source: the text between two offsets of a file's line becomes another."""

    file: str
    line: int
    start: int  # in bytes, from the beginning of the file
    end: int
    text: str
    was: str

    @property
    def room(self) -> str:
        parts = Path(self.file).parts
        return parts[1] if len(parts) > 2 else parts[0]


# Drawing --------------------------------------------------------------------------------------------------------------


def mutants_of(file: Path) -> Iterator[Mutant]:
    """Yields all mutants of a file."""
    source = file.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    name = str(file.relative_to(ROOT))

    def place(node: ast.AST) -> tuple[int, int]:
        return (
            starts[node.lineno - 1] + node.col_offset,  # type: ignore[attr-defined]
            starts[node.end_lineno - 1] + node.end_col_offset,  # type: ignore[attr-defined]
        )

    def mutant(node: ast.AST, start: int, end: int, text: str) -> Mutant:
        return Mutant(name, source[:start].count(b"\n") + 1, start, end, text, source[start:end].decode())

    def between(node: ast.AST, left: ast.AST, right: ast.AST, op: ast.AST) -> Iterator[Mutant]:
        start, end = place(left)[1], place(right)[0]
        if type(op) in SWAPPED and not {b"(", b")", b"#", b"\n"} & {bytes([b]) for b in source[start:end]}:
            yield mutant(node, start, end, f" {SWAPPED[type(op)]} ")

    tree = ast.parse(source)
    types = [getattr(node, key, None) for node in ast.walk(tree) for key in ("annotation", "returns")]
    left_out = {id(part) for node in types if node is not None for part in ast.walk(node)}
    for node in (node for node in ast.walk(tree) if id(node) not in left_out):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from between(node, node.left, node.comparators[0], node.ops[0])
        elif isinstance(node, ast.BinOp):
            yield from between(node, node.left, node.right, node.op)
        elif isinstance(node, ast.BoolOp):
            yield from between(node, node.values[0], node.values[1], node.op)
        elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
            start, end = place(node.test)
            yield mutant(node, start, end, f"(not ({source[start:end].decode()}))")
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield mutant(node, *place(node), f"({node.value!r} + 1)")
        elif isinstance(node, ast.Raise):
            yield mutant(node, *place(node), "pass")


def drawn(count: int, seed: int, modules: list[str]) -> list[Mutant]:
    """Returns mutants of all rooms, each with its share of the lines; or of these modules, as one room each."""
    rooms: dict[str, list[Mutant]] = defaultdict(list)
    files = [ROOT / PACKAGE / module for module in modules]
    for file in files or sorted((ROOT / PACKAGE).rglob("*.py")):
        for one in mutants_of(file):
            rooms[one.file if modules else one.room].append(one)
    chance, total = random.Random(seed), sum(map(len, rooms.values()))
    numbers = {room: max(2, round(count * len(all_) / total)) for room, all_ in rooms.items()}
    chosen = [one for room, all_ in rooms.items() for one in chance.sample(all_, min(numbers[room], len(all_)))]
    chance.shuffle(chosen)
    return chosen


# Running --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What the tests said of a mutant: the first that failed, and where it stands among all cases."""

    failed: str  # "" if none did
    of_make_test: bool  # whether `make test` has the case that failed
    timed_out: bool


def outcome(folder: Path, files: list[str], seconds: float) -> Outcome:
    """Runs every case of these files in a copy of the repository, those of `make test` first, until one fails."""
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "--all", "-p", "no:cacheprovider", *files]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, timed_out = process.communicate(timeout=seconds)[0], False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, timed_out = process.communicate()[0], True
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    few = re.search(r"^of make test: (\d+) cases", said, re.MULTILINE)
    lines = re.findall(r"^\S+\.py ([.sxFE]+)(?: +\[ *\d+%\])?$", said, re.MULTILINE)
    made = sum(map(len, lines))
    if timed_out:
        return Outcome("", few is not None and made < int(few[1]), True)
    if process.returncode in (0, 5):  # 5: no tests in these files
        return Outcome("", False, False)
    return Outcome(failed[1] if failed else "pytest itself", few is None or made <= int(few[1]), False)


def tests_for(mutant: Mutant) -> list[str]:
    """Returns the test files that can notice a mutant, those most likely to first."""
    tree = ast.parse((ROOT / mutant.file).read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    module, folder = Path(mutant.file).stem, Path("tests", FOLDERS.get(mutant.room, mutant.room))
    likely = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        name, text = str(file.relative_to(ROOT)), file.read_text()
        named = sum(len(re.findall(rf"\b{re.escape(word)}\b", text)) for word in {*names, module})
        in_room = folder in Path(name).parents
        if in_room or named:
            likely[name] = (file.stem != f"test_{module}", not (in_room and named), not in_room, -named)
    return sorted(likely, key=lambda name: likely[name])


def run(arguments: argparse.Namespace) -> None:
    """Runs the tests on each mutant, and logs what became of it."""
    log: Path = arguments.log
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "repository"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
        (Path(name) / "shared").symlink_to(ROOT.parent / "shared")
        part, of = arguments.part
        for mutant in drawn(arguments.count, arguments.seed, arguments.modules)[part::of]:
            if any(row["mutant"] == asdict(mutant) for row in rows):
                continue
            path = folder / mutant.file
            source = path.read_bytes()
            path.write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
            begin = time.monotonic()
            tests = [f"tests/{test}" for test in arguments.tests] or tests_for(mutant)[: arguments.files]
            found = outcome(folder, tests, arguments.seconds)
            path.write_bytes(source)
            rows.append({"mutant": asdict(mutant), **asdict(found), "seconds": round(time.monotonic() - begin, 1)})
            with log.open("a") as file:
                print(json.dumps(rows[-1]), file=file)
            verdict = f"killed by {found.failed}" if found.failed else "out of time" if found.timed_out else "survived"
            print(f"{mutant.file}:{mutant.line}", mutant.was, "->", mutant.text, verdict, flush=True)


def table(log: Path) -> None:
    """Prints, for each room, what became of its mutants."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    numbers: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        kind = "out of time" if row["timed_out"] else "survived"
        if row["failed"]:
            kind = "make test" if row["of_make_test"] else "make thorough alone"
        for key in (Mutant(**row["mutant"]).room, "all"):
            numbers[key].update(["mutants", kind])
    columns = "mutants", "make test", "make thorough alone", "survived", "out of time"
    print(f"{'room':<14}" + "".join(f"{column:>21}" for column in columns) + f"{'share of make test':>21}")
    for room, n in sorted(numbers.items()):
        share = n["make test"] / max(1, n["make test"] + n["make thorough alone"])
        print(f"{room:<14}" + "".join(f"{n[column]:>21}" for column in columns) + f"{share:>21.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--log", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", type=int, default=FILES, help="test files for each mutant")
    parser.add_argument("--modules", nargs="+", default=[], help="draw from these alone, as in sampling/canaries.py")
    parser.add_argument("--tests", nargs="+", default=[], help="run these alone, as in training/test_audit.py")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each mutant")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("K", "OF"), help="every OF-th mutant")
    arguments = parser.parse_args()
    if arguments.what == "run":
        run(arguments)
    else:
        table(arguments.log)


if __name__ == "__main__":
    main()
