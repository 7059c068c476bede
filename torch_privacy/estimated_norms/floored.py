# SPDX-License-Identifier: Apache-2.0
"""Few projections with a floor under the estimate: a cheap sure bound on each row's norm takes away the heavy tail.

The estimate Mᵢ from r projections can fall far below ‖gᵢ‖, and with few projections it often does. With a sure bound
``Uᵢ >= ‖gᵢ‖`` the division is by ``max(Mᵢ, floor·Uᵢ)``, so that an example enters with at most ``1 / floor`` times the
clip norm. Where Uᵢ is far above ‖gᵢ‖ the example is clipped more than it need be: that costs accuracy, not privacy.

A row of one parameter is a sum over the positions at which it is used, in one use or several; so the bound is the sum
of the norms of its terms, ``Uᵢ = Σₜ ‖bᵢₜ‖ ‖xᵢₜ‖ >= ‖Σₜ bᵢₜ xᵢₜᵀ‖``. It is at most ``‖bᵢ‖_F ‖xᵢ‖_F`` for one use, and
for several at most the sum of these, by Cauchy and Schwarz; and exact at one position. The root of the sum of squares
over the uses would be no bound: two uses may add up to twice the norm of each. Over parameters squares are added.
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
from ..ops.conv import Conv, _by_group
from ..ops.embedding import TiedEmbedding
from ..ops.gram import lengths
from ..ops.linear import Bilinear, GroupedLinear, Linear
from ..ops.routed import RoutedLinear
from .estimates import Estimates


@singledispatch
def norm_bounds(op: Op) -> Tensor:
    """Sure bounds (n,) on the norms of an op's rows: the norms themselves, where these are cheap or there is no rule.

    A bound is a function of the row's own factors. How many examples there are and what fills up shorter ones with
    zeros has no part in it.
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
    return terms.new_zeros(len(terms), op.num_experts).scatter_add_(1, op.experts, terms).norm(dim=1)


@norm_bounds.register
def _(op: TiedEmbedding) -> Tensor:
    return norm_bounds(op.looked_up) + norm_bounds(op.product)


@norm_bounds.register
def _(op: Conv) -> Tensor:
    """The squared length of a patch is the sum of x² over it: channels are added first, so that little is unfolded."""
    n, groups = op.num_examples, op.geometry.groups
    squares = replace(op, x=op.x.square().unflatten(2, (groups, -1)).sum(3))  # one channel in each group
    vanished = op.shape[1:].numel() * torch.finfo(op.dtype).tiny
    patches = (squares._patches().sum(1) + vanished).sqrt()  # (n·groups, places of all images)
    b = lengths(_by_group(op.b, groups).flatten(2).mT)
    return (patches * b).sum(1).view(n, groups).norm(dim=1)


class FlooredNorms(Estimates):
    """``max(mean over j of (gᵢ·vⱼ)², floor² Uᵢ²)``, both from what the tape noted of x and b."""

    block_by_block = False

    def prepare(self, block: Block, *, alone: bool) -> None:
        kinds = " and ".join(sorted({type(op).__name__.lower() for op in block.ops}))
        self.forms.take(block.names, f"bounded as {kinds}" if alone and block.stands_alone else "bounded by its norm")

    def squared_norms(self, jacobian: Jacobian) -> Tensor:
        setting, parameters = self.setting, self.parameters
        assert setting.floor is not None
        bounds = jacobian.squared_bounds(norm_bounds)
        total = torch.zeros_like(bounds)
        for v in self.directions.in_groups(setting.num_projections, setting.group_size, parameters):
            total += jacobian.project(v).to(total).square().sum(1)
        return torch.maximum(total / setting.num_projections, setting.floor**2 * bounds)
