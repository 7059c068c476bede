# SPDX-License-Identifier: Apache-2.0
"""Provides fast forward modes of torch functions, for one direction at a time.

That of a convolution, ``ẏ = ẋ ⋆ W + x ⋆ Ẇ + ḃ``, takes some of the images at a time: torch's own holds both products
and their sum for all images, which for the first layers of a network is as much as all values together.

That of ``nn.LSTM`` has one op for the values and one for the tangents. With ``a = x W_ihᵀ + b_ih + h W_hhᵀ + b_hh`` a
tangent passes from step to step by

    ȧ = x Ẇ_ihᵀ + ẋ W_ihᵀ + h Ẇ_hhᵀ + ḃ + ḣ W_hhᵀ,   ċ = f ċ + (∂c/∂a) ȧ,   ḣ = (∂h/∂a_o) ȧ_o + (∂h/∂c) ċ

where all terms but ``ḣ W_hhᵀ`` are computed for many steps at once. The derivatives are kept with the values, for all
directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ._base import CHUNK_FLOATS
from .recurrence import LSTM, Carried, TimeSteps, Track, lstm_factors
from .recurrent import Weights, arguments, through_layers

LIBRARY = torch.library.Library("torch_privacy", "DEF")
LIBRARY.define("lstm_values(Tensor x, Tensor h, Tensor c, Tensor?[] weights, int[] sizes) -> Tensor[]")
LIBRARY.define(
    "lstm_tangents(Tensor?[] weights, Tensor[] kept, Tensor?[] tangents, int[] sizes) -> (Tensor, Tensor, Tensor)"
)
EACH = 4  # number of weights of a direction (w_ih, w_hh, b_ih, b_hh), and of tensors kept for it


def _values(x: Tensor, h: Tensor, c: Tensor, weights: Sequence[Any], sizes: Sequence[int]) -> list[Tensor]:
    """Runs a layer in k directions on x (total, d_in) and first states (k, n, d).

    Returns outputs (total, k·d), last states and, for each direction, the tensors for tangents: the factors of weights
    (x, h before the step, and 1), derivatives of c in a_i, a_f, a_g and of h in a_o, derivatives of c in the previous
    c, and of h in c.
    """
    k, n, d = c.shape
    y, lasts, kept = x.new_empty(len(x), k * d), [], []
    for j, (w_ih, w_hh, *biases) in enumerate(_by_direction(weights)):
        steps, bias = (
            TimeSteps(tuple(sizes), j == 1),
            sum((b for b in biases if b is not None), start=x.new_zeros(4 * d)),
        )
        gates = F.linear(x, w_ih, bias)
        hs, cs = (Track(steps, first, first.new_empty(n + len(x) + n, d)) for first in (h[j], c[j]))
        tanh = LSTM(w_hh, None, None).forward(steps, gates, hs, cs)[2]
        factors, h_to_c = torch.empty_like(gates), torch.empty_like(cs.after)
        for _, rows in steps.chunks(4 * d):
            lstm_factors(gates[rows], cs.before[rows], tanh[rows], factors[rows], h_to_c[rows])
        y[:, j * d : (j + 1) * d] = hs.after
        lasts.append((hs.finish(), cs.finish()))
        kept += [_concatenated(x, hs.before, x.new_ones(len(x))), factors, gates[:, d : 2 * d].contiguous(), h_to_c]
    return [y, *(torch.stack(states) for states in zip(*lasts, strict=True)), *kept]


def _concatenated(x: Tensor, h: Tensor, one: Tensor) -> Tensor:
    """Concatenates (m, d_in), (m, d) and (m,) by columns, zero-padded to a width that multiplies fast."""
    width = x.shape[1] + h.shape[1]
    joined = x.new_empty(len(x), width + 8)
    joined[:, : x.shape[1]], joined[:, x.shape[1] : width], joined[:, width], joined[:, width + 1 :] = x, h, one, 0
    return joined


def _tangents(
    weights: Sequence[Any], kept: Sequence[Tensor], tangents: Sequence[Any], sizes: Sequence[int]
) -> tuple[Tensor, ...]:
    """Returns the tangents of the outputs and last states; None stands for a zero tangent."""
    dx, dh, dc, *dw = tangents
    n, d, k = sizes[0], kept[2].shape[1], len(kept) // EACH
    dy, lasts = kept[0].new_empty(len(kept[0]), k * d), []
    firsts = [dy.new_zeros(k, n, d) if first is None else first for first in (dh, dc)]
    for j, (w, kept_here, dw_here) in enumerate(zip(*map(_by_direction, (weights, kept, dw)), strict=True)):
        dw_ih, dw_hh = (
            torch.zeros_like(p) if tangent is None else tangent for p, tangent in zip(w[:2], dw_here[:2], strict=True)
        )
        bias = sum((b for b in dw_here[2:] if b is not None), start=dy.new_zeros(4 * d))
        states = [Carried(first[j]) for first in firsts]
        steps, part = TimeSteps(tuple(sizes), j == 1), dy[:, j * d : (j + 1) * d]
        _run_direction(steps, kept_here, _concatenated(dw_ih, dw_hh, bias), dx, w[0], w[1], states, part)
        lasts.append([state.finish() for state in states])
    return dy, *(torch.stack(states) for states in zip(*lasts, strict=True))


def _run_direction(
    steps: TimeSteps,
    kept: Sequence[Tensor],
    tangent: Tensor,
    dx: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    states: Sequence[Carried],
    dy: Tensor,
) -> None:
    """Computes one direction of a layer: ȧ for several steps at once, then ``dy`` step by step, by the states h, c."""
    (joined, factors, f, h_to_c), (h, c) = kept, states
    ys, fs, h_to_cs = (steps.split(part) for part in (dy, f, h_to_c))
    for chunk, rows in steps.chunks(len(tangent), forward=True):
        da = joined[rows] @ tangent.t()
        if dx is not None:
            da.addmm_(dx[rows], w_ih.t())
        das, scales = steps.split_chunk(da, chunk), steps.split_chunk(factors[rows], chunk)
        for t in chunk:
            a = das[t].addmm_(h.enter(len(das[t])), w_hh.t()).mul_(scales[t]).unflatten(1, (4, -1))
            c.state = a[:, :3].sum(1).addcmul_(c.enter(len(a)), fs[t])
            h.state = torch.addcmul(a[:, 3], c.state, h_to_cs[t], out=ys[t])


def _by_direction(flat: Sequence[Any]) -> list[Sequence[Any]]:
    return [flat[i : i + EACH] for i in range(0, len(flat), EACH)]


LIBRARY.impl("lstm_values", _values, "CompositeExplicitAutograd")
LIBRARY.impl("lstm_tangents", _tangents, "CompositeExplicitAutograd")


class _Layer(torch.autograd.Function):
    """A layer with only a forward mode: x (total, d_in), first states (k, n, d) -> (total, k·d), last states."""

    @staticmethod
    def forward(
        ctx: Any, sizes: tuple[int, ...], x: Tensor, h: Tensor, c: Tensor, *weights: Tensor | None
    ) -> tuple[Tensor, ...]:
        y, h_n, c_n, *kept = torch.ops.torch_privacy.lstm_values(x, h, c, weights, sizes)
        ctx.sizes = sizes
        ctx.save_for_forward(*(tensor for pair in zip(weights, kept, strict=True) for tensor in pair))
        ctx.set_materialize_grads(False)
        return y, h_n, c_n

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Tensor | None) -> tuple[Tensor, ...]:
        weights, kept = (ctx.saved_tensors[start::2] for start in (0, 1))
        return torch.ops.torch_privacy.lstm_tangents(weights, kept, grad_inputs[1:], ctx.sizes)


def _layer(
    x: Tensor, sizes: tuple[int, ...], firsts: list[Tensor], weights: list[Weights]
) -> tuple[Tensor, list[Tensor]]:
    """Runs one layer in all its directions; returns its output and last states."""
    flat = [p for w in weights for p in (w.w_ih, w.w_hh, w.b_ih, w.b_hh)]
    y, *lasts = _Layer.apply(sizes, x.reshape(-1, x.shape[-1]), *firsts, *flat)
    return y.view(*x.shape[:-1], -1), lasts


def lstm(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Replaces ``torch.lstm``; LSTMs with projections use torch's own."""
    given = arguments(args, kwargs)
    projected = len({state.shape[-1] for state in given["hx"]}) > 1
    return torch.lstm(*args, **kwargs) if projected else through_layers(_layer, given)


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
