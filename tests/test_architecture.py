# SPDX-License-Identifier: Apache-2.0
"""Tests that imports go only downward in the order of the package's parts, type-only imports included."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "torch_privacy"
FLOORS = [  # from the commands at the top to the validators at the bottom
    ["cli"],
    ["experiments"],
    ["training"],
    ["gep", "estimated_norms"],
    ["model_check"],
    ["report"],
    ["runs"],
    ["pca", "selection", "averaging"],
    ["mechanism"],
    ["jacobian"],
    ["clipping"],
    ["ops"],
    ["privacy"],
    ["data"],
    ["noise", "sampling", "batches"],
    ["_model_state"],
    ["_replay", "_torch_modes"],
    ["_validate"],
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
NOT_YET = {("model_check", "cli")}  # in a function


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> Iterator[str]:
    """Yields the parts of the package that a file imports from, anywhere in the file."""
    here = ("torch_privacy", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*here[: len(here) - node.level + 1]] if node.level else []
            whole = base + (node.module.split(".") if node.module else [])
            names = [[*whole, alias.name] for alias in node.names] if len(whole) == 1 else [whole]
        else:
            continue
        yield from (name[1] for name in names if name[0] == "torch_privacy" and len(name) > 1 and name[1] in FLOOR)


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def test_every_room_has_its_floor():
    assert {room_of(path) for path in FILES} == set(FLOOR)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path):
    room = room_of(path)
    up = {(room, other) for other in imported_rooms(path) if other != room and FLOOR[other] <= FLOOR[room]}
    assert not up - NOT_YET


def test_what_is_not_yet_done_is_still_there():
    found = {(room_of(path), other) for path in FILES for other in imported_rooms(path)}
    assert found >= NOT_YET
