# SPDX-License-Identifier: Apache-2.0
"""The floors of the package, and what its files really import: ``python tests/architecture.py`` counts both.

A room is an entry of the package's root: a file, or a folder with all that is in it.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "torch_privacy"
FLOORS = [  # from the top: what a user calls, down to what knows nothing of privacy
    ["cli"],
    ["experiments"],
    ["huggingface", "lightning", "opacus", "sklearn", "tables"],
    ["training"],
    ["runs"],
    ["mechanisms"],
    ["model_check"],
    ["jacobian"],
    ["ops"],
    ["data", "sampling"],
    ["privacy"],
    ["support"],
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def module_of(path: Path) -> str:
    """Returns the module's name below the package: ``jacobian.tape``; the name of a folder for its ``__init__``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    """Returns every module but the package's own ``__init__``, which lists the public names."""
    return {module_of(path): path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"}


def room_of(module: str) -> str:
    """Returns the entry of the package's root that a module belongs to; what starts the command is part of it."""
    return "cli" if module == "__main__" else module.split(".")[0]


@cache
def imports_of(module: str) -> frozenset[str]:
    """Returns the modules of the package that a module imports, anywhere in its file, for types alone included."""
    path = modules()[module]
    package = ["torch_privacy", *path.relative_to(PACKAGE).parent.parts]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            names = {f"{source}.{alias.name}" for alias in node.names}
            found |= {name if _below(name) in modules() else source for name in names}
    return frozenset(_below(name) for name in found if _below(name) in modules()) - {module}


def _below(name: str) -> str:
    return name.removeprefix("torch_privacy.") if name.startswith("torch_privacy.") else ""


def room_imports() -> dict[str, set[str]]:
    """Returns, for each room, the rooms that it imports."""
    found: dict[str, set[str]] = {room_of(module): set() for module in modules()}
    for module in modules():
        found[room_of(module)] |= {room_of(other) for other in imports_of(module)} - {room_of(module)}
    return found


def upward_imports() -> list[tuple[str, str]]:
    """Returns the imports (module, imported module) that lead to the same floor or a higher one."""
    return [
        (module, other)
        for module in modules()
        for other in sorted(imports_of(module))
        if room_of(module) != room_of(other) and FLOOR[room_of(other)] <= FLOOR[room_of(module)]
    ]


def circles() -> list[list[str]]:
    """Returns the groups of modules that import each other in a circle."""
    reach = {module: _reachable(module) for module in modules()}
    groups = {frozenset([module, *(m for m in reach[module] if module in reach[m])]) for module in modules()}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reachable(start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = imports_of(waiting.pop()) - found
        found |= new
        waiting += new
    return found


def lines_of(room: str) -> int:
    """Returns the number of lines in a room."""
    return sum(len(path.read_text().splitlines()) for module, path in modules().items() if room_of(module) == room)


def counts() -> dict[str, int]:
    """Returns the numbers that describe the house."""
    return {
        "files": len(modules()),
        "lines": sum(map(lines_of, FLOOR)),
        "entries of the root": sum(not entry.name.startswith("__pycache__") for entry in PACKAGE.iterdir()),
        "rooms": len(FLOOR),
        "floors": len(FLOORS),
        "imports between rooms": sum(map(len, room_imports().values())),
        "imports that lead up": len(upward_imports()),
        "circles of modules": len(circles()),
    }


if __name__ == "__main__":
    for name, number in counts().items():
        print(f"{number:6}  {name}")
    for module, other in upward_imports():
        print(f"        up: {module} imports {other}")
    for circle in circles():
        print(f"        circle: {', '.join(circle)}")
