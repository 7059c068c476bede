# SPDX-License-Identifier: Apache-2.0
"""Provides the forward hooks that tell the recorder when the model runs on a batch of the training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..jacobian.recording.called import TakenBranches
from ..mechanisms.sums import Recording
from ..model_check.rehearsal.turn import Turn
from ..support.model_state import MutationGuard
from ..support.random_state import SeededRandomNumbers, is_recording_disabled
from ..support.script_modules import takes_hooks
from ..support.torch_modes import OpMode, is_transformed, tensors_in


@dataclass
class Pending:
    """Holds a (micro)batch that was handed to the loop; ``waits`` until ``step`` has taken its losses."""

    turn: Turn
    tape: Recording | None  # None if only the losses are compared
    guard: MutationGuard
    numbers: SeededRandomNumbers
    contexts: ExitStack
    notes: OpMode | None = None  # looks at the ops of the user's code, too
    branches: OpMode = field(default_factory=TakenBranches)  # where nothing is recorded
    waits: bool = True

    def start(self) -> None:
        """Begins to record the user's code, which gets the batch now."""
        if self.notes is not None:
            self.notes.__enter__()
        if self.tape is not None:
            self.tape.start(self.turn.batch)
        else:
            self.branches.__enter__()

    def stop(self) -> None:
        """Ends the recording in this thread; a second call does nothing."""
        if self.notes is not None:
            self.notes.stop()
        if self.tape is not None:
            self.tape.stop()
        else:
            self.branches.stop()

    def close(self) -> None:
        """Restores what was set while the user's code ran; a second call does nothing."""
        self.stop()
        self.contexts.close()
        self.numbers.close()


class _Running(threading.local):
    """Holds the recordings of the forwards that run in one thread; None for a forward that is not recorded."""

    def __init__(self) -> None:
        self.recordings: list[Recording | None] = []


class ForwardHooks:
    """Notifies the recorder when the model's forward begins and ends on a pending batch.

    The recorder is on from the batch to its step in the loop's thread; in another one, while the forward runs there.
    Copied or pickled hooks do nothing, so that a copy of the model is an ordinary model. Evaluation between steps is
    not recorded.

    Args:
        pending: returns the batch that is waiting for its losses, if any; must not keep the training alive.
        outside: returns what receives the inputs of a forward on other rows than those of a batch, if anything.
    """

    def __init__(self, pending: Callable[[], Pending | None] = lambda: None, outside: Callable[[], Any] = lambda: None):
        self._pending, self._outside = pending, outside
        self._running = _Running()

    def __deepcopy__(self, memo: dict) -> ForwardHooks:
        return ForwardHooks()

    def __reduce__(self) -> tuple:
        return ForwardHooks, ()

    def register(self, model: nn.Module) -> None:
        """Registers one hook before all others and one after them, so that the recorder sees what they do."""
        if not takes_hooks(model):
            return
        model.register_forward_pre_hook(self.before, with_kwargs=True, prepend=True)
        model.register_forward_hook(self.after, always_call=True)

    def before(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        if torch.compiler.is_compiling():  # an evaluation: from a batch to its step, nothing is compiled
            return
        if is_transformed():  # the recorder is on already, and tensors stand for others
            self._running.recordings.append(None)
            return
        pending = self._pending()
        tape = None if pending is None or not torch.is_grad_enabled() or is_recording_disabled() else pending.tape
        if pending is None or (tape is None and _has_more_rows((args, kwargs), pending)):
            note = self._outside()
            if note is not None:
                note((args, kwargs))
        self._running.recordings.append(tape)
        if tape is not None and pending is not None:
            tape.code.note_inputs((args, kwargs), pending.turn.batch)
            tape.begin(model, args, kwargs)

    def after(self, model: nn.Module, args: tuple, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        tape = self._running.recordings.pop() if self._running.recordings else None
        if tape is not None:
            tape.end(output)

    def unwind(self) -> None:
        """Turns off the recorders of forwards that never ended, as after Ctrl-C."""
        while self._running.recordings:
            self.after(nn.Identity(), (), None)


def _has_more_rows(inputs: Any, pending: Pending) -> bool:
    """True if inputs have more rows than the batch, as all data have."""
    views = max(len(t) for t in tensors_in(pending.turn.batch) if t.ndim) if tensors_in(pending.turn.batch) else 0
    return any(t.ndim > 0 and len(t) > max(views, pending.turn.count) for t in tensors_in(inputs))
