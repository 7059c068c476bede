# SPDX-License-Identifier: Apache-2.0
"""Decides which batches of a training compiled graphs compute, at which sizes, and which are compared with the tape."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..clipping import MicroBatches
from ..jacobian.compiled.actions import ActionTape
from ..jacobian.compiled.agreement import Wanted
from ..jacobian.compiled.recording import CompiledRecording
from ..jacobian.turns import Turn
from ..mechanism import ClippedSum, Mechanism
from ..support.validate import Refused
from .rehearsals import Part
from .settings import TrainingSettings

RARELY = 64  # one batch in this many is compared with the tape
STEPS = (0.1, 1.2, 4.0)  # sizes of padded batches: standard deviations of a Poisson batch above its mean


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the model inside of ``torch.compile(model)``."""
    return getattr(model, "_orig_mod", model)


class CompiledBatches:
    """Lets compiled graphs compute the batches of a training.

    Args:
        model: the user's model.
        settings: True, or the arguments of torch.compile.
        expected_size: mean number of examples of a batch.
        num_examples: size of the data set, or the number of its owners.
        largest: largest number of examples handed out at once, if it is fixed.
        views: rows of inputs per example.
        memory_budget: of a step.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: bool | Mapping[str, Any],
        expected_size: float,
        num_examples: int,
        largest: int | None,
        views: int,
        memory_budget: float,
    ):
        from ..jacobian.compiled.replay import Compiled  # imports the compiler, which takes seconds

        self._views, self._memory_budget = views, memory_budget
        self._left_to_tape: Turn | None = None
        self._compiled = Compiled(model, {} if settings is True else dict(settings))  # type: ignore[arg-type]
        self._sizes = sizes_of(expected_size, num_examples, largest)

    @classmethod
    def of(
        cls, model: nn.Module, arguments: bool | Mapping[str, Any], settings: TrainingSettings, mechanism: Mechanism
    ) -> CompiledBatches:
        """Returns the compiled batches of a training; refuses what only the tape can compute."""
        if type(mechanism) is not ClippedSum or isinstance(mechanism.rule, MicroBatches):
            raise Refused(
                f"PrivateTraining: compile={arguments!r} needs clipping= with a row for every example, and exact "
                "norms. Leave out compile=, or jacobian=, perturbation= and MicroBatches."
            )
        if settings.shares_rows:
            raise Refused(
                f"PrivateTraining: compile={arguments!r} with owners= has no graphs for rows that several examples "
                "share. Leave out compile=, or take per_owner=1."
            )
        return cls(
            model,
            arguments,
            settings.expected_batch_size,
            settings.num_units,
            settings.microbatch_size,
            settings.views,
            settings.memory_budget,
        )

    @contextmanager
    def recording(
        self, tape: ActionTape, turn: Turn, part: Part, groups: Mapping[str, Sequence[str]], chance: bytes
    ) -> Iterator[CompiledRecording]:
        """Sends calls of the model to the recording of a turn, within the ``with`` block.

        Args:
            tape: of the turn.
            turn: the turn; the tape makes rehearsals, and the batches of rehearsed parts.
            part: its part.
            groups: label -> names of parameters.
            chance: secret bytes that determine whether the batch is compared with the tape.
        """
        size, wanted = next((size for size in self._sizes if size >= turn.count), 0), None
        if size and turn.is_batch and not part.rehearsed and turn is not self._left_to_tape:
            wanted = Wanted(groups, turn.count, self._views, self._memory_budget)
        compare = int.from_bytes(chance[:8], "little") % RARELY == 0
        recording = CompiledRecording(tape, self._compiled, wanted, size, compare=compare)
        model = self._compiled.model
        if wanted is None:
            yield recording
            return
        before = model._compiled_call_impl
        # torch leaves this attribute out of copies and pickles of a module.
        model._compiled_call_impl = lambda *args, **kwargs: recording.call(args, kwargs)
        try:
            yield recording
        finally:
            model._compiled_call_impl = before

    def leave_to_tape(self, turn: Turn) -> None:
        """Leaves a turn that is handed out again to the tape."""
        self._left_to_tape = turn


def sizes_of(mean: float, num_examples: int, largest: int | None) -> list[int]:
    """Returns the sizes that batches are padded to, so that few graphs are compiled and little is computed in vain."""
    if largest is not None and mean > largest:
        return [largest]
    spread = math.sqrt(mean * max(0.0, 1 - mean / num_examples))
    most = num_examples if largest is None else min(largest, num_examples)
    return sorted({min(most, max(2, math.ceil(mean + step * spread))) for step in STEPS})
