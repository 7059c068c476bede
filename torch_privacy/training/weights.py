# SPDX-License-Identifier: Apache-2.0
"""Guards the trained weights: only the training's own updates may move them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..support.validate import Refused

SAMPLED = 16  # entries of each parameter that are compared


class WeightMarks:
    """Remembers some entries of each parameter, and its version, which counts the writes into it."""

    def __init__(self, parameters: Mapping[str, Tensor]):
        self._views = {name: (p, p.data_ptr(), _sampled(p)) for name, p in parameters.items()}
        self._kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name, (_, _, view) in self._views.items():
            self._kinds.setdefault((view.dtype, view.device), []).append(name)
        devices = {device for _, device in self._kinds}
        self._asks_late = len(devices) == 1 and "cpu" not in {device.type for device in devices}
        self._late: tuple[Tensor, Tensor] | None = None  # step after which entries had changed, -1 if none; which had
        self.renew()

    def renew(self) -> None:
        """Remembers their present values."""
        self._entries = self._present_entries()
        self._versions = [p._version for p, _, _ in self._views.values()]

    def _present_entries(self) -> list[Tensor]:
        """Returns the entries of all parameters of each kind, in one tensor."""
        return [torch.cat([self._views[name][2] for name in names]) for names in self._kinds.values()]

    def holds(self, parameters: Mapping[str, Tensor]) -> bool:
        """True if these are the remembered parameters, at the same addresses in memory."""
        known = self._views
        return parameters.keys() == known.keys() and all(
            known[name][0] is p and known[name][1] == p.data_ptr() for name, p in parameters.items()
        )

    def moved(self) -> list[str]:
        """Returns the names of the parameters that have changed since."""
        names = [name for name, (p, place, _) in self._views.items() if p.data_ptr() != place]
        if not names and not all(map(torch.equal, self._present_entries(), self._entries)):
            names = self._names_of(self._changed())
        return names

    def look(self, step: int) -> list[str]:
        """Returns `moved`; but on a GPU, for which the host would wait, only notes it for `seen_late`."""
        if not self._asks_late:
            return self.moved()
        if self._late is None:
            self._late = torch.full((), -1, device=self._entries[0].device), torch.zeros_like(self._changed())
        changed, (first, which) = self._changed(), self._late
        is_first = changed.any() & (first < 0)
        self._late = torch.where(is_first, step, first), torch.where(is_first, changed, which)
        return []

    def seen_late(self) -> tuple[int, list[str]]:
        """Returns the first step after which `look` saw changes that it did not return, and the names."""
        if self._late is None:
            return -1, []
        return int(self._late[0]), self._names_of(self._late[1])

    def _changed(self) -> Tensor:
        """Returns which of all entries have changed, kind by kind."""
        changed = [now != before for now, before in zip(self._present_entries(), self._entries, strict=True)]
        return changed[0] if len(changed) == 1 else torch.cat([part.to(changed[0].device) for part in changed])

    def _names_of(self, changed: Tensor) -> list[str]:
        names = [name for of_kind in self._kinds.values() for name in of_kind]
        parts = changed.cpu().split([len(self._views[name][2].view(-1)) for name in names])
        return [name for name, part in zip(names, parts, strict=True) if part.any()]

    def untouched(self) -> bool:
        """True if nothing has been written into any of them since."""
        return self._versions == [p._version for p, _, _ in self._views.values()] and not self.moved()


def _sampled(p: Tensor) -> Tensor:
    """Returns a view of some entries as integers, so that NaN equals NaN."""
    flat = p.detach().view(-1) if p.is_contiguous() else p.detach().flatten()[:0]
    sampled = flat[:: max(1, flat.numel() // SAMPLED)]
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if p.itemsize not in integers:
        return torch.view_as_real(sampled).view(-1)
    return sampled.view(integers[p.itemsize])


def padding_rows(model: nn.Module, trained: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns ``padding_idx`` for each trained embedding table that has one and that no other module shares."""
    uses = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    tables = {
        id(m.weight): m.padding_idx
        for m in model.modules()
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.padding_idx is not None
    }
    return {name: tables[id(p)] for name, p in trained.items() if id(p) in tables and uses.count(id(p)) == 1}


class WeightGuard:
    """Makes the updates of a training, and notices those of other code.

    While it is active, steps of any other optimizer that holds trained parameters are refused.

    Args:
        trained: returns the trained parameters by name; must not keep the training alive.
    """

    def __init__(self, trained: Callable[[], Mapping[str, Tensor]]):
        self._trained = trained
        self._marks: WeightMarks | None = None  # after the last update, or from the start of the loop
        self._moved_otherwise = ""
        self._is_own_step = False
        self._handle: RemovableHandle | None = None  # while a loop is running

    def activate(self) -> None:
        """Refuses the steps of other optimizers from now on."""
        self.deactivate()
        self._handle = register_optimizer_step_pre_hook(self._check)
        if self._marks is None:
            self._marks = WeightMarks(self._trained())

    def deactivate(self) -> None:
        """Lets every step pass again."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None

    def reset(self, moved_otherwise: str) -> None:
        """Forgets the weights, before others are loaded; ``moved_otherwise`` is what is known about earlier changes."""
        self._marks, self._moved_otherwise = None, moved_otherwise

    def moved_otherwise(self, steps_made: int) -> str:
        """Returns when other code was first seen to have moved the weights; empty if it did not."""
        if self._marks is not None and not self._moved_otherwise:
            step, moved = self._marks.seen_late()
            self._note(*((step, moved) if moved else (steps_made, self._marks.moved())))
        return self._moved_otherwise

    def _note(self, step: int, moved: list[str]) -> None:
        if moved and not self._moved_otherwise:
            self._moved_otherwise = f"first seen after step {step}, in {moved[0]!r}"

    def update(self, optimizer: Optimizer, parameters: Mapping[str, Tensor], steps_made: int) -> None:
        """Makes the training's own step, which must move the weights."""
        if self._marks is None or not self._marks.holds(parameters):
            self.moved_otherwise(steps_made)
            self._marks = WeightMarks(parameters)
        else:
            self._note(steps_made, self._marks.look(steps_made))
            self._marks.renew()
        self._is_own_step = True
        try:
            optimizer.step()
        except BaseException:  # the weights may be moved in part, by this step
            self._marks.renew()
            raise
        finally:
            self._is_own_step = False
        rates = [float(group.get("lr", 1.0)) for group in optimizer.param_groups]
        if self._marks.untouched() and any(rates):
            raise Refused(
                f"PrivateTraining: {type(optimizer).__name__}.step() made no update, like a wrapper that "
                "accumulates gradients or skips steps. The release of this step was spent without use. Pass the "
                "optimizer itself; for larger batches raise expected_batch_size and set microbatch_size."
            )
        self._marks.renew()

    def _check(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_own_step:
            return
        trained = {id(p) for p in self._trained().values()}
        if any(id(p) in trained for group in optimizer.param_groups for p in group["params"]):
            raise Refused(
                "PrivateTraining: optimizer.step() was called inside of the loop, with a gradient that is not private. "
                "No weight was moved. Leave out losses.backward(), optimizer.step() and GradScaler: "
                "training.step(losses) computes the gradient, clips, adds noise, and steps the optimizer. A trainer "
                "that makes the steps itself cannot be used."
            )
