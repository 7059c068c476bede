# SPDX-License-Identifier: Apache-2.0
"""Provides the choice among examples with several owners: e-mails, chats, transactions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch

from ..support.validate import Refused

SEVERAL = (tuple, list, set, frozenset)


def owners_of_each(where: str, ids: Sequence[Any] | np.ndarray) -> list[set[Hashable]] | None:
    """Returns the owners of each example if one of them has several in a list; None if each has a single id."""
    if isinstance(ids, np.ndarray) and ids.dtype.kind != "O":
        return None
    plain = [one.tolist() if isinstance(one, (np.ndarray, torch.Tensor)) else one for one in ids]
    if not any(isinstance(one, SEVERAL) for one in plain):
        return None
    lists = [list(one) if isinstance(one, SEVERAL) else [one] for one in plain]
    if empty := [i for i, one in enumerate(lists) if not one]:
        raise Refused(
            f"{where}: example {empty[0]} has no owner. Every example needs one: leave it out, or give it an owner of "
            "its own."
        )
    return [{plain_id(where, owner, i) for owner in owners} for i, owners in enumerate(lists)]


def check_public(where: str, owners: Sequence[set[Hashable]], public: bool) -> None:
    """Refuses several owners of an example that are not public."""
    if not public:
        first = next((i for i, one in enumerate(owners) if len(one) > 1), 0)
        raise Refused(
            f"{where}: example {first} has its owners in a list. Which examples stay depends on who shares examples "
            "with whom: one person more could exchange all others, so that no price is known if this is private. If it "
            "is public who owns each example (its content need not be), pass public_owners=True. Else give an example "
            "one owner, or leave it out."
        )


def kept_of_each(owners: Sequence[set[Hashable]], most: int) -> np.ndarray:
    """Returns the examples that stay, ascending, of which every owner has at most ``most``.

    Examples with few owners come first, then those in front. None that was left out could be added. The choice depends
    on the owners alone, not on what the examples are.

    Source: Ganesh, McKenna, McMahan, Smith & Wu (2025), arXiv:2503.03622: greedy bounds of contributions.
    """
    counts: Counter[Hashable] = Counter()
    kept = []
    for i in sorted(range(len(owners)), key=lambda i: len(owners[i])):
        if all(counts[owner] < most for owner in owners[i]):
            counts.update(owners[i])
            kept.append(i)
    return np.sort(np.array(kept, np.int64))


def plain_id(where: str, one: Any, index: int) -> Hashable:
    """Returns an id by which equal owners are equal; refuses what is no id of one owner."""
    if isinstance(one, torch.Tensor):
        one = one.item() if one.ndim == 0 else one.tolist()
    one = one.item() if isinstance(one, np.generic) else one
    if isinstance(one, (tuple, list, set, frozenset, dict, np.ndarray)):
        raise Refused(
            f"{where}: an owner of example {index} is {repr(one)[:60]}. If these are parts of one id, join them into a "
            "text."
        )
    if one is None or _is_missing(one):
        raise Refused(
            f"{where}: example {index} has no owner ({one!r}). Every example needs one: leave it out, or give it an "
            "owner of its own."
        )
    try:
        hash(one)
    except TypeError:
        raise Refused(
            f"{where}: the owner of example {index} is {type(one).__name__}, which is not hashable. Give a number or a "
            "text for each owner."
        ) from None
    return one


def _is_missing(one: Any) -> bool:
    """True for NaN, NaT and pandas.NA, which are not equal to themselves."""
    try:
        return not bool(one == one)
    except (TypeError, ValueError):
        return True
