# SPDX-License-Identifier: Apache-2.0
"""Lets the processes of ``torch.distributed`` agree, so that what one refuses all refuse, and none waits for ever."""

from __future__ import annotations

import atexit
import hashlib
import pickle  # pickle: messages between ranks, which trust each other: gradients could lie, too
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .notes import NOTES
from .validate import Refused

MESSAGE_BYTES = 32  # of one rank, in every exchange
_TAG_BYTES = 8
_PAYLOAD_BYTES = MESSAGE_BYTES - _TAG_BYTES - 1
_FINE, _FAILED = 0, 1
PATIENCE = 60.0  # seconds that a rank which failed, or leaves, waits for the others to hear of it


class RefusedTogether(Refused):
    """Raised on every rank, with the same text, for what one of them found."""


class RankLost(RuntimeError):
    """Raised where another rank ended, or has not answered in time."""


class MessageGroup:
    """A process group for messages alone, which is closed before the interpreter ends.

    A thread of gloo frees a message's tensors a moment after it was received. If the interpreter has ended by then, the
    process aborts, although all was done (torch's pull request 179291). To drop the group waits for these threads.
    """

    def __init__(self, group: Any):
        self.group = group
        atexit.register(_close, weakref.ref(self))

    def close(self) -> None:
        """Closes the connections; nothing can be sent any more."""
        group, self.group = self.group, None
        if group is not None:  # None would close all groups
            with suppress(Exception):  # the user has closed it with all others
                dist.destroy_process_group(group)


def _close(group: weakref.ref[MessageGroup]) -> None:
    if (found := group()) is not None:
        found.close()


class Ranks:
    """The processes of a training, each a rank, and what they tell each other.

    All messages between ranks have one form: a tag for the place in the code, whether this rank failed, and a few
    bytes. A rank that fails says so in its next message. So all ranks raise the same error, whatever each was doing,
    and two ranks that have come to different places both learn it. Messages go through a process group of their own,
    on the processor, so that they are never taken for those of the user's code.

    Args:
        messages: their process group; None for a single process, which agrees with itself at no cost.
        where: name of the caller, with which its refusals begin.
    """

    def __init__(self, messages: MessageGroup | None = None, where: str = "PrivateTraining"):
        self._messages, self._where = messages, where
        self.size: int = 1 if messages is None else dist.get_world_size(messages.group)
        self.rank: int = 0 if messages is None else dist.get_rank(messages.group)
        self._are_apart = False  # True after an error: they no longer wait for each other
        self._is_cut_off = False  # True after communication has failed: it never works again

    @classmethod
    def here(cls, where: str = "PrivateTraining") -> Ranks:
        """Returns the ranks of the default process group; a single one if there is none.

        The first call in a process group of several makes the group of the messages: every rank must make it.
        """
        if num_processes() == 1:
            return cls(where=where)
        with communicating(where):
            return cls(NOTES.of(dist.group.WORLD, _group_of_all), where)

    @property
    def _group(self) -> Any:
        return None if self._messages is None else self._messages.group

    @property
    def is_first(self) -> bool:
        """True for rank 0, which keeps the ledger, and writes all files."""
        return self.rank == 0

    def exchange(
        self, place: str, error: BaseException | None = None, payload: bytes = b"", patience: float | None = None
    ) -> list[bytes]:
        """Gives a few bytes to all ranks, and returns those of each, in order.

        Args:
            place: names the place in the code; must be the same on all ranks.
            error: what this rank failed with, if it did.
            payload: up to 23 bytes; of the same length on all ranks.
            patience: seconds to wait for the others; by default `PATIENCE` if this rank failed, else as long as the
                process group waits.

        Raises:
            RefusedTogether: a rank failed, or is at another place; the same text on all ranks.
        """
        if self.size == 1:
            if error is not None:
                raise error
            return [payload]
        message = _tag(place) + bytes([_FINE if error is None else _FAILED]) + payload.ljust(_PAYLOAD_BYTES, b"\0")
        assert len(message) == MESSAGE_BYTES, "a message has one length"
        if error is not None:
            error._told = True  # type: ignore[attr-defined]
            patience = PATIENCE
        messages = self._gather(message, patience)
        if any(other[_TAG_BYTES] for other in messages):
            self._are_apart = True
            self._raise_together(error)
        if len({other[:_TAG_BYTES] for other in messages}) > 1:
            self._are_apart = True
            places = self.gather(place)
            listed = ", ".join(f"rank {rank} {at}" for rank, at in enumerate(places))
            raise RefusedTogether(
                f"{self._where}: the ranks have come to different places: {listed}. Every rank must run the same "
                "loop, with as many calls of training.step; leave it at the same time on all ranks, or on none."
            ) from error
        start = _TAG_BYTES + 1
        return [other[start : start + len(payload)] for other in messages]

    @contextmanager
    def together(self, place: str) -> Iterator[None]:
        """Raises on every rank what any rank raises within the ``with`` block, in which none must wait for another."""
        try:
            yield
        except RefusedTogether:
            raise
        except Exception as error:
            self.tell(place, error)
            raise
        self.exchange(place)

    def tell(self, place: str, error: BaseException) -> None:
        """Reports this rank's failure to the others, unless it was reported; re-raises a refusal on every rank.

        Returns if they do not hear of it, as they have ended, or wait for this rank in another communication: they
        notice when this process ends.
        """
        if self.size == 1 or self._is_cut_off:
            return
        if not isinstance(error, RefusedTogether | RankLost) and not getattr(error, "_told", False):
            with suppress(RankLost):
                self.exchange(place, error)

    def begin(self, place: str) -> None:
        """Waits until all ranks begin a loop, which ends with `leave` or with an error."""
        self._are_apart = False
        self.exchange(place)

    def leave(self, place: str) -> None:
        """Notifies the others that this rank leaves the loop, so that none waits for it; raises nothing."""
        if self.size > 1 and not self._are_apart:
            with suppress(Exception):  # the others raise it
                self.exchange(place, patience=PATIENCE)

    @contextmanager
    def summing(self) -> Iterator[None]:
        """Lets a rank that fails within the ``with`` block end at once: the others wait for its sums, not for words.

        A message that no rank takes would keep the process from ending, and the others notice failures by that end.
        """
        try:
            yield
        except Refused:
            raise
        except BaseException:
            self._are_apart = self._is_cut_off = True
            raise

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in order; any that can be pickled."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        # pickle: as above; torch's own message
        self._wait(lambda: dist.all_gather_object(found, value, group=self._group))
        return found

    def from_first(self, value: Any) -> Any:
        """Returns the value of rank 0, any that can be pickled."""
        if self.size == 1:
            return value
        own = bytearray(pickle.dumps(value))
        size = torch.tensor([len(own)], device="cpu")
        self._from_first_in_place(size)
        data = torch.frombuffer(own, dtype=torch.uint8)
        if len(data) != int(size):
            data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self._from_first_in_place(data)
        return pickle.loads(bytes(data.numpy()))

    def first_does(self, place: str, action: Callable[[], int | None]) -> int:
        """Lets rank 0 do something before all go on; returns on all ranks the number below 255 that it returned, or 0.

        Raises:
            RefusedTogether: it failed on rank 0; the same text on all ranks.
        """
        if self.size == 1:
            return action() or 0
        code, failure = torch.zeros(1, dtype=torch.uint8, device="cpu"), None
        if self.is_first:
            try:
                code[0] = action() or 0
            except Exception as error:
                failure, code[0] = error, 255
        self._from_first_in_place(code)
        if int(code) == 255:
            self.exchange(place, failure)
        return int(code)

    def sum_in_place(self, tensor: Tensor, group: Any = None) -> None:
        """Adds up a tensor over all ranks; one on the processor needs no group."""
        if self.size > 1:
            self._wait(lambda: dist.all_reduce(tensor, group=group or self._group))

    def add_at_first(self, sums: Tensor) -> None:
        """Adds the tensors of all ranks, on the processor; the sum is in that of rank 0, and the others are spent."""
        if self.size > 1:
            self._wait(lambda: dist.reduce(sums, dst=0, group=self._group))

    def check_same(self, where: str, values: Mapping[str, Any], cure: str) -> None:
        """Refuses values that differ between ranks, by name.

        Raises:
            RefusedTogether: names what differs, and shows it on the first two ranks that differ.
        """
        if self.size == 1:
            return
        digests = [hashlib.blake2b(pickle.dumps(value), digest_size=8).digest() for value in values.values()]
        everywhere = self.gather(digests)
        differing = [
            (name, next(rank for rank, other in enumerate(everywhere) if other[k] != everywhere[0][k]))
            for k, name in enumerate(values)
            if len({other[k] for other in everywhere}) > 1
        ]
        if not differing:
            return
        shown = self.gather({name: f"{values[name]!r:.200}" for name, _ in differing})
        listed = ", ".join(f"{name} (rank 0: {shown[0][name]}, rank {k}: {shown[k][name]})" for name, k in differing)
        raise RefusedTogether(f"{where}: the ranks differ in {listed}. {cure}")

    def _gather(self, message: bytes, patience: float | None) -> list[bytes]:
        """Returns the messages of all ranks.

        An all-gather of gloo goes through N - 1 rounds. With more than two ranks, it is faster that rank 0 collects the
        messages and sends all of them to the others: 1.7 ms for 16 ranks on two cores, instead of 6.1 ms.
        """
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        found = mine.repeat(self.size)  # stays where a process group of the backend "fake" has no others
        if self.size == 2:
            others = [*found.split(len(message))]
            self._wait(lambda: dist.all_gather(others, mine, group=self._group, async_op=True), patience)
        else:
            parts = [*found.split(len(message))] if self.is_first else None
            self._wait(lambda: dist.gather(mine, parts, dst=0, group=self._group, async_op=True), patience)
            self._from_first_in_place(found, patience)
        whole = bytes(found.numpy())
        return [whole[k : k + len(message)] for k in range(0, len(whole), len(message))]

    def _from_first_in_place(self, tensor: Tensor, patience: float | None = None) -> None:
        self._wait(lambda: dist.broadcast(tensor, src=0, group=self._group, async_op=True), patience)

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Raises `RankLost` if communication fails within the ``with`` block, and lets the other ranks know."""
        if self._is_cut_off:
            raise RankLost(f"{self._where}: another rank ended. Start all ranks again, and load the last checkpoint.")
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, RankLost) and not _is_of_communication(error):
                raise
            self._cut_off()
            with communicating(self._where):
                raise

    def _cut_off(self) -> None:
        """Closes the connections of the messages, so that ranks that wait for this one learn of it, too."""
        self._are_apart = self._is_cut_off = True
        if self._messages is not None:
            self._messages.close()
        NOTES.forget(dist.group.WORLD)

    def _wait(self, communicate: Callable[[], Any], patience: float | None = None) -> None:
        with self.communicating(), communicating(self._where):
            work = communicate()
            if work is None or patience is None:
                if work is not None:
                    work.wait()
                return
        end = time.monotonic() + patience
        while not work.is_completed():
            if time.monotonic() > end:  # to close the connections would wait for this communication
                self._are_apart = self._is_cut_off = True
                raise RankLost(f"{self._where}: another rank has not answered within {patience:g} seconds.")
            time.sleep(1e-3)
        with self.communicating(), communicating(self._where):
            work.wait()

    def _raise_together(self, error: BaseException | None) -> None:
        """Raises the error of the first rank that failed, on all ranks."""
        found = self.gather(None if error is None else (type(error).__name__, isinstance(error, Refused), str(error)))
        rank, (kind, refused, text) = next((k, one) for k, one in enumerate(found) if one is not None)
        if error is not None and not isinstance(error, Refused):
            raise error
        if refused:
            raise RefusedTogether(f"{text} (on rank {rank})") from error
        raise RefusedTogether(
            f"{self._where}: rank {rank} failed with {kind}: {text.rstrip('.')}. The ledger of rank 0 has what was "
            "released."
        ) from error


def messages_of(group: Any) -> Any:
    """Returns a group of the same ranks with collectives on the processor, so that nothing waits for a GPU."""
    return group if "gloo" in str(dist.get_backend(group)) else NOTES.of(group, _group_of_some).group


def _group_of_some(group: Any) -> MessageGroup:
    ranks = dist.get_process_group_ranks(group)
    return MessageGroup(dist.new_group(ranks, backend="gloo", use_local_synchronization=True))


def _group_of_all(default: Any) -> MessageGroup:
    """Returns a group of all ranks: every rank must make it."""
    kind = "fake" if dist.get_backend() == "fake" else "gloo"
    return MessageGroup(dist.new_group(backend=kind, timeout=_chosen_timeout(default)))


@contextmanager
def communicating(where: str = "PrivateTraining") -> Iterator[None]:
    """Turns an error of communication within the ``with`` block into `RankLost`."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RankLost | torch.OutOfMemoryError):
            raise
        raise RankLost(
            f"{where}: another rank ended, or has not answered in time ({_first_line(error)}). Nothing was "
            "released unless the ledger of rank 0 has it: start all ranks again, and load the last checkpoint."
        ) from error


def num_processes() -> int:
    """Returns the number of processes of ``torch.distributed``; 1 if it is not in use."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _chosen_timeout(group: Any) -> timedelta | None:
    """Returns the timeout that the user gave a process group; None for that of torch."""
    from torch.distributed import constants

    for device in group._device_types:
        chosen = getattr(group._get_backend(device).options, "_timeout", None)
        return None if chosen in (constants.default_pg_timeout, constants.default_pg_nccl_timeout) else chosen
    return None


def _is_of_communication(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _tag(place: str) -> bytes:
    return hashlib.blake2b(place.encode(), digest_size=_TAG_BYTES).digest()


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
