# SPDX-License-Identifier: Apache-2.0
"""Remembers which parameters the losses have reached, and which rows of padding got no gradient; on all ranks alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..jacobian.tape import never_reached
from ..mechanism import Mechanism
from ..support.ranks import Ranks, RefusedTogether


class Reached:
    """Remembers what the batches so far have shown of the parameters, and of the mechanism's choices.

    Args:
        padding: name of an embedding table -> its ``padding_idx``.
        mechanism: learns from batches, too.
    """

    def __init__(self, padding: Mapping[str, int], mechanism: Mechanism):
        self.names: set[str] = set()  # later losses may miss these
        self.padding = dict(padding)  # of tables that were used for look-ups alone
        self._mechanism = mechanism
        self._known_to_all: Any = None

    def note(self, reached: Collection[str], used_otherwise: Collection[str]) -> None:
        """Adds what a batch has reached: layers that are skipped at random are reached when they are not skipped."""
        self.names.update(reached)
        self.padding = {name: row for name, row in self.padding.items() if name not in used_otherwise}

    @property
    def has_changed(self) -> bool:
        """Returns whether this rank knows what the others may not know."""
        return self._known_to_all != self._known()

    def share(self, ranks: Ranks, trained: Sequence[str], *, changed: bool) -> None:
        """Joins what the ranks know, if it has changed on one of them; every rank calls it.

        Raises:
            RefusedTogether: the losses of no rank have reached some of the trained parameters.
        """
        if changed:  # a bit for each name, as all ranks have the same ones in the same order
            bits = [*(name in self.names for name in trained), *(name not in self.padding for name in trained)]
            known = ranks.gather((np.packbits(bits).tobytes(), self._mechanism.learned()))
            joined = np.bitwise_or.reduce([np.frombuffer(packed, np.uint8) for packed, _ in known])
            reached, used = np.split(np.unpackbits(joined, count=len(bits)).astype(bool), 2)
            self.names = {name for name, is_reached in zip(trained, reached, strict=True) if is_reached}
            self.note((), {name for name, is_used in zip(trained, used, strict=True) if is_used})
            self._mechanism.learn([learned for _, learned in known])
            self._known_to_all = self._known()
        missing = [name for name in trained if name not in self.names]
        if missing:
            raise RefusedTogether(never_reached(missing))

    def _known(self) -> Any:
        return frozenset(self.names), frozenset(self.padding), repr(self._mechanism.learned())
