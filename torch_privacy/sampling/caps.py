# SPDX-License-Identifier: Apache-2.0
"""Provides `at_most`, a cap on everybody's examples."""

from __future__ import annotations

import hashlib
import math
import numbers
import secrets
from collections.abc import Hashable
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset

from ..support.validate import plain_number, whole
from .co_owners import check_public, kept_of_each, owners_of_each, plain_id
from .datasets import ChosenByOwners, check_map_style
from .owners import column_of, ids_of, owners_of


def at_most(
    dataset: Dataset, owners: Any, count: int, *, seed: int | None = None, public_owners: bool = False
) -> Subset:
    """Returns the data set with at most ``count`` examples of each owner, chosen at random.

    It enforces the cap that `training.spent(examples_per_person=count)` states for example-level training. The cap must
    not be the largest number of examples of one owner in the data, which is private.

    Args:
        dataset: map-style.
        owners: (n,) one id for each example, or the name of a column: as for `Examples`. With ``public_owners`` an
            example may have several, in a list; examples with few owners stay first then, and nothing is random.
        count: largest number of examples of each owner, at least 1.
        seed: fixes the choice. It may be public; by default it is secret, from the operating system.
        public_owners: True if it is public who owns each example; its content need not be.

    Returns:
        A ``torch.utils.data.Subset``; its ``indices`` are as private as the data.

    Guarantees:
        - Every subset of an owner's examples of that size is equally likely.
        - The choice for an owner depends on the seed, its id and the number of its examples alone, so that adding or
          removing another owner changes nothing for it, whatever the seed.
        - Where examples have several owners, the choice depends on who owns them alone, and the statement of a training
          on the result lists the owners of each example as public.

    Raises:
        Refused: an example without an owner, several owners that are not public, or another number of ids.
        ValueError: ``count`` is below 1.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> data = TensorDataset(torch.arange(6))
        >>> capped = at_most(data, ["ann", "ann", "ann", "bob", "ann", "cem"], 2)
        >>> len(capped)
        4
    """
    where = "at_most"
    check_map_style(dataset)
    whole(where, at_least=1, count=plain_number(count))
    if isinstance(owners, str):
        owners = column_of(where, owners, dataset)
    ids = ids_of(where, owners)
    if (several := owners_of_each(where, ids)) is not None and len(several) == len(dataset):  # type: ignore[arg-type]
        check_public(where, several, public_owners)
        return ChosenByOwners(dataset, kept_of_each(several, count).tolist())
    known = owners_of(where, ids, dataset, count, public=public_owners)
    assert known is not None
    key = secrets.token_bytes(32) if seed is None else hashlib.blake2b(repr(plain_number(seed)).encode()).digest()[:32]
    first = known.examples[known.starts[:-1]]
    seeds = [
        hashlib.blake2b(_canonical(plain_id(where, ids[i], i)), key=key, digest_size=8).digest() for i in first.tolist()
    ]
    chosen, _ = known.chosen(np.arange(known.count), np.frombuffer(b"".join(seeds), "<u8").astype(np.uint64))
    return Subset(dataset, np.sort(chosen).tolist())


def _canonical(one: Hashable) -> bytes:
    """Returns bytes that are equal for equal ids."""
    number: Any = one if isinstance(one, numbers.Real) else math.nan
    if math.isfinite(number) and number == int(number):
        return repr(int(number)).encode()
    return repr(str(one) if isinstance(one, str) else one).encode()
