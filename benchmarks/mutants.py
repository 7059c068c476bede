# SPDX-License-Identifier: Apache-2.0
"""Breaks the code at many places, one at a time, and counts which of these mutants the tests notice.

    pip install coverage
    python benchmarks/mutants.py cover --data cover.sqlite          # which test function runs which line (make test's)
    python benchmarks/mutants.py run --data cover.sqlite --log mutants.jsonl --count 150
    python benchmarks/mutants.py run --data cover.sqlite --log mutants.jsonl --thorough       # those that survived
    python benchmarks/mutants.py table --log mutants.jsonl

A mutant swaps a comparison, an operator, ``and`` and ``or``, a condition and its opposite, changes a number by one, or
drops a statement that raises. The draw gives each room its share of lines. A mutant runs the test functions that run
its line in a copy of the repository, those of its own room first, until one fails or the time is over. One that no test
runs survives. With ``--thorough``, survivors run what `make test` leaves out of the same files. Some mutants cannot be
noticed, because they change speed or a message only, so what counts is the share of those that `make thorough` notices
and `make test` does not.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import sqlite3
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
SWAPPED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Pow: "*", ast.Mod: "*",
    ast.BitAnd: "|", ast.BitOr: "&", ast.And: "or", ast.Or: "and",
}  # fmt: skip
PLUGIN = """
import json, os
def pytest_collection_modifyitems(config, items):
    wanted = set(json.loads(os.environ["MUTANT_TESTS"]))
    left_out = [item for item in items if item.nodeid.partition("[")[0] not in wanted]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item.nodeid.partition("[")[0] in wanted]
"""
CONTEXTS = """
import coverage, os, pytest
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    found = coverage.Coverage.current()
    if found is not None:
        found.switch_context(item.nodeid.partition("[")[0])
def pytest_runtest_logreport(report):
    if report.failed:
        with open(os.environ["MUTANT_FAILED"], "a") as file:
            print(report.nodeid.partition("[")[0], file=file)
"""


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


def drawn(count: int, seed: int) -> list[Mutant]:
    """Returns mutants of all rooms, each with its share of the lines."""
    rooms: dict[str, list[Mutant]] = defaultdict(list)
    for file in sorted((ROOT / PACKAGE).rglob("*.py")):
        for one in mutants_of(file):
            rooms[one.room].append(one)
    chance, total = random.Random(seed), sum(map(len, rooms.values()))
    numbers = {room: max(2, round(count * len(all_) / total)) for room, all_ in rooms.items()}
    chosen = [one for room, all_ in rooms.items() for one in chance.sample(all_, min(numbers[room], len(all_)))]
    chance.shuffle(chosen)
    return chosen


# Running --------------------------------------------------------------------------------------------------------------


def copy_of_repository(folder: Path) -> None:
    """Copies the files that git knows, and links the data beside it."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, files):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)


def pytest_in(folder: Path, *arguments: str, plugins: Path, seconds: float | None = None, **variables: str) -> int:
    """Runs pytest in a copy; returns its exit status, -1 if the time was over."""
    paths = [str(folder), str(plugins), *filter(None, [os.environ.get("PYTHONPATH")])]
    data = {"TORCH_PRIVACY_DATA": os.environ.get("TORCH_PRIVACY_DATA", str(ROOT.parent / "shared" / "data"))}
    environment = os.environ | data | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, "-m", *arguments]
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return -1
    return done.returncode


def cover(data: Path) -> None:
    """Runs the tests of `make test` once, and notes which lines each test function runs."""
    with tempfile.TemporaryDirectory() as name:
        folder, plugins = Path(name) / "repository", Path(name) / "plugins"
        plugins.mkdir()
        (plugins / "mutant_contexts.py").write_text(CONTEXTS)
        copy_of_repository(folder)
        run = ["coverage", "run", f"--data-file={data.resolve()}", f"--source={PACKAGE}", "-m", "pytest", "-q"]
        failed = failed_without_mutants(data)
        failed.unlink(missing_ok=True)
        status = pytest_in(folder, *run, "-p", "mutant_contexts", plugins=plugins, MUTANT_FAILED=str(failed.resolve()))
    print(f"pytest ended with {status}")


def failed_without_mutants(data: Path) -> Path:
    """Returns the file with the names of tests that fail in a copy, mutant or not, such as those that need git."""
    return data.with_suffix(".failed")


def tests_of(data: Path, mutant: Mutant) -> set[str]:
    """Returns the test functions that run the mutant's line."""
    from coverage.numbits import register_sqlite_functions

    connection = sqlite3.connect(data)
    register_sqlite_functions(connection)
    query = (
        "select distinct context.context from line_bits join file on file.id = line_bits.file_id "
        "join context on context.id = line_bits.context_id where file.path like ? and num_in_numbits(?, numbits)"
    )
    found = connection.execute(query, (f"%/repository/{mutant.file}", mutant.line)).fetchall()
    failed = failed_without_mutants(data)
    return {c for (c,) in found if "::" in c} - set(failed.read_text().split("\n") if failed.exists() else [])


def run(arguments: argparse.Namespace) -> None:
    """Runs the tests on each mutant, and logs what became of it."""
    log: Path = arguments.log
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    with tempfile.TemporaryDirectory() as name:
        folder, plugins = Path(name) / "repository", Path(name) / "plugins"
        plugins.mkdir()
        (plugins / "mutant_tests.py").write_text(PLUGIN)
        copy_of_repository(folder)
        for mutant in drawn(arguments.count, arguments.seed):
            known = {row["set"]: row for row in rows if row["mutant"] == asdict(mutant)}
            kind = "thorough" if arguments.thorough else "test"
            if kind in known or (arguments.thorough and known.get("test", {"killed": True})["killed"]):
                continue
            path = folder / mutant.file
            source = path.read_bytes()
            path.write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
            begin = time.monotonic()
            killed, tests = killed_by(arguments, mutant, folder, plugins)
            path.write_bytes(source)
            row = {"mutant": asdict(mutant), "set": kind, "killed": killed, "tests": tests}
            rows.append(row | {"seconds": round(time.monotonic() - begin, 1)})
            with log.open("a") as file:
                print(json.dumps(rows[-1]), file=file)
            print(
                kind,
                "killed  " if killed else "survived",
                f"{mutant.file}:{mutant.line}",
                mutant.was,
                "->",
                mutant.text,
            )


def killed_by(arguments: argparse.Namespace, mutant: Mutant, folder: Path, plugins: Path) -> tuple[bool, int]:
    """Returns whether a test fails on a mutant, and how many test functions run its line."""
    tests = tests_of(arguments.data, mutant)
    files = sorted({test.partition("::")[0] for test in tests}, key=lambda file: (mutant.room not in file, file))
    files = [file for file in files if (folder / file).exists()]
    if not files:
        return False, 0
    more = ["--thorough"] if arguments.thorough else ["-p", "mutant_tests"]  # of the others no data say what they run
    status = pytest_in(
        folder, "pytest", "-q", "-x", "-p", "no:cacheprovider", *more, *files,
        plugins=plugins, seconds=arguments.seconds, MUTANT_TESTS=json.dumps(sorted(tests)),
    )  # fmt: skip
    return status not in (0, 5, -1), len(tests)


def table(log: Path) -> None:
    """Prints, for each room, how many mutants each set of tests notices."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    numbers: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        room = Mutant(**row["mutant"]).room
        for key in (room, "all"):
            numbers[key]["mutants"] += row["set"] == "test"
            numbers[key][row["set"]] += row["killed"]
    print(f"{'room':<14} mutants   make test   make thorough besides   share of make test")
    for room, n in sorted(numbers.items()):
        share = n["test"] / max(1, n["test"] + n["thorough"])
        print(f"{room:<14} {n['mutants']:7} {n['test']:11} {n['thorough']:23} {share:20.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cover", "run", "table"])
    parser.add_argument("--data", type=Path, default=Path("cover.sqlite"))
    parser.add_argument("--log", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument(
        "--thorough", action="store_true", help="survivors, with what make test leaves out of the files"
    )
    arguments = parser.parse_args()
    if arguments.what == "cover":
        cover(arguments.data)
    elif arguments.what == "run":
        run(arguments)
    else:
        table(arguments.log)


if __name__ == "__main__":
    main()
