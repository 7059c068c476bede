# SPDX-License-Identifier: Apache-2.0
"""What is asked of the user's model before anything else: whose parameters are trained, and no learning from data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import LBFGS, Optimizer

from ._check import Refused


@dataclass(frozen=True)
class Census:
    """The tensors of a model, by the part they play in one step."""

    trained: Mapping[str, Tensor]  # held by the optimizer and requiring a gradient, by dotted name
    constants: Sequence[Tensor]  # the others that hold no data of the batch: buffers and frozen parameters
    buffers: Mapping[str, Tensor]


def take_census(model: nn.Module, optimizer: Optimizer) -> Census:
    """Who is who in the model just now; refuses parameters of the optimizer that are not the model's."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    strangers = held - {id(p) for p in named.values()}
    if strangers:
        raise Refused(
            f"PrivateTraining: the optimizer holds {len(strangers)} parameter(s) that are not the model's. Make it "
            "over model.parameters(), or pass one model that has all of them."
        )
    trained = {name: p for name, p in named.items() if id(p) in held and p.requires_grad}
    if not trained:
        raise Refused("PrivateTraining: no parameter of the optimizer requires a gradient; there is nothing to train.")
    frozen = [p for p in named.values() if not p.requires_grad]
    return Census(trained, [*frozen, *buffers.values()], buffers)


def check_model(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse LBFGS, and batch normalisation in training mode, which mixes a batch's examples."""
    if isinstance(optimizer, LBFGS):
        raise Refused("PrivateTraining: LBFGS asks for gradients several times a step; use a first-order optimizer.")
    offenders = [(name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training]
    if offenders:
        listed = ", ".join(
            f"{name!r} (use nn.GroupNorm({math.gcd(32, m.num_features)}, {m.num_features}))" for name, m in offenders
        )
        raise Refused(
            f"PrivateTraining: batch normalisation in training mode mixes examples, in module {listed}. Replace it, or "
            "put it in eval mode and freeze it."
        )


def check_buffers_unchanged(buffers: Mapping[str, Tensor], versions: Mapping[str, int]) -> None:
    """Refuse a forward that wrote into a buffer: such a buffer learns from the data without noise."""
    changed = [name for name, buffer in buffers.items() if buffer._version != versions[name]]
    if changed:
        raise Refused(
            f"PrivateTraining: the forward changed buffer {', '.join(map(repr, changed))}, which would carry data past "
            "the noise. Use a layer without running statistics, such as GroupNorm, or put that module in eval mode."
        )
