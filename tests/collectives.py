# SPDX-License-Identifier: Apache-2.0
"""Counts what the ranks send each other: every collective of ``torch.distributed``, in order, with its bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import torch
from ranked import CASES, WRAPPERS, Case, Losses, calls, case, mesh_of, mlp, start
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

NAMESPACES = ("c10d", "_c10d_functional")
WAITS = ("wait_tensor", "barrier", "monitored_barrier_", "_wrap_tensor_autograd")  # have no numbers
KINDS = {  # part of an op's name -> name in tables
    "reduce_scatter": "reduce-scatter",
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "broadcast": "broadcast",
    "gather": "gather",
}


@dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
        kind: one of ``KINDS``' names, or the op's own.
        bytes: of the whole vector, which every rank gets or gives: what an all-gather puts out, what a reduce-scatter
            takes in; an all-reduce is both, and counts twice. A rank of N sends (N - 1)/N of it in a ring.
        dtype: of its numbers; messages between ranks are bytes.
    """

    kind: str
    bytes: int
    dtype: str


TURN, STEP = "a turn begins", "a step ends"


class Log(TorchDispatchMode):
    """Lists the collectives of this process, while it is a context; `mark` ends a step.

    It sees what goes through torch's dispatcher: FSDP2, functional collectives, and ``torch.distributed``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._noted: SimpleQueue[Collective | str] = SimpleQueue()  # rehearsals would put a list of the loop's back
        self._taken: list[Collective | str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an op, and lists it if it is a collective."""
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace in NAMESPACES and name not in WAITS:
            self._noted.put(_collective(name, args, result))
        return result

    def begin_turn(self) -> None:
        """Begins a turn of the loop."""
        self._noted.put(TURN)

    def mark(self) -> None:
        """Ends a step: those since the last mark belong to it."""
        self._noted.put(STEP)

    @property
    def collectives(self) -> list[Collective]:
        """Returns all collectives so far."""
        return [one for one in self._all() if isinstance(one, Collective)]

    def steps(self) -> list[list[Collective]]:
        """Returns the collectives of each step."""
        return [[one for one in step if isinstance(one, Collective)] for step in self._by_step()]

    def turns(self) -> list[int]:
        """Returns the number of turns of each step."""
        return [step.count(TURN) for step in self._by_step()]

    def _by_step(self) -> list[list[Collective | str]]:
        noted = self._all()
        ends = [0, *(k + 1 for k, one in enumerate(noted) if one == STEP)]
        return [noted[a:b] for a, b in pairwise(ends)]

    def _all(self) -> list[Collective | str]:
        while not self._noted.empty():
            self._taken.append(self._noted.get())
        return self._taken


def _collective(name: str, args: Iterable[Any], result: Any) -> Collective:
    kind = next((kind for part, kind in KINDS.items() if part in name), name)
    tensors = [[leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)] for value in (*args, result)]
    whole = max(sum(tensor.nbytes for tensor in group) for group in tensors)
    dtype = next(str(tensor.dtype).removeprefix("torch.") for group in tensors for tensor in group)
    return Collective(kind, 2 * whole if kind == "all-reduce" else whole, dtype)


def num_bytes(collectives: Iterable[Collective]) -> int:
    """Returns the sum of their bytes."""
    return sum(one.bytes for one in collectives)


def is_message(one: Collective) -> bool:
    """True for what ranks tell each other, which are bytes and sizes; false for numbers of a model."""
    return one.dtype in ("uint8", "int64")


def numbers_of_calls(collectives: Iterable[Collective]) -> Counter[str]:
    """Returns how many there are of each kind; messages are counted apart."""
    return Counter("message" if is_message(one) else one.kind for one in collectives)


def shown(collectives: Iterable[Collective]) -> str:
    """Returns a line for each, and their sum."""
    lines = [f"{one.kind} of {one.bytes} bytes ({one.dtype})" for one in collectives]
    return "\n".join([*lines, f"in all {num_bytes(collectives)} bytes"])


# Steps of networks -------------------------------------------------------------------------------------------------


def of_width(features: int) -> Callable[[], TensorDataset]:
    """Returns what makes sixty examples of three classes."""

    def data() -> TensorDataset:
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(60, features, generator=generator, dtype=torch.float32)
        return TensorDataset(x.to(torch.get_default_dtype()), torch.arange(60) % 3)

    return data


NETWORKS: dict[str, Case] = {
    "MLP, uneven": case(partial(mlp, 20, 61, 45, 3), data=of_width(20)),
    "MLP, 1,699 parameters": case(partial(mlp, 16, 32, 32, 3), data=of_width(16)),
    "GPT-2, tied": CASES["GPT-2"],
    "GRU": case(
        calls(
            lambda m, x: m.out(m.gru(x[:, :, None])[0][:, -1]),
            gru=lambda: nn.GRU(1, 40, batch_first=True),
            out=lambda: nn.Linear(40, 3),
        ),
        data=of_width(6),
    ),
}


@dataclass(frozen=True)
class Counted:
    """Collectives of one rank: of an ordinary step, and of each private one."""

    ordinary: list[Collective]
    private: list[list[Collective]]
    turns: list[int]  # of each private step; 1 if it is settled

    def settled(self) -> list[Collective]:
        """Returns the last step that was not rehearsed."""
        return [step for step, turns in zip(self.private, self.turns, strict=True) if turns == 1][-1]

    def ratio(self, step: list[Collective]) -> float:
        """Returns a step's bytes over those of the ordinary step."""
        return num_bytes(step) / num_bytes(self.ordinary)


def counted(rank: int, name: str, how: str, num_steps: int = 6) -> Counted:
    """Counts what ordinary and private steps of a network in float32 send, on the ranks of which this is one."""
    torch.set_default_dtype(torch.float32)
    case, log = NETWORKS[name], Log()
    model = WRAPPERS[how](case.model(), case, mesh_of(how))
    batch = next(iter(DataLoader(case.data(), batch_size=4)))
    with log:
        for _ in range(3):
            case.losses(model, batch).sum().backward()
            log.mark()
    return Counted(log.steps()[-1], *private_steps(case, how, num_steps=num_steps, expected_batch_size=8))


def private_steps(
    case: Case, how: str, losses: Losses | None = None, **settings: Any
) -> tuple[list[list[Collective]], list[int]]:
    """Returns the collectives of each private step that the loop sees, and its number of turns.

    A step without examples, which the loop does not see, counts to the next one.
    """
    training, log = start(case, how, "adam", **settings), Log()
    with log:
        for batch in training:
            log.begin_turn()
            if training.step((losses or case.losses)(training.model, batch)):
                log.mark()
    return log.steps(), log.turns()
