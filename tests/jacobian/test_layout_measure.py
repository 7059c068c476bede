# SPDX-License-Identifier: Apache-2.0
"""Layouts are measured in any type, and with examples whose gradients are not finite."""

import pytest
import torch
from cases import CASES
from oracle import flat, rows_of_one_graph, rows_or_skip
from parts import Calls, in_type, losses_of, tokens, trained
from torch import nn

import torch_privacy as tp
from torch_privacy.jacobian.layouts.codes import Codes
from torch_privacy.jacobian.layouts.known import Layouts
from torch_privacy.jacobian.tape import Tape

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
IRREGULAR = [case for case in CASES if case.startswith("irregular: ")]


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", IRREGULAR)
def test_irregular_order_is_found_in_any_type(case, dtype):
    for seed in range(4):
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float64)
        model, x = in_type(dtype, *CASES[case]())
        rows = rows_or_skip(model, x)
        with tp.record(model) as tape:
            losses = losses_of(model, x)
        off = (flat(tape.jacobian(losses).rows(), 1).double() - rows).norm(dim=1)
        assert (off <= 20 * torch.finfo(dtype).eps * rows.norm(dim=1).max()).all()


@pytest.mark.parametrize("exponents", [4, 16])
@pytest.mark.parametrize("n", [1, 2, 8, 9, 32, 33, 1000, 1025])
def test_codes_separate_every_two_examples(n, exponents):
    codes = Codes(n, exponents)
    digits = [codes.digit(codes.cotangent(k)) for k in range(codes.num_digits)]
    assert codes.num_digits <= (1 if n <= 2 * exponents else 2 if n <= (2 * exponents) ** 2 else 4)
    assert torch.equal(codes.owner(digits), torch.arange(n))
    assert (codes.digit(torch.tensor([3.0**20, 0.0, torch.nan])) == -1).all()


@pytest.mark.parametrize("n", [5, 40, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_examples_in_an_irregular_order(n, dtype):
    torch.set_default_dtype(dtype)
    x, order = torch.randn(n, 3), torch.randperm(n)
    model = Calls(lambda m, x: m.f(x[order])[order.argsort()], f=nn.Linear(3, 2))
    rows = rows_of_one_graph(losses_of(model, x), model)
    with tp.record(model) as tape:
        losses = losses_of(model, x)
    off = (flat(tape.jacobian(losses).rows(), 1).double() - rows).norm(dim=1)
    assert (off <= 20 * torch.finfo(dtype).eps * rows.norm(dim=1).max()).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "coupled",
    [
        lambda losses, h: losses * (1 + h.mean()),
        lambda losses, h: losses + 0.05 * losses.mean(),
        lambda losses, h: losses + 0.05 * losses.roll(1),
        lambda losses, h: losses + 0.1 * torch.where(torch.arange(len(losses)) == 3, losses[4], 0),
    ],
)
def test_weak_coupling_is_refused_in_any_type(coupled, dtype):
    torch.set_default_dtype(dtype)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    with tp.record(model) as tape:
        h = model(torch.randn(20, 3))
        losses = coupled(h.square().sum(1), h)
    with pytest.raises(tp.Refused, match="cannot be separated"):
        tape.jacobian(losses)


@pytest.mark.parametrize("case", ["linear, flattened time first", "attention", "transformer layer"])
def test_bad_example_leaves_the_others_and_proves_nothing(case):
    model, x = CASES[case]()
    with tp.record(model) as tape:
        losses = losses_of(model, x)
    norms, layouts = tape.jacobian(losses).squared_norms(), Layouts()
    bad = x.clone()
    bad[1] = torch.inf
    for _ in range(3):
        with Tape(trained(model), model.buffers(), layouts, len(x)) as tape:
            losses = losses_of(model, bad)
        found = tape.jacobian(losses).squared_norms()
        assert not found[1].isfinite()
        others = torch.arange(len(x)) != 1
        torch.testing.assert_close(found[others], norms[others])
    assert not any(known.proofs for known in layouts._on_path.values())


def test_number_of_backwards():
    """If every call has one regular layout that fits, one backward beside that for b confirms it."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(32, 3)
    with tp.record(model) as tape:
        losses = losses_of(model, x)
    count = []
    losses.grad_fn.register_prehook(lambda grads: count.append(1))
    tape.jacobian(losses)
    assert len(count) == 2


def test_batches_of_any_size_take_one_path(monkeypatch):
    """Sizes of the model that happen to be multiples of the batch size do not change the path."""

    def forward(m, x):
        return m.e(x).view(len(x), 8, 4).flatten(0, 1) @ m.w

    model, layouts, measured = Calls(forward, e=nn.Embedding(7, 4), w=torch.randn(4, 4)), Layouts(), []
    measure = Layouts.measure
    monkeypatch.setattr(Layouts, "measure", lambda *args: measured.append(1) or measure(*args))
    monkeypatch.setattr(Layouts, "spot_check_is_due", lambda self: False)
    for n in (8, 5, 4, 2, 16, 7, 8, 6):
        x = tokens(n, 8)
        tape = Tape(trained(model), (), layouts, n)
        tape.note_inputs(x)
        with tape:
            losses = model(x).view(n, -1).square().mean(1)
        tape.jacobian(losses)
    assert not measured


POOLS = {
    "a product": lambda h, pool: pool @ h,
    "segments": lambda h, pool: torch.segment_reduce(h, "sum", lengths=pool.sum(1).long(), axis=0),
    "a reduction by index": lambda h, pool: h.new_zeros(len(pool), 4).index_reduce(0, pool.argmax(0), h, "amax"),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("pool", POOLS)
def test_graphs_of_other_sizes_do_not_get_the_layout_of_equal_ones(pool):
    """Two batches of equal graphs determine nothing for unequal ones with the same number of nodes."""
    model, layouts = (
        Calls(lambda m, x, p: m.out(POOLS[pool](m.f(x).relu(), p)), f=nn.Linear(7, 4), out=nn.Linear(4, 5)),
        Layouts(),
    )
    model.forward = lambda x, p: model._forward(model, x, p)
    for sizes in ((4, 4), (4, 4), (4, 4), (5, 3), (2, 6)):
        x, p = torch.randn(8, 7), torch.block_diag(*(torch.ones(1, size) for size in sizes))
        with Tape(dict(model.named_parameters()), (), layouts, 2) as tape:
            losses = model(x, p).square().sum(1)
        found = flat(tape.jacobian(losses).rows(), 1)
        parts = [model(part, torch.ones(1, len(part))).square().sum() for part in x.split(sizes)]
        rows = [torch.cat([g.flatten() for g in torch.autograd.grad(part, list(model.parameters()))]) for part in parts]
        torch.testing.assert_close(found, torch.stack(rows))
