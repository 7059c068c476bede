# SPDX-License-Identifier: Apache-2.0
"""Provides fast forward modes of torch functions, for one direction at a time.

That of a convolution, ``ẏ = ẋ ⋆ W + x ⋆ Ẇ + ḃ``, takes some of the images at a time: torch's own holds both products
and their sum for all images, which for the first layers of a network is as much as all values together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ._base import CHUNK_FLOATS
from .recurrent_tangents import LIBRARY, lstm

LIBRARY.define(
    "conv_tangents(Tensor x, Tensor weight, Tensor? dx, Tensor? dweight, Tensor? dbias, int[] stride, int[] padding,"
    " int[] dilation, bool transposed, int[] output_padding, int groups) -> Tensor"
)
PARTS = 12  # of the cache, for the outputs of a chunk: two products and their sum, each also in the native layout
_DEFAULTS = {"input": None, "weight": None, "bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def _conv_tangents(
    x: Tensor, weight: Tensor, dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None, *options: Any
) -> Tensor:
    """Returns the tangents of all outputs; None stands for a zero tangent."""
    terms = [(t, w) for t, w in ((dx, weight), (x, dweight)) if t is not None and w is not None]
    (t, w), *others = terms or [(x, torch.zeros_like(weight))]
    one = torch.convolution(t[:1], w, dbias, *options)
    out, step = x.new_empty(len(x), *one.shape[1:]), max(1, CHUNK_FLOATS // PARTS // max(1, one.numel()))
    for i in range(0, len(x), step):
        part = torch.convolution(t[i : i + step], w, dbias, *options)
        for t2, w2 in others:
            part += torch.convolution(t2[i : i + step], w2, None, *options)
        out[i : i + step] = part
    return out


LIBRARY.impl("conv_tangents", _conv_tangents, "CompositeExplicitAutograd")


class _Convolution(torch.autograd.Function):
    """A convolution with only a forward mode."""

    @staticmethod
    def forward(ctx: Any, options: tuple, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.options = options
        ctx.save_for_forward(x, weight)
        ctx.set_materialize_grads(False)
        return torch.convolution(x, weight, bias, *options)

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Tensor | None) -> Tensor:
        return torch.ops.torch_privacy.conv_tangents(*ctx.saved_tensors, *grad_inputs[1:], *ctx.options)


def _convolution(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Replaces ``torch.conv2d`` and the like; named paddings and single images use torch's own."""
    given = {**_DEFAULTS, **dict(zip(_DEFAULTS, args, strict=False)), **kwargs}
    x, weight, bias, *numbers, groups = given.values()
    dims = weight.ndim - 2
    if x.ndim < weight.ndim or isinstance(given["padding"], str):
        return func(*args, **kwargs)
    options = [[k] * dims if isinstance(k, int) else list(k) * (dims if len(k) == 1 else 1) for k in numbers]
    return _Convolution.apply((*options, False, [0] * dims, groups), x, weight, bias)


_REPLACED: dict[Any, Callable[..., Any]] = {torch.lstm: lstm}
_REPLACED |= {func: partial(_convolution, func) for func in (torch.conv1d, torch.conv2d, torch.conv3d)}


class FastTangents(TorchFunctionMode):
    """Makes nn.LSTM and convolutions use the ops above, for tangents of ``torch.autograd.forward_ad``."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        replacement: Callable[..., Any] = _REPLACED.get(func) or func
        return replacement(*args, **(kwargs or {}))
