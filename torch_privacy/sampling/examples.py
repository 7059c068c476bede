# SPDX-License-Identifier: Apache-2.0
"""Provides ``Examples``: the data of a training, what one unit of privacy is in them, and what may be spent on them."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from torch.utils.data import Dataset

from .. import privacy
from ..support.validate import Refused, plain_number, whole
from .batches import Batches, Collate
from .canaries import WithCanaries
from .datasets import check_map_style, check_taken_once, shows_owners
from .owners import Owners, owners_of

WHERE = "Examples"


@dataclass(frozen=True, eq=False)
class Examples:
    """The data of a `PrivateTraining`: how examples are fetched, and whether an example or its owner is protected.

    Where all defaults fit, pass the data set itself.

    Args:
        dataset: map-style; one item is one example, and no example is in it twice. Its size is treated as public.
        collate_fn: as in ``torch.utils.data.DataLoader``; must not mix examples, which rehearsals check, too.
        num_workers: number of processes that fetch examples, as in ``DataLoader``.
        views: number of consecutive copies of each example in a batch, fetched separately (random augmentations):
            batches have ``views`` times as many items, and ``step`` takes losses (n, views). The gradient of their mean
            is the example's one row, so more views cost no privacy.
        owners: (n,) the owner of each example, as integers or texts, or the name of the data set's column that has
            them. Then owners are protected with all of their examples, not single examples: an owner joins a step with
            probability q, up to ``per_owner`` of its examples are drawn by the secret key, and the mean of their
            gradients is one row, which is clipped once. ``delta`` must be below one over the number of owners, which is
            treated as public. An example joins with a probability that depends on the number of its owner's examples.
        per_owner: largest number of an owner's examples in a step, at least 1.
        public_owners: True if it is public who owns each example (its content need not be). Then an example may have
            several owners, in a list, such as sender and recipients, with ``per_owner=1``: each owner keeps at most one
            example, and the others are in no step. ``expected_batch_size`` counts the examples that stay.
        owner_name: the word for an owner in every statement, such as "customer"; by default the column's name, or
            "owner".
        budget: ``tp.Budget(epsilon, delta)``; training stops by itself before the step that would exceed it, if that
            step comes before ``num_steps``. Or the budget of the data, ``tp.Budget.open(path, ...)``, from which other
            runs draw, too: a training that does not fit is refused, before it reads a row. It needs ``run_folder``.
        assume_independent: a reason, in words, why examples do not depend on each other. No batch is rehearsed then,
            and the privacy statement prints the reason. Use it for a forward or a loop that cannot be repeated.

    Raises:
        Refused: no map-style data set; an example without an owner, another number of owners, or no such column.
        ValueError: a number is out of range.

    Example:
        >>> import torch
        >>> data = torch.utils.data.TensorDataset(torch.randn(6, 2))
        >>> Examples(data, owners=["ann", "ann", "bob", "bob", "bob", "cem"], per_owner=2, owner_name="person").unit
        'person'
    """

    dataset: Dataset
    _: KW_ONLY
    collate_fn: Collate | None = None
    num_workers: int = 0
    views: int = 1
    owners: Any = field(default=None, repr=False)
    per_owner: int | None = None
    owner_name: str | None = None
    assume_independent: str | None = None
    public_owners: bool = False
    budget: privacy.Budget | None = None
    known_owners: Owners | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.dataset, Examples):
            raise Refused(f"{WHERE}: dataset is Examples itself. Pass its dataset; dataclasses.replace changes fields.")
        check_map_style(self.dataset)
        for name in ("num_workers", "views"):
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        whole(WHERE, num_workers=self.num_workers)
        whole(WHERE, views=self.views, at_least=1)
        if self.collate_fn is not None and not callable(self.collate_fn):
            raise ValueError(f"{WHERE}: collate_fn={self.collate_fn!r} must be a function of a list of items.")
        if self.assume_independent is not None and not str(self.assume_independent).strip():
            raise ValueError(f"{WHERE}: assume_independent={self.assume_independent!r} must be a reason, in words.")
        canaries = self.canaries
        examples = self.dataset if canaries is None else canaries.examples
        known = owners_of(WHERE, self.owners, examples, self.per_owner, self.owner_name, public=self.public_owners)
        if known is not None and canaries is not None:
            known = known.with_more(canaries.num_canaries)
        object.__setattr__(self, "known_owners", known)
        if known is None:
            check_taken_once(examples, WHERE)

    @property
    def canaries(self) -> WithCanaries | None:
        """Returns the data set with its canaries in an audit, else None."""
        return self.dataset if isinstance(self.dataset, WithCanaries) else None

    @property
    def unit(self) -> str:
        """Returns what is protected: "example", or the word for an owner."""
        return "example" if self.known_owners is None else self.known_owners.name

    @property
    def num_examples(self) -> int:
        """Returns n; refuses a data set that has another size than its owners."""
        n, known = len(self.dataset), self.known_owners  # type: ignore[arg-type]
        if known is not None and len(known.numbers) != n:
            raise Refused(
                f"{WHERE}: the data set has {n} examples, and had {len(known.numbers)} when their owners were read. "
                "Make new Examples of it."
            )
        return n

    @property
    def num_units(self) -> int:
        """Returns the number of examples, or of owners."""
        return self.num_examples if self.known_owners is None else self.known_owners.count

    @property
    def shows_owners(self) -> bool:
        """True if it is public who owns each example, because examples have several owners and were chosen by that."""
        known, canaries = self.known_owners, self.canaries
        return shows_owners(self.dataset if canaries is None else canaries.examples) or (
            known is not None and known.left_out is not None
        )

    def batches(self) -> Batches:
        """Returns what fetches and collates batches of the examples."""
        canaries, known = self.canaries, self.known_owners
        items = self.dataset if canaries is None else canaries.items
        fetchable = None if canaries is None else canaries.fetchable
        return Batches(items, self.collate_fn, self.num_workers, fetchable, None if known is None else known.numbers)


def examples_of(dataset: Dataset | Examples) -> Examples:
    """Returns the examples of a training, from a plain data set, too."""
    return dataset if isinstance(dataset, Examples) else Examples(dataset)
