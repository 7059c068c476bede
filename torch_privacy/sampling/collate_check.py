# SPDX-License-Identifier: Apache-2.0
"""Shows that what ``collate_fn`` makes of examples does not depend on the batches that it had before."""

from __future__ import annotations

from typing import Any

from torch.utils._pytree import tree_flatten

from ..support.validate import Refused
from .batches import Batches, BatchRequest, random_numbers_of
from .exchanged_items import digest_of
from .fingerprint import Unhashable
from .shadow import DatasetShadow
from .variants import DatasetExamples, shapes_of

FEW, MORE = 2, 16  # examples that are compared, and before them; more would hide what the earlier ones left

HARMLESS = "This is harmless if it keeps nothing of a batch for later ones."


class CollateCheck:
    """Collates a few examples with two copies of ``collate_fn``, which have had other examples before.

    The copies begin in the state in which ``collate_fn`` was when the training was made. A rehearsal cannot show what
    it has learned from the batch itself, such as a largest value or the number of a word, as each of its turns has it.

    Args:
        batches: have the user's ``collate_fn``.

    Attributes:
        notes: what could not be compared, in words.
    """

    def __init__(self, batches: Batches):
        self.notes: set[str] = set()
        self._items_of = batches.items
        self._shadow: DatasetShadow | None = None
        try:
            self._shadow = DatasetShadow.of(batches.collate_fn)
        except Exception as error:  # of the user's code; the text may hold data
            self._give_up(f"it cannot be copied ({type(error).__name__})")

    def __call__(self, examples: DatasetExamples) -> None:
        """Compares a few examples of a batch.

        Raises:
            Refused: what ``collate_fn`` makes of them depends on the examples that it had before.
        """
        if self._shadow is None:
            return
        first, second = examples.others(MORE), examples.others(MORE)
        try:
            expected, found = (self._made_after(self._shadow, examples, others) for others in (first, second))
            if expected[0] != found[0] or expected == found:  # rehearsals compare losses of batches of other shapes
                return
            repeats = not self._shadow.has_generators and self._made_after(self._shadow, examples, first) == expected
        except Unhashable as error:
            return self._give_up(str(error))
        except Exception as error:  # of the user's code
            return self._give_up(f"a copy of it fails ({type(error).__name__})")
        if not repeats:
            return self._give_up("it has random numbers of its own")
        raise Refused(
            "PrivateTraining: what collate_fn makes of an example depends on the examples that it had before: it keeps "
            "something of every batch, such as a largest value, a mean, or numbers for words in the order in which "
            "they appear. Then one example changes many gradients, and epsilon does not hold. Nothing was released. "
            "Take such values from public data, before the training, or give the reason: tp.Examples(data, "
            "assume_independent=...)."
        )

    def _give_up(self, why: str) -> None:
        self._shadow = None
        self.notes.add(f"What collate_fn keeps of earlier batches was not compared, because {why}. {HARMLESS}")

    def _made_after(self, shadow: DatasetShadow, examples: DatasetExamples, others: BatchRequest) -> tuple[Any, ...]:
        """Returns shapes, structure and digests of what a copy makes of a few examples after these others."""
        requests = [others, examples.few(FEW)]
        groups = [self._items_of(request) for request in requests]  # anew, as collate_fn may write into items
        batch: Any = None
        with shadow.copy({}).in_place() as collate:
            for request, items in zip(requests, groups, strict=True):
                with random_numbers_of(request, "collate"):
                    batch = collate(items)
        leaves, structure = tree_flatten(batch)
        return shapes_of(batch), str(structure), [digest_of(leaf) for leaf in leaves]
