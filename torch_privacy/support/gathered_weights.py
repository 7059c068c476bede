# SPDX-License-Identifier: Apache-2.0
"""Gathers the weights that ``fully_shard`` has sharded, and keeps them while a recorder needs them.

FSDP frees the weights of a module after its forward and after its backward, and gathers them again for the next. Each
gathering waits for all ranks, so that every rank would have to run the same forwards and backwards, and a recorder
needs more of them on some batches. While the weights are held, neither waits for other ranks.

All of this uses the public interface of torch, but `let_go` also restores what ``set_reshard_after_forward`` changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


class GatheredWeights:
    """The weights of a model with sharded modules; ``units`` are these modules.

    Attributes:
        units: the modules that ``fully_shard`` was applied to.
        sharded: the parameters by name, in shards.
        are_gathered: True between `gather` and `let_go`.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self.units: list[Any] = sharded_modules(model)
        self.are_gathered = False
        self._before: list[Any] = []
        self._reshard()
        self.sharded: dict[str, Tensor] = dict(model.named_parameters())

    @property
    def groups(self) -> list[Any]:
        """Returns FSDP's groups of parameters that are gathered together."""
        return [group for unit in self.units for group in _groups_of(unit._get_fsdp_state())]

    def gather(self) -> None:
        """Gathers all weights, which stay until `let_go`; every rank must call it. Does nothing the second time."""
        if self.are_gathered:
            return
        self._reshard()  # an evaluation leaves some gathered
        self.sharded = dict(self._model.named_parameters())
        self._before = [_settings_of(unit) for unit in self.units]
        self.are_gathered = True
        for unit in self.units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.set_reshard_after_backward(False, recurse=False)
            unit.unshard()
        _freeze_alike(self._model, self.sharded)

    def let_go(self) -> None:
        """Frees the gathered weights, also after an error in the middle of a forward or backward."""
        gathered = dict(self._model.named_parameters()) if self.are_gathered else {}
        self._reshard()
        if self.are_gathered:
            for unit, before in zip(self.units, self._before, strict=True):
                _restore_settings(unit, before)
            _freeze_alike(self._model, gathered)
        self.are_gathered = False

    def _reshard(self) -> None:
        for unit in self.units:
            state = unit._get_fsdp_state()
            for group in _groups_of(state):  # after an error in a forward they are not idle
                group._training_state = type(group._training_state).IDLE
            state._training_state = type(state._training_state).IDLE
            state._state_ctx.iter_forward_root = None
            unit.reshard()


def sharded_modules(model: nn.Module) -> list[Any]:
    """Returns the modules of a model that ``fully_shard`` was applied to."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _freeze_alike(model: nn.Module, others: Mapping[str, Tensor]) -> None:
    """Gives parameters the ``requires_grad`` of the others, in the places of which they are now."""
    for name, p in model.named_parameters():
        if p.requires_grad != others[name].requires_grad:
            p.requires_grad_(others[name].requires_grad)


def _groups_of(state: Any) -> list[Any]:
    """Returns the groups of parameters that one sharded module gathers; older releases of torch have one at most."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in (groups if groups is not None else [state._fsdp_param_group]) if group is not None]


def _settings_of(unit: Any) -> tuple[bool, list[tuple[Any, bool]]]:
    state = unit._get_fsdp_state()
    groups = [(group.post_forward_mesh_info, group.reshard_after_backward) for group in _groups_of(state)]
    return state._auto_reshard_after_forward, groups


def _restore_settings(unit: Any, before: tuple[bool, list[tuple[Any, bool]]]) -> None:
    state = unit._get_fsdp_state()
    state._auto_reshard_after_forward, groups = before
    for group, (mesh_info, after_backward) in zip(_groups_of(state), groups, strict=True):
        is_root = bool(state._is_root) and state._auto_reshard_after_forward  # torch keeps the root's weights
        group.post_forward_mesh_info = None if is_root else mesh_info
        group.reshard_after_backward = after_backward
