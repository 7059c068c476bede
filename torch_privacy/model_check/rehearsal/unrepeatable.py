# SPDX-License-Identifier: Apache-2.0
"""Separates what differs between two runs of the same batch, such as durations, from what the examples determine."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...support.contents import same
from .turn import Answers

VARIES = object()  # stands for a value that differs between two runs of the same batch


def varying_names(names: Collection[str], original: Answers, again: Answers, others: Sequence[Answers]) -> set[str]:
    """Returns the names with contents that differ between two runs of the same batch.

    With other examples it must differ in no other places.
    """
    varying = set()
    for name in names:
        repeated = _repeated_part(_contents_of(original, name), _contents_of(again, name))
        differs = not same(repeated, _contents_of(original, name))
        if differs and all(_agrees(_contents_of(other, name), repeated) for other in others):
            varying.add(name)
    return varying


def not_compared(names: str) -> str:
    """Returns the sentence for the statement."""
    return (
        f"Not compared: {names}, which differ between two runs of the same batch, as durations do. No loss depends on "
        "them."
    )


def _contents_of(answers: Answers, name: str) -> tuple[Any, Any]:
    """Returns what a run left under a name, after the losses and after the rows."""
    return answers.changes.get(name), answers.later.get(name)


def _repeated_part(one: Any, other: Any) -> Any:
    """Returns a content with ``VARIES`` in the places where two runs of the same batch differ."""
    if same(one, other):
        return one
    if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        return {key: _repeated_part(value, other[key]) for key, value in one.items()}
    sequences = isinstance(one, (list, tuple, deque)) and isinstance(other, (list, tuple, deque))
    if sequences and len(one) == len(other):
        return [_repeated_part(a, b) for a, b in zip(one, other, strict=True)]
    return VARIES


def _agrees(content: Any, repeated: Any) -> bool:
    """True if a content differs from a repeated part in no other places than those that vary anyway."""
    if repeated is VARIES:
        return True
    if isinstance(repeated, Mapping) and isinstance(content, Mapping):
        return content.keys() == repeated.keys() and all(_agrees(v, repeated[key]) for key, v in content.items())
    if isinstance(repeated, (list, tuple)) and isinstance(content, (list, tuple, deque)):
        return len(content) == len(repeated) and all(map(_agrees, content, repeated))
    return same(content, repeated)
