# SPDX-License-Identifier: Apache-2.0
"""Implements the recurrence of nn.LSTM, nn.GRU and nn.RNN as one autograd function per layer, for all its directions.

Forward and backward go step by step and write into preallocated tensors: here a torch call costs as much as its
arithmetic, and allocating memory costs more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..support.validate import Refused

aten = torch.ops.aten

CHUNK_ENTRIES = 2**19  # gate entries for which the backward prepares its factors at once: 2 MiB of float32


@dataclass(frozen=True)
class TimeSteps:
    """Concatenated time steps of ``sizes[t]`` rows each, in non-increasing sizes; ``backward`` in time or not.

    Rows [0, sizes[t]) of step t are the sequences that have not ended, so row i is the same sequence in all steps.
    """

    sizes: tuple[int, ...]
    backward: bool

    @property
    def ragged(self) -> bool:
        """True if sequences differ in length (a packed batch)."""
        return self.sizes[0] != self.sizes[-1]

    def order(self) -> list[int]:
        """Returns the steps in the order in which the state passes through them."""
        order = list(range(len(self.sizes)))
        return order[::-1] if self.backward else order

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Splits (total, ..) into one (sizes[t], ..) per step."""
        return rows.split(self.sizes)

    def split_chunk(self, rows: Tensor, chunk: list[int]) -> dict[int, Tensor]:
        """Splits the rows of a chunk, by step."""
        chunk = sorted(chunk)
        return dict(zip(chunk, rows.split([self.sizes[t] for t in chunk]), strict=True))

    def chunks(self, width: int, *, forward: bool = False) -> Iterator[tuple[list[int], slice]]:
        """Yields steps, in reverse order or forward, in chunks with their rows, for rows of ``width`` entries."""
        order = self.order() if forward else self.order()[::-1]
        count = max(1, CHUNK_ENTRIES // max(1, width * self.sizes[0]))
        starts = [0, *accumulate(self.sizes)]
        for i in range(0, len(order), count):
            steps = order[i : i + count]
            yield steps, slice(starts[min(steps)], starts[max(steps) + 1])


@dataclass
class Carried:
    """A state passed from step to step: sequences join it with their rows of ``joining``, and leave their last rows."""

    joining: Tensor
    state: Tensor = field(init=False)
    left: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.state, self.left = self.joining[:0], torch.empty_like(self.joining, memory_format=torch.contiguous_format)

    def enter(self, size: int) -> Tensor:
        """Returns the state for a step of ``size`` rows."""
        held = len(self.state)
        if held < size:
            self.state = torch.cat([self.state, self.joining[held:size]])
        elif held > size:
            self.left[size:held] = self.state[size:]
            self.state = self.state[:size]
        return self.state

    def finish(self) -> Tensor:
        """Returns the state of every sequence at its end, (n, ..)."""
        self.left[: len(self.state)] = self.state
        return self.left


@dataclass
class Gradient(Carried):
    """The gradient in a state, passed backward; ``added[t]`` is added at step t (from the layer's output)."""

    sizes: tuple[int, ...]
    added: Sequence[Tensor] | None = None

    def enter_step(self, t: int) -> Tensor:
        """Returns the gradient in the state after step t, which may be overwritten."""
        state = self.enter(self.sizes[t])
        return state if self.added is None else state.add_(self.added[t])


class Track:
    """A state before and after every step, (total, d) each.

    If all sequences have equal length, both are parts of one buffer (n + total + n, d): the state after a step is the
    state before the next.
    """

    def __init__(self, steps: TimeSteps, first: Tensor, buffer: Tensor):
        n = len(first)
        self._carried = Carried(first) if steps.ragged else None
        self.after = buffer[n:-n] if n else buffer
        if self._carried is not None:
            self.before = buffer.new_empty(self.after.shape)
        else:
            self.before = buffer[2 * n :] if steps.backward else buffer[: len(buffer) - 2 * n]
            (buffer[-n:] if steps.backward else buffer[:n]).copy_(first)
        self._last = steps.order()[-1]
        self.befores, self.afters = steps.split(self.before), steps.split(self.after)

    def enter(self, t: int) -> Tensor:
        """Returns the state before step t; the caller fills ``afters[t]``."""
        before = self.befores[t]
        if self._carried is not None:
            before.copy_(self._carried.enter(len(before)))
            self._carried.state = self.afters[t]
        return before

    def finish(self) -> Tensor:
        """Returns every sequence's last state, (n, d)."""
        return self.afters[self._last].clone() if self._carried is None else self._carried.finish()


@dataclass(frozen=True)
class Cell(ABC):
    """One direction of a layer: its detached hidden weights, and the forward and backward of its state.

    Shapes: ``w_hh`` (gates·d, e), ``b_hh`` (gates·d,), ``w_hr`` (e, d) or None, for d hidden units and states of e.
    """

    w_hh: Tensor
    b_hh: Tensor | None
    w_hr: Tensor | None

    @abstractmethod
    def forward(self, steps: TimeSteps, gates: Tensor, h: Track, c: Track | None) -> tuple[Tensor, ...]:
        """Fills the tracks, overwriting ``gates`` (total, gates·d); returns the tensors for ``backward``."""

    @abstractmethod
    def backward(
        self, steps: TimeSteps, saved: Sequence[Tensor], dh: Gradient, dc: Gradient | None
    ) -> tuple[Tensor, ...]:
        """Returns gradients in gates, u and, with ``w_hr``, its product; those in the first states stay in dh and dc.

        It must not overwrite ``saved``, because there may be another backward.
        """


class LSTM(Cell):
    """``i, f, o = σ(a_i), σ(a_f), σ(a_o); g = tanh(a_g); c = f c + i g; m = o tanh(c)``; h is m or ``m W_hrᵀ``."""

    def forward(self, steps: TimeSteps, gates: Tensor, h: Track, c: Track | None) -> tuple[Tensor, ...]:
        assert c is not None
        d, w = c.after.shape[1], self.w_hh.t()
        if self.b_hh is not None:
            gates += self.b_hh
        hidden = h.after if self.w_hr is None else torch.empty_like(c.after)
        hiddens, wholes, i_f = steps.split(hidden), steps.split(gates), steps.split(gates[:, : 2 * d])
        i, f, g, o = (steps.split(part) for part in gates.chunk(4, 1))
        tanh = torch.empty_like(c.after)
        tanhs = steps.split(tanh)
        for t in steps.order():
            wholes[t].addmm_(h.enter(t), w)
            i_f[t].sigmoid_()
            g[t].tanh_()
            o[t].sigmoid_()
            torch.mul(f[t], c.enter(t), out=c.afters[t]).addcmul_(i[t], g[t])
            torch.mul(o[t], torch.tanh(c.afters[t], out=tanhs[t]), out=hiddens[t])
            if self.w_hr is not None:
                torch.mm(hiddens[t], self.w_hr.t(), out=h.afters[t])
        return gates, c.before, tanh, hidden

    def backward(
        self, steps: TimeSteps, saved: Sequence[Tensor], dh: Gradient, dc: Gradient | None
    ) -> tuple[Tensor, ...]:
        assert dc is not None
        gates, before, tanh, _ = saved
        d = tanh.shape[1]
        f = steps.split(gates[:, d : 2 * d])
        da = torch.empty_like(gates)
        das, das_o = steps.split(da), steps.split(da[:, 3 * d :])
        das_ifg = [part.unflatten(1, (3, d)) for part in steps.split(da[:, : 3 * d])]
        projected: list[Tensor] = []
        for chunk, rows in steps.chunks(4 * d):
            h_to_c = steps.split_chunk(lstm_factors(gates[rows], before[rows], tanh[rows], da[rows]), chunk)
            for t in chunk:
                dm = dh.enter_step(t)
                if self.w_hr is not None:
                    projected.append(dm)
                    dm = dm @ self.w_hr
                cell = dc.enter_step(t).addcmul_(dm, h_to_c[t])
                das_o[t].mul_(dm)
                das_ifg[t].mul_(cell.unsqueeze(1))
                dc.state = cell.mul_(f[t])
                dh.state = das[t] @ self.w_hh
        return (da, da) if self.w_hr is None else (da, da, torch.cat(projected if steps.backward else projected[::-1]))


def lstm_factors(gates: Tensor, before: Tensor, tanh: Tensor, out: Tensor, h_to_c: Tensor | None = None) -> Tensor:
    """Writes the derivatives of c in a_i, a_f, a_g and of h in a_o to ``out``; returns that of h in c, ``h_to_c``.

    ``before`` is the previous c, and ``tanh`` that of the next c.
    """
    (i, f, g, o), (to_i, to_f, to_g, to_o) = gates.chunk(4, 1), out.chunk(4, 1)
    aten.sigmoid_backward(g, i, grad_input=to_i)
    aten.sigmoid_backward(before, f, grad_input=to_f)
    aten.tanh_backward(i, g, grad_input=to_g)
    aten.sigmoid_backward(tanh, o, grad_input=to_o)
    return aten.tanh_backward(o, tanh, grad_input=torch.empty_like(tanh) if h_to_c is None else h_to_c)


class GRU(Cell):
    """``r, z = σ(a_r), σ(a_z); n = tanh(x_n + r q); h = (1 - z) n + z h`` with ``q = W_hn h + b_hn``."""

    def forward(self, steps: TimeSteps, gates: Tensor, h: Track, c: Track | None) -> tuple[Tensor, ...]:
        d = h.after.shape[1]
        w_rz, w_n = self.w_hh[: 2 * d].t(), self.w_hh[2 * d :].t()
        b_n = self.w_hh.new_zeros(d) if self.b_hh is None else self.b_hh[2 * d :]
        if self.b_hh is not None:
            gates[:, : 2 * d] += self.b_hh[: 2 * d]
        q = gates.new_empty(len(gates), d)
        qs, rz = steps.split(q), steps.split(gates[:, : 2 * d])
        r, z, n = (steps.split(part) for part in gates.chunk(3, 1))
        for t in steps.order():
            before = h.enter(t)
            rz[t].addmm_(before, w_rz).sigmoid_()
            n[t].addcmul_(r[t], torch.addmm(b_n, before, w_n, out=qs[t])).tanh_()
            torch.lerp(n[t], before, z[t], out=h.afters[t])
        return gates, q, h.before

    def backward(
        self, steps: TimeSteps, saved: Sequence[Tensor], dh: Gradient, dc: Gradient | None
    ) -> tuple[Tensor, ...]:
        gates, q, before = saved
        d = q.shape[1]
        z = steps.split(gates[:, d : 2 * d])
        du, dn = torch.empty_like(gates), torch.empty_like(q)
        dus, dns = steps.split(du), steps.split(dn)
        for chunk, rows in steps.chunks(4 * d):
            _gru_factors(gates[rows], q[rows], before[rows], du[rows], dn[rows])
            for t in chunk:
                gradient = dh.enter_step(t)
                dus[t].unflatten(1, (3, d)).mul_(gradient.unsqueeze(1))
                dns[t].mul_(gradient)
                dh.state = (dus[t] @ self.w_hh).addcmul_(gradient, z[t])
        return torch.cat([du[:, : 2 * d], dn], 1), du


def _gru_factors(gates: Tensor, q: Tensor, before: Tensor, out: Tensor, out_n: Tensor) -> None:
    """Writes the derivatives of h in a_r, a_z and q to ``out``, and in x_n to ``out_n``."""
    (r, z, n), (to_r, to_z, to_q) = gates.chunk(3, 1), out.chunk(3, 1)
    aten.sigmoid_backward(before - n, z, grad_input=to_z)
    aten.tanh_backward(1 - z, n, grad_input=out_n)
    torch.mul(out_n, r, out=to_q)
    aten.sigmoid_backward(out_n * q, r, grad_input=to_r)


class RNN(Cell):
    """``h = f(a)`` with f = tanh; subclasses may override f."""

    def forward(self, steps: TimeSteps, gates: Tensor, h: Track, c: Track | None) -> tuple[Tensor, ...]:
        w = self.w_hh.t()
        if self.b_hh is not None:
            gates += self.b_hh
        gates_of = steps.split(gates)
        for t in steps.order():
            self._activate(gates_of[t].addmm_(h.enter(t), w), h.afters[t])
        return (h.after,)

    def backward(
        self, steps: TimeSteps, saved: Sequence[Tensor], dh: Gradient, dc: Gradient | None
    ) -> tuple[Tensor, ...]:
        (y,) = saved
        da = y.new_empty(y.shape)
        das, ys = steps.split(da), steps.split(y)
        for t in reversed(steps.order()):
            self._derive(dh.enter_step(t), ys[t], das[t])
            dh.state = das[t] @ self.w_hh
        return da, da

    def _activate(self, a: Tensor, out: Tensor) -> None:
        torch.tanh(a, out=out)

    def _derive(self, dy: Tensor, y: Tensor, out: Tensor) -> None:
        aten.tanh_backward(dy, y, grad_input=out)


class ReluRNN(RNN):
    """``h = max(a, 0)``."""

    def _activate(self, a: Tensor, out: Tensor) -> None:
        torch.clamp_min(a, 0, out=out)

    def _derive(self, dy: Tensor, y: Tensor, out: Tensor) -> None:
        aten.threshold_backward(dy, y, 0, grad_input=out)


class Scan(torch.autograd.Function):
    """Maps gates and first states of one layer, in all directions, to outputs and last states.

    Arguments: the cells and steps of k directions; first states ``h0`` (k, n, e) and, for an LSTM, ``c0`` (k, n, d);
    then by direction the gates (*rows, gates·d), u of the same shape and, if projected, one more zero (*rows, e). The
    gates are overwritten.

    Returns y (*rows, k·e), h_n and c_n; then, without a gradient, by direction the states before every step (*rows, e)
    and, if projected, the hidden units (*rows, d).
    """

    @staticmethod
    def forward(
        ctx: Any, cells: list[Cell], steps: list[TimeSteps], h0: Tensor, c0: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        with torch._C.DisableTorchFunction():  # a recording tape would cost more than most of the calls
            return _run(ctx, cells, steps, h0, c0, inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        if torch.is_grad_enabled():  # once_differentiable would drop a part of the second derivative without a word
            raise Refused(
                "ops.recurrent: a gradient through nn.LSTM, nn.GRU or nn.RNN was asked for with create_graph=True. Its "
                "second derivative has no exact rule here. Take the difference of two forwards in place of that "
                "gradient (docs/jacobian.md#gradients-inside-of-a-loss), or loop over nn.LSTMCell."
            )
        (y, *saved), (dy, *lasts) = ctx.saved_tensors, gradients
        k, each = len(ctx.cells), len(saved) // len(ctx.cells)
        joining = [y.new_zeros(s) if last is None else last for s, last in zip(ctx.states, lasts, strict=False)]
        firsts, found = [], []
        for j, (cell, steps) in enumerate(zip(ctx.cells, ctx.steps, strict=True)):
            dh = Gradient(joining[0][j], steps.sizes, _by_step(dy, steps, j, k))
            dc = Gradient(joining[1][j], steps.sizes) if len(joining) > 1 else None
            found += cell.backward(steps, saved[j * each : (j + 1) * each], dh, dc)
            firsts.append((dh.finish(), None if dc is None else dc.finish()))
        return None, None, *_stack(firsts), *(g.view(*y.shape[:-1], g.shape[1]) for g in found)


def _run(
    ctx: Any, cells: list[Cell], steps: list[TimeSteps], h0: Tensor, c0: Tensor | None, inputs: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    k, n, e = h0.shape
    rows = inputs[0].shape[:-1]
    total = rows.numel()
    buffer = h0.new_empty(n + total + n, k * e)
    y = buffer[n : n + total].view(*rows, k * e).data  # autograd would forbid in-place changes of a view
    lasts, noted, saved = [], [], []
    for j, (cell, step) in enumerate(zip(cells, steps, strict=True)):
        h = Track(step, h0[j], buffer[:, j * e : (j + 1) * e])
        c = None if c0 is None else Track(step, c0[j], c0.new_empty(len(buffer), c0.shape[2]))
        saved += cell.forward(step, inputs[j * len(inputs) // k].data.flatten(0, -2), h, c)
        lasts.append((h.finish(), None if c is None else c.finish()))
        noted.append(_shaped(h.before, rows, y))
        if cell.w_hr is not None:
            noted.append(saved[-1].view(*rows, saved[-1].shape[1]))
    ctx.cells, ctx.steps, ctx.states = cells, steps, [state.shape for state in (h0, c0) if state is not None]
    ctx.save_for_backward(y, *saved)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*noted)
    return y, *_stack(lasts), *noted


def _stack(states: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Stacks (h, c) by direction to h (k, n, e) and c (k, n, d), if any."""
    hs, cs = zip(*states, strict=True)
    return torch.stack(hs), None if cs[0] is None else torch.stack(cs)


def _shaped(before: Tensor, rows: torch.Size, y: Tensor) -> Tensor:
    """Returns the states before every step, (*rows, e); as views of y where they share its memory."""
    if before.untyped_storage().data_ptr() != y.untyped_storage().data_ptr():
        return before.view(*rows, before.shape[1])
    return y.detach().as_strided(before.shape, before.stride(), before.storage_offset()).view(*rows, before.shape[1])


def _by_step(dy: Tensor | None, steps: TimeSteps, j: int, k: int) -> list[Tensor] | None:
    """Splits the gradient in the output (*rows, k·e) by step, for direction j: (sizes[t], e)."""
    if dy is None:
        return None
    parts = dy.unbind() if dy.ndim == 3 else dy.split(steps.sizes)
    e = dy.shape[-1] // k
    return [part[:, j * e : (j + 1) * e] for part in parts]
