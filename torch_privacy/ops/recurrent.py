# SPDX-License-Identifier: Apache-2.0
"""Composes nn.LSTM, nn.GRU, nn.RNN and their cells of ops that the tape can record.

A layer multiplies all its inputs by W_ih in one ordinary ``linear``, which the tape records as usual. The recurrence is
one autograd function, the scan: ``a_t = gates_t + h_{t-1} W_hhᵀ + b_hh + u_t``, followed by the cell's nonlinearities.
Its weights are detached. In the graph they are represented by ``u``, a zero that takes no memory and is never really
added, but receives the gradient of that product for all steps at once: u counts as the product of W_hh with the states
shifted by one step, both for the tape and in an ordinary backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..support.validate import Refused
from ._base import Use
from .einsum import linear
from .recurrence import GRU, LSTM, RNN, Cell, ReluRNN, Scan, TimeSteps

Note = Callable[[Tensor, Sequence[Use]], None]


class Placeholder(torch.autograd.Function):
    """A zero in place of ``x Wᵀ + bias``, with its gradients; x is appended to the list ``later`` afterwards."""

    @staticmethod
    def forward(ctx: Any, later: list[Tensor], shape: Sequence[int], like: Tensor, *parameters: Tensor) -> Tensor:
        ctx.later, ctx.count = later, len(parameters)
        return like.new_zeros(()).expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, du: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,), du = (tensor.flatten(0, -2) for tensor in ctx.later), du.flatten(0, -2)
        return None, None, None, *(du.t() @ x, du.sum(0))[: ctx.count]


class Product:
    """The zero ``u`` that represents ``x Wᵀ + bias`` in the scan, and is recorded as such once x is known."""

    def __init__(self, like: Tensor, weight: Tensor, bias: Tensor | None = None):
        self._parameters = (weight,) if bias is None else (weight, bias)
        self._later: list[Tensor] = []
        shape = (*like.shape[:-1], weight.shape[0])
        self.u: Tensor = Placeholder.apply(self._later, shape, like.detach(), *self._parameters)

    def complete(self, note: Note, x: Tensor) -> None:
        """Records the product with ``x`` (*rows, d), the factor of the weight in the scan."""
        self._later.append(x)
        uses = [use for use in linear(self.u, x, *self._parameters) if use.weight.requires_grad]
        if uses:
            note(self.u, uses)


@dataclass(frozen=True)
class Weights:
    """Parameters of one direction of one layer, in torch's order; biases and projection may be missing."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    w_hr: Tensor | None = None


def _weights(flat: Sequence[Tensor], has_biases: bool, count: int) -> list[Weights]:
    """Groups a flat list of parameters by layer, and within it by direction."""
    each = len(flat) // count
    found = []
    for i in range(0, len(flat), each):
        w_ih, w_hh, *others = flat[i : i + each]
        b_ih, b_hh = others[:2] if has_biases else (None, None)
        found.append(Weights(w_ih, w_hh, b_ih, b_hh, others[-1] if len(others) % 2 else None))
    return found


def _layer(
    note: Note, kind: type[Cell], x: Tensor, sizes: tuple[int, ...], firsts: list[Tensor], weights: list[Weights]
) -> tuple[Tensor, list[Tensor]]:
    """Runs one layer in all its directions; returns its output and last states."""
    gates = [F.linear(x, w.w_ih, w.b_ih) for w in weights]
    products = [[Product(gates[0], w.w_hh, w.b_hh)] for w in weights]
    for in_direction, w in zip(products, weights, strict=True):
        if w.w_hr is not None:
            in_direction.append(Product(gates[0], w.w_hr))
    pairs = zip(gates, products, strict=True)
    inputs = [tensor for a, in_direction in pairs for tensor in (a, *(p.u for p in in_direction))]
    dtype = inputs[0].dtype
    with torch.no_grad():
        cells = [kind(w.w_hh.detach().to(dtype), *(_detached(p, dtype) for p in (w.b_hh, w.w_hr))) for w in weights]
    steps = [TimeSteps(sizes, backward) for backward in (False, True)[: len(weights)]]
    h0, c0 = (*(first.to(dtype) for first in firsts), None)[:2]
    y, h_n, c_n, *factors = Scan.apply(cells, steps, h0, c0, *inputs)
    for product, factor in zip((p for in_direction in products for p in in_direction), factors, strict=True):
        product.complete(note, factor)
    return y, [h_n] if c_n is None else [h_n, c_n]


def _detached(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if parameter is None else parameter.detach().to(dtype)


def _as_data(state: Tensor) -> Tensor:
    """Returns the state as data; adds zeros to one made from parameters, so that the tape records its first use.

    The tape would treat new zeros as a constant, and their product with a weight as one that has entries of its own for
    every example: rows of these take much longer than those of a linear layer.
    """
    with torch._C.DisableTorchFunction():
        if not state.requires_grad:
            return state.clone()
        zeros = torch.zeros(state.shape, dtype=state.dtype, device=state.device)
    return state + zeros


OPTIONS = ("hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
PADDED, PACKED = ("input", *OPTIONS, "batch_first"), ("data", "batch_sizes", *OPTIONS)


def _layers(kind: type[Cell], note: Note, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Returns output and last states of all layers, given the arguments of torch.lstm or a similar function."""
    given = arguments(args, kwargs)
    return through_layers(partial(_layer, note, kind), given | {"hx": [_as_data(state) for state in given["hx"]]})


def arguments(args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of torch.lstm or similar by name, first states in a list; ``batch_sizes`` if packed."""
    packed = "batch_sizes" in kwargs or (len(args) > 1 and _are_sizes(args[1]))
    given = dict(zip(PACKED if packed else PADDED, args, strict=False)) | kwargs
    return given | {"hx": [given["hx"]] if isinstance(given["hx"], Tensor) else list(given["hx"])}


def through_layers(layer: Callable[..., tuple[Tensor, list[Tensor]]], given: dict[str, Any]) -> tuple[Tensor, ...]:
    """Returns output and last states of all layers; ``layer`` maps (x, sizes, first states, weights) to these."""
    packed, transposed = "batch_sizes" in given, given.get("batch_first", False)
    x = given["data" if packed else "input"]
    x = x.transpose(0, 1) if transposed else x
    sizes = tuple(given["batch_sizes"].tolist()) if packed else (x.shape[1],) * x.shape[0]
    if not sizes:
        raise Refused("ops.recurrent: the sequences have no time steps; they need at least one. Skip such batches.")
    k = 2 if given["bidirectional"] else 1
    count = given["num_layers"] * k
    weights, lasts = _weights(given["params"], given["has_biases"], count), []
    for i in range(0, count, k):
        if i and given["dropout"] and given["train"]:
            x = F.dropout(x, given["dropout"])
        x, last = layer(x, sizes, [state[i : i + k] for state in given["hx"]], weights[i : i + k])
        lasts.append(last)
    return x.transpose(0, 1) if transposed else x, *(torch.cat(states) for states in zip(*lasts, strict=True))


def _are_sizes(value: Any) -> bool:
    """Returns True if the second argument holds batch sizes instead of a state."""
    return isinstance(value, Tensor) and not value.is_floating_point()


# Cells compute one step per call, so they are composed of ops that the tape knows.


def lstm_cell(
    note: Note,
    input: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes ``torch.lstm_cell``: (h, c) after one step."""
    h, c = (_as_data(state) for state in hx)
    i, f, g, o = (F.linear(input, w_ih, b_ih) + F.linear(h, w_hh, b_hh)).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_cell(
    note: Note,
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """Computes ``torch.gru_cell``: h after one step."""
    hx = _as_data(hx)
    (x_r, x_z, x_n), (r, z, n) = F.linear(input, w_ih, b_ih).chunk(3, 1), F.linear(hx, w_hh, b_hh).chunk(3, 1)
    n = (x_n + (x_r + r).sigmoid() * n).tanh()
    return n + (x_z + z).sigmoid() * (hx - n)


def _rnn_cell(
    activation: Callable[[Tensor], Tensor],
    note: Note,
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    return activation(F.linear(input, w_ih, b_ih) + F.linear(_as_data(hx), w_hh, b_hh))


COMPOSED = {
    torch.lstm: partial(_layers, LSTM),
    torch.gru: partial(_layers, GRU),
    torch.rnn_tanh: partial(_layers, RNN),
    torch.rnn_relu: partial(_layers, ReluRNN),
    torch.lstm_cell: lstm_cell,
    torch.gru_cell: gru_cell,
    torch.rnn_tanh_cell: partial(_rnn_cell, torch.tanh),
    torch.rnn_relu_cell: partial(_rnn_cell, torch.relu),
}
