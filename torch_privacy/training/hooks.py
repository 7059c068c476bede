# SPDX-License-Identifier: Apache-2.0
"""Between a batch that is handed out and its losses: hooks that let the model's own forward be recorded."""

from __future__ import annotations

import threading
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._model import Seal
from .._replay import OwnRandomNumbers, is_unwatched
from ..jacobian.independence import Turn
from ..mechanism import Recording

if TYPE_CHECKING:
    from .loop import PrivateTraining


@dataclass
class Pending:
    """The (micro)batch that was handed out and whose losses are awaited."""

    turn: Turn
    tape: Recording | None  # None where only the losses are asked for
    seal: Seal
    numbers: OwnRandomNumbers
    contexts: ExitStack

    def close(self) -> None:
        """Put back what was set for the user's code; a second time it does nothing."""
        self.contexts.close()
        self.numbers.close()


class _UnderWay(threading.local):
    """The forwards under way in one thread; None for one that runs untouched."""

    def __init__(self) -> None:
        self.watches: list[Recording | None] = []


class Switch:
    """Turns the recorder on while the model's forward runs on a batch that was handed out, and off again.

    It holds the training weakly and is empty in copies of the model, so that a copied or pickled model is an ordinary
    one, and evaluation between steps runs untouched.
    """

    def __init__(self, training: PrivateTraining | None = None):
        self._training = weakref.ref(training) if training is not None else lambda: None
        self._under_way = _UnderWay()

    @property
    def _active(self) -> list[Recording | None]:
        return self._under_way.watches

    def __deepcopy__(self, memo: dict) -> Switch:
        return Switch()

    def __reduce__(self) -> tuple:
        return Switch, ()

    def watch(self, model: nn.Module) -> None:
        """Hook into a model: first of the hooks before the forward and last of those behind, to see what these do."""
        model.register_forward_pre_hook(self.before, with_kwargs=True, prepend=True)
        model.register_forward_hook(self.after, always_call=True)

    def before(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        training = self._training()
        pending = None if training is None else training._pending
        tape = None if pending is None or not torch.is_grad_enabled() or is_unwatched() else pending.tape
        self._active.append(tape)
        if tape is not None and pending is not None:
            tape.code.note_inputs((args, kwargs), pending.turn.batch)
            tape.begin(model, args, kwargs)

    def after(self, model: nn.Module, args: tuple, output: Any) -> None:
        tape = self._active.pop() if self._active else None
        if tape is not None:
            tape.end(output)

    def unwind(self) -> None:
        """Turn off what a forward left on that never came to its end, as after Ctrl-C."""
        while self._active:
            self.after(nn.Identity(), (), None)
