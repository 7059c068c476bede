# SPDX-License-Identifier: Apache-2.0
"""Refuses what the user's code must not do between a batch and its step."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..jacobian.recording.paths import check_losses
from ..model_check.rehearsal.comparison import written_into
from ..support.held_state import SIMPLE
from ..support.validate import Refused
from .hooks import Pending


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
