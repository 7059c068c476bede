# SPDX-License-Identifier: Apache-2.0
"""Shows that items do not depend on each other: fetches them from a copy with the rows of others exchanged.

The copy is another object (`DatasetShadow`), so that caches are filled anew. Two copies are compared, one with the rows
as they are, and one in which those of all other items are replaced by rows drawn from the others. Both begin in the
state that the data set had when the training was made, and with the same random numbers, own generators included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ..support.validate import Refused
from .datasets import tensors_and_rows
from .exchanged_items import CannotCompare, ExchangedItems, FetchFailed, Item, digest_of
from .row_laws import StoredRows, stored_in
from .shadow import DatasetShadow, TooLarge
from .stored_rows import is_keyed, num_bytes

MOST_BYTES = 2**30  # of something stored that is copied to exchange its rows
COSTLY = 2**24  # bytes of a table from which on it is exchanged in thorough comparisons only
FEWEST = 16  # items; with fewer, a list of this length may be anything
FEW = 8  # items that are compared in a rehearsal that is not thorough
MOST_ROWS, MOST_ENTRIES = 2**24, 2**20  # of an array, or of others, longer than the data set, to look for windows
MOST_SECONDS = 2.0  # for a thorough comparison, about
REPEATED, FEWEST_CHANGED = 12, 4  # comparisons before items are refused, and those in which they must change

HARMLESS = "This is harmless if each item is made from its own entries alone."


def item_check(dataset: Any, owners: np.ndarray | None) -> ItemCheck | None:
    """Returns the check for a data set; None if its items are its rows, without code that could read others."""
    is_plain = tensors_and_rows(dataset) is not None or type(dataset) in (list, tuple, np.ndarray, Tensor)
    return None if is_plain else ItemCheck(dataset, owners)


class ItemCheck:
    """Compares items of a data set with those of copies in which the rows of other items are exchanged.

    Args:
        dataset: map-style; it is copied in its present state.
        owners: (n,) the owner of each item, if items of one owner may depend on each other.

    Attributes:
        notes: what could not be compared, in words.
    """

    def __init__(self, dataset: Any, owners: np.ndarray | None = None):
        self._name, self._n, self._owners = type(dataset).__name__, len(dataset), owners
        self.notes: set[str] = set()
        self._shadow: DatasetShadow | None = None
        self._stored: list[StoredRows] = []
        self._is_new = self._is_thorough = True
        if self._n < FEWEST:
            return self._give_up(f"it has fewer than {FEWEST} items")
        try:
            self._shadow = DatasetShadow.of(dataset)
            self._stored = stored_in(self._shadow, self._n)
        except TooLarge as error:
            return self._give_up(str(error))
        except Exception as error:  # of the data set's own code; the text may hold data
            return self._give_up(f"it cannot be copied ({type(error).__name__})")
        self._longer = [stored for stored in self._stored if not stored.laws and stored.length > self._n]
        for stored in self._stored:
            if stored.laws and num_bytes(stored.value) > MOST_BYTES:
                stored.laws = []
                self.notes.add(
                    f"The entries of `{stored.path}` are larger than 1 GiB and were not exchanged. {HARMLESS}"
                )
        if not any(stored.laws for stored in self._stored):
            self.notes.add(
                "Nothing was found that the data set stores with one entry for each item, so items were not compared "
                f"with those of a data set with other examples. {HARMLESS}"
            )

    def __call__(self, items: np.ndarray, generator: np.random.Generator, *, thorough: bool) -> None:
        """Compares a few of these items; if thorough, all of them, or as many as take about two seconds.

        Raises:
            Refused: an item depends on what is stored of other items.
        """
        items, self._is_thorough = np.unique(items), thorough
        generator.shuffle(items)
        begun = time.monotonic()
        self._compare_group(items[:FEW], generator, memory=True)
        if thorough:
            count = int(FEW * MOST_SECONDS / (time.monotonic() - begun))
            for group in np.array_split(items[FEW : 2 * FEW + count], 2):
                self._compare_group(group, generator)

    def _compare_group(self, items: np.ndarray, generator: np.random.Generator, *, memory: bool = False) -> None:
        if self._shadow is None or not len(items):
            return
        run = ExchangedItems(self._shadow, generator, self._owners, self._n)
        try:
            self._compare(run, items)
            if memory:
                self._check_memory(run, items)
            if self._is_new:
                self._is_new = False
                self._check_origin(run, items)
                self._check_windows(run, items)
        except CannotCompare as error:
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        self._shadow = None
        self.notes.add(
            f"Items were not compared with those of a data set with other examples, because {why}. {HARMLESS}"
        )

    def _assigned(self) -> list[StoredRows]:
        """Returns what is exchanged: large tables, of which each comparison needs a new copy, only if thorough."""
        costly = (stored for stored in self._stored if stored.kind.put is None and num_bytes(stored.value) > COSTLY)
        left_out = [] if self._is_thorough else [*costly]
        return [stored for stored in self._stored if stored.laws and stored not in left_out]

    def _compare(self, run: ExchangedItems, items: np.ndarray) -> None:
        expected = run.items(items)
        for _ in range(len(self._stored) + 1):
            found = self._fetched(run, items)
            differing = [item for item, a, b in zip(items, expected, found, strict=True) if a != b]
            if not differing:
                return
            if run.items(items) != expected:
                raise CannotCompare("an item differs from one time that it is fetched to the next")
            try:
                self._explain(run, int(differing[0]))
            except Refused:
                self._check_again(lambda: run.items(items), lambda: run.items(items, self._assigned()))
                raise

    def _fetched(self, run: ExchangedItems, items: np.ndarray) -> list[Item]:
        """Returns the items with the rows of others exchanged; leaves out what makes fetching fail."""
        try:
            return run.items(items, self._assigned())
        except FetchFailed as error:
            for stored in self._assigned():
                try:
                    run.items(items, [stored])
                except FetchFailed:
                    self._leave_out(stored, f"fetching fails with other entries in it ({error})")
            try:
                return run.items(items, self._assigned())
            except FetchFailed:
                raise CannotCompare(f"fetching one with other examples fails ({error})") from None

    def _leave_out(self, stored: StoredRows, why: str) -> None:
        stored.laws = []
        self.notes.add(f"The entries of `{stored.path}` were not exchanged to compare items, because {why}. {HARMLESS}")

    def _explain(self, run: ExchangedItems, item: int) -> None:
        """Finds out what made an item differ: changes the laws of what it reads by others, or refuses."""
        assigned = self._assigned()
        read = [stored for stored in assigned if run.reads_others(item, stored)]
        if not read:
            self._refuse([stored.path for stored in assigned])
        for stored in read:
            fitting = [law for law in stored.laws if not run.reads_others(item, stored, law)]
            if fitting:
                stored.laws = fitting
            elif self._has_rows_of_its_own(run, item, stored, read):
                stored.laws = []
            else:
                self._refuse([stored.path])

    def _has_rows_of_its_own(
        self, run: ExchangedItems, item: int, stored: StoredRows, read: Sequence[StoredRows]
    ) -> bool:
        """True if no law fits, and the item reads an entry of its own nevertheless, or rows that no neighbor reads."""
        law, span = stored.laws[0], run.rows_read(item, stored)
        neighbors = run.neighbors(item, law)
        if span is None or span[0] != span[1]:
            is_shared = span is None or stored.length == self._n or law.of_items
            return not (is_shared or any(run.share_rows(item, other, stored) for other in neighbors))
        of_others = [run.rows_read(other, stored) for other in neighbors]
        if run.with_other_numbers().rows_read(item, stored) != span or span in of_others:
            return False
        if is_keyed(stored.value):  # read by a key that is computed
            return True
        return all(run.rows_read(item, other) == span for other in read) and not any(
            run.reads(item, row, other)
            for other in self._assigned()
            for row in other.laws[0].rows(np.asarray([item])).tolist()
            if row != span[0]
        )

    def _check_memory(self, run: ExchangedItems, items: np.ndarray) -> None:
        """Refuses items that depend on the content of items fetched before."""
        assigned, expected = self._assigned(), run.after_others(items)
        try:
            if run.after_others(items, assigned) == expected:
                return
            if self._shadow is None or self._shadow.has_generators or run.after_others(items) != expected:
                raise CannotCompare("an item depends on which ones were fetched before, or on generators of its own")
            self._check_again(lambda: run.after_others(items), lambda: run.after_others(items, assigned))
            read = [stored for stored in assigned if run.after_others(items, [stored]) != expected]
        except FetchFailed:
            return
        self._refuse([stored.path for stored in read or assigned])

    def _check_again(self, plain: Callable[[], list[Item]], exchanged: Callable[[], list[Item]]) -> None:
        """Raises an error if items that have changed may have done so by random numbers of their own, drawn rarely."""
        expected, changed = plain(), 0
        for _ in range(REPEATED):
            changed += exchanged() != expected
            if plain() != expected:
                raise CannotCompare("an item differs from one time that it is fetched to the next")
        if changed < FEWEST_CHANGED:
            raise CannotCompare("items change rarely when others are exchanged, as by random numbers of their own")

    def _check_windows(self, run: ExchangedItems, items: np.ndarray) -> None:
        """Refuses items that are overlapping windows of something longer than the data set."""
        run = run.with_other_numbers(draws_alike=True)
        for stored in self._longer:
            most = MOST_ROWS if stored.kind.is_array else MOST_ENTRIES
            if stored.length > most or num_bytes(stored.value) > MOST_BYTES:
                self._leave_out(stored, "it is too large")
                continue
            item = self._next_to_another(int(min(items[0], self._n - 3)))
            places = [run.rows_read(i, stored) for i in (item, item + 1, item + 2)]
            if any(place is None for place in places):
                continue
            steps = np.diff(np.asarray(places), axis=0)
            is_window = (steps == steps[0, 0]).all() and steps[0, 0] > 0
            if run.share_rows(item, item + 1, stored) if is_window else run.share_blocks(item, stored):
                self._refuse([stored.path])
            if not is_window:
                self._leave_out(stored, "the items read places in it that do not follow from their number")

    def _next_to_another(self, item: int) -> int:
        """Returns an item with a successor of another owner: the first from ``item`` on."""
        if self._owners is None:
            return item
        ends = np.flatnonzero(np.diff(self._owners[:-1]))
        return int(ends[np.searchsorted(ends, item) % len(ends)]) if len(ends) else item

    def _check_origin(self, run: ExchangedItems, items: np.ndarray) -> None:
        """Notes if a part of the items does not come from what is stored with one entry for each of them."""
        assigned = self._assigned()
        if len(items) < 2 or not assigned:
            return
        try:
            before, after = run.items(items), run.items(items, assigned, keep=np.empty(0, np.int64))
        except FetchFailed:
            return
        if len({(structure, len(leaves)) for structure, leaves in [*before, *after]}) > 1:
            return
        columns = zip(*(zip(*[leaves for _, leaves in found], strict=True) for found in (before, after)), strict=True)
        numbers = tuple(digest_of(item) for item in items.tolist())
        if any(len(set(old)) > 1 and old == new != numbers for old, new in columns):
            self.notes.add(
                "A part of each item comes from elsewhere than from what the data set stores with one entry for each "
                "item, such as a file or a data base, so that part was not compared with that of a data set with other "
                f"examples. {HARMLESS}"
            )

    def _refuse(self, paths: Sequence[str]) -> None:
        listed = ", ".join(f"`{path}`" for path in paths)
        raise Refused(
            f"PrivateTraining: an item of the data set ({self._name}) changes if entries of {listed} that belong to "
            "other examples are exchanged: its __getitem__ reads other examples, as mixing, negatives, overlapping "
            "windows, statistics over all data or items so far, and substitutes for broken examples do. Then one "
            "example changes many gradients, and epsilon does not hold. Nothing was released. Make every item from its "
            "own entries alone (statistics from public data or released with noise; broken examples left out "
            "beforehand). If these entries are public, and just happen to be as many as the examples, append one that "
            "is never read; or give the reason: tp.Examples(data, assume_independent=...)."
        )
