# SPDX-License-Identifier: Apache-2.0
"""Where the examples sit, as measured: in any type, with bad examples, and never with another example's data."""

import pytest
import torch
import torch.nn.functional as F
from cases import CASES
from oracle import flat, rows_of_one_graph, rows_or_skip
from parts import Calls, in_type, losses_of, tokens, trained
from torch import nn

import torch_privacy as tp
from torch_privacy._fitting import Codes
from torch_privacy._layout import Layouts
from torch_privacy._tape import Tape

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
IRREGULAR = [case for case in CASES if case.startswith("irregular: ")]


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
def test_codes_tell_every_example_from_every_other(n, exponents):
    codes = Codes(n, exponents)
    digits = [codes.digit(codes.cotangent(k)) for k in range(codes.num_digits)]
    assert codes.num_digits <= (1 if n <= 2 * exponents else 2 if n <= (2 * exponents) ** 2 else 4)
    assert torch.equal(codes.owner(digits), torch.arange(n))
    assert (codes.digit(torch.tensor([3.0**20, 0.0, torch.nan])) == -1).all()


@pytest.mark.parametrize("n", [5, 40, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_examples_in_an_order_of_their_own(n, dtype):
    torch.set_default_dtype(dtype)
    x, order = torch.randn(n, 3), torch.randperm(n)
    model = Calls(lambda m, x: m.f(x[order])[order.argsort()], f=nn.Linear(3, 2))
    rows = rows_of_one_graph(losses_of(model, x), model)
    with tp.record(model) as tape:
        losses = losses_of(model, tape.probe(x))
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
    with pytest.raises(tp.Refused, match="cannot be told apart"):
        tape.jacobian(losses)


@pytest.mark.parametrize("case", ["linear, flattened time first", "attention", "transformer layer"])
def test_bad_example_is_set_aside_alone_and_teaches_nothing(case):
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
    assert not layouts._proofs


TABLE = torch.arange(7).flip(0)
ORDER = torch.tensor([2, 0, 1, 4, 3])


def written(x, column):
    x = x.clone()
    x[:, 0] = column
    return x


HONEST = {  # name -> function of the tokens (5, 6) within each example
    "as they are": lambda x: x,
    "positions rolled": lambda x: x.roll(1, 1),
    "moved and masked": lambda x: torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1).masked_fill(x == 3, 0),
    "through a table": lambda x: TABLE[x],
    "two in one": lambda x: (x + 7 * x.roll(1, 1)) % 7,
    "chosen by position": lambda x: x.gather(1, x.clamp(max=5)),
    "sorted within": lambda x: x.sort(1).values,
    "time first": lambda x: x.t().contiguous().t(),
    "there and back": lambda x: x[ORDER][ORDER.argsort()],
    "largest": lambda x: x.amax(1, keepdim=True).expand(-1, 6),
    "padded": lambda x: F.pad(x, (1, 0))[:, :-1],
    "written": lambda x: written(x, x[:, 1]),
    "changed in place": lambda x: x.clone().add_(3).remainder_(7),
    "part overwritten": lambda x: torch.where(x > 3, x, x.flip(1)),
}
FOREIGN = {  # name -> function that gives an example some of another one's
    "rolled": lambda x: x.roll(1, 0),
    "turned round": lambda x: x.flip(0),
    "indexed": lambda x: x[ORDER],
    "selected": lambda x: x.index_select(0, ORDER),
    "rolled when flat": lambda x: x.flatten().roll(6).view_as(x),
    "taken apart": lambda x: torch.stack(x.unbind(0)[::-1]),
    "split and joined": lambda x: torch.cat([x[1:], x[:1]]),
    "through a table": lambda x: TABLE[x.roll(1, 0)],
    "mixed": lambda x: (x + x.roll(1, 0)) % 7,
    "chosen": lambda x: torch.where(x > 3, x, x.roll(1, 0)),
    "written": lambda x: written(x, x[:, 1].roll(1)),
    "positions of the neighbor": lambda x: x.gather(1, x.roll(1, 0).clamp(max=5)),
    "largest of the neighbor": lambda x: x.roll(1, 0).amax(1, keepdim=True).expand(-1, 6),
    "largest of all": lambda x: (x + x.amax()) % 7,
    "in other numbers": lambda x: x.roll(1, 0).float().to(torch.int32).clamp(0, 5).long(),
}
MEETINGS = {
    "embedding": lambda m, ids: F.embedding(ids, m.w),
    "index": lambda m, ids: m.w[ids],
    "one-hot": lambda m, ids: F.one_hot(ids, 7).to(m.w.dtype) @ m.w,
    "bags": lambda m, ids: F.embedding_bag(ids, m.w),
}


def tokens_through(function, meeting):
    model = Calls(lambda m, x: MEETINGS[meeting](m, x) + MEETINGS[meeting](m, function(x)) / 2, w=torch.randn(7, 4))
    with Tape(trained(model), (TABLE, ORDER), Layouts(), 5) as tape:
        losses = losses_of(model, tape.probe(tokens(5, 6)))
    tape.clipped_sum(losses, {"": ("w",)}, lambda jacobian, _: jacobian.weighted_sum(torch.ones(5)))


@pytest.mark.parametrize("meeting", MEETINGS)
@pytest.mark.parametrize("name", HONEST)
def test_tokens_moved_within_an_example_are_accepted(name, meeting):
    tokens_through(HONEST[name], meeting)


@pytest.mark.parametrize("meeting", MEETINGS)
@pytest.mark.parametrize("name", FOREIGN)
def test_tokens_of_another_example_are_refused(name, meeting):
    with pytest.raises(tp.Refused, match=r"op .* parameter 'w' .* depend on each other's part of the model's input"):
        tokens_through(FOREIGN[name], meeting)


def test_loss_may_not_read_only_the_neighbors_tokens():
    """The rows then lie in their regular order; but example i's labels are in row i, and its tokens in row i + 1."""
    model = Calls(lambda m, x: m.e(x.roll(1, 0)), e=nn.Embedding(7, 4))
    with tp.record(model) as tape:
        losses = losses_of(model, tape.probe(tokens(5, 6)))
    with pytest.raises(tp.Refused, match="depend on each other's part"):
        tape.jacobian(losses)


def test_refused_batches_teach_nothing():
    model, layouts = Calls(lambda m, x: m.e(x.roll(1, 0)), e=nn.Embedding(7, 4)), Layouts()
    for _ in range(4):
        with Tape(trained(model), (), layouts, 5) as tape:
            losses = losses_of(model, tape.probe(tokens(5, 6)))
        with pytest.raises(tp.Refused):
            tape.jacobian(losses)


def test_clipped_sum_wants_to_know_whose_data_lie_in_an_irregular_order():
    model, x = CASES["irregular: sorted by data"]() if "irregular: sorted by data" in CASES else CASES[IRREGULAR[0]]()
    for probed in (False, True):
        with Tape(trained(model), (), Layouts(), len(x)) as tape:
            losses = losses_of(model, tape.probe(x) if probed else x)

        def total():
            names = tuple(trained(model))
            return tape.clipped_sum(losses, {"": names}, lambda J, _: J.weighted_sum(torch.ones(len(x))))  # noqa: B023

        if probed:
            assert set(total()) == set(trained(model))
        else:
            with pytest.raises(tp.Refused, match=r"cannot be told apart by their data: .* Pass the batch's tensors"):
                total()


def test_number_of_backwards():
    """With up to 32 examples two beside that for b, where every call has a regular layout."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(32, 3)
    with tp.record(model) as tape:
        losses = losses_of(model, x)
    count = []
    losses.grad_fn.register_prehook(lambda grads: count.append(1))
    tape.jacobian(losses)
    assert len(count) == 3


def test_batches_of_any_size_take_one_path(monkeypatch):
    """Sizes of the model that happen to be multiples of the batch's are not taken for it."""

    def forward(m, x):
        return m.e(x).view(len(x), 8, 4).flatten(0, 1) @ m.w

    model, layouts, measured = Calls(forward, e=nn.Embedding(7, 4), w=torch.randn(4, 4)), Layouts(), []
    measure = Layouts.measure
    monkeypatch.setattr(Layouts, "measure", lambda *args: measured.append(1) or measure(*args))
    monkeypatch.setattr(Layouts, "spot_check_is_due", lambda self: False)
    for n in (8, 5, 4, 2, 16, 7, 8, 6):
        x = tokens(n, 8)
        tape = Tape(trained(model), (), layouts, n)
        x = tape.probe(x)
        with tape:
            losses = model(x).view(n, -1).square().mean(1)
        tape.jacobian(losses)
    assert len(measured) == 2


POOLS = {
    "a product": lambda h, pool: pool @ h,
    "segments": lambda h, pool: torch.segment_reduce(h, "sum", lengths=pool.sum(1).long(), axis=0),
    "a reduction by index": lambda h, pool: h.new_zeros(len(pool), 4).index_reduce(0, pool.argmax(0), h, "amax"),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("pool", POOLS)
def test_graphs_of_other_sizes_are_not_cut_as_equal_ones_were(pool):
    """Two batches of equal graphs teach nothing for one of unequal ones, in which as many nodes lie otherwise."""
    model, layouts = (
        Calls(lambda m, x, p: m.out(POOLS[pool](m.f(x).relu(), p)), f=nn.Linear(7, 4), out=nn.Linear(4, 5)),
        Layouts(),
    )
    model.forward = lambda x, p: model._forward(model, x, p)
    for sizes in ((4, 4), (4, 4), (4, 4), (5, 3), (2, 6)):
        x, p = torch.randn(8, 7), torch.block_diag(*(torch.ones(1, size) for size in sizes))
        with Tape(dict(model.named_parameters()), (), layouts, 2) as tape:
            losses = model(*tape.probe((x, p))).square().sum(1)
        found = flat(tape.jacobian(losses).rows(), 1)
        parts = [model(part, torch.ones(1, len(part))).square().sum() for part in x.split(sizes)]
        rows = [torch.cat([g.flatten() for g in torch.autograd.grad(part, list(model.parameters()))]) for part in parts]
        torch.testing.assert_close(found, torch.stack(rows))
