# SPDX-License-Identifier: Apache-2.0
"""Records the user's code between a batch and its step, by hooks of the model; refuses what it must not do there."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..jacobian.recording.called import TakenBranches
from ..jacobian.recording.paths import check_losses
from ..mechanisms.sums import Recording
from ..model_check.rehearsal.comparison import written_into
from ..model_check.rehearsal.turn import Turn
from ..support.held_state import SIMPLE
from ..support.model_state import MutationGuard
from ..support.random_state import SeededRandomNumbers, is_recording_disabled
from ..support.script_modules import takes_hooks
from ..support.torch_modes import OpMode, is_transformed, tensors_in
from ..support.validate import Refused


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
        """Restores what was set while the user's code ran, once the recording has ended; a second call does nothing."""
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


def check_user_code(pending: Pending, losses: Tensor) -> list[str]:
    """Refuses code that seeded torch, scaled the losses or wrote into a parameter; returns the changed buffers."""
    if pending.numbers.was_seeded:
        raise Refused(
            "PrivateTraining: torch.manual_seed was called inside of the loop. Then anyone can compute the dropout "
            "masks, which depend on an example's place in the batch. Leave it out: inside the loop all random "
            "numbers come from the training's secret key, and a resumed run repeats them."
        )
    _check_unscaled(losses)
    written, changed_buffers = pending.guard.changed()
    if written:
        raise Refused(written_into(written))
    return changed_buffers


def flat_losses(losses: Tensor, size: int, views: int) -> Tensor:
    """Returns the checked losses (n,) or (n, views) of n examples as (n · views,)."""
    shape = (size,) if views == 1 else (size, views)
    flat = losses.flatten() if views > 1 and isinstance(losses, Tensor) and losses.ndim == 2 else losses
    check_losses(flat)
    if losses.shape != shape:
        meaning = "one loss per example" if views == 1 else "a loss for every view of each example"
        part = losses.ndim > 0 and losses.shape[0] < size  # as in a loop that accumulates over parts of its batch
        cure = " To compute in parts, pass performance=tp.Performance(microbatch_size=...)." if part else ""
        raise Refused(
            f"losses of shape {tuple(losses.shape)} given for a batch of {size} examples: must be {shape}, "
            f"{meaning}.{cure}"
        )
    return flat


def check_still_trained(pending: Pending) -> None:
    """Refuses a loop that freezes or unfreezes parameters in every turn of a batch."""
    tape = pending.tape
    if tape is not None and not all(map(_is_trained, tape.parameters.values())):
        frozen = [name for name, p in tape.parameters.items() if not p.requires_grad]
        raise Refused(
            f"PrivateTraining: the loop switches requires_grad of {', '.join(map(repr, frozen))} in every turn of "
            "a batch, so that its rehearsals train other parameters than the batch. Let it depend on "
            "training.step_count, which is the same in all turns, or switch where training.step returned True."
        )


def equal_rates(optimizer: Optimizer, before: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Returns learning rates, weight decay, ...; refuses others than in earlier turns of the batch, if there were any.

    So a loop cannot change them between the turns of one batch.
    """
    now: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        now.append(settings := {**group})
        del settings["params"]
        for key, value in settings.items():
            if type(value) not in SIMPLE:
                settings[key] = plain(value)
    if before is not None and now != before:
        pairs = zip(now, before, strict=False)
        changed = sorted({key for new, old in pairs for key in new if new[key] != old.get(key)}) or ["params"]
        raise Refused(
            f"PrivateTraining: {', '.join(changed)} of the optimizer changed before the step was made, at a "
            "rehearsal of its batch. Advance a scheduler only where training.step(losses) returns True, or pass it "
            "as scheduler=. No setting may depend on the batch."
        )
    return now


def name_of(function: Any) -> str:
    """Returns the name of a function, for statements and messages."""
    return getattr(function, "__qualname__", type(function).__qualname__)


def plain(value: Any) -> Any:
    """Returns a value that equals a later one of the same content: itself, or its text."""
    return value if type(value) in (int, float, bool, str, type(None)) else repr(value)


def _check_unscaled(losses: Tensor) -> None:
    """Refuses losses that a GradScaler scaled, that is, multiplied by a tensor with a large power of two."""
    node = losses.grad_fn
    if node is None or not node.name().startswith("MulBackward"):
        return
    for factor in (getattr(node, "_saved_other", None), getattr(node, "_saved_self", None)):
        if isinstance(factor, Tensor) and factor.ndim == 0 and factor.dtype == torch.float32:
            if factor >= 2**10 and float(factor).hex().startswith("0x1.0000000000000p"):
                raise Refused(
                    f"PrivateTraining: the losses were multiplied by {float(factor):g}, as GradScaler does. Leave the "
                    "scaler out: norms and sums are computed in float32, also under autocast with float16."
                )


@contextmanager
def refusing_used_graphs() -> Iterator[None]:
    """Turns torch's error about a graph that was used before into a refusal."""
    try:
        yield
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise Refused(
            "PrivateTraining: the graph of the losses was used up before training.step. Leave out losses.backward(): "
            "step computes the gradient and makes the update."
        ) from None


@contextmanager
def closed_at_exit(turns: Generator[Any, None, None]) -> Iterator[None]:
    """Closes a loop's turns after the ``with`` block, and at the interpreter's exit: later, modules are gone."""
    at_exit = partial(_close, weakref.ref(turns))
    atexit.register(at_exit)
    try:
        yield
    finally:
        atexit.unregister(at_exit)
        turns.close()


def _close(turns: weakref.ref[Generator[Any, None, None]]) -> None:
    alive = turns()
    if alive is not None:
        with suppress(ValueError):  # another thread runs it
            alive.close()


_is_trained = attrgetter("requires_grad")


class OneThread:
    """Refuses a second thread inside of its ``with`` block."""

    def __init__(self) -> None:
        self._in_use = threading.RLock()  # not held while the user's loop runs

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Enters, unless another thread is inside."""
        if not self._in_use.acquire(blocking=False):
            raise Refused(
                "PrivateTraining: two threads use one training at the same time, so that a batch could enter its sum "
                "twice. Nothing was released for the second call. Iterate and call step in the same thread."
            )
        try:
            yield
        finally:
            self._in_use.release()


def without_accelerate(optimizer: Any, scheduler: Any) -> tuple[Any, Any]:
    """Returns the optimizer and the scheduler that ``Accelerator.prepare`` has wrapped; others as they are.

    The wrappers count accumulated gradients and skipped steps; a private step has neither.

    Raises:
        Refused: the wrapper scales losses (float16), or belongs to DeepSpeed or another engine.
    """
    kind = type(optimizer)
    if any(base.__module__ == "accelerate.optimizer" for base in kind.__mro__):
        if kind.__module__ != "accelerate.optimizer":
            raise Refused(
                f"PrivateTraining: {kind.__name__} of Accelerate steps in its own way. Prepare the model with plain "
                "DDP or FSDP version 2, and make the optimizer over the prepared model's parameters."
            )
        if optimizer.scaler is not None:
            raise Refused(
                "PrivateTraining: the Accelerator scales losses (mixed_precision='fp16'). Use "
                "Accelerator(mixed_precision='bf16') or 'no'."
            )
        optimizer = optimizer.optimizer
    if type(scheduler).__module__ == "accelerate.scheduler":
        scheduler = scheduler.scheduler  # the wrapper takes one step for each rank
    return optimizer, scheduler


def check_not_for_accelerate(caller: FrameType | None) -> None:
    """Refuses to give the secret state to ``Accelerator.save_state``: its folder holds models for others to load."""
    if caller is not None and caller.f_globals.get("__name__") == "accelerate.checkpointing":
        raise Refused(
            "PrivateTraining: register_for_checkpointing(training) would write the keys of noise and batches into the "
            "folder of save_state. Leave it out, and call tp.save_secret(training, path) after save_state."
        )
