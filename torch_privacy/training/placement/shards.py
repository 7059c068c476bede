# SPDX-License-Identifier: Apache-2.0
"""Provides the shards of tensors, for what is kept beside the weights."""

from __future__ import annotations

from torch import Tensor, nn

from ...support.gathered_weights import sharded_modules
from ...support.validate import Refused
from .base import local_of


def shard_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns this rank's shard of a tensor, which is whole or sharded as ``like`` is; without communication.

    Raises:
        Refused: it is sharded otherwise.
    """
    mesh, placements = getattr(like, "device_mesh", None), getattr(like, "placements", ())
    theirs = getattr(tensor, "placements", None)
    if theirs is not None and (theirs, getattr(tensor, "device_mesh", None)) != (placements, mesh):
        raise Refused(
            f"a shard {theirs} of a tensor of shape {tuple(tensor.shape)} cannot become one {placements or 'of none'}. "
            "Load the state with torch.distributed.checkpoint, which moves shards between ranks."
        )
    if mesh is None or theirs is not None:
        return local_of(tensor)
    for dim, placement in enumerate(placements):
        if placement.is_shard():
            size = tensor.shape[placement.dim]
            each = -(-size // mesh.size(dim))
            start = min(mesh.get_local_rank(dim) * each, size)
            tensor = tensor.narrow(placement.dim, start, min(each, size - start))
    return tensor


def reshard(model: nn.Module) -> None:
    """Frees the whole weights that a forward has left, so that the model's parameters are shards."""
    for unit in sharded_modules(model):
        unit.reshard()
