# SPDX-License-Identifier: Apache-2.0
"""Parameters that are used where no op is recorded have exact rows, by the nodes that they leave in the graph."""

import subprocess
import sys
import warnings

import pytest
import torch
import torch._dynamo  # in a test of its own it is loaded by the first compilation
import torch.nn.functional as F
from oracle import assert_jacobian_equals_rows, one_backward_per_example, recorded_jacobian
from parts import Calls, Hidden, losses_of
from torch import Tensor, nn

import torch_privacy as tp

N, D = 5, 3


class OfWeights(torch.autograd.Function):
    """Computes a product of two weights, as adapters of peft do."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        a, b = ctx.saved_tensors
        return g @ b.T, a.T @ g


class Sign(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, w):
        return w.sign()

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        return g


@torch.library.custom_op("torch_privacy_tests::squares", mutates_args=())
def squares_in_numpy(x: Tensor, w: Tensor) -> Tensor:
    """An op with a backward that leaves torch, so that torch cannot batch it."""
    return x * w * w


def _backward_in_numpy(ctx, b):
    x, w = ctx.saved_tensors
    return b * w * w, torch.from_numpy((2 * b * x * w).sum(0).numpy())


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


squares_in_numpy.register_autograd(_backward_in_numpy, setup_context=_keep)


@pytest.fixture(autouse=True)
def _allow_torch_jit():
    """Ignores that torch.jit is deprecated, and what tracing an LSTM warns about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        yield


def scripted(part):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(part)


def _gate(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(x @ w) * b + x


def _centred(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return y - y.mean(0)


gate, centred = scripted(_gate), scripted(_centred)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.lstm, self.g = nn.Linear(D, D), nn.LSTM(D, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.g(self.lstm(self.f(x)[:, None].expand(-1, 4, -1))[0][:, -1])


def mlp(d: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, d))


def with_mlp(forward, **parts):
    return lambda: Calls(forward, f=mlp(), **{name: torch.randn(*shape) for name, shape in parts.items()})


# name -> model; what is hidden stands behind recorded layers, before them, and alone
HIDDEN = {
    "custom function, alone": with_mlp(lambda m, x: Hidden.apply(x, m.w) + m.f(x).sum(1, True), w=(D,)),
    "custom function, behind a layer": with_mlp(lambda m, x: Hidden.apply(m.f(x), m.w), w=(2,)),
    "custom function, before a layer": with_mlp(lambda m, x: m.f(Hidden.apply(x, m.w)), w=(D,)),
    "custom function, twice and tied": with_mlp(
        lambda m, x: Hidden.apply(Hidden.apply(m.f(x), m.w), m.w.exp()) * m.w, w=(2,)
    ),
    "custom function of weights": with_mlp(
        lambda m, x: F.linear(m.f(x), OfWeights.apply(m.a, m.b) * m.a.sum()), a=(4, 3), b=(3, 2)
    ),
    "straight-through estimator": with_mlp(lambda m, x: F.linear(m.f(x), Sign.apply(m.w)), w=(4, 2)),
    "backward in numpy": with_mlp(lambda m, x: squares_in_numpy(m.f(x), m.w), w=(2,)),
    "complex numbers": with_mlp(
        lambda m, x: torch.view_as_real(torch.complex(m.f(x), x[:, :2]) @ torch.view_as_complex(m.w)), w=(2, 4, 2)
    ),
    "Fourier transform": with_mlp(
        lambda m, x: torch.fft.irfft(torch.fft.rfft(m.f(x)) * torch.fft.rfft(m.w), n=2), w=(2,)
    ),
    "frozen weight, as a new parameter": with_mlp(
        lambda m, x: x @ (nn.Parameter(m.f[0].weight.detach().T) + m.a @ m.b) + m.f(x).sum(1, True), a=(D, 2), b=(2, 6)
    ),
    "scripted function": with_mlp(lambda m, x: gate(m.f(x), m.w, m.b), w=(2, 2), b=(2,)),
    "scripted first layer": lambda: nn.Sequential(scripted(nn.Linear(D, 4)), nn.ReLU(), nn.Linear(4, 2)),
    "scripted part": lambda: nn.Sequential(nn.Linear(D, D), scripted(mlp()), nn.Linear(2, 2)),
    "scripted model": lambda: scripted(mlp()),
    "traced model": lambda: torch.jit.trace(mlp(), torch.randn(2, D)),
    "traced LSTM": lambda: torch.jit.trace(Recurrent(), torch.randn(2, D)),
    "vmap, behind a layer": with_mlp(lambda m, x: torch.vmap(lambda v: torch.tanh(m.w @ v))(m.f(x)), w=(2, 2)),
    "vmap of a module": with_mlp(lambda m, x: torch.vmap(m.f)(x)),
    "vmap over a weight": with_mlp(lambda m, x: torch.vmap(lambda w: F.linear(m.f(x), w[None]))(m.w).sum(0), w=(4, 2)),
    "functional_call": with_mlp(lambda m, x: torch.func.functional_call(m.f, dict(m.f.named_parameters()), (x,))),
    "jvp": with_mlp(lambda m, x: torch.func.jvp(m.f, (x,), (torch.ones_like(x),))[1]),
    "gradient under vmap": with_mlp(lambda m, x: torch.vmap(torch.func.grad(lambda v: m.f(v).sum()))(x)),
    "hessian under vmap": with_mlp(lambda m, x: torch.vmap(torch.func.hessian(lambda v: m.f(v).sum()))(x).flatten(1)),
}
MAY_MISS = {"jvp": ["f.2.bias"], "gradient under vmap": ["f.2.bias"], "hessian under vmap": ["f.2.bias"]}


@pytest.mark.parametrize("case", HIDDEN)
def test_unrecorded_use_matches_one_backward_per_example(case):
    model, x = HIDDEN[case](), torch.randn(N, D)
    rows = one_backward_per_example(model, x, losses_of)
    for _ in range(3):  # TorchScript compiles the second call; layouts are known from the third on
        with tp.record(model) as tape:
            losses = losses_of(model, x)
        assert_jacobian_equals_rows(tape.jacobian(losses, verify=True, may_miss=MAY_MISS.get(case, ())), rows)


def slope_of(y: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def gradient_penalty(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    return y.flatten(1).sum(1) + 10 * (slope_of(y, x).flatten(1).norm(dim=1) - 1) ** 2


def physics(model, x):
    x = x.clone().requires_grad_()
    u = model(x)[:, 0]
    slope = slope_of(u, x)
    return (slope[:, 1] - slope_of(slope[:, 0], x)[:, 0] + u).square()


def score_matching(model, x):
    x = x.clone().requires_grad_()
    score = model(x)
    return sum(slope_of(score[:, k], x)[:, k] for k in range(2)) + score.square().sum(1) / 2


def weight_penalty(model, x):
    return model(x).square().sum(1) + sum(p.pow(2).sum() for p in model.parameters())


IMAGES = (1, 6, 6)
SLOPES = {  # name -> model, shape of an example, losses
    "gradient penalty": lambda: (mlp(1), (D,), gradient_penalty),
    "gradient penalty, convolution": lambda: (
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Softplus(), nn.Flatten(), nn.Linear(64, 1)),
        IMAGES,
        gradient_penalty,
    ),
    "gradient penalty, LeakyReLU and LayerNorm": lambda: (
        nn.Sequential(nn.Linear(D, 6), nn.LayerNorm(6), nn.LeakyReLU(0.2), nn.Linear(6, 1)),
        (D,),
        gradient_penalty,
    ),
    "gradient penalty, weight normalization": lambda: (
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(D, 6)), nn.Tanh(), nn.Linear(6, 1)),
        (D,),
        gradient_penalty,
    ),
    "second derivatives": lambda: (mlp(1), (D,), physics),
    "score matching": lambda: (mlp(2), (D,), score_matching),
    "weight penalty": lambda: (mlp(2), (D,), weight_penalty),
}


@pytest.mark.parametrize("case", SLOPES)
def test_derivative_inside_of_the_loss_matches_one_backward_per_example(case):
    model, shape, losses_with = SLOPES[case]()
    x = torch.randn(N, *shape)
    rows = one_backward_per_example(model, x, losses_with)
    names = [name for name, _ in model.named_parameters()]
    for _ in range(3):
        with tp.record(model) as tape:
            losses = losses_with(model, x)
        jacobian = tape.jacobian(losses, verify=True, retain_graph=True, may_miss=names)
        assert_jacobian_equals_rows(jacobian, rows)
        sums = tape.clipped_sum(losses, {"all": names}, lambda j, _: j.weighted_sum(torch.arange(1.0, N + 1)))
        total = torch.cat([sums[name].flatten() for name in names])
        torch.testing.assert_close(total, torch.arange(1.0, N + 1) @ rows)


def test_weights_may_be_used_before_the_recording():
    model, x = nn.Linear(D, 4), torch.randn(N, D)
    early = model.weight.square().sum()
    with tp.record(model) as tape:
        losses = losses_of(model, x) + early
    rows = one_backward_per_example(model, x, lambda m, x: losses_of(m, x) + m.weight.square().sum())
    assert_jacobian_equals_rows(tape.jacobian(losses, verify=True), rows)


def with_branches(branches):
    """Returns a model in which data and hidden values go through a branch, and a branch of a branch."""
    yes, no = torch.tensor(True), torch.tensor(False)

    def forward(m, x):
        nested = lambda h: branches(no, lambda h: h.cos(), lambda h: h * m.w, (h,))  # noqa: E731
        return m.f(x) + branches(yes, lambda x: m.f(2 * x), m.f, (x,)) + branches(yes, nested, m.f[2], (m.f(x),))

    return Calls(forward, f=mlp(), w=torch.randn(2))


def taken(pred, true_fn, false_fn, operands):
    return (true_fn if pred else false_fn)(*operands)


def test_branches_of_cond_are_recorded():
    """Run uncompiled, as here, torch.cond drops gradients of parameters or fails."""
    model, x = with_branches(torch.cond), torch.randn(N, D)
    plain = with_branches(taken)
    plain.load_state_dict(model.state_dict())
    rows = one_backward_per_example(plain, x, losses_of)
    for _ in range(3):
        with tp.record(model) as tape:
            losses = losses_of(model, x)
        assert_jacobian_equals_rows(tape.jacobian(losses, verify=True), rows)


COMPILES_FIRST = """
import sys
import torch
import torch_privacy as tp
part, x, usual = torch.nn.Linear(3, 2), torch.randn(4, 3), torch.compile
assert "torch._dynamo" not in sys.modules
with tp.record(part) as tape:
    losses = torch.cond(torch.tensor(True), part, part, (x,)).square().sum(1)
assert torch.compile is usual and torch._dynamo.eval_frame._stance.stance == "default"
rows = [torch.autograd.grad(part(row).square().sum(), [*part.parameters()]) for row in x]
expected = torch.stack([sum(g.square().sum() for g in row) for row in rows])
torch.testing.assert_close(tape.jacobian(losses).squared_norms(), expected)
"""


@pytest.mark.thorough
def test_the_first_compilation_of_a_process_runs_uncompiled_while_it_is_recorded():
    subprocess.run([sys.executable, "-c", COMPILES_FIRST], check=True)


def test_functions_given_to_torch_may_use_parameters_as_arguments_alone():
    over_rows, w, x = torch.ops.higher_order.map_impl, torch.randn(D), torch.randn(N, D)
    given = Calls(lambda m, x: over_rows(lambda v, w: (v * w,), [x], [m.w])[0], w=w)
    rows = one_backward_per_example(Calls(lambda m, x: x * m.w, w=w), x, losses_of)
    assert_jacobian_equals_rows(recorded_jacobian(given, x, losses_of), rows)
    captured = Calls(lambda m, x: over_rows(lambda v: (v * m.w,), [x], [])[0], w=w)
    with pytest.raises(tp.Refused, match=r"'map_impl' uses parameter 'w' without an argument"):
        recorded_jacobian(captured, x, losses_of)
    named = Calls(lambda m, x: over_rows(f=lambda v: (v * m.w,), xs=[x], pos_args=[])[0], w=w)
    with pytest.raises(tp.Refused, match=r"'map_impl' uses parameter 'w' without an argument"):
        recorded_jacobian(named, x, losses_of)


def test_scripted_code_that_mixes_examples_is_refused():
    model, x = Calls(lambda m, x: centred(m.f(x), m.w).sin(), f=mlp(), w=torch.randn(2, 2)), torch.randn(N, D)
    with tp.record(model) as tape:
        losses = losses_of(model, x)
    with pytest.raises(tp.Refused, match="cannot be separated"):
        tape.jacobian(losses)


def test_second_derivative_of_a_recurrent_layer_is_refused():
    model, x = Recurrent(), torch.randn(N, D)
    with pytest.raises(tp.Refused, match="second derivative has no exact rule"), tp.record(model):
        gradient_penalty(model, x)
