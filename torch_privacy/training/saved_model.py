# SPDX-License-Identifier: Apache-2.0
"""Makes the content of a model's file, and says what in it no release has made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..support.ranks import Ranks
from ..support.validate import quoted
from .placement import reshard

BESIDE_RELEASES = (
    "what is in the model's file and was made by no release here, as the training found it or the loop changed it"
)
MOST_NAMES = 5


def weights_of(model: nn.Module, ranks: Ranks) -> bytes:
    """Returns a model's parameters and buffers in the safetensors format.

    Of a sharded model every rank calls it, and the first one gets all weights; the others get nothing. Tied weights are
    stored once, under their first name, and the metadata have the other names, as for
    ``safetensors.torch.load_model``.
    """
    inner = without_wrapper(model)
    reshard(inner)
    weights: dict[str, Tensor] = {}
    names: dict[Any, str] = {}  # the first one of each tensor
    metadata: dict[str, str] = {}
    tied = {name: id(p) for name, p in inner.named_parameters(remove_duplicate=False)}
    with torch.no_grad():
        for name, value in inner.state_dict().items():
            if not isinstance(value, Tensor):
                continue  # extra state of a module, which the format cannot hold
            place = _place(value.detach(), tied.get(name))
            if place in names:
                metadata[name] = names[place]
                continue
            names[place] = name
            if hasattr(value, "full_tensor"):  # every rank takes part
                value = value.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
            if ranks.is_first:
                dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
                weights[name] = dense.to("cpu", copy=True).contiguous()
    return safetensors.torch.save(weights, metadata or None) if ranks.is_first else b""


def unreleased(model: nn.Module, trained: Mapping[str, Tensor]) -> list[str]:
    """Returns a sentence on what a model's file has beside trained parameters, which no release made; or nothing."""
    inner, ours = without_wrapper(model), {id(p) for p in trained.values()}
    buffers = [
        f"{place}.{name}".lstrip(".")
        for place, module in inner.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
    frozen = [name for name, p in inner.named_parameters() if id(p) not in ours]
    kinds = {"buffers": buffers, "parameters that were not trained": frozen}
    listed = [f"{kind} {quoted(names, at_most=MOST_NAMES)}" for kind, names in kinds.items() if names]
    return [f"{BESIDE_RELEASES}: {'; '.join(listed)}"] if listed else []


def without_wrapper(model: nn.Module) -> nn.Module:
    """Returns the network in a ``DistributedDataParallel``, or the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _place(value: Tensor, parameter: int | None) -> Any:
    """Returns what all names of one tensor have in common: the same on all ranks, where it is a shard."""
    is_here = not hasattr(value, "full_tensor") and value.layout is torch.strided and value.numel() > 0
    if is_here:
        return value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride()
    return object() if parameter is None else parameter


def check_alike(model: nn.Module, trained: Mapping[str, Tensor]) -> None:
    """Refuses a model without the trained parameters, by name and shape."""
    inner = without_wrapper(model)
    there = dict(inner.named_parameters(remove_duplicate=False))
    differing = [name for name, p in trained.items() if name not in there or there[name].shape != p.shape]
    if differing:
        raise ValueError(
            f"PrivateTraining.write_run: model={type(inner).__name__} has no {quoted(differing, at_most=5)} of the "
            "shape that was trained. Pass the trained model or its moving average, average.model."
        )
