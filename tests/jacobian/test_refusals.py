# SPDX-License-Identifier: Apache-2.0
"""The tape refuses by name: it assumes nothing and drops nothing."""

import cases_conv
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle import assert_jacobian_equals_rows, one_backward_per_example, recorded_jacobian
from parts import Calls, losses_of, tokens
from torch import nn

import torch_privacy as tp
from torch_privacy.jacobian.rows.native import ProjectedSum, RowCheck


def data_mixed_into_weight(m, x):
    w = m.w.clone()
    w[0] = m.f(x)[0]
    return F.linear(x, w)


def input_changed_after_use(m, x):
    h = x + m.b
    y = m.f(h)
    h.detach().mul_(2)
    return y


def contrast(m, x):
    """Returns similarities of each example's image with the texts of all examples."""
    return F.normalize(m.image(x), dim=1) @ F.normalize(m.text(x), dim=1).T


REFUSED = {  # name -> (model, input, part of the message)
    "in-batch contrast": lambda: (
        Calls(contrast, image=nn.Linear(3, 4, bias=False), text=nn.Linear(3, 4)),
        torch.randn(5, 3),
        r"op 'linear' with parameter '(image.weight|text.bias', 'text.weight)' .* cannot be separated",
    ),
    "loss over the batch's total": lambda: (
        Calls(lambda m, x: m.f(x).square() / m.f(x).square().sum(), f=nn.Linear(3, 4)),
        torch.randn(5, 3),
        r"'f.bias', 'f.weight' .* cannot be separated",
    ),
    "largest of the batch": lambda: (
        Calls(lambda m, x: x.exp() * m.w + (x * m.w).amax(), w=torch.randn(3)),
        torch.randn(5, 3),
        r"op 'mul' with parameter 'w' .* cannot be separated",
    ),
    "running sum over the batch": lambda: (
        Calls(lambda m, x: m.f(x).cumsum(0), f=nn.Linear(3, 4)),
        torch.randn(5, 3),
        r"'f.bias', 'f.weight' .* cannot be separated",
    ),
    "attention over the batch": lambda: (
        Calls(lambda m, x: m.f(x, x, x)[0], f=nn.MultiheadAttention(4, 2)),  # batch_first forgotten
        torch.randn(5, 6, 4),
        r"'f.in_proj_bias', 'f.in_proj_weight'.* cannot be separated|'f.in_proj_.*cannot be separated",
    ),
    "complex parameter": lambda: (
        Calls(lambda m, x: torch.view_as_real(x * m.w), w=torch.randn(3, dtype=torch.complex128)),
        torch.randn(5, 3),
        r"parameter 'w' is complex.* torch.view_as_complex",
    ),
    "batch norm": lambda: (
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False, track_running_stats=False)),
        torch.randn(5, 3),
        r"'linear' with parameter '0.bias', '0.weight' .* cannot be separated",
    ),
    "softmax over the batch": lambda: (
        Calls(lambda m, x: m.f(x).softmax(0), f=nn.Linear(3, 4)),
        torch.randn(5, 3),
        r"'f.bias', 'f.weight' .* cannot be separated",
    ),
    "loss centred over the batch": lambda: (
        Calls(lambda m, x: m.f(x) - m.f(x).mean(0), f=nn.Linear(3, 4)),
        torch.randn(5, 3),
        r"cannot be separated",
    ),
    "points of all examples": lambda: (
        Calls(lambda m, x: m.f(x) + m.f(torch.from_numpy(np.ones((7, 3)))).square().mean(), f=nn.Linear(3, 4)),
        torch.randn(5, 3),
        r"cannot be separated.* the same for all examples.* \(5 examples do not fit .* in a buffer of the model",
    ),
    "parameter never reached": lambda: (
        Calls(lambda m, x: m.f(x), f=nn.Linear(3, 4), unused=torch.randn(2)),
        torch.randn(5, 3),
        r"never reach parameter 'unused'",
    ),
    "data mixed into a weight": lambda: (
        Calls(data_mixed_into_weight, w=torch.randn(3, 3), f=nn.Linear(3, 3)),
        torch.randn(5, 3),
        r"cannot be separated",
    ),
    "weight written into": lambda: (
        Calls(lambda m, x: [m.w.detach().clamp_(max=0.1), x @ m.w][1], w=torch.randn(3, 4)),
        torch.randn(5, 3),
        r"wrote into parameter 'w'.*after_update=",
    ),
    "input changed after its use": lambda: (
        Calls(input_changed_after_use, b=torch.randn(3), f=nn.Linear(3, 3)),
        torch.randn(5, 3),
        r"'linear' was changed in place",
    ),
    **{
        f"{name} {option}": lambda layer=layer, option=option, value=value: (
            layer(7, 4, **{option: value}),
            tokens(5, 6),
            rf"{option}={value} .* 'weight'",
        )
        for name, layer in [("embedding", nn.Embedding), ("embedding bag", nn.EmbeddingBag)]
        for option, value in {"max_norm": 1.0, "scale_grad_by_freq": True, "sparse": True}.items()
    },
    "entries for every example, too many": lambda: (
        Calls(lambda m, x: x + m.w.repeat(len(x), 1), w=torch.randn(1, 2**14)),
        torch.randn(80, 2**14),
        r"separate entries for each of the 80 examples, and their rows are too large\. .*'w'",
    ),
    **cases_conv.REFUSED,
}


def test_reentrant_checkpoint_of_a_part_is_refused():
    model = Calls(
        lambda m, x: torch.utils.checkpoint.checkpoint(m.g, m.f(x), use_reentrant=True),
        f=nn.Linear(3, 4),
        g=nn.Linear(4, 2),
    )
    with pytest.raises(tp.Refused, match=r"reentrant activation checkpointing hides ops\. Pass"):
        recorded_jacobian(model, torch.randn(5, 3), losses_of)


def recurrent():
    return Calls(lambda m, x: m.gru(x[:, None])[0][:, 0], gru=nn.GRU(4, 4, batch_first=True))


@pytest.mark.parametrize("part", [nn.Tanh, recurrent])
def test_compiled_model_is_exact_over_several_batches(part):
    model = nn.Sequential(nn.Linear(3, 4), part(), nn.Linear(4, 2))
    compiled = torch.compile(model, backend="eager")
    for n in (5, 3):
        x = torch.randn(n, 3)
        with tp.record(model) as tape:
            losses = losses_of(compiled, x)
        rows = one_backward_per_example(model, x, losses_of)
        assert_jacobian_equals_rows(tape.jacobian(losses, verify=True), rows)


def test_constant_with_data_written_into_it_is_data():
    """A buffer made in the forward takes in activations, so that the path through them counts."""

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
    native = ProjectedSum.of(losses, tape.parameters, None, 16)
    checks = RowCheck(native, {torch.float64})
    checks.add(jacobian)
    checks.conclude()
    checks = RowCheck(native, {torch.float64})
    checks.add(swapped)
    with pytest.raises(tp.Refused, match=r"'weight', 'bias' do not add up"):
        checks.conclude()


def test_gradient_override_is_refused():
    """A tensor hook changes a gradient, so that the rows differ from the native backward."""
    model = nn.Linear(3, 4)
    model.weight.register_hook(lambda g: 2 * g)
    with pytest.raises(tp.Refused, match=r"rows of parameter 'weight' do not add up to the native gradient"):
        recorded_jacobian(model, torch.randn(5, 3), losses_of)


@pytest.mark.parametrize(
    ("x", "scale", "weight", "match"),
    [(1.0, 5e4, 4.0, "'weight', 'bias' cannot be checked"), (1e3, 2.0**-24, 0.25, "too small for float16 may be lost")],
    ids=["overflow", "underflow"],
)
def test_the_range_of_float16_is_not_called_a_bug(x, scale, weight, match):
    """The cotangent is 5e4, and four times as much beyond float16; or its smallest number, and a quarter of it zero."""
    model = nn.Linear(3, 4).float()
    with tp.record(model) as tape, torch.autocast("cpu", torch.float16):
        losses = model(torch.full((1, 3), x, dtype=torch.float32)).float().sum(1) * scale
    rows = tape.jacobian(losses, retain_graph=True)
    native = ProjectedSum(tape.parameters, torch.tensor([weight]))
    with native.watching(losses):
        torch.autograd.grad(losses, native.leaves, native.weights)
    check = RowCheck(native, {torch.float16})
    check.add(rows)
    with pytest.raises(tp.Refused, match=match):
        check.conclude()
