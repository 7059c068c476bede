# SPDX-License-Identifier: Apache-2.0
"""Forward mode whose values are computed once for all directions: the same tangents, or a refusal to share."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from parts import Calls, trained
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode

import torch_privacy as tp
from torch_privacy._replay import RandomState
from torch_privacy.estimated_norms import jvp as _pushforward
from torch_privacy.estimated_norms.directions import Directions
from torch_privacy.estimated_norms.jvp import Manner, Run
from torch_privacy.estimated_norms.projected import Sketching
from torch_privacy.estimated_norms.shared_forward import Unshared

R = 3


def pushed(model, x, manner):
    """Tangents of the outputs along three directions, and the run that made them."""
    torch.manual_seed(3)
    run = Run(model, (x,), {}, RandomState())
    run.ended(model(x))
    v = Directions(bytes(32), 0, 0).draw(range(R), trained(model))
    return run.push(v, trained(model), manner), run


def filled(model, x):
    out = torch.zeros(len(x), 4)
    out[:, :2] = x[:, :2]  # a value, in zeros that are made in every pass
    out[:, 2:] = (x @ model.w)[:, 2:]
    return out


def zeros_multiplied(model, x):
    z = torch.zeros(len(x), 4)
    z[:, :2] = x.sin()[:, :2]
    y = x @ model.w
    return y * (z @ torch.ones(4, 4)) + y * z


def copy_filled(model, x):
    h, y = x.clone(), x @ model.w
    h[:, :2] = y[:, :2]
    h[:, 2:] = y[:, 2:]
    return h.sin()


class OwnBuffer(torch.autograd.Function):
    """Twice its argument; the tangent is written into what the forward made."""

    @staticmethod
    def forward(ctx, x):
        ctx.buffer = torch.empty_like(x)
        return 2 * x

    @staticmethod
    def jvp(ctx, dx):
        return ctx.buffer.copy_(dx) * 2


class OwnZeros(torch.autograd.Function):
    """Twice its argument; the tangent is added to zeros."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def jvp(ctx, dx):
        zeros = torch.zeros(dx.shape)
        torch._foreach_add_([zeros], [dx])  # which returns nothing
        return zeros * 2


def counted(model, x):
    model.count.add_(1)
    return torch.tanh(x @ model.w)


def on_half(model, x):
    h = x @ model.w
    h[:, :2].sigmoid_()
    return h.cos()


def by_a_number(model, x):
    h = torch.tanh(x @ model.w)
    return h * 2 if h.abs().max().item() < 5 else h


def added_later(model, x):
    h = x @ model.w
    square = h * h
    h.add_(1)
    return square + h


def through_numpy(model, x):
    h = torch.tanh(x @ model.w)
    return h * torch.from_numpy(h.detach().numpy() > 0).to(h)


SHARED = {
    "dense": lambda m, x: torch.tanh(x @ m.w) @ m.w,
    "rectified in place": lambda m, x: F.relu_(x @ m.w) @ m.w,
    "dropout": lambda m, x: F.dropout(F.relu(x @ m.w), 0.5) @ m.w,
    "normalized": lambda m, x: F.layer_norm(x @ m.w, (4,)),
    "zeros filled": filled,
    "zeros multiplied": zeros_multiplied,
    "a copy filled": copy_filled,
    "tangents added to zeros": lambda m, x: OwnZeros.apply(x @ m.w),
    "zeros beside": lambda m, x: torch.cat([x @ m.w, torch.zeros(len(x), 1)], 1),
    "a buffer counted": counted,
    "a part changed in place": on_half,
    "a number read": by_a_number,
    "chosen entries": lambda m, x: torch.where(x > 0, x @ m.w, x)[:, torch.tensor([2, 0])].topk(1).values,
    "attention": lambda m, x: F.scaled_dot_product_attention(*((x @ m.w)[None, None],) * 3)[0, 0],
    "scan of sums": lambda m, x: (x @ m.w).cumsum(1).exp(),
}
UNSHARED = {
    "a value changed after use": added_later,
    "through numpy": through_numpy,
    "tangents written into a value": lambda m, x: OwnBuffer.apply(x @ m.w),
}


def calls(function):
    torch.manual_seed(1)
    model = Calls(function, w=torch.randn(4, 4))
    model.register_buffer("count", torch.zeros(()))
    return model, torch.randn(5, 4)


@pytest.mark.parametrize("function", [*SHARED.values(), *UNSHARED.values()], ids=[*SHARED, *UNSHARED])
def test_tangents_are_those_of_separate_forwards_or_nothing_is_shared(function):
    expected, _ = pushed(*calls(function), Manner.EACH)
    if function in UNSHARED.values():
        with pytest.raises(Unshared):
            pushed(*calls(function), Manner.SHARED)
    else:
        found, _ = pushed(*calls(function), Manner.SHARED)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def test_values_are_computed_once():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(5, 4)
    found = {}
    for manner in (Manner.EACH, Manner.SHARED):
        with Products() as products:
            pushed(model, x, manner)
        found[manner] = products.count
    assert found[Manner.EACH] - found[Manner.SHARED] >= (R - 1) * 2  # of two layers


def test_values_that_no_tangent_needs_are_not_kept():
    model, x = nn.Sequential(nn.Linear(4, 1000), nn.Tanh(), nn.Linear(1000, 1)), torch.randn(50, 4)
    _, run = pushed(model, x, Manner.SHARED)
    kept = sum(storage.nbytes() for storage in run.shared._needed.values())
    assert 50 * 1000 < kept / x.itemsize < 2 * 50 * 1000  # what tanh gave, not what it was given
    run.forget()
    assert run.shared is None


def test_a_pass_that_takes_another_course_is_noticed():
    courses = iter([torch.sin] * (1 + R) + [torch.tanh])
    model, x = calls(lambda m, x: next(courses)(x @ m.w))
    _, run = pushed(model, x, Manner.SHARED)
    with pytest.raises(Unshared, match="tanh"):
        run.push(Directions(bytes(32), 0, 0).draw(range(1), trained(model)), trained(model), Manner.SHARED)


@pytest.mark.parametrize(("width", "group_size", "said"), [
    (900, None, "sharing the forward"), (4, None, "together"), (4, 1, "sharing the forward"), (900, 2, "together"),
])  # fmt: skip
def test_forwards_of_large_tensors_are_shared(width, group_size, said):
    model, x = nn.Linear(4, width), torch.randn(60, 4)
    run = Run(model, (x,), {}, RandomState())
    out = model(x)
    run.ended(out)
    sketching = Sketching(tp.Sketched(R, group_size))
    sketching.jacobian(out.square().sum(1), trained(model), [run], Directions(bytes(32), 0, 0))
    assert said in sketching.explain().partition(";")[0]


class Recurrent(nn.Module):
    """An LSTM whose arguments and results all matter."""

    def __init__(self, *, packed=False, first=False, **options):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, **options)
        self.packed, self.first = packed, first
        directions = 2 if options.get("bidirectional") else 1
        self.states = nn.ParameterList(
            torch.randn(options.get("num_layers", 1) * directions, 1, width)
            for width in (options.get("proj_size") or 4, 4)
        )

    def forward(self, x):  # (5, 7, 3)
        batch_first = self.lstm.batch_first
        n = x.shape[0] if batch_first else x.shape[1]
        if self.packed:
            x = pack_padded_sequence(x, torch.tensor([7, 2, 5, 5, 1][:n]), batch_first, enforce_sorted=False)
        states = [state.expand(-1, n, -1).contiguous() for state in self.states] if self.first else None
        y, last = self.lstm(x, states)
        return y.data if self.packed else y, *last


LSTMS = {
    "plain": {},
    "no biases": {"bias": False},
    "first states": {"first": True},
    "both directions": {"bidirectional": True, "batch_first": True},
    "layers with dropout": {"num_layers": 2, "dropout": 0.5, "bidirectional": True, "first": True},
    "packed": {"packed": True, "batch_first": True},
    "packed, both directions": {"packed": True, "bidirectional": True, "batch_first": True, "first": True},
    "projected": {"proj_size": 2, "first": True},
}


@pytest.mark.parametrize("frozen", ["", "lstm.weight_ih_l0", "lstm.weight_hh_l0"])
@pytest.mark.parametrize("manner", [Manner.EACH, Manner.SHARED])
@pytest.mark.parametrize("options", LSTMS.values(), ids=LSTMS)
def test_tangents_of_an_lstm_are_those_of_torch_itself(options, manner, frozen, monkeypatch):
    torch.manual_seed(2)
    model, x = Recurrent(**options).double(), torch.randn(5, 7, 3).double()
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    if not model.lstm.batch_first:
        x = x.transpose(0, 1)
    with monkeypatch.context() as without:
        without.setattr(_pushforward, "FastTangents", nullcontext)
        expected, _ = pushed(model, x, Manner.EACH)
    if "proj_size" in options and manner is Manner.SHARED:
        with pytest.raises(Unshared, match="changes a value"):
            pushed(model, x, manner)
        return
    found, _ = pushed(model, x, manner)
    assert len(found) == 3
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
