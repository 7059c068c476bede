# SPDX-License-Identifier: Apache-2.0
"""Remembers which parameters the losses have reached, and which rows of padding got no gradient; on all ranks alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..jacobian.recording.paths import never_reached
from ..mechanisms.base import Mechanism
from ..support.ranks import Ranks, RefusedTogether
from ..support.validate import quoted
from ..support.warning import warn

PATIENCE = 8  # batches that may miss a parameter, if random numbers or the data may decide which layers are run
WARNED = (
    "PrivateTraining: the losses of the first batch do not reach {}. That is fine if random numbers or the data decide "
    "which layers are run, as with LayerDrop and experts. Otherwise freeze what is not used, with "
    f"requires_grad_(False): what is not reached in {PATIENCE} batches is refused."
)


class ReachedParameters:
    """Remembers what the batches so far have shown of the parameters, and of the mechanism's choices.

    Args:
        padding: name of an embedding table -> its ``padding_idx``.
        mechanism: learns from batches, too.
    """

    def __init__(self, padding: Mapping[str, int], mechanism: Mechanism):
        self.names: set[str] = set()  # later losses may miss these
        self.padding = dict(padding)  # of tables that were used for look-ups alone
        self._mechanism = mechanism
        self.drew = False  # whether random numbers were drawn in some turn
        self._last: set[str] | None = None  # what the turn before has reached
        self._varies = False  # whether two turns, with other examples, have reached other parameters
        self._num_batches, self._has_warned = 0, False
        self._known_to_all: Any = None

    def may_miss(self, names: Collection[str]) -> Collection[str]:
        """Returns which of the trained parameters the losses of the next batch may miss.

        If random numbers were drawn, they may decide which layers are run, and the data do where turns with other
        examples have reached others. Then all may be missed in the first batches.
        """
        self._num_batches += 1
        return names if (self.drew or self._varies) and self._num_batches <= PATIENCE else self.names

    def warn_of_missing(self, trained: Collection[str]) -> None:
        """Warns once of parameters that the losses have not reached, if that may be by chance."""
        missing = [name for name in trained if name not in self.names]
        if missing and not self._has_warned:
            self._has_warned = True
            warn(WARNED.format(quoted(missing)))

    def note(self, reached: Collection[str], used_otherwise: Collection[str]) -> None:
        """Adds what a batch has reached: layers that are skipped at random are reached when they are not skipped."""
        reached, last = set(reached), self._last
        self._varies |= last is not None and last != reached
        self._last = reached
        self.names |= reached
        self._note_use(used_otherwise)

    def _note_use(self, used_otherwise: Collection[str]) -> None:
        """Notes parameters that are no tables of look-ups alone."""
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
            self._note_use({name for name, is_used in zip(trained, used, strict=True) if is_used})
            self._mechanism.learn([learned for _, learned in known])
            self._known_to_all = self._known()
        missing = [name for name in trained if name not in self.names]
        if missing:
            raise RefusedTogether(never_reached(missing))

    def _known(self) -> Any:
        return frozenset(self.names), frozenset(self.padding), repr(self._mechanism.learned())
