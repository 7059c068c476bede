# SPDX-License-Identifier: Apache-2.0
"""Tests that forward mode with shared values gives the same tangents, or refuses to share."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from parts import Calls, trained
from torch import nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from torch_privacy.mechanisms.estimated_norms import jvp
from torch_privacy.mechanisms.estimated_norms.directions import Directions
from torch_privacy.mechanisms.estimated_norms.jvp import BatchingMode, ForwardCall
from torch_privacy.mechanisms.estimated_norms.projected import Projector
from torch_privacy.mechanisms.estimated_norms.settings import Projections
from torch_privacy.mechanisms.estimated_norms.shared_forward import CannotShare, SharedForward
from torch_privacy.ops import tangents as fast
from torch_privacy.ops.tangents import FastTangents
from torch_privacy.support.random_state import RandomState
from torch_privacy_papers.bu2021.measure import peak_bytes

R = 3


def tangents(model, x, batching):
    """Returns the outputs' tangents along three directions, and the recorded forward call."""
    torch.manual_seed(3)
    call = ForwardCall(model, (x,), {}, RandomState())
    call.record_output(model(x))
    v = Directions(bytes(32), 0, 0).draw(range(R), trained(model))
    return call.tangents(v, trained(model), batching), call


def filled(model, x):
    out = torch.zeros(len(x), 4)
    out[:, :2] = x[:, :2]  # a value, in zeros that are created in every pass
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
    """Doubles its argument; the tangent is written into a buffer of the forward."""

    @staticmethod
    def forward(ctx, x):
        ctx.buffer = torch.empty_like(x)
        return 2 * x

    @staticmethod
    def jvp(ctx, dx):
        return ctx.buffer.copy_(dx) * 2


class OwnZeros(torch.autograd.Function):
    """Doubles its argument; the tangent is added to zeros."""

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
def test_tangents_equal_those_of_separate_forwards_or_sharing_is_refused(function):
    expected, _ = tangents(*calls(function), BatchingMode.EACH)
    if function in UNSHARED.values():
        with pytest.raises(CannotShare):
            tangents(*calls(function), BatchingMode.SHARED)
    else:
        found, _ = tangents(*calls(function), BatchingMode.SHARED)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def test_values_are_computed_once():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(5, 4)
    found = {}
    for batching in (BatchingMode.EACH, BatchingMode.SHARED):
        with Products() as products:
            tangents(model, x, batching)
        found[batching] = products.count
    assert found[BatchingMode.EACH] - found[BatchingMode.SHARED] >= (R - 1) * 2  # two layers


def test_values_that_no_tangent_needs_are_not_kept():
    model, x = nn.Sequential(nn.Linear(4, 1000), nn.Tanh(), nn.Linear(1000, 1)), torch.randn(50, 4)
    _, call = tangents(model, x, BatchingMode.SHARED)
    kept = sum(storage.nbytes() for storage in call.shared._kept.values())
    assert 50 * 1000 < kept / x.itemsize < 2 * 50 * 1000  # the output of tanh, but not its input
    call.free_shared()
    assert call.shared is None


def test_a_pass_with_other_ops_is_detected():
    functions = iter([torch.sin] * (1 + R) + [torch.tanh])
    model, x = calls(lambda m, x: next(functions)(x @ m.w))
    _, call = tangents(model, x, BatchingMode.SHARED)
    v = Directions(bytes(32), 0, 0).draw(range(1), trained(model))
    with pytest.raises(CannotShare, match="tanh"):
        call.tangents(v, trained(model), BatchingMode.SHARED)


@pytest.mark.parametrize(("width", "group_size", "expected"), [
    (900, None, "sharing the forward"), (4, None, "together"), (4, 1, "sharing the forward"), (900, 2, "together"),
])  # fmt: skip
def test_forwards_of_large_tensors_are_shared(width, group_size, expected):
    model, x = nn.Linear(4, width), torch.randn(60, 4)
    call = ForwardCall(model, (x,), {}, RandomState())
    out = model(x)
    call.record_output(out)
    projector = Projector(Projections(R, group_size))
    projector.jacobian(out.square().sum(1), trained(model), [call], Directions(bytes(32), 0, 0))
    assert expected in projector.explain().partition(";")[0]


def test_directions_run_one_by_one_where_the_forward_cannot_be_shared():
    model, x = calls(through_numpy)
    call = ForwardCall(model, (x,), {}, RandomState())
    out = model(x)
    call.record_output(out)
    projector = Projector(Projections(R))
    projector.jacobian(out.square().sum(1), trained(model), [call], Directions(bytes(32), 0, 0))
    assert projector.strategy == "forward mode, one direction after the other"
    assert call.shared is None


class Recurrent(nn.Module):
    """An LSTM with the losses depending on all its arguments and results."""

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
@pytest.mark.parametrize("batching", [BatchingMode.EACH, BatchingMode.SHARED])
@pytest.mark.parametrize("options", LSTMS.values(), ids=LSTMS)
def test_tangents_of_an_lstm_equal_those_of_torch(options, batching, frozen, monkeypatch):
    torch.manual_seed(2)
    model, x = Recurrent(**options).double(), torch.randn(5, 7, 3).double()
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    if not model.lstm.batch_first:
        x = x.transpose(0, 1)
    with monkeypatch.context() as without:
        without.setattr(jvp, "FastTangents", nullcontext)
        expected, _ = tangents(model, x, BatchingMode.EACH)
    if "proj_size" in options and batching is BatchingMode.SHARED:
        with pytest.raises(CannotShare, match="changes a value"):
            tangents(model, x, batching)
        return
    found, _ = tangents(model, x, batching)
    assert len(found) == 3
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


CONVOLUTIONS = {
    "plain": (nn.Conv2d(2, 3, 3), (5, 2, 6, 7)),
    "all options": (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2), (5, 4, 8, 7)),
    "without bias": (nn.Conv2d(2, 3, 3, bias=False), (5, 2, 6, 7)),
    "one dimension": (nn.Conv1d(2, 3, 3, stride=2), (5, 2, 9)),
    "three dimensions": (nn.Conv3d(2, 3, 2, padding=1), (5, 2, 4, 3, 5)),
    "padding by name": (nn.Conv2d(2, 3, 3, padding="same"), (5, 2, 6, 7)),
    "padding by reflection": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (5, 2, 6, 7)),
    "no images": (nn.Conv2d(2, 3, 3), (0, 2, 6, 7)),
}


class Convolved(nn.Module):
    """A function with weights, then a convolution, then a function."""

    def __init__(self, convolution, size):
        super().__init__()
        self.scale, self.convolution = nn.Parameter(torch.randn(size[1:])), convolution
        self.last = nn.Parameter(torch.randn(()))

    def forward(self, x):
        return (self.convolution(x * self.scale)).tanh() * self.last


@pytest.mark.parametrize("frozen", [(), ("scale",), ("convolution.weight",), ("scale", "convolution.weight")])
@pytest.mark.parametrize("batching", [BatchingMode.EACH, BatchingMode.SHARED])
@pytest.mark.parametrize(("convolution", "size"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_tangents_of_a_convolution_equal_those_of_torch(convolution, size, batching, frozen, monkeypatch):
    torch.manual_seed(3)
    model, x = Convolved(copy.deepcopy(convolution), size).double(), torch.randn(size).double()
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    with monkeypatch.context() as without:
        without.setattr(jvp, "FastTangents", nullcontext)
        expected, _ = tangents(model, x, BatchingMode.EACH)
    monkeypatch.setattr(fast, "PARTS", 2**20)  # images one by one
    found, _ = tangents(model, x, batching)
    torch.testing.assert_close(found, expected)
    assert found[0].shape[1] == len(x)


def test_tangents_of_a_convolution_need_little_memory_beyond_their_own():
    model, x = nn.Conv2d(8, 8, 3, padding=1).float(), torch.randn(512, 8, 32, 32).float()
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}

    def derivative():
        with torch.no_grad(), forward_ad.dual_level(), FastTangents():
            dual = forward_ad.make_dual(x, x)
            y = functional_call(model, {n: forward_ad.make_dual(p, v[n]) for n, p in trained(model).items()}, (dual,))
            return forward_ad.unpack_dual(y)

    with torch.no_grad():
        values = peak_bytes(lambda: model(x))
    assert x.nbytes <= values <= peak_bytes(derivative) < values + 0.6 * x.nbytes  # torch's own: values + 1.5 x


def test_freed_values_take_no_memory_where_a_kept_one_has_their_size():
    model, x = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()), torch.randn(16, 4, 16, 16)
    shared = SharedForward()
    for _ in range(2):
        with forward_ad.dual_level(), torch.no_grad():
            v = {name: torch.randn_like(p) for name, p in trained(model).items()}
            with shared.along(v.values()), FastTangents():
                duals = {name: forward_ad.make_dual(p.detach(), v[name]) for name, p in trained(model).items()}
                functional_call(model, duals, (x,))
    kept = {storage.data_ptr() for storage in shared._kept.values()}
    (of_outputs,) = (storage for (size, _), storage in shared._stand_ins.items() if size == x.nbytes)
    assert of_outputs is not None
    assert of_outputs.data_ptr() in kept
