# SPDX-License-Identifier: Apache-2.0
"""Provides `Program`, the text of a program and the edits to be made in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

MARK = "# torch_privacy:"


@dataclass
class Program:
    """Holds the parts of a program that change.

    Args:
        source: the program.
    """

    source: str
    tree: ast.Module = field(init=False)
    edits: list[tuple[int, int, str]] = field(default_factory=list)
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    hinted: set[tuple[int, str]] = field(default_factory=set)
    removed: set[int] = field(default_factory=set)  # ids of statements
    passed: list[tuple[ast.AST, str]] = field(default_factory=list)  # functions that get a training for a loader

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.source)
        self.text = self.source.encode()
        self.starts = [0]
        for line in self.text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
        self.engines: set[str] = set()
        self.optimizers: set[str] = set()
        self.loaders: set[str] = set()
        self.trainings: dict[str, str] = {}  # name of a loader -> of its training
        self.limits: dict[str, str] = {}  # name of a loader -> its microbatch size

    def __str__(self) -> str:
        text = self.text
        for start, end, new in sorted(self.edits, reverse=True):
            text = text[:start] + new.encode() + text[end:]
        return text.decode()

    def of(self, node: ast.AST) -> str:
        """Returns the text of a node as it stands in the program."""
        start, end = self.span(node)
        return self.text[start:end].decode()

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Returns the place of a node in the encoded program."""
        return (
            self.starts[node.lineno - 1] + node.col_offset,  # type: ignore[attr-defined]
            self.starts[node.end_lineno - 1] + node.end_col_offset,  # type: ignore[attr-defined]
        )

    def replace(self, node: ast.AST, new: str) -> None:
        """Puts a text in the place of a node."""
        self.edits.append((*self.span(node), new))

    def remove(self, statement: ast.stmt) -> None:
        """Removes a statement, with its line if it is alone there."""
        block = self._block(statement)
        if block is not None and all(other is statement or id(other) in self.removed for other in block):
            self.replace(statement, "pass")
            return
        self.removed.add(id(statement))
        first, last = statement.lineno - 1, statement.end_lineno or statement.lineno
        start, end = self.span(statement)
        around = self.text[self.starts[first] : start] + self.text[end : self.starts[last]].split(b"#")[0]
        if around.strip():
            self.replace(statement, "pass")
        else:
            self.edits.append((self.starts[first], self.starts[last], ""))

    def _block(self, statement: ast.stmt) -> list[ast.stmt] | None:
        parent = self.parents[statement]
        for name in ("body", "orelse", "finalbody"):
            block = getattr(parent, name, None)
            if isinstance(block, list) and statement in block:
                return block
        return None

    def statement(self, node: ast.AST) -> ast.stmt:
        """Returns the statement that a node belongs to."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def function(self, node: ast.AST) -> ast.AST:
        """Returns the function that a node is in, or the module."""
        while not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            node = self.parents[node]
        return node

    def hint(self, node: ast.AST, text: str) -> None:
        """Puts a comment above the statement of a node."""
        line = self.statement(node).lineno
        if (line, text) in self.hinted:
            return
        self.hinted.add((line, text))
        start = self.starts[line - 1]
        content = self.text[start : self.starts[line]].decode()
        indent = content[: len(content) - len(content.lstrip())]
        self.edits.append((start, start, f"{indent}{MARK} {text}\n"))

    def find(self, kind: type, within: ast.AST | None = None) -> Iterator[ast.AST]:
        """Yields the nodes of a kind, in the order of the program."""
        nodes = [node for node in ast.walk(within or self.tree) if isinstance(node, kind)]
        yield from sorted(nodes, key=lambda node: (node.lineno, node.col_offset))  # type: ignore[attr-defined]

    def calls(self, *names: str, within: ast.AST | None = None) -> Iterator[ast.Call]:
        """Yields the calls of functions or methods of these names."""
        for call in self.find(ast.Call, within):
            assert isinstance(call, ast.Call)
            if called(call) in names:
                yield call


def called(call: ast.Call) -> str:
    """Returns the last part of the name of what is called."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""
