# SPDX-License-Identifier: Apache-2.0
"""Lets the ranks that hold the same examples decide alike, because their backwards wait for each other.

Every backward of a tensor-parallel model contains collectives. So all ranks must make equally many backwards, in one
order and with equal cotangents. Three things ensure that:

* Random numbers: within ``same_random`` all seeds come from one that the first rank draws anew for every batch.
* Decisions that depend on a rank's own shards (does this layout fit, is a second backward due) are made together.
* What the ranks remember of earlier batches may differ. Each batch begins with an exchange of what every rank would do
  with it; if they differ, all of them measure, which is right in any case.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...support.ranks import messages_of
from ...support.validate import Refused
from ..layouts.codes import fresh_generator, shared_seeds

Value = TypeVar("Value")


class Peers:
    """The ranks of one group, which hold the same examples and parts of the same model.

    Args:
        group: of the ranks; None for a single process, which agrees with itself at no cost.
    """

    def __init__(self, group: Any = None):
        self.group = group
        self.size: int = 1 if group is None else dist.get_world_size(group)
        self._messages = None if self.size == 1 else messages_of(group)

    @contextmanager
    def same_random(self) -> Iterator[None]:
        """Draws equal random numbers for checks on all ranks inside; the first rank chooses the seed."""
        if self.size == 1:
            yield
        else:
            (seed, *_), *_ = self._exchange([fresh_generator().initial_seed() % 2**62])
            with shared_seeds(seed):
                yield

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Returns, for each flag, whether it is true on some rank."""
        if self.size == 1 or not flags:
            return list(flags)
        return [any(column) for column in zip(*self._exchange(flags), strict=True)]

    def any(self, flag: bool) -> bool:
        """True if the flag is true on some rank."""
        return flag if self.size == 1 else self.any_of([flag])[0]

    def all(self, flag: bool) -> bool:
        """True if the flag is true on every rank."""
        return flag if self.size == 1 else not self.any(not flag)

    def are_equal(self, numbers: Sequence[int]) -> bool:
        """True if these numbers, equally many everywhere, are equal on all ranks."""
        return self.size == 1 or len(set(map(tuple, self._exchange(numbers)))) == 1

    def gather(self, value: Value) -> list[Value]:
        """Returns the values of all ranks, any that can be pickled, in the order of the ranks."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        # pickle: torch's own message between ranks, which trust each other: a gradient could lie, too
        dist.all_gather_object(found, value, group=self._messages)
        return found

    def refuse(self, text: str | None) -> None:
        """Refuses, on all ranks and with one text, what some of them found; None says that this rank found nothing."""
        if self.size > 1 and self.any(text is not None):
            text = next(text for text in self.gather(text) if text is not None)
        if text is not None:
            raise Refused(text)

    def sum(self, tensor: Tensor, *, once: Tensor) -> Tensor:
        """Returns the sum of ``tensor`` over the ranks, and of ``once`` from the first of them, by one all-reduce.

        The result is equal on all ranks, bit for bit, also if ``once`` was rounded differently.
        """
        if self.size == 1 or not tensor.numel():
            return tensor + once
        total = tensor + once if dist.get_rank(self.group) == 0 else tensor.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def _exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the whole numbers of every rank."""
        mine = torch.tensor([int(number) for number in numbers], dtype=torch.int64, device="cpu")
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self._messages)
        return [numbers.tolist() for numbers in found]


ALONE = Peers()


def peers_of(meshes: Sequence[Any]) -> Peers:
    """Returns the ranks of the mesh that the ops of a forward met; a single process if there was none."""
    if not meshes:
        return ALONE
    mesh = meshes[0]
    if len(meshes) > 1 or mesh.ndim > 1:
        raise Refused(
            f"tape: the model's activations are distributed over several meshes ({', '.join(map(str, meshes))}). Use "
            "one mesh of one dimension for the whole plan."
        )
    return Peers(mesh.get_group())
