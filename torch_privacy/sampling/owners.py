# SPDX-License-Identifier: Apache-2.0
"""Provides owners: which examples belong to the same person, and samplers that draw persons instead of examples."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from ..support.units import unit_of_column, with_at_most
from ..support.validate import Refused, check_unit, plain_number, whole
from .co_owners import check_public, kept_of_each, owners_of_each, plain_id
from .samplers import Sampler

OWNER = "owner"  # the usual word for who has several examples
GAMMA, MIX_1, MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, eq=False)
class Owners:
    """The owner of each example, by number, and the largest number of an owner's examples that a step uses.

    Args:
        numbers: (n,) owner of each example, 0 ... count - 1, in the order of their first examples.
        count: number of owners.
        per_owner: k, at least 1.
        name: the word for an owner, such as "customer".
        left_out: number of examples that are in no step, because examples have several owners; their number is -1.
            None if every example has one owner.
    """

    numbers: np.ndarray
    count: int
    per_owner: int
    name: str = OWNER
    left_out: int | None = None

    def __repr__(self) -> str:
        return f"Owners({self.count} of {self.name!r}, per_owner={self.per_owner})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Owners) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @property
    def in_words(self) -> str:
        """Returns the unit of privacy: "customer with at most 5 examples"."""
        return with_at_most(self.name, self.per_owner)

    @cached_property
    def fingerprint(self) -> str:
        """Returns a digest of the assignment, ``per_owner`` and the name, without the ids."""
        digest = hashlib.blake2b(f"{self.name} {self.per_owner} {self.count} ".encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.numbers, "<i8").tobytes())
        return digest.hexdigest()

    @cached_property
    def examples(self) -> np.ndarray:
        """Returns all examples that are in steps, those of one owner together and in their order."""
        return np.argsort(self.numbers, kind="stable")[self.left_out or 0 :]

    @cached_property
    def starts(self) -> np.ndarray:
        """Returns (count + 1,) where each owner's examples begin in `examples`."""
        return np.append(0, np.cumsum(np.bincount(self.numbers + 1, minlength=self.count + 1)[1:]))

    def with_more(self, count: int) -> Owners:
        """Returns the owners of ``count`` more examples, each of which has an owner of its own."""
        more = self.count + np.arange(count)
        return replace(self, numbers=np.append(self.numbers, more), count=self.count + count)

    def chosen(self, owners: np.ndarray, seeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns up to ``per_owner`` examples of each of these owners, and the position of each example's owner.

        Every subset of an owner's examples of that size is equally likely. The choice is a function of the owner's seed
        and of the number of its examples alone.

        Args:
            owners: (m,) numbers of different owners.
            seeds: (m,) uint64, one for each.
        """
        first, sizes = self.starts[owners], np.diff(self.starts)[owners]
        position = np.repeat(np.arange(len(owners)), sizes)
        within = np.arange(len(position)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        if (sizes > self.per_owner).any():
            lot = _mixed(seeds[position] + GAMMA * (within + 1).astype(np.uint64))
            order = np.lexsort((lot, position))
            rank = np.empty_like(order)
            rank[order] = within  # positions ascend, so that each owner's lots are ranked among themselves
            kept = rank < self.per_owner
            position, within = position[kept], within[kept]
        return self.examples[first[position] + within], position


def _mixed(state: np.ndarray) -> np.ndarray:
    """Returns the outputs of SplitMix64 (Steele, Lea and Flood 2014) in these states."""
    state = (state ^ (state >> np.uint64(30))) * MIX_1
    state = (state ^ (state >> np.uint64(27))) * MIX_2
    return state ^ (state >> np.uint64(31))


class OwnerSampler:
    """Draws owners by a sampler, and up to ``per_owner`` examples of each.

    Args:
        owners: the owner of each example.
        sampler: draws owners, as others draw examples.

    Guarantees:
        - Owners join as the sampler says, whatever the number of their examples. An *example* of an owner who joins is
          drawn with probability ``min(1, per_owner / size of its owner)``.
        - An owner's choice is a function of key, step, the owner's place among those drawn and its number of examples,
          so that replacing all examples of one owner changes nothing for the others.
    """

    def __init__(self, owners: Owners, sampler: Sampler):
        self.owners, self.key, self._sampler = owners, sampler.key, sampler
        self._drawn = lru_cache(maxsize=64)(self._draw)

    def _draw(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = self._sampler.indices(step)
        return self.owners.chosen(chosen, self._sampler.seeds(step, len(chosen)))

    def indices(self, step: int) -> np.ndarray:
        """Returns the examples that join the step, those of one owner together, (batch_size,) int64."""
        return self._drawn(step)[0]

    def units(self, step: int) -> np.ndarray:
        """Returns (batch_size,) the position of each example's owner among the owners drawn, in ascending order."""
        return self._drawn(step)[1]


# Reading owners


def owners_of(
    where: str,
    owners: Any,
    dataset: Any,
    per_owner: int | None,
    name: str | None = None,
    *,
    num_examples: int | None = None,
    public: bool = False,
) -> Owners | None:
    """Returns the owners of a data set's examples; None if there are none.

    Args:
        where: the function that was called, for messages.
        owners: (n,) one id for each example: integers, texts or other hashable values, in a list, array, tensor or
            series; or the name of the data set's column that has them. With ``public`` several for an example.
        dataset: the data set.
        per_owner: see `Owners`.
        name: the word for an owner; by default the column's name, or "owner".
        num_examples: n, if it is not the length of the data set.
        public: True if it is public who owns each example.

    Raises:
        Refused: an example without an owner, another number of ids, or no such column; several owners of an example
            that are not public, or with ``per_owner`` above 1.
        ValueError: ``per_owner`` without ``owners``, or below 1.
    """
    if owners is None:
        if per_owner is not None or name is not None:
            given = f"per_owner={per_owner!r}" if per_owner is not None else f"owner_name={name!r}"
            raise ValueError(
                f"{where}: {given} needs owners=, the owner of each example: a list, an array, or the name of a column."
            )
        return None
    if per_owner is None:
        raise ValueError(
            f"{where}: owners= needs per_owner=, the largest number of an owner's examples that a step uses, such as 5."
        )
    most: int = plain_number(per_owner)
    whole(where, at_least=1, per_owner=most)
    column = owners if isinstance(owners, str) else None
    if column is not None:
        owners = column_of(where, column, dataset)
    if name is None:
        name = OWNER if column is None else unit_of_column(column)
    check_unit(where, owner_name=name)
    ids, n = ids_of(where, owners), len(dataset) if num_examples is None else num_examples
    if len(ids) != n:
        raise Refused(
            f"{where}: owners has {len(ids)} ids, and the data set {n} examples. Give one id for each example, in the "
            "order of the data set."
        )
    if (several := owners_of_each(where, ids)) is not None:
        check_public(where, several, public)
        if most > 1:
            raise Refused(
                f"{where}: per_owner={most} and examples with several owners: an owner's row would hold examples of "
                f"others, so that two rows change with one person. Take per_owner=1; or tp.at_most(dataset, owners, "
                f"{most}, public_owners=True) and training.spent(examples_per_person={most})."
            )
        kept = kept_of_each(several, 1)
        numbers = np.full(n, -1)
        numbers[kept] = np.arange(len(kept))
        return Owners(numbers, len(kept), 1, name, n - len(kept))
    numbers = _numbered(where, ids)
    return Owners(numbers, int(numbers.max()) + 1, most, name)


def column_of(where: str, column: str, dataset: Any) -> Any:
    """Returns a data set's column; items that are mappings are read one by one."""
    names = getattr(dataset, "column_names", None)
    if isinstance(names, (list, tuple)):
        if column in names:
            plain = dataset.with_format(None) if hasattr(dataset, "with_format") else dataset  # all columns, no tensors
            return list(plain[column])
        raise Refused(f"{where}: owners={column!r} is no column of the data set, which has {', '.join(names)}.")
    first = dataset[0]
    if isinstance(first, Mapping):
        if column in first:
            return [dataset[i][column] for i in range(len(dataset))]
        raise Refused(f"{where}: owners={column!r} is no key of the items, which have {', '.join(map(str, first))}.")
    raise Refused(
        f"{where}: owners={column!r} names a column, but items of {type(dataset).__name__} are no mappings. Pass the "
        "ids themselves, one for each example, such as owners=table['customer']."
    )


def ids_of(where: str, owners: Any) -> Sequence[Any] | np.ndarray:
    """Returns the ids as a sequence with one entry for each example."""
    if isinstance(owners, torch.Tensor):
        owners = owners.detach().cpu().numpy() if owners.dtype is not torch.bfloat16 else owners.tolist()
    elif hasattr(owners, "to_pylist"):  # a column of pyarrow
        owners = owners.to_pylist()
    elif hasattr(owners, "to_numpy"):  # a series of pandas or polars
        owners = owners.to_numpy()
    if isinstance(owners, (bytes, Mapping, set, frozenset)) or not isinstance(owners, (Iterable, np.ndarray)):
        raise Refused(
            f"{where}: owners of type {type(owners).__name__} must be one id for each example: a list, an array, or "
            "the name of a column."
        )
    owners = owners if isinstance(owners, np.ndarray) else list(owners)
    if isinstance(owners, np.ndarray) and owners.ndim != 1:
        if owners.ndim == 2:
            return owners.tolist()  # several owners of each example
        raise Refused(f"{where}: owners of shape {owners.shape} must be of shape (n,), one id for each example.")
    return owners


def _numbered(where: str, ids: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Returns the number of each id, in the order of their first examples."""
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iubSU":
        _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        return rank[inverse.ravel()]
    known: dict[Hashable, int] = {}
    return np.fromiter(
        (known.setdefault(plain_id(where, one, i), len(known)) for i, one in enumerate(ids)), np.int64, len(ids)
    )
