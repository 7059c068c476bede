# SPDX-License-Identifier: Apache-2.0
"""Chooses what may replace batch normalization, and finds normalization over too few values.

A value that is normalized by itself becomes 0, and two become 1 and -1 whatever they were. With fewer than 4 at a time
little of the input is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .torch_modes import OpMode

FEWEST = 4  # values that are normalized together
MOST_GROUPS = 32


def groups_for(channels: int) -> int:
    """Returns the largest number of groups, up to 32, with 4 or more of the channels in each; else 1.

    Example:
        >>> [groups_for(channels) for channels in (2, 4, 16, 48, 64, 256)]
        [1, 1, 4, 12, 16, 32]
    """
    fitting = (n for n in range(MOST_GROUPS, 1, -1) if channels % n == 0 and channels // n >= FEWEST)
    return next(fitting, 1)


def advice(batch_norm: _BatchNorm) -> str:
    """Returns what can replace a batch normalization, by the shapes that it normalizes."""
    channels = batch_norm.num_features
    groups = f"nn.GroupNorm({groups_for(channels)}, {channels})"
    if channels < FEWEST:
        return f"use nn.Identity(), or on inputs (n, {channels}, ...) with {FEWEST} or more positions {groups}"
    if isinstance(batch_norm, nn.BatchNorm1d):
        return f"use nn.LayerNorm({channels}), or on inputs (n, {channels}, length) nn.GroupNorm(1, {channels})"
    return f"use {groups}"


def values_together(func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> int | None:
    """Returns how many values of one example a call normalizes together; None if it is no such normalization."""
    if func not in _COUNTS:
        return None
    given = dict(zip(_NAMES[func], args, strict=False)) | dict(kwargs)
    return _COUNTS[func](given["input"], given)


def _of_groups(x: Tensor, given: Mapping[str, Any]) -> int:
    return math.prod(x.shape[1:]) // given["num_groups"]


def _of_last_dimensions(x: Tensor, given: Mapping[str, Any]) -> int:
    shape = given["normalized_shape"]
    return shape if isinstance(shape, int) else math.prod(shape)


def _of_channel(x: Tensor, given: Mapping[str, Any]) -> int | None:
    return math.prod(x.shape[2:]) if given.get("use_input_stats", True) else None


_COUNTS: Mapping[Callable, Callable[[Tensor, Mapping[str, Any]], int | None]] = {
    F.group_norm: _of_groups,
    torch.group_norm: _of_groups,
    F.layer_norm: _of_last_dimensions,
    torch.layer_norm: _of_last_dimensions,
    F.instance_norm: _of_channel,
    torch.instance_norm: _of_channel,
}
_GROUPS, _LAYERS = ("input", "num_groups", "weight"), ("input", "normalized_shape", "weight")
_NAMES: Mapping[Callable, tuple[str, ...]] = {
    F.group_norm: _GROUPS,
    torch.group_norm: _GROUPS,
    F.layer_norm: _LAYERS,
    torch.layer_norm: _LAYERS,
    F.instance_norm: ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats"),
    torch.instance_norm: ("input", "weight", "bias", "running_mean", "running_var", "use_input_stats"),
}


class SmallGroups(OpMode):
    """Notes each normalization of fewer than 4 values that runs inside the ``with`` block.

    Args:
        model: its parameters are named in the message.
        tell: is called with a sentence for each, once.
    """

    def __init__(self, model: nn.Module, tell: Callable[[str], Any]):
        super().__init__()
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._tell, self._told = tell, set[str]()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        together = values_together(func, args, kwargs)
        if together is not None and together < FEWEST:
            self._note(func, together, dict(zip(_NAMES[func], args, strict=False)) | kwargs)
        return func(*args, **kwargs)

    def _note(self, func: Any, together: int, given: Mapping[str, Any]) -> None:
        shape = ", ".join(("n", *map(str, given["input"].shape[1:])))
        name = self._names.get(id(given.get("weight")))
        of = "" if name is None else f", with the weight {name!r},"
        became = {1: "which is always 0", 2: "which are always 1 and -1"}.get(together, "of which little is left")
        text = (
            f"{func.__name__} of an input ({shape}){of} normalizes {together} value{'s' * (together != 1)} at a time, "
            f"{became}. Normalize at least {FEWEST} together: fewer groups, nn.LayerNorm over all features, or none."
        )
        if text not in self._told:
            self._told.add(text)
            self._tell(text)
