# SPDX-License-Identifier: Apache-2.0
"""Guards the trained weights, and the optimizer's state: only the training's own updates may move them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..support.every_step import BEFORE_EVERY_STEP
from ..support.model_state import Versions, version_of
from ..support.torch_modes import is_dense
from ..support.validate import Refused
from ..support.warning import warn
from .placement import local_of
from .placement.base import begin_use, end_use, is_in_use


class OptimizerMarks:
    """Remembers the tensors of an optimizer's state, such as momenta, and how often each was written into.

    Writes through ``.data`` are not seen. Counts of steps are left out.
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._known = {(id(p), key): (value, _version(value)) for p, key, value in self._present()}

    def moved(self, parameters: Mapping[str, Tensor]) -> list[str]:
        """Returns the names of what is new or was written into since, for these parameters, unless it is zero."""
        others = [place for place in self._present() if self._is_other(*place)]
        if not others:
            return []
        names = {id(p): name for name, p in parameters.items()}
        return [
            f"{key} of {names[id(p)]}" for p, key, value in others if id(p) in names and bool(local_of(value).any())
        ]

    def _is_other(self, p: Tensor, key: str, value: Tensor) -> bool:
        known, version = self._known.get((id(p), key), (None, 0))
        return known is not value or _version(value) != version

    def _present(self) -> list[tuple[Tensor, str, Tensor]]:
        return [
            (p, key, value)
            for p, entries in self._optimizer.state.items()
            if isinstance(entries, dict)
            for key, value in entries.items()
            if key != "step" and isinstance(value, Tensor) and (value.ndim or not p.ndim)
        ]


def _version(value: Tensor) -> int:
    value = value if type(value) is Tensor else local_of(value)
    return 0 if value.is_inference() else version_of(value)


WHOLE = 4096  # entries up to which all of a parameter are compared
SAMPLED = 16  # entries of a larger one that are compared, besides the sum of all
LATE = 16  # steps after which the host waits for a GPU to tell whether weights were moved
MOVED_IN_LOOP = (
    "PrivateTraining: the trained weights were changed other than by the training's own steps, {}. From now on spent() "
    "and the statement say NOT PRIVATE. Pass a function of the released weights alone, such as a clamp, to "
    "PrivateTraining as after_update=; apply averages within MovingAverage.applied(); load earlier weights within "
    "training.loading_released_weights()."
)


class WeightMarks:
    """Remembers the entries of small parameters, some of large ones and the sum of all, as integers; and versions.

    A version counts the writes into a parameter. A sum changes with every entry, but not if entries change places.
    """

    def __init__(self, parameters: Mapping[str, Tensor]):
        self._parameters = dict(parameters)
        self._locals = [local_of(p) for p in parameters.values()]
        self._is_sharded = not all(map(is_, parameters.values(), self._locals))
        self._addresses = [*map(Tensor.data_ptr, self._locals)]
        self._views: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
        self._summed: dict[torch.device, dict[str, list[Tensor]]] = {}
        for name, p in zip(parameters, self._locals, strict=True):
            view, parts = _marked(p)
            self._views.setdefault((view.dtype, view.device), {})[name] = view
            if parts:
                self._summed.setdefault(view.device, {})[name] = parts
        self._lengths = [{name: len(view) for name, view in views.items()} for views in self._views.values()]
        self._lengths += [dict.fromkeys(summed, 1) for summed in self._summed.values()]
        devices = {device for _, device in self._views}
        self.asks_late = len(devices) == 1 and next(iter(devices)).type != "cpu"  # else the host waits for a GPU
        self._looked: list[tuple[int, list[Tensor], list[Tensor]]] = []  # step, entries, the expected ones
        self.renew()

    def renew(self) -> None:
        """Remembers their present values."""
        self._entries = self._present_entries()
        self.renew_versions()

    def renew_versions(self) -> None:
        """Remembers their present versions, if the values are those remembered."""
        self._versions = Versions(self._locals)

    def holds(self, parameters: Mapping[str, Tensor]) -> bool:
        """True if these are among the remembered parameters, which all are at the same addresses in memory."""
        known = self._parameters
        if not all(map(is_, map(known.get, parameters), parameters.values())):
            return False
        if self._is_sharded and not all(map(is_, map(local_of, known.values()), self._locals)):
            return False
        return self._are_in_place()

    def with_more(self, parameters: Mapping[str, Tensor]) -> WeightMarks:
        """Returns the present marks of these parameters, and of the others, such as those that were frozen since."""
        return WeightMarks(self._parameters | dict(parameters))

    def moved(self) -> list[str]:
        """Returns the names of the parameters that have changed since."""
        now = self._present_entries()
        if self._are_in_place() and all(map(torch.equal, now, self._entries)):
            return []
        elsewhere = {
            name
            for name, p, address in zip(self._parameters, self._locals, self._addresses, strict=True)
            if p.data_ptr() != address
        }
        return self._names_of([a != b for a, b in zip(now, self._entries, strict=True)], elsewhere)

    def digest(self, names: Collection[str] | None = None) -> bytes:
        """Returns 8 bytes that depend on the remembered entries of these parameters, by default of all."""
        digest = hashlib.blake2b(digest_size=8)
        for lengths, entries in zip(self._lengths, self._entries, strict=True):
            parts = entries.cpu().split([*lengths.values()])
            for name, part in zip(lengths, parts, strict=True):
                if names is None or name in names:
                    digest.update(part.numpy().tobytes())
        return digest.digest()

    def look(self, step: int) -> None:
        """Keeps the present entries for `seen_late`, which compares them, and remembers them; on one device only."""
        now = self._present_entries()
        self._looked.append((step, now, self._entries))
        self._entries = now

    def seen_late(self) -> tuple[int, list[str]]:
        """Returns the first step since the last call at which `look` saw changes, and the names; -1 and [] if none."""
        steps, seen, expected = [[*parts] for parts in zip(*self._looked, strict=True)] or ([], [], [])
        self._looked.clear()
        kinds = zip(zip(*seen, strict=True), zip(*expected, strict=True), strict=True)  # of entries: by dtype
        changed = [(torch.stack(a) != torch.stack(b)).cpu() for a, b in kinds]
        for step, *of_kinds in zip(steps, *changed, strict=True):
            if any(entries.any() for entries in of_kinds):
                return step, self._names_of(of_kinds)
        return -1, []

    def _names_of(self, changed: Sequence[Tensor], others: Collection[str] = ()) -> list[str]:
        """Returns the names, in order, of the parameters with changed entries, and the others."""
        moved = set(others)
        for lengths, of_kind in zip(self._lengths, changed, strict=True):
            parts = of_kind.cpu().split([*lengths.values()])
            moved |= {name for name, part in zip(lengths, parts, strict=True) if part.any()}
        return [name for name in self._parameters if name in moved]

    def untouched(self) -> bool:
        """True if nothing has been written into any of them since."""
        return self._versions.are_current() and not self.moved()

    def _are_in_place(self) -> bool:
        return self._addresses == [*map(Tensor.data_ptr, self._locals)]

    def _present_entries(self) -> list[Tensor]:
        sums = [[reduce(add, map(Tensor.sum, parts)) for parts in summed.values()] for summed in self._summed.values()]
        return [*map(torch.cat, map(list, map(dict.values, self._views.values()))), *map(torch.stack, sums)]


def _marked(p: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns a view of entries to compare and views of all others to sum, as integers, so that NaN equals NaN."""
    p = torch.view_as_real(p.detach()) if p.is_complex() else p.detach()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if not is_dense(p):
        p = p.view(integers[p.itemsize])
        return p.flatten()[:0], [p]
    flat, words = p.as_strided((p.numel(),), (1,)), 8 // p.itemsize
    entries = flat.view(integers[p.itemsize])
    if len(flat) <= WHOLE:
        return entries, []
    parts, cut = [entries], len(flat) - len(flat) % words
    if not flat.storage_offset() % words:  # long integers are summed faster
        parts = [part for part in (flat[:cut].view(torch.int64), entries[cut:]) if len(part)]
    return entries[:: len(flat) // SAMPLED], parts


def padding_rows(model: nn.Module, trained: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns ``padding_idx`` for each trained embedding table that has one and that no other module shares."""
    uses = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    tables = {
        id(m.weight): m.padding_idx
        for m in model.modules()
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.padding_idx is not None
    }
    return {name: tables[id(p)] for name, p in trained.items() if id(p) in tables and uses.count(id(p)) == 1}


@contextmanager
def lent(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Allows other parameter values inside the block: the weight guard is suspended, and no training may step."""
    used = begin_use(parameters)
    try:
        yield
    finally:
        end_use(used)


def moves_nothing(optimizer: Optimizer) -> bool:
    """True if all learning rates and gradients are zero.

    ``torch.distributed.checkpoint`` makes a step with these to see the state of an optimizer that has none. A private
    gradient is never zero, because of its noise.
    """
    if any(float(group.get("lr", 1.0)) for group in optimizer.param_groups):
        return False
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return not any(local_of(gradient).any() for gradient in gradients)


class WeightGuard:
    """Applies the training's own updates, and detects updates made by other code.

    While it is active, steps of any other optimizer that holds trained parameters are refused.

    Args:
        trained: returns the trained parameters by name; must not keep the training alive.
        optimizer: makes the updates; its state may not be written into by other code, either.

    Attributes:
        seen_otherwise: what is known of moves by other code without looking at the weights; empty if nothing is.
    """

    def __init__(self, trained: Callable[[], Mapping[str, Tensor]], optimizer: Optimizer):
        self._trained, self._optimizer = trained, optimizer
        self._optimizer_marks: OptimizerMarks | None = None  # after the last update, or from the start of the loop
        self._marks: WeightMarks | None = None  # after the last update, or from the start of the loop
        self.seen_otherwise = self._warned_of = ""
        self._is_own_step = False
        self._leave: Callable[[], None] = lambda: None

    def check_not_lent(self) -> None:
        """Refuses weights that have other values for a while."""
        if self._is_lent():
            raise Refused(
                "PrivateTraining: the averaged weights are applied to the model, so that a step would begin with them "
                "and be lost. Leave the block of MovingAverage.applied() before the loop goes on."
            )

    def _is_lent(self) -> bool:
        return is_in_use(self._trained().values())

    def activate(self) -> None:
        """Refuses the steps of other optimizers from now on."""
        self.deactivate()
        self.check_not_lent()
        self._leave = BEFORE_EVERY_STEP.add(self._check)
        if self._marks is None:
            self.accept(self.seen_otherwise)

    def deactivate(self) -> None:
        """Lets every step pass again."""
        self._leave()

    def reset(self, moved_otherwise: str) -> None:
        """Forgets the weights, before others are loaded; ``moved_otherwise`` is what is known about earlier changes."""
        self._marks, self.seen_otherwise, self._optimizer_marks = None, moved_otherwise, None
        self._warned_of = moved_otherwise

    def accept(self, moved_otherwise: str) -> None:
        """Takes the present weights for its own; ``moved_otherwise`` is what is known about earlier changes."""
        self._marks, self.seen_otherwise = WeightMarks(self._trained()), moved_otherwise
        self._optimizer_marks = OptimizerMarks(self._optimizer)

    def moved_otherwise(self, steps_made: int) -> str:
        """Returns when other code was first seen to have moved the weights; empty if it did not."""
        if self._marks is not None and not self.seen_otherwise and not self._is_lent():
            step, moved = self._marks.seen_late()
            self._note(*((step, moved) if moved else (steps_made, self._marks.moved())))
        return self.seen_otherwise

    def note_seen(self, steps_made: int, seen_by: Sequence[int]) -> None:
        """Records that other ranks saw their shards change: ``seen_by[r]`` is true if rank r did."""
        if any(seen_by) and not self.seen_otherwise:
            rank = next(rank for rank, seen in enumerate(seen_by) if seen)
            self.seen_otherwise = f"first seen after step {steps_made}, on rank {rank}"

    def _note(self, step: int, moved: list[str]) -> bool:
        if moved and not self.seen_otherwise:
            self.seen_otherwise = f"first seen after step {step}, in {moved[0]!r}"
        return bool(moved)

    def _warn_if_new(self) -> None:
        if self.seen_otherwise != self._warned_of:  # whoever has noted it
            self._warned_of = self.seen_otherwise
            warn(MOVED_IN_LOOP.format(self.seen_otherwise))

    def look(self, parameters: Mapping[str, Tensor], steps_made: int) -> WeightMarks:
        """Notes whether other code has moved the weights since the last update, and warns when it is first seen.

        So it does for the optimizer's state, from which the next update moves them.
        """
        if self._optimizer_marks is not None:
            self._note(steps_made, self._optimizer_marks.moved(parameters))
        marks = self._marks
        if marks is None or not marks.holds(parameters):
            self.moved_otherwise(steps_made)
            marks = self._marks = WeightMarks(parameters) if marks is None else marks.with_more(parameters)
        elif marks.asks_late:
            marks.look(steps_made)
            if steps_made % LATE == 0:
                self._note(*marks.seen_late())
            marks.renew_versions()
        elif self._note(steps_made, marks.moved()):
            marks.renew()
        else:
            marks.renew_versions()
        self._warn_if_new()
        return marks

    def update(
        self,
        parameters: Mapping[str, Tensor],
        steps_made: int,
        after: Callable[[], None] = lambda: None,
    ) -> bool:
        """Makes the training's own step after a `look`; returns whether it moved the weights, or did not have to.

        ``after`` is then called, and may move them, too.
        """
        marks = self._marks
        if marks is None or not marks.holds(parameters):
            marks = self.look(parameters, steps_made)
        self._is_own_step = True
        try:
            self._optimizer.step()
        except BaseException:  # the weights may be moved in part, by this step
            marks.renew()
            raise
        finally:
            self._is_own_step = False
            self._optimizer_marks = OptimizerMarks(self._optimizer)
        rates = [float(group.get("lr", 1.0)) for group in self._optimizer.param_groups]
        moved = not (marks.untouched() and any(rates))
        try:
            after()
        finally:
            if not marks.holds(parameters):
                self._note(*marks.seen_late())  # what is not read yet would be lost with these marks
                self._warn_if_new()
                marks = marks.with_more(parameters)
            self._marks = marks
            marks.renew()
        return moved

    def digest(self, names: Collection[str] | None = None) -> bytes:
        """Returns 8 bytes that depend on the remembered entries of these weights, those after the last update."""
        assert self._marks is not None, "after an update"
        return self._marks.digest(names)

    def _check(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_own_step or moves_nothing(optimizer):
            return
        trained = {id(p) for p in self._trained().values()}
        if any(id(p) in trained for group in optimizer.param_groups for p in group["params"]):
            raise Refused(
                "PrivateTraining: optimizer.step() was called inside of the loop, with a gradient that is not private. "
                "No weight was moved. Leave out losses.backward(), optimizer.step() and GradScaler: "
                "training.step(losses) computes the gradient, clips, adds noise, and steps the optimizer. A trainer "
                "that makes the steps itself cannot be used."
            )


DIVERGED = 1e6  # a weight beyond which a failed check is blamed on its size


def largest_weight(parameters: Iterable[Tensor]) -> float:
    """Returns the largest size of a weight on this rank; infinity where one is not finite."""
    local = [local_of(p).detach() for p in parameters]
    sizes = [float(p.abs().max()) for p in local if p.numel()]
    return max(sizes, default=0.0) if all(map(math.isfinite, sizes)) else math.inf


def has_diverged(model: nn.Module, *scores: float | None) -> bool:
    """True if weights or test scores have diverged: what results may say, as an exact loss may be one example's."""
    are_finite = all(math.isfinite(score) for score in scores if score is not None)
    return not (are_finite and largest_weight(model.parameters()) < DIVERGED)
