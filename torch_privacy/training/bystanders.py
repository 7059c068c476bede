# SPDX-License-Identifier: Apache-2.0
"""Notes what happens beside the steps of a training: other optimizers, forwards on private data, changed rows."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ..sampling.batches import Batches, BatchRequest
from ..support.every_step import AFTER_EVERY_STEP
from ..support.random_state import is_recording_disabled
from ..support.torch_modes import tensors_in
from ..support.warning import warn
from .loop_frames import frames_of_loop
from .loop_variables import Finder
from .weights import WeightGuard, moves_nothing

WARNED = (
    "PrivateTraining: {} made a step for {} while the training iterates. What it trains learns from the batch, or at "
    "least from its exact size, without noise: no epsilon covers it, and the privacy statement says so under "
    "not_covered. If it needs the released model alone, give it a constant number of rows and no tensor of the batch, "
    "such as torch.randn(expected_batch_size, ...), once for each step: see docs/training.md#a-second-network."
)
TRAINED = (
    "what {} trained while the training iterated ({}): it may have learned from the batches, or from their exact "
    "sizes, without noise"
)
RUN = (
    "what was computed from outputs of the model for rows of the private data outside of a batch: it was run on such "
    "rows after {} steps"
)
REWRITTEN = (
    "rows of the data set that were written or replaced while the training iterated (first seen before step {}): if "
    "one depends on other rows, or on losses, it carries data past the noise"
)
WARNED_OF_ROWS = (
    "PrivateTraining: rows of the data set were written or replaced before step {}. If one depends on other rows, as "
    "on a mean, or on losses, no epsilon covers that, and the privacy statement says so under not_covered. Make each "
    "from its own row and the released weights alone."
)
NOTED = object()
PROBED = 32  # examples of the data set that are compared with the rows of other forwards
FEWEST = 2  # of them that must be among these rows
PREFIX = 16  # whole numbers of a row, such as tokens, which may be followed by padding


class OtherOptimizers:
    """Notes other optimizers that make steps while the loop of a training runs.

    Steps for tensors that live for one turn alone, such as a perturbation of the inputs, are not noted.

    Args:
        own: the training's optimizer.
        turn: returns what identifies the batch that waits for its step, or None; must not keep the training alive.
    """

    def __init__(self, own: Optimizer, turn: Callable[[], Any]):
        self._own, self._turn = own, turn
        self._trained: dict[str, None] = {}  # what they trained, in words; once for each
        self._turns: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()  # NOTED for those named
        self._parameters = WeakIdKeyDictionary()
        self._leave: Callable[[], None] = lambda: None
        self._thread = 0

    @property
    def not_covered(self) -> list[str]:
        """Returns what the privacy statement says about them."""
        return [*self._trained]

    @property
    def parameters(self) -> set[int]:
        """Returns the ids of the tensors that they train, or trained before they were dropped."""
        for other in [other for other, turn in self._turns.items() if turn is NOTED]:
            self._keep_parameters(other)
        return {*map(id, self._parameters.keys())}

    def begin_loop(self) -> None:
        """Notes the steps of this thread from now on."""
        self.end_loop()
        self._thread, self._leave = threading.get_ident(), AFTER_EVERY_STEP.add(self._note)

    def end_loop(self) -> None:
        """Notes no more steps."""
        self._leave()

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        is_known = optimizer is self._own or self._turns.get(optimizer) is NOTED
        if is_known or threading.get_ident() != self._thread or moves_nothing(optimizer) or _is_private_step():
            return
        turn = self._turn()
        if turn is not None and self._turns.setdefault(optimizer, turn) == turn:
            return
        self._turns[optimizer] = NOTED
        self._keep_parameters(optimizer)
        names = type(optimizer).__name__, _names_of(optimizer)
        if (trained := TRAINED.format(*names)) not in self._trained:  # a loop may make an optimizer anew in each step
            self._trained[trained] = None
            warn(WARNED.format(*names))

    def _keep_parameters(self, optimizer: Optimizer) -> None:
        self._parameters.update({p: None for group in optimizer.param_groups for p in group["params"]})


def _is_private_step() -> bool:
    """True within the step of a training, of this one or of another."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is WeightGuard.update.__code__:
            return True
        frame = frame.f_back
    return False


def _names_of(optimizer: Optimizer) -> str:
    """Returns the names that the loop has for what an optimizer trains."""
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = Finder([]).variables(frames_of_loop())
    groups = [variable.group for variable in found if id(variable.read()) in trained]
    return ", ".join(map(repr, dict.fromkeys(groups))) or f"{len(trained)} tensors"


class OutsideForwards:
    """Notes whether the model runs on rows of the private data outside of a batch, as to assign them to clusters.

    Some examples of the data set are compared with the rows of every such forward. A single forward on a few rows, or
    on rows that were changed after they were fetched, may not be noted. Forwards of this library on public examples are
    compared before the first step alone, because the host waits for the rows.
    """

    def __init__(self, batches: Batches):
        self._batches = batches
        self._probes: set[bytes] | None = None
        self._hits: set[bytes] = set()
        self._first: int | None = None  # steps made before such a forward was noted

    @property
    def not_covered(self) -> list[str]:
        """Returns what the privacy statement says about such forwards."""
        return [] if self._first is None else [RUN.format(self._first)]

    def note(self, inputs: Any, steps_made: int) -> None:
        """Compares the rows of a forward's inputs."""
        if self._first is not None or (steps_made and is_recording_disabled()):
            return
        if self._probes is None:
            self._probes = self._fetched()
        with torch._C.DisableTorchFunction():  # the tape of another forward may record
            for tensor in tensors_in(inputs) if self._probes else ():
                self._hits |= self._probes.intersection(_rows(tensor))
        if len(self._hits) >= min(FEWEST, len(self._probes)) > 0:
            self._first = steps_made

    def _fetched(self) -> set[bytes]:
        """Returns rows that tell examples of the data set from others: no masks beside them, and none of two examples.

        Masks of padding follow from the length of a text alone, so that other texts have the same.
        """
        size = len(self._batches.dataset)  # type: ignore[arg-type]
        indices = np.random.default_rng(size).permutation(size)[:PROBED]
        try:
            fetched = self._batches.fetch(BatchRequest(indices, seed=bytes(32))).batch
        except Exception:  # a data set that works in other processes only
            return set()
        found = [(rows, _is_mask(tensor)) for tensor in tensors_in(fetched) if (rows := _rows(tensor))]
        telling = [rows for rows, is_mask in found if not is_mask] or [rows for rows, _ in found]
        return {row for rows in telling for row, count in Counter(rows).items() if count == 1}


class RewrittenRows:
    """Notes that other code has changed rows of the data."""

    def __init__(self) -> None:
        self._first: int | None = None  # steps made before that was seen

    @property
    def not_covered(self) -> list[str]:
        """Returns what the privacy statement says about them."""
        return [] if self._first is None else [REWRITTEN.format(self._first)]

    def note(self, steps_made: int) -> None:
        """Notes it, and warns at the first time."""
        if self._first is None:
            self._first = steps_made
            warn(WARNED_OF_ROWS.format(steps_made))


def _is_mask(tensor: Tensor) -> bool:
    """True if all numbers are 0 or 1."""
    return bool(((tensor == 0) | (tensor == 1)).all())


def _rows(tensor: Tensor) -> list[bytes]:
    """Returns the rows of a tensor of several numbers each; none that are constant."""
    if tensor.ndim < 2 or tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return []
    flat = tensor.detach().flatten(1)
    if not flat.is_floating_point():
        flat = flat[:, :PREFIX]
    flat = flat[(flat != flat[:, :1]).any(1)].cpu()
    rows = flat.float().numpy() if flat.is_floating_point() else flat.long().numpy()
    return [row.tobytes() for row in rows]
