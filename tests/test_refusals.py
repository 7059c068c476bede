# SPDX-License-Identifier: Apache-2.0
"""What the tape must refuse, by name: nothing is assumed and nothing is dropped."""

import pytest
import torch
import torch.nn.functional as F
from cases import Calls, losses_of, tokens
from oracle import recorded_jacobian
from torch import nn

import torch_privacy as tp
from torch_privacy._tape import verify_against_native


class Squares(torch.autograd.Function):
    """A custom function whose parameter no torch function shows to the tape."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w * w

    @staticmethod
    def backward(ctx, b):
        x, w = ctx.saved_tensors
        return b * w * w, (2 * b * x * w).sum(0)


def data_mixed_into_weight(m, x):
    w = m.w.clone()
    w[0] = m.f(x)[0]
    return F.linear(x, w)


def input_changed_after_use(m, x):
    h = x + m.b
    y = m.f(h)
    h.detach().mul_(2)
    return y


REFUSED = {  # name -> (model, input, what the message must name)
    "unknown op": lambda: (
        Calls(lambda m, x: torch.maximum(x, m.w), w=torch.randn(3)),
        torch.randn(5, 3),
        r"'w' was used by 'maximum', which has no exact rule. Allowed: .*linear",
    ),
    "bilinear": lambda: (
        Calls(lambda m, x: m.f(x, x), f=nn.Bilinear(3, 3, 2)),
        torch.randn(5, 3),
        r"'f.bias', 'f.weight' was used by 'bilinear'",
    ),
    "recurrent": lambda: (
        Calls(lambda m, x: m.f(x)[0], f=nn.LSTM(3, 4, batch_first=True)),
        torch.randn(5, 6, 3),
        r"'f.bias_hh_l0'.* was used by 'lstm'",
    ),
    "transposed convolution": lambda: (nn.ConvTranspose2d(3, 4, 3), torch.randn(5, 3, 6, 6), r"'conv_transpose2d'"),
    "custom function": lambda: (
        Calls(lambda m, x: Squares.apply(x, m.w), w=torch.randn(3)),
        torch.randn(5, 3),
        r"'w' was used by 'apply'|'w' reaches the losses by a path",
    ),
    "batch norm": lambda: (
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False, track_running_stats=False)),
        torch.randn(5, 3),
        r"'linear' with parameter '0.bias', '0.weight' .* cannot be told apart",
    ),
    "batch norm's scale": lambda: (nn.BatchNorm1d(3), torch.randn(5, 3), r"'bias', 'weight' was used by 'batch_norm'"),
    "softmax over the batch": lambda: (
        Calls(lambda m, x: m.f(x).softmax(0), f=nn.Linear(3, 4)),
        torch.randn(5, 3),
        r"'f.bias', 'f.weight' .* cannot be told apart",
    ),
    "loss centred over the batch": lambda: (
        Calls(lambda m, x: m.f(x) - m.f(x).mean(0), f=nn.Linear(3, 4)),
        torch.randn(5, 3),
        r"cannot be told apart",
    ),
    "examples in no order": lambda: (
        Calls(lambda m, x: m.f(x.flatten(0, 1)[M])[M.argsort()].view_as(x), f=nn.Linear(3, 3)),
        torch.randn(5, 2, 3),
        r"in no regular order",
    ),
    "parameter never reached": lambda: (
        Calls(lambda m, x: m.f(x), f=nn.Linear(3, 4), unused=torch.randn(2)),
        torch.randn(5, 3),
        r"never reach parameter 'unused'",
    ),
    "data mixed into a weight": lambda: (
        Calls(data_mixed_into_weight, w=torch.randn(3, 3), f=nn.Linear(3, 3)),
        torch.randn(5, 3),
        r"'w' ",
    ),
    "input changed after its use": lambda: (
        Calls(input_changed_after_use, b=torch.randn(3), f=nn.Linear(3, 3)),
        torch.randn(5, 3),
        r"'linear' was changed in place",
    ),
    "embedding with max_norm": lambda: (nn.Embedding(7, 4, max_norm=1.0), tokens(5, 6), r"max_norm=1.0.* 'weight'"),
    "embedding scaled by frequency": lambda: (
        nn.Embedding(7, 4, scale_grad_by_freq=True),
        tokens(5, 6),
        r"scale_grad_by_freq=True .* 'weight'",
    ),
    "sparse embedding": lambda: (nn.Embedding(7, 4, sparse=True), tokens(5, 6), r"sparse=True .* 'weight'"),
    "entries for every example, too many": lambda: (
        Calls(lambda m, x: x + m.w.repeat(len(x), 1), w=torch.randn(1, 2**14)),
        torch.randn(80, 2**14),
        r"entries of its own for each of the 80 examples, too many .* 'w'",
    ),
    "one parameter in two roles": lambda: (
        Calls(lambda m, x: F.linear(m.a, x[0], m.a)[None], a=torch.randn(3)),
        torch.randn(1, 3, 3),
        r"'a' was used by 'linear'",
    ),
    "complex numbers": lambda: (
        Calls(
            lambda m, x: torch.view_as_real(torch.complex(x, 2 * x) @ torch.view_as_complex(m.w)),
            w=torch.randn(3, 4, 2),
        ),
        torch.randn(5, 3),
        r"'w' was used by 'matmul'",
    ),
    "image without a batch": lambda: (
        Calls(lambda m, x: m.f(x).flatten(1), f=nn.Conv2d(3, 3, 3)),
        torch.randn(3, 6, 6),
        r"was used by 'conv2d'",
    ),
}
M = torch.tensor([3, 1, 4, 0, 5, 9, 2, 6, 8, 7])


def test_constant_with_data_written_into_it_is_data():
    """A buffer made in the forward takes in activations: the path through them must count."""

    def forward(m, x):
        o = m.w.new_zeros(3, 3)
        o[:] = F.linear(x, m.u).mean(0)
        return F.linear(x, o * m.w) + F.linear(x, m.u)

    model = Calls(forward, w=torch.randn(3, 3), u=torch.randn(3, 3))
    with pytest.raises(tp.Refused):
        recorded_jacobian(model, torch.randn(4, 3), losses_of)


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_by_name(case):
    model, x, message = REFUSED[case]()
    with pytest.raises(tp.Refused, match=message):
        recorded_jacobian(model, x, losses_of)


def test_refuses_a_parameter_used_outside_of_the_recording():
    model, x = nn.Linear(3, 4), torch.randn(5, 3)
    with tp.record(model) as tape:
        y = model(x)
    with pytest.raises(tp.Refused, match=r"'weight' reaches the losses by a path that no recorded op explains"):
        tape.jacobian(y.sum(1) + model.weight.square().sum())


def test_coupling_that_only_the_input_shows_is_refused():
    """Batch normalisation in front of the first parameter: every b looks fine, the gradient in the input does not."""
    model = nn.Sequential(nn.BatchNorm1d(3, affine=False, track_running_stats=False), nn.Linear(3, 2))
    with tp.record(model) as tape:
        losses = losses_of(model, tape.probe(torch.randn(5, 3)))
    with pytest.raises(tp.Refused, match=r"depend on each other's part of the model's input of shape \(5, 3\)"):
        tape.jacobian(losses)


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (lambda y: y.sum(), r"shape \(\) given: must be \(n,\).*reduction='none'"),
        (lambda y: y, r"shape \(5, 4\) given"),
        (lambda y: y.sum(1).detach(), r"requires_grad=False"),
        (lambda y: [1.0], r"shape list given"),
    ],
)
def test_refuses_losses_that_are_not_one_per_example(losses, message):
    model = nn.Linear(3, 4)
    with tp.record(model) as tape:
        y = model(torch.randn(5, 3))
    with pytest.raises(tp.Refused, match=message):
        tape.jacobian(losses(y))


def test_rows_in_the_wrong_order_are_refused_although_their_sum_is_right():
    model, x = nn.Linear(3, 4), torch.randn(2, 3)
    with tp.record(model) as tape:
        losses = losses_of(model, x)
    jacobian = tape.jacobian(losses, retain_graph=True)
    swapped = jacobian.select(torch.tensor([1, 0]))
    verify_against_native(jacobian, losses, tape.parameters, 1e-16)
    with pytest.raises(tp.Refused, match=r"'weight', 'bias' do not add up"):
        verify_against_native(swapped, losses, tape.parameters, 1e-16)


def test_gradient_override_is_refused():
    """A tensor hook that changes a gradient: the rows are no longer what the native backward gives."""
    model = nn.Linear(3, 4)
    model.weight.register_hook(lambda g: 2 * g)
    with pytest.raises(tp.Refused, match=r"rows of parameter 'weight' do not add up to the native gradient"):
        recorded_jacobian(model, torch.randn(5, 3), losses_of)
