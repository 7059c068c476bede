# SPDX-License-Identifier: Apache-2.0
"""Compares the vmapped Jacobian with one backward per example, and refuses what vmap cannot follow."""

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, Calls, losses_of
from oracle import assert_jacobian_equals_rows, flat, one_backward_per_example
from torch import nn

import torch_privacy as tp
from torch_privacy_papers.bu2021.vmapped import vmapped_jacobian

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]

REFUSED = {  # cases that vmap cannot follow
    *("long short-term memory", "irregular: packed", "irregular: two experts each", "irregular: one expert each"),
    *("irregular: sorted by expert", "conv2d, channels last", "group norm, channels last"),
    *(f"embedding bag, offsets{kind}" for kind in ("", ", mean", ", largest")),
    *(f"embedding bag, last offset{kind}" for kind in ("", ", largest")),
}
WRONG = {"by fallback: solve"}  # torch's batched gradient differs from a loop's


@pytest.mark.parametrize("case", CASES)
def test_vmapped_jacobian_matches_one_backward_per_example(case):
    model, x = CASES[case]()
    if case in REFUSED:
        with pytest.raises(tp.Refused, match="which vmap refuses"):
            vmapped_jacobian(model, losses_of, x).squared_norms()
        return
    if case in WRONG:
        with pytest.raises(tp.Refused, match=r"row of parameter 'w' differs from that of an ordinary backward"):
            vmapped_jacobian(model, losses_of, x).squared_norms()
        return
    rows = one_backward_per_example(model, x, losses_of)
    assert_jacobian_equals_rows(vmapped_jacobian(model, losses_of, x, chunk_size=2), rows)


def small() -> tuple[nn.Module, torch.Tensor]:
    return CASES["convolutional network"]()


class RoundsUpInBatches(torch.autograd.Function):
    """The identity; under vmap its values are larger by a rounding, as those of another kernel could be."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g

    @staticmethod
    def vmap(info, in_dims, x):
        return x * (1 + torch.finfo(x.dtype).eps), in_dims[0]


def kinked(frozen: bool = False) -> tuple[nn.Module, torch.Tensor]:
    """Returns a network and inputs that rounding to float32 puts exactly at the kink of its ReLU."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).float()
    model.register_buffer("threshold", torch.ones(1, dtype=torch.float32))
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    model[1].weight.requires_grad_(not frozen)
    return model, torch.full((2, 1), 1 / 3, dtype=torch.float32)


def kinked_losses(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model[1]((RoundsUpInBatches.apply(model[0](x)) - model.threshold).relu() + x).squeeze(1)


@pytest.mark.parametrize("frozen", [False, True])
def test_vmapped_jacobian_takes_rows_that_differ_by_the_side_of_a_kink(frozen):
    model, x = kinked(frozen)
    w = model[1].weight.item()
    rows = vmapped_jacobian(model, kinked_losses, x).rows()["0.weight"].flatten()
    assert torch.autograd.grad(kinked_losses(model, x).sum(), model[0].weight)[0] == 0  # on the other side
    torch.testing.assert_close(rows, w * x.flatten())


def test_vmapped_jacobian_refuses_a_kink_that_float64_cannot_decide():
    model, x = kinked()

    def needs_float32(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return kinked_losses(model, x.float())

    with pytest.raises(tp.Refused, match=r"row of parameter '0.weight' differs from that of an ordinary backward"):
        vmapped_jacobian(model, needs_float32, x).squared_norms()


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5, 100, None])
def test_vmapped_jacobian_is_the_same_in_any_chunks(chunk_size):
    model, x = small()
    rows = one_backward_per_example(model, x, losses_of)
    assert_jacobian_equals_rows(vmapped_jacobian(model, losses_of, x, chunk_size=chunk_size), rows)


def test_vmapped_jacobian_of_a_batch_of_one():
    model, x = nn.Linear(3, 4), torch.randn(1, 3)
    rows = one_backward_per_example(model, x, losses_of, [x])
    assert_jacobian_equals_rows(vmapped_jacobian(model, losses_of, x), rows)


def test_vmapped_jacobian_of_an_empty_batch():
    model = nn.Linear(3, 4)
    jacobian = vmapped_jacobian(model, losses_of, torch.randn(0, 3))
    assert jacobian.squared_norms().shape == (0,)
    assert {name: row.shape for name, row in jacobian.rows().items()} == {"weight": (0, 4, 3), "bias": (0, 4)}
    assert jacobian.project({name: torch.randn(2, *shape) for name, shape in jacobian.shapes.items()}).shape == (0, 2)
    total = jacobian.select(slice(0, 0)).weighted_sum(torch.zeros(0))
    assert all(torch.equal(total[name], torch.zeros_like(p)) for name, p in model.named_parameters())


def test_vmapped_jacobian_takes_any_nesting_of_tensors():
    model, x, y = nn.Linear(3, 4), torch.randn(5, 3), torch.randint(4, (5,))

    def losses(model, batch):
        return F.cross_entropy(model(batch["in"][0]), batch["out"], reduction="none")

    rows = one_backward_per_example(
        model, x, losses, [{"in": (a,), "out": b} for a, b in zip(x.split(1), y.split(1), strict=True)]
    )
    assert_jacobian_equals_rows(vmapped_jacobian(model, losses, {"in": (x,), "out": y}, chunk_size=2), rows)


def test_vmapped_norms_over_some_of_the_parameters():
    model, x = small()
    jacobian = vmapped_jacobian(model, losses_of, x, chunk_size=2)
    expected = sum(jacobian.rows()[name].flatten(1).square().sum(1) for name in ("0.weight", "5.bias"))
    torch.testing.assert_close(jacobian.squared_norms(("0.weight", "5.bias")), expected)


@pytest.mark.parametrize(
    "index", [torch.tensor([4, 0, 4]), torch.tensor([True, False, True, True, False]), slice(1, None, 2)]
)
def test_vmapped_select_takes_any_index(index):
    model, x = small()
    jacobian = vmapped_jacobian(model, losses_of, x, chunk_size=2)
    rows = flat(jacobian.rows(), 1)[index]
    part = jacobian.select(index)
    torch.testing.assert_close(flat(part.rows(), 1), rows)
    torch.testing.assert_close(
        flat(part.weighted_sum(torch.arange(1.0, len(rows) + 1)), 0), rows.T @ torch.arange(1.0, len(rows) + 1)
    )
    torch.testing.assert_close(part.select(slice(1, None)).squared_norms(), rows[1:].square().sum(1))


def test_vmapped_select_leaves_out_rows_that_are_not_finite():
    x = torch.randn(5, 3)
    x[1] = torch.inf
    jacobian = vmapped_jacobian(nn.Linear(3, 1), lambda model, x: model(x).squeeze(1), x)
    finite = jacobian.squared_norms().isfinite().nonzero().flatten()
    total = jacobian.select(finite).weighted_sum(torch.ones(4))
    torch.testing.assert_close(total["weight"][0], x[finite].sum(0))


@pytest.mark.parametrize("chunk_size", [2, 5])
def test_vmapped_answers_use_the_same_dropout_masks(chunk_size):
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    x = torch.randn(1, 3).expand(5, 3)
    jacobian = vmapped_jacobian(model, losses_of, x, chunk_size=chunk_size)
    rows = flat(jacobian.rows(), 1)
    assert len(rows.unique(dim=0)) > 3  # equal examples with different masks
    assert_jacobian_equals_rows(jacobian, rows)
    assert not torch.equal(vmapped_jacobian(model, losses_of, x).squared_norms(), jacobian.squared_norms())


def test_vmapped_answers_leave_the_random_state_unchanged():
    model, x = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5)), torch.randn(5, 3)
    jacobian = vmapped_jacobian(model, losses_of, x)
    state = torch.random.get_rng_state()
    jacobian.squared_norms()
    assert torch.equal(torch.random.get_rng_state(), state)


class Remembers(nn.Module):
    """Replaces its buffer by a new tensor at every call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        self.seen = self.seen + x.detach().sum(0)
        return self.linear(x) + self.seen.sum()


@pytest.mark.parametrize("case", ["convolutional network", "frozen part", "buffer", "refused"])
def test_vmapped_jacobian_leaves_the_model_as_it_was(case):
    model, x = {"buffer": (Remembers(), torch.randn(5, 3)), "refused": (Counts(), torch.randn(5, 3))}.get(
        case
    ) or CASES[case]()
    before = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    try:
        vmapped_jacobian(model, losses_of, x).rows()
    except tp.Refused:
        assert case == "refused"
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(after[name] is value and torch.equal(value, copy) for name, (value, copy) in before.items())
    assert all(p.grad is None for p in model.parameters())


def test_vmapped_jacobian_has_no_frozen_parameters():
    model, x = CASES["frozen part"]()
    assert list(vmapped_jacobian(model, losses_of, x).shapes) == ["2.weight", "2.bias"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_vmapped_release_of_one_example_is_within_the_clip_norm(dtype):
    model, x = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 3)).to(dtype), torch.randn(9, 30).to(dtype)
    jacobian = vmapped_jacobian(model, losses_of, x, chunk_size=4)
    norms = jacobian.squared_norms().sqrt()
    assert norms.dtype == torch.float32
    factors = tp.Flat(0.3).factors(norms)
    for i in range(9):
        release = flat(jacobian.select(slice(i, i + 1)).weighted_sum(factors[i : i + 1]), 0)
        assert release.double().norm() <= 0.3 * (1 + 1e-5)


def test_vmapped_explain_names_the_chunk_size():
    model, x = small()
    assert "2 at a time" in vmapped_jacobian(model, losses_of, x, chunk_size=2).explain()
    assert "kept" in vmapped_jacobian(model, losses_of, x).explain()


def test_vmapped_project_needs_a_direction_for_every_parameter():
    with pytest.raises(ValueError, match=r"no direction for parameter 'bias'"):
        vmapped_jacobian(nn.Linear(3, 4), losses_of, torch.randn(5, 3)).project({"weight": torch.zeros(1, 4, 3)})


class Counts(nn.Module):
    """Changes a buffer in place at every call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.linear(x)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * grad


class DoubleWithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * grad


def into_zeros(m, x):
    y = torch.zeros(len(x), 3)
    y[:] = m.f(x)
    return y


BEYOND_VMAP = {  # name -> (forward, part of the message)
    "item": (lambda m, x: m.f(x) * x.sum().item(), "number is taken out"),
    "control flow": (lambda m, x: m.f(x) if x.sum() > 0 else 2 * m.f(x), "`if` depends"),
    "list": (lambda m, x: m.f(x) * x.sum().tolist(), "list or a NumPy array"),
    "boolean mask": (lambda m, x: m.f(x)[x > 0].sum()[None], "shape depends on the data"),
    "nonzero": (lambda m, x: m.f(x)[:, x[0].nonzero()[:, 0]].sum(1), "shape depends on the data"),
    "in place": (into_zeros, "written in place"),
    "in place, by a method": (lambda m, x: torch.zeros(len(x), 3).add_(m.f(x)), "written in place"),
    "autograd function": (lambda m, x: Double.apply(m.f(x)), "setup_context"),
    "autograd function without vmap": (lambda m, x: DoubleWithSetup.apply(m.f(x)), "vmap rule"),
    "checkpoint": (lambda m, x: torch.utils.checkpoint.checkpoint(m.f, x, use_reentrant=False), "checkpointing"),
    "running statistics": (
        lambda m, x: F.instance_norm(m.f(x)[:, None], torch.zeros(1), torch.ones(1)),
        "running statistics are updated",
    ),
    "op without a rule": (lambda m, x: F.rrelu(m.f(x), training=True), "no batching rule"),
    "something else": (lambda m, x: shout(m.f(x)), "something vmap cannot follow"),
}


def shout(x):
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError("no!")
    return x


@pytest.mark.parametrize("case", BEYOND_VMAP)
def test_vmapped_jacobian_refuses_what_vmap_cannot_follow(case):
    forward, cause = BEYOND_VMAP[case]
    jacobian = vmapped_jacobian(Calls(forward, f=nn.Linear(3, 3)), losses_of, torch.randn(5, 3))
    with pytest.raises(tp.Refused, match=cause) as caught:
        jacobian.squared_norms()
    assert "torch_privacy.record" in str(caught.value)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_vmapped_jacobian_refuses_recurrent_layers(layer):
    model = Calls(lambda m, x: m.f(x)[0], f=layer(3, 4, batch_first=True))
    with pytest.raises(tp.Refused, match="which vmap refuses"):
        vmapped_jacobian(model, losses_of, torch.randn(5, 6, 3)).squared_norms()


def test_vmapped_jacobian_refuses_a_buffer_changed_in_place():
    with pytest.raises(tp.Refused, match="such as a buffer, is changed in place"):
        vmapped_jacobian(Counts(), losses_of, torch.randn(5, 3)).squared_norms()


def test_vmapped_jacobian_lets_errors_of_the_model_through():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        vmapped_jacobian(nn.Linear(3, 4), losses_of, torch.randn(5, 2)).squared_norms()
    assert not isinstance(caught.value, tp.Refused)


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(3), nn.SyncBatchNorm(3), nn.BatchNorm1d(3, track_running_stats=False).eval()]
)
def test_vmapped_jacobian_refuses_batch_norm_that_mixes_examples(norm):
    with pytest.raises(tp.Refused, match=r"in module '1'.*GroupNorm"):
        vmapped_jacobian(nn.Sequential(nn.Linear(3, 3), norm), losses_of, torch.randn(5, 3))


def test_vmapped_jacobian_takes_batch_norm_in_eval_mode():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval(), torch.randn(5, 3)
    rows = one_backward_per_example(model, x, losses_of)
    assert_jacobian_equals_rows(vmapped_jacobian(model, losses_of, x), rows)


def test_vmapped_jacobian_refuses_parameters_used_outside_of_the_model():
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    weight = model.weight
    for losses in (lambda m, x: (m(x) + x @ weight.T).squeeze(1), lambda m, x: (m(x) + other(x)).squeeze(1)):
        with pytest.raises(tp.Refused, match="other than through the model"), torch.no_grad():
            vmapped_jacobian(model, losses, torch.randn(5, 3)).squared_norms()


def test_vmapped_jacobian_refuses_a_changed_model():
    model, x = nn.Linear(3, 4), torch.randn(5, 3)
    jacobian = vmapped_jacobian(model, losses_of, x)
    with torch.no_grad():
        model.weight.mul_(2)
    with pytest.raises(tp.Refused, match="model was changed since"):
        jacobian.squared_norms()


@pytest.mark.parametrize("losses", [lambda m, x: m(x).mean(), lambda m, x: m(x), lambda m, x: [m(x)]])
def test_vmapped_jacobian_refuses_losses_that_are_not_one_per_example(losses):
    with pytest.raises(tp.Refused, match=r"must be \(1,\), one loss per example"):
        vmapped_jacobian(nn.Linear(3, 1), losses, torch.randn(5, 3)).squared_norms()


@pytest.mark.parametrize(
    "batch", [(), 3, torch.tensor(1.0), (torch.randn(5, 3), torch.randn(4)), [torch.randn(5, 3), "a"]]
)
def test_vmapped_jacobian_refuses_a_batch_without_examples_first(batch):
    with pytest.raises(ValueError, match="must be tensors with the same n first"):
        vmapped_jacobian(nn.Linear(3, 1), losses_of, batch)


def test_vmapped_jacobian_refuses_a_bad_chunk_size():
    with pytest.raises(ValueError, match=r"chunk_size=0 must be an integer of at least 1"):
        vmapped_jacobian(nn.Linear(3, 1), losses_of, torch.randn(5, 3), chunk_size=0)
