# SPDX-License-Identifier: Apache-2.0
"""Lets the ranks of a training meet in a step; one process does its own part alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..model_check.rehearsal.turn import Turn
from .agreement import (
    check_equal_tensors,
    check_equal_turns,
    check_equal_weights,
    check_same_names,
    check_same_updates,
    check_still,
    kind_of_turn,
    names_tag,
    settings_of_groups,
)
from .placement import Ranked
from .rehearsals import RARELY, idle_turn
from .state import Setup, State, StepSums, optimized

Taken = tuple[dict[str, Tensor], dict[str, int] | None]


class Meeting:
    """Does what one process has to do where several ranks would meet."""

    def __init__(self, setup: Setup, state: State):
        self._setup, self._state = setup, state

    @staticmethod
    def of(setup: Setup, state: State) -> Meeting:
        """Returns the meeting of one process, or of several."""
        return (MeetingOfRanks if isinstance(setup.placement, Ranked) else Meeting)(setup, state)

    @contextmanager
    def looping(self) -> Iterator[None]:
        """Lets the other ranks know if this one fails, or leaves the loop, within the ``with`` block."""
        check_still(self._setup.placement.ranks)
        yield

    def tell(self, place: str, error: Exception) -> None:
        """Lets the other ranks know that this one failed; raises what all of them raise."""

    def begin_step(self) -> None:
        """Makes the weights whole, after all ranks have come to the step; refuses those that train other parameters."""
        self._setup.placement.hold()
        self._state.tensors = self._setup.tensors()

    def check_public_tensors(self) -> None:
        """Refuses ranks that computed different directions, such as GEP's, for this step."""

    def begin_turn(self, turn: Turn, place: str) -> None:
        """Refuses ranks with the same part of a batch that would run it differently."""

    def wait_for_losses(self, place: str) -> None:
        """Waits for ranks without which this one cannot compute rows; none of them waits for one that has failed."""

    def answered(self, place: str, turn: Turn | None, part: Any, left_out: int) -> tuple[Turn | None, int]:
        """Returns the next turn, None if no rank has one; and how many examples all ranks have left out."""
        return turn, left_out

    def add(self, total: StepSums, sums: dict[str, Any]) -> None:
        """Adds the sums of a (micro)batch to those of the step."""
        for name, tensor in sums.items():
            total.sums[name] = total.sums[name].add_(tensor) if name in total.sums else tensor

    def take(self, sums: dict[str, Tensor]) -> Taken:
        """Returns the sums of the step that this rank gives noise, and their places if they are slices of all."""
        parameters = self._state.tensors.trained
        sums = self._setup.mechanism.complete(sums, parameters)
        for name, p in parameters.items():
            assert sums.get(name, p).shape == p.shape, f"the sum of {name!r} has the shape of its parameter"
        return sums, None

    def gradients(self, mean: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the gradients of the optimizer's parameters."""
        return self._setup.placement.gradients(mean, self._state.tensors.trained)

    def updated(self, place: str, *, moved: bool) -> bool:
        """Returns whether any rank has moved its weights; refuses ranks that have other weights now."""
        return moved

    def end_loop(self) -> None:
        """Learns from the other ranks whether other code has moved weights."""

    def let_go(self) -> None:
        """Undoes what `begin_step` did; also after an error, or if the loop was left."""
        self._setup.placement.let_go()


class MeetingOfRanks(Meeting):
    """Lets the ranks of a training meet; all of them call its methods in the same order."""

    def __init__(self, setup: Setup, state: State):
        super().__init__(setup, state)
        assert isinstance(setup.placement, Ranked)
        self._placement, self._ranks = setup.placement, setup.placement.ranks

    @contextmanager
    def looping(self) -> Iterator[None]:
        try:
            check_still(self._ranks)
            self._ranks.begin("begins a loop")
            yield
        except GeneratorExit:
            self._ranks.leave(f"leaves the loop in step {self._state.step}")
            raise
        except Exception as error:
            self._ranks.tell("goes through the loop", error)
            raise

    def tell(self, place: str, error: Exception) -> None:
        self._ranks.tell(place, error)

    def begin_step(self) -> None:
        if self._ranks.size > 1:
            self._placement.let_go()  # an evaluation leaves some weights gathered
            trained = self._setup.tensors().trained
            tags = names_tag(trained) + names_tag(map(repr, settings_of_groups(self._setup.optimizer)))
            messages = self._ranks.exchange(f"begins step {self._state.step}", payload=tags)
            check_same_names(self._ranks, trained, [message[:4] for message in messages])
            check_same_updates(self._state.step, [message[4:] for message in messages])
        with self._ranks.communicating():
            super().begin_step()

    def check_public_tensors(self) -> None:
        tensors = self._setup.mechanism.equal_tensors()
        if self._ranks.size > 1 and tensors:
            step = self._state.step
            check_equal_tensors(self._ranks, step, self._state.releases.tag(step, tensors))

    def begin_turn(self, turn: Turn, place: str) -> None:
        messages = self._placement.meet(f"begins {place}", kind_of_turn(turn, self._placement))
        check_equal_turns(self._state.step, messages)

    def wait_for_losses(self, place: str) -> None:
        self._placement.meet(f"has the losses of {place}")

    def answered(self, place: str, turn: Turn | None, part: Any, left_out: int) -> tuple[Turn | None, int]:
        trained, reached = self._state.tensors.trained, self._state.reached
        learned = bytes([turn is not None, reached.has_changed])
        counted = (left_out if self._placement.counts else 0).to_bytes(8, "big")
        messages = self._ranks.exchange(place, payload=learned + names_tag(trained) + counted)
        if any(message[0] for message in messages):
            return turn or idle_turn(self._setup.model, part.examples), 0
        if self._ranks.size > 1:
            check_same_names(self._ranks, trained, [message[2:6] for message in messages])
            reached.share(self._ranks, [*trained], changed=any(message[1] for message in messages))
        return None, sum(int.from_bytes(message[6:14], "big") for message in messages)

    def add(self, total: StepSums, sums: dict[str, Any]) -> None:
        with self._ranks.communicating(), self._ranks.summing():
            self._placement.collect(sums, self._setup.mechanism, self._optimized())

    def take(self, sums: dict[str, Tensor]) -> Taken:
        with self._ranks.summing():
            taken = self._placement.take(self._setup.mechanism, self._optimized())
        self._placement.let_go()
        self._state.tensors = self._setup.tensors()
        return taken

    def gradients(self, mean: dict[str, Tensor]) -> dict[str, Tensor]:
        with self._ranks.communicating():
            return super().gradients(mean)

    def updated(self, place: str, *, moved: bool) -> bool:
        guard, step = self._state.guard, self._state.step
        payload = bytes([moved, bool(guard.seen_otherwise)]) + self._weights_tag(step - 1)
        messages = self._ranks.exchange(place, payload=payload)
        check_equal_weights(step, [message[2:12] for message in messages])
        check_equal_weights(step, [message[12:] for message in messages])
        guard.note_seen(step, [message[1] for message in messages])
        return any(message[0] for message in messages)

    def _weights_tag(self, step: int) -> bytes:
        """Returns the number of this rank's shard and, now and then, a digest of its weights; the same of its part.

        Ranks with the same part of a batch have some weights in common even if their shards differ.
        """
        place, guard = self._placement, self._state.guard
        is_due = self._ranks.size > 1 and (step & (step - 1) == 0 or step % RARELY == 0)
        digests = [guard.digest(), guard.digest(place.in_common())] if is_due else [bytes(8)] * 2
        return b"".join(n.to_bytes(2, "big") + d for n, d in zip((place.shard, place.part), digests, strict=True))

    def end_loop(self) -> None:
        if self._ranks.size > 1:
            seen = bool(self._state.guard.moved_otherwise(self._state.step))
            messages: Sequence[bytes] = self._ranks.exchange("ends the loop", payload=bytes([seen]))
            self._state.guard.note_seen(self._state.step, [message[0] for message in messages])

    def let_go(self) -> None:
        self._placement.let_go()
        self._placement.forget()

    def _optimized(self) -> Mapping[str, Tensor]:
        return optimized(self._placement, self._state.tensors)
