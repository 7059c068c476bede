# SPDX-License-Identifier: Apache-2.0
"""Splits rows into training and test rows, by their positions or owners alone."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..support.validate import strictly_between, whole
from .extra import needed

WORD = 2**64


def split(
    n: int, *, seed: int = 0, share: float = 0.2, owners: Any = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the positions of the training rows and of the test rows, each in increasing order.

    Row i is a test row if ``hash(seed, i) < share``; with owners, if ``hash(seed, owner)`` is, so that all rows of an
    owner are on the same side. So adding a row at the end, or an owner, moves no other row to the other side.

    Args:
        n: number of rows.
        seed: public seed, 0 or greater.
        share: share of test rows (or owners) to expect, in (0, 1).
        owners: one value per row; none may be missing.

    Guarantees:
        - A function of the arguments alone: the same on every machine, and of no other cell.

    Raises:
        ValueError: a number is out of range, an owner is missing, or one of the two parts would be empty.

    Example:
        >>> train, test = split(10, share=0.4)
        >>> train.tolist(), test.tolist()
        ([0, 2, 4, 5, 7], [1, 3, 6, 8, 9])
    """
    whole("split", at_least=1, n=n)
    whole("split", seed=seed)
    strictly_between("split", 0, 1, share=share)
    if owners is None:
        is_test = np.array([_hash(seed, "row", i) for i in range(n)]) < share
    else:
        codes, names = owner_codes(owners, n, "split")
        is_test = np.array([_hash(seed, "owner", name) for name in names])[codes] < share
    if is_test.all() or not is_test.any():
        what = "rows" if owners is None else "owners"
        raise ValueError(
            f"split: share={share!r} of the {what} leaves none for {'training' if is_test.all() else 'test'}. Choose "
            "another share or seed."
        )
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def owner_codes(owners: Any, n: int, where: str) -> tuple[NDArray[np.int64], list[str]]:
    """Returns the number of each row's owner, (n,), and the owners' names.

    Raises:
        ValueError: there are not n owners, or one is missing.
    """
    owners = needed("pandas").Series(list(owners), dtype=object)
    if len(owners) != n:
        raise ValueError(f"{where}: got {len(owners)} owners for {n} rows. Pass one owner per row.")
    place: dict[Any, int] = {}  # of each name; to some versions of pandas a text ends at a zero character
    codes = np.fromiter((place.setdefault(owner, len(place)) for owner in owners), np.int64, n)
    texts = [" ".join(str(name).split()) for name in place]
    if owners.isna().any() or "" in texts:
        raise ValueError(f"{where}: some rows have no owner. Give every row one, or leave these rows out of the file.")
    distinct = {text: i for i, text in enumerate(dict.fromkeys(texts))}  # " a" and "a" are one owner
    return np.array([distinct[text] for text in texts], np.int64)[codes], list(distinct)


def _hash(seed: int, kind: str, name: object) -> float:
    """Returns a number in [0, 1)."""
    digest = hashlib.blake2b(f"{seed} {kind} {name}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) / WORD
