# SPDX-License-Identifier: Apache-2.0
"""Estimates norms by few projections with a floor: a cheap guaranteed bound on each row's norm removes the heavy tail.

The estimate Mᵢ from r projections can fall far below ‖gᵢ‖, and with few projections it often does. With a guaranteed
bound ``Uᵢ >= ‖gᵢ‖`` the divisor is ``max(Mᵢ, floor·Uᵢ)``, so that an example contributes at most ``1 / floor`` times
the clip norm. If Uᵢ is far above ‖gᵢ‖, the example is clipped more than necessary: that costs accuracy, not privacy.

A row of one parameter is a sum over the positions at which it is used, in one use or several; so the bound is the sum
of the norms of its terms, ``Uᵢ = Σₜ ‖bᵢₜ‖ ‖xᵢₜ‖ >= ‖Σₜ bᵢₜ xᵢₜᵀ‖``. It is at most ``‖bᵢ‖_F ‖xᵢ‖_F`` for one use, and
at most the sum of these for several, by Cauchy-Schwarz; at one position it is exact. The root of the sum of squares
over the uses would not be a bound: two uses may add up to twice the norm of each. Over parameters, squares are added.
"""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch

import torch
from torch import Tensor

from ..jacobian.blocks import Block
from ..jacobian.norms import squared_norms
from ..jacobian.operator import Jacobian
from ..ops import Op
from ..ops._base import add_at
from ..ops.conv import Conv, by_group
from ..ops.embedding import TiedEmbedding
from ..ops.gram import lengths
from ..ops.linear import Bilinear, GroupedLinear, Linear
from ..ops.routed import RoutedLinear
from .estimates import Estimates


@singledispatch
def norm_bounds(op: Op) -> Tensor:
    """Returns guaranteed bounds (n,) on the norms of an op's rows: the norms themselves if cheap or without a rule.

    A bound is a function of the row's own factors. It depends neither on the number of examples nor on zero padding.
    """
    return squared_norms(op).sqrt()


@norm_bounds.register
def _(op: Linear) -> Tensor:
    return (lengths(op.x) * lengths(op.b)).sum(1)


@norm_bounds.register
def _(op: GroupedLinear) -> Tensor:
    return (lengths(op.x) * lengths(op.b)).sum(2).norm(dim=1)


@norm_bounds.register
def _(op: Bilinear) -> Tensor:
    return (lengths(op.x1) * lengths(op.x2) * lengths(op.b)).sum(1)


@norm_bounds.register
def _(op: RoutedLinear) -> Tensor:
    terms = lengths(op.x) * lengths(op.b)
    places = op.experts + op.num_experts * torch.arange(len(terms), device=terms.device)[:, None]
    total = add_at(terms.new_zeros(len(terms) * op.num_experts), places.flatten(), terms.flatten())
    return total.view(len(terms), op.num_experts).norm(dim=1)


@norm_bounds.register
def _(op: TiedEmbedding) -> Tensor:
    return norm_bounds(op.looked_up) + norm_bounds(op.product)


@norm_bounds.register
def _(op: Conv) -> Tensor:
    """The squared norm of a patch is the sum of x² over it; summing channels first keeps the unfolded tensor small."""
    n, groups = op.num_examples, op.geometry.groups
    squares = replace(op, x=op.x.square().unflatten(2, (groups, -1)).sum(3))  # one channel in each group
    vanished = op.shape[1:].numel() * torch.finfo(op.dtype).tiny
    patches = (squares.patches().sum(1) + vanished).sqrt()  # (n·groups, places of all images)
    b = lengths(by_group(op.b, groups).flatten(2).mT)
    return (patches * b).sum(1).view(n, groups).norm(dim=1)


class FlooredNorms(Estimates):
    """Estimates ``max(mean over j of (gᵢ·vⱼ)², floor² Uᵢ²)`` from the x and b that the tape recorded."""

    block_by_block = False

    def prepare(self, block: Block, *, alone: bool) -> None:
        kinds = " and ".join(sorted({type(op).__name__.lower() for op in block.ops}))
        self.forms.require(
            block.names, f"bounded as {kinds}" if alone and block.stands_alone else "bounded by its norm"
        )

    def squared_norms(self, jacobian: Jacobian) -> Tensor:
        setting, parameters = self.setting, self.parameters
        assert setting.floor is not None
        bounds = jacobian.squared_bounds(norm_bounds)
        total = torch.zeros_like(bounds)
        for v in self.directions.in_groups(setting.num_projections, setting.group_size, parameters):
            total += jacobian.project(v).to(total).square().sum(1)
        return torch.maximum(total / setting.num_projections, setting.floor**2 * bounds)
