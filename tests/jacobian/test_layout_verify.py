# SPDX-License-Identifier: Apache-2.0
"""Layouts known from earlier batches are confirmed on each batch, or measured again; none is guessed."""

import gc
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle import flat, rows_of_one_graph
from parts import trained
from torch import Tensor, nn

import torch_privacy as tp
from torch_privacy.jacobian.layouts.codes import Rounding
from torch_privacy.jacobian.layouts.find import UNKNOWN, LayoutFinder
from torch_privacy.jacobian.layouts.known import PROOFS, Layouts, Merging
from torch_privacy.jacobian.layouts.predict import Disagreement, Prediction
from torch_privacy.jacobian.recording.backward import OpenNodes
from torch_privacy.jacobian.recording.calls import Call, Output
from torch_privacy.jacobian.recording.graph import Graph
from torch_privacy.jacobian.tape import Tape
from torch_privacy.ops import Layout

N, T = 6, 4


class Counted(Layouts):
    """Counts the batches that were measured; makes no spot checks."""

    def __init__(self) -> None:
        super().__init__()
        self.measured = 0

    def measure(self, *args, **kwargs):
        self.measured += 1
        return super().measure(*args, **kwargs)

    def spot_check_is_due(self) -> bool:
        return False


class Model(nn.Module):
    """Two layers on tokens (n, t, 3), with ``between`` between them, and losses of the output (n, ..)."""

    def __init__(self, between, parts=None):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(3, 5), nn.Linear(5, 4), between
        self.parts = parts or nn.ModuleList()

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        y = self.last(self.between(self.first(x).tanh(), *others))
        y = y.reshape(len(x), -1)
        return (y.sin() * torch.linspace(0.5, 1.5, y.shape[1])).sum(1)


def recorded(model, layouts, *inputs) -> tuple[Tape, Tensor]:
    with Tape(trained(model), model.buffers(), layouts, len(inputs[0])) as tape:
        losses = model(*inputs)
    return tape, losses


def clipped(model, layouts, *inputs, clip_norm=1.0, groups=None, merging=None, **settings) -> dict[str, Tensor]:
    """Returns the clipped sum of a batch by the tape."""

    def clip(jacobian, group):
        return jacobian.weighted_sum(tp.Flat(clip_norm).factors(jacobian.squared_norms().sqrt()))

    tape, losses = recorded(model, layouts, *inputs)
    return tape.clipped_sum(losses, groups or {"all": tuple(trained(model))}, clip, merging=merging, **settings)


def oracle(model, *inputs) -> Tensor:
    return rows_of_one_graph(model(*inputs), model)


def clipped_rows(rows: Tensor, clip_norm=1.0) -> Tensor:
    return (rows.norm(dim=1) / clip_norm).clamp(min=1).reciprocal() @ rows


def assert_exact(model, layouts, *inputs, **settings) -> None:
    """Compares rows and clipped sum with one backward for each example."""
    rows = oracle(model, *inputs)
    tape, losses = recorded(model, layouts, *inputs)
    torch.testing.assert_close(flat(tape.jacobian(losses).rows(), 1), rows)
    total = flat(clipped(model, layouts, *inputs, **settings), 0)
    torch.testing.assert_close(total, clipped_rows(rows))


def last_token(h: Tensor, lengths: Tensor) -> Tensor:
    return h[torch.arange(len(h)), lengths - 1]


def by_gather(h: Tensor, lengths: Tensor) -> Tensor:
    return h.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, h.shape[2]))[:, 0]


def in_place(h: Tensor, lengths: Tensor) -> Tensor:
    picked = h.new_zeros(len(h), h.shape[2])
    return picked.index_add_(0, torch.arange(len(h)), last_token(h, lengths))


class Unseen(torch.autograd.Function):
    """A gather inside of a custom function, which cannot be seen."""

    @staticmethod
    def forward(ctx, h, order):
        ctx.save_for_backward(order)
        return h[order]

    @staticmethod
    def backward(ctx, b):
        (order,) = ctx.saved_tensors
        return torch.zeros_like(b).index_add(0, order, b), None


POOLS = {"last token": last_token, "gather": by_gather, "written in place": in_place}


def batches(count: int, n=N, t=T):
    for _ in range(count):
        yield torch.randn(n, t, 3), torch.randint(1, t + 1, (n,))


@pytest.mark.parametrize("pool", POOLS)
def test_reordered_batches_are_exact_and_never_measured(pool):
    model, layouts = Model(POOLS[pool]), Counted()
    for x, lengths in batches(6):
        assert_exact(model, layouts, x, lengths)
    assert layouts.measured == 0


def backwards_through(model, monkeypatch) -> list[int]:
    """Counts the backwards that reach the first layer."""
    count = []
    forward = model.first.forward

    def watched(x):
        y = forward(x).clone()
        y.grad_fn.register_prehook(lambda grads: count.append(1))
        return y

    monkeypatch.setattr(model.first, "forward", watched)
    return count


@pytest.mark.parametrize(("pool", "most"), [("last token", 1), ("written in place", 2)])
def test_confirmed_batch_takes_one_more_backward_or_none_below_the_cut(pool, most, monkeypatch):
    parts = nn.Sequential(*(nn.Linear(5, 5) for _ in range(12)))
    model, layouts = Model(lambda h, lengths: POOLS[pool](parts(h), lengths), parts), Counted()
    count = backwards_through(model, monkeypatch)
    for x, lengths in batches(PROOFS):
        clipped(model, layouts, x, lengths)
    for x, lengths in batches(3):
        count.clear()
        clipped(model, layouts, x, lengths)
        assert len(count) == most


class Reordered(nn.Module):
    """Reorders the tokens (n·t, d) after the first layer as the data say."""

    def __init__(self, reorder):
        super().__init__()
        self.first, self.last, self.reorder = nn.Linear(3, 5), nn.Linear(5, 4), reorder

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        h = self.first(x.flatten(0, 1)[order.argsort()]).tanh()
        return self.last(self.reorder(h, order)).view(len(x), -1).sin().sum(1)


def written(h: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(h).index_copy_(0, order.argsort(), h)


CONSECUTIVE = torch.arange(N * T)


def changed(order: Tensor) -> Tensor:
    """Returns (n·t, 1), whether the order is another one than before."""
    return (order != CONSECUTIVE).any().expand(len(order), 1)


def is_taken(order: Tensor) -> Tensor:
    """Returns a mask (n·t, n·t) of the token that each place takes, made without a gather."""
    return order[:, None] == CONSECUTIVE


def rolled(h: Tensor, changed: Tensor) -> Tensor:
    return h.roll([int(changed[0, 0])], [0])


def rolled_by_bound(h: Tensor, start: Tensor) -> Tensor:
    return torch.cat([h[start:], h[:start]])


def rolled_by_script(h: Tensor, changed: Tensor) -> Tensor:
    """Rolls by a number of the data that Python never sees."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(rolled)(h, changed)


class InNumpy(torch.autograd.Function):
    """Reorders in numpy, inside of a custom function."""

    @staticmethod
    def forward(ctx, h, order):
        ctx.order = order.numpy()
        return torch.from_numpy(h.detach().numpy()[ctx.order])

    @staticmethod
    def backward(ctx, b):
        back = torch.zeros_like(b)
        back.numpy()[ctx.order] = b.numpy()
        return back, None


ORDERS = {
    "interleaved": CONSECUTIVE.view(N, T).t().flatten(),
    "rolled": CONSECUTIVE.roll(1),
    "two changed": CONSECUTIVE.clone().index_copy_(0, torch.tensor([0, 7]), torch.tensor([7, 0])),
}
REORDERINGS = {
    "index": lambda h, order: h[order],
    "hidden": lambda h, order: Unseen.apply(h, order.argsort().argsort()),
    "in place": written,
    "product": lambda h, order: torch.einsum("ab,bd->ad", F.one_hot(order).to(h.dtype), h),
    "mask": lambda h, order: (F.one_hot(order).to(h.dtype)[:, :, None] * h).sum(1),
    "choice": lambda h, order: torch.where((order == CONSECUTIVE).all(), h, h.flip(0)),
    "choice of each": lambda h, order: torch.where(changed(order), h.flip(0), h),
    "weights": lambda h, order: h.flip(0) * changed(order) + h * ~changed(order),
    "number": lambda h, order: torch.lerp(h, h.flip(0), float(changed(order)[0, 0])),
    "maximum": lambda h, order: torch.maximum(h - 1e6 * changed(order), h.flip(0) - 1e6 * ~changed(order)),
    "copies": lambda h, order: (F.one_hot(order)[:, :, None] * h.expand(len(h), -1, -1)).sum(1),
    "repeated": lambda h, order: (F.one_hot(order)[:, :, None] * h.repeat(len(h), 1, 1)).sum(1),
    "layer": lambda h, order: F.linear(F.one_hot(order).to(h.dtype), h.t()),
    "attention": lambda h, order: F.scaled_dot_product_attention(h[None], h[None], h[None], is_taken(order)[None])[0],
    "solution": lambda h, order: torch.linalg.solve(is_taken(order).t().to(h.dtype), h),
    "bags": lambda h, order: F.embedding_bag(order[:, None], h, mode="sum"),
    "inner function": lambda h, order: torch.ops.aten.index.Tensor(h, [order]),
    "numpy": lambda h, order: h[order.numpy()],
    "range": lambda h, order: h[range(len(h))[:: 1 - 2 * bool(changed(order)[0, 0])]],
    "numpy numbers": lambda h, order: h.roll(np.int64(changed(order)[0, 0].item()), 0),
    "tensors as bounds": lambda h, order: rolled_by_bound(h, changed(order)[0, 0].long()),
    "one of two": lambda h, order: (h.roll(0, 0), h.roll(1, 0))[bool(changed(order)[0, 0])],
    "one of two kinds": lambda h, order: (h * 1, h.flip(0))[bool(changed(order)[0, 0])],
    "halves": lambda h, order: torch.vstack(torch.vsplit(h, 2)[:: 1 - 2 * bool(changed(order)[0, 0])]),
    "script": lambda h, order: rolled_by_script(h, changed(order)),
    "list": lambda h, order: torch.stack([h.unbind(0)[k] for k in order.tolist()]),
    "pieces": lambda h, order: torch.cat([h.split(1)[k] for k in order.tolist()]),
}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("how", REORDERINGS)
def test_changed_layouts_are_noticed_and_measured(how, order, groups):
    """On one path the data keep the order of the tokens at first, and change it later."""
    model, layouts, order = Reordered(REORDERINGS[how]), Counted(), ORDERS[order]
    names = tuple(trained(model))
    split = {"all": names} if groups == 1 else {"weights": names[::2], "biases": names[1::2]}
    for _ in range(PROOFS + 1):
        clipped(model, layouts, torch.randn(N, T, 3), CONSECUTIVE, groups=split)
    assert layouts.measured == 0
    x = torch.randn(N, T, 3)
    asked = []

    def clip(jacobian, group):
        asked.append(group)
        return jacobian.weighted_sum(torch.arange(N) + 1.0)

    tape, losses = recorded(model, layouts, x, order)
    total = tape.clipped_sum(losses, split, clip)
    assert layouts.measured == 1
    rows = oracle(model, x, order)
    torch.testing.assert_close(flat({name: total[name] for name in names}, 0), (torch.arange(N) + 1.0) @ rows)
    assert sorted(asked) == sorted(split), "a group was clipped before its layouts were proved"
    tape, losses = recorded(model, layouts, x, order)
    torch.testing.assert_close(flat(tape.jacobian(losses).rows(), 1), rows)


@pytest.mark.parametrize("how", ["replaced", "written into", "viewed", "made of numbers"])
def test_a_constant_that_changes_between_batches_may_change_the_order(how):
    def ordered(h):
        order = model.order.t().t() if how == "viewed" else model.order
        return (torch.tensor(order.tolist()) if how == "made of numbers" else order) @ h.flatten(1)

    model, layouts = Model(ordered), Counted()
    model.last = nn.Linear(5 * T, 4)
    model.register_buffer("order", torch.eye(N))
    for _ in range(PROOFS + 1):
        clipped(model, layouts, torch.randn(N, T, 3))
    if how == "written into":
        model.order.copy_(torch.eye(N).flip(0))
    else:
        model.order = torch.eye(N).flip(0)
    assert_exact(model, layouts, torch.randn(N, T, 3))


def test_an_order_made_in_numpy_in_a_custom_function_is_noticed():
    model, layouts = Model(lambda h, order: InNumpy.apply(h, order)), Counted()
    for _ in range(PROOFS + 1):
        clipped(model, layouts, torch.randn(N, T, 3), torch.arange(N))
    assert_exact(model, layouts, torch.randn(N, T, 3), torch.arange(N).flip(0))


def test_a_closed_branch_takes_no_additional_backward_while_it_is_closed(monkeypatch):
    """Once the data open it, the batch is measured, and the branch is known from then on."""
    model, layouts = Model(lambda h, opens: h + opens * h.cos().sin()), Counted()
    count, measured = backwards_through(model, monkeypatch), []
    closed, opened = torch.zeros(N, 1, 1), torch.ones(N, 1, 1)
    for number, opens in enumerate([closed] * 4 + [opened] * 3 + [closed, opened]):
        x = torch.randn(N, T, 3)
        rows = oracle(model, x, opens)
        count.clear()
        torch.testing.assert_close(flat(clipped(model, layouts, x, opens), 0), clipped_rows(rows))
        assert len(count) == 1 or number < PROOFS or number == 4
        measured.append(layouts.measured)
    assert measured == [0] * 4 + [1] * 5


class Dropped(nn.Module):
    """Skips the layers that it is asked to skip; a layer may get the tokens time first."""

    def __init__(self, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(layers))
        self.kept, self.time_first = set(range(layers)), False

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number in self.kept:
                x = layer(x.transpose(0, 1) if self.time_first else x).tanh()
                x = x.transpose(0, 1) if self.time_first else x
        return x.flatten(1).sin().sum(1)


def test_a_new_path_of_known_calls_is_not_measured():
    model, layouts = Dropped(), Counted()
    for kept in ({0, 1, 2, 3}, {0, 1, 2, 3}, {0, 2, 3}, {1}, {0, 3}):
        model.kept = kept
        x = torch.randn(N, T, 3)
        tape, losses = recorded(model, layouts, x)
        rows = tape.jacobian(losses, may_miss=trained(model)).rows()
        expected = torch.autograd.grad(model(x).sum(), [*model.layers[1].parameters()], allow_unused=True)
        if expected[0] is not None:
            torch.testing.assert_close(rows["layers.1.weight"].sum(0), expected[0])
    assert layouts.measured == 0


def test_a_new_path_becomes_known_once_batches_have_confirmed_it():
    model, layouts = Dropped(), Counted()
    count = []
    for kept in ({0, 1, 2, 3}, {0, 1, 2, 3}, {0, 2, 3}, {0, 2, 3}, {0, 2, 3}):
        model.kept = kept
        tape, losses = recorded(model, layouts, torch.randn(N, T, 3))
        tape.jacobian(losses, may_miss=trained(model))
        count.append(tape.measured)
    assert count == [True, True, True, True, False]


def test_a_new_path_with_other_layouts_is_measured():
    model, layouts = Dropped(), Counted()
    for time_first in (False, False, True):
        model.time_first = time_first
        assert_exact_rows(model, layouts, torch.randn(N, N, 3))
    assert layouts.measured == 1


def assert_exact_rows(model, layouts, *inputs) -> None:
    rows = oracle(model, *inputs)
    tape, losses = recorded(model, layouts, *inputs)
    torch.testing.assert_close(flat(tape.jacobian(losses).rows(), 1), rows)


def test_a_confirmed_batch_gives_the_same_bits_as_a_measured_one():
    """Otherwise a resumed run, which measures again, could not repeat its releases."""
    for pool in POOLS.values():
        model, layouts = Model(pool), Counted()
        for inputs in batches(PROOFS):
            clipped(model, layouts, *inputs)
        for inputs in batches(3):
            ours, anew = clipped(model, layouts, *inputs), clipped(model, Layouts(), *inputs)
            assert all(torch.equal(ours[name], anew[name]) for name in ours)


def test_micro_batches_are_confirmed_under_their_weights():
    model, layouts = Model(in_place), Counted()
    merging = Merging(torch.tensor([0, 1, 1, 0, 2, 1]), 4)
    for x, lengths in batches(5):
        total = clipped(model, layouts, x, lengths, merging=merging)
        rows = oracle(model, x, lengths)
        means = torch.zeros(4, rows.shape[1]).index_add(0, merging.assignment, rows * merging.weights()[:, None])
        torch.testing.assert_close(flat(total, 0), clipped_rows(means))
    assert layouts.measured == 0


def test_a_bad_example_leaves_the_others_when_layouts_are_confirmed():
    model, layouts = Model(in_place), Counted()
    for x, lengths in batches(PROOFS):
        clipped(model, layouts, x, lengths)
    for x, lengths in batches(2):
        good, rows = torch.arange(N) != 1, oracle(model, x, lengths)
        x[1] = torch.inf
        tape, losses = recorded(model, layouts, x, lengths)
        norms = tape.jacobian(losses).squared_norms()
        assert not norms[1].isfinite()
        torch.testing.assert_close(norms[good], rows[good].square().sum(1))
    assert layouts.measured == 0


@pytest.mark.parametrize("crop", ["sliced", "indexed", "stacked"])
def test_reordering_before_any_parameter_takes_no_additional_backward(crop, monkeypatch):
    def cropped(x):
        starts = torch.randint(0, 3, (len(x),))
        if crop == "sliced":
            return x[:, int(starts[0]) :][:, :T]
        if crop == "indexed":
            return x[torch.arange(len(x))[:, None], starts[:, None] + torch.arange(T)]
        return torch.stack([tokens[start : start + T] for tokens, start in zip(x, starts.tolist(), strict=True)])

    model, layouts = Model(lambda h: h), Counted()
    count = backwards_through(model, monkeypatch)
    for number in range(8):
        count.clear()
        tape, losses = recorded(model, layouts, cropped(torch.randn(N, T + 3, 3)))
        tape.jacobian(losses)
        assert len(count) == 1 or number < PROOFS


def pooled_by_product(h: Tensor, numbers: Tensor) -> Tensor:
    """Sums tokens (10, d) by the number of each, by a matrix that no gradient goes back to."""
    pool = torch.zeros(3, len(h)).scatter(0, numbers[None], 1.0)
    return torch.einsum("gn,nd->gd", pool, h)


def pooled_without_gradient(h: Tensor, numbers: Tensor) -> Tensor:
    with torch.no_grad():
        pool = torch.zeros(3, len(h)).scatter(0, numbers[None], 1.0)
    return (pool[:, :, None] * h).sum(1)


@pytest.mark.parametrize("pool", [pooled_by_product, pooled_without_gradient])
def test_reordered_data_are_followed_to_tensors_with_a_gradient(pool):
    class Graphs(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 4)

        def forward(self, x, numbers):
            return self.last(pool(self.first(x).tanh(), numbers)).sin().sum(1)

    model, layouts = Graphs(), Counted()
    even, uneven = torch.arange(9) // 3, torch.tensor([0, 0, 0, 0, 0, 1, 2, 2, 2])
    for numbers in (even, even, even, uneven, even):
        x = torch.randn(9, 3)
        with Tape(trained(model), (), layouts, 3) as tape:
            losses = model(x, numbers)
        torch.testing.assert_close(flat(tape.jacobian(losses).rows(), 1), oracle(model, x, numbers))


class Experts(nn.Module):
    """Sends each token through the expert that its data choose."""

    def __init__(self, count=3):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(count))
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        chosen = rows.argmax(1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            (places,) = torch.where(chosen == number)
            out = out.index_add(0, places, expert(rows[places]).tanh())
        return self.last(out.view_as(x)).flatten(1).sin().sum(1)


@pytest.mark.parametrize("n", [N, 40])
def test_irregular_orders_are_read_from_the_codes(n):
    """Up to 32 examples need one more backward, up to 1024 two."""
    model, layouts, counts = Experts(), Counted(), []
    for _ in range(5):
        x = torch.randn(n, T, 3)
        tape, losses = recorded(model, layouts, x)
        count = []
        losses.grad_fn.register_prehook(lambda grads, count=count: count.append(1))
        rows = tape.jacobian(losses, may_miss=trained(model)).rows()
        torch.testing.assert_close(flat(rows, 1), oracle(model, x))
        counts.append(len(count))
    assert layouts.measured == PROOFS
    assert counts[PROOFS:] == [2 if n <= 32 else 3] * 3


@pytest.mark.parametrize("mix", ["product", "mask"])
def test_coupling_that_begins_later_is_refused(mix):
    """Examples are mixed on a path that was taken before."""

    def mixed(h, weights):
        if mix == "product":
            return torch.einsum("nm,mtd->ntd", weights, h)
        return (weights[:, :, None, None] * h).sum(1)

    model, layouts = Model(mixed), Counted()
    for _ in range(PROOFS + 1):
        clipped(model, layouts, torch.randn(N, T, 3), torch.eye(N))
    assert layouts.measured == 0
    with pytest.raises(tp.Refused, match="cannot be separated"):
        clipped(model, layouts, torch.randn(N, T, 3), torch.rand(N, N))


def test_swapped_examples_are_missed_as_rarely_as_the_docstring_states():
    """Of 64 examples two share a code with probability 1/32; of 32 none do."""
    rates = {}
    for n in (32, 64):
        slipped = 0
        x = torch.randn(n, 7)
        call = Call.cut(torch.relu, _edge_of(x), 0)
        for _ in range(400):
            layout = _batch_first(n)
            prediction = Prediction([call], [(layout,)], torch.ones(n), Rounding.of({torch.float64}))
            (c,) = prediction.coded
            owner = torch.arange(n)
            owner[:2] = torch.tensor([1, 0])
            prediction.note(0, 0, x * c[owner][:, None])
            prediction.layout(0, x)
            try:
                prediction.conclude()
                slipped += 1
            except Disagreement:
                pass
        rates[n] = slipped / 400
    assert rates[32] == 0
    assert rates[64] <= 0.07


def _batch_first(n):
    return Layout(0, 1, n, 1)


def _edge_of(x):
    return Output(None, x.shape, x.dtype, None)  # type: ignore[arg-type]


class Ordered(nn.Module):
    """A layer on tokens (n, t, 3) in some order, and losses that weigh each token.

    With ``noise`` what other tokens add cancels up to rounding only.
    """

    ORDERS = ("examples first", "time first", "examples first, flat", "time first, flat")

    def __init__(self, order: str, *, noise: bool = False):
        super().__init__()
        self.layer, self.order, self.noise = nn.Linear(3, 4), order, noise

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        x = x.transpose(0, 1) if "time" in self.order else x
        first = x.shape[:2]
        y = self.layer(x.flatten(0, 1) if "flat" in self.order else x)
        if self.noise:
            total = y.cumsum(0)
            y = torch.cat([total[:1], total[1:] - total[:-1]])
        y = y.view(*first, 4)
        y = y.transpose(0, 1) if "time" in self.order else y
        return (y.sin().sum(2) * weights).sum(1)


def weights_of(outlier: str, n: int, t: int, size: float) -> Tensor:
    weights = torch.ones(n, t)
    if outlier == "one example":
        weights[1] = size
    elif outlier == "one token":
        weights[1, 1] = size
    elif outlier == "one example alone":
        weights *= 0
        weights[1] = size
    return weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1e7, 1e9])
@pytest.mark.parametrize("outlier", ["one example", "one token", "one example alone"])
@pytest.mark.parametrize("shape", [(5, 5), (6, 3), (4, 8)], ids=str)
@pytest.mark.parametrize("order", Ordered.ORDERS)
def test_an_outlier_hides_no_layout(order, shape, outlier, size, dtype):
    torch.set_default_dtype(dtype)
    model, x, weights = Ordered(order), torch.randn(*shape, 3), weights_of(outlier, *shape, size)
    rows = oracle(model, x, weights)
    tape, losses = recorded(model, Layouts(), x, weights)
    off = (flat(tape.jacobian(losses, verify=True).rows(), 1).double() - rows).norm(dim=1)
    assert (off <= 100 * torch.finfo(dtype).eps * rows.norm(dim=1)).all()
    total = flat(clipped(model, Layouts(), x, weights), 0).double()
    torch.testing.assert_close(total, clipped_rows(rows), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("outlier", ["one example", "one token"])
@pytest.mark.parametrize("order", ["examples first, flat", "time first, flat"])
def test_losses_are_weighted_until_one_layout_remains(order, outlier):
    """The rounding of the outlier's gradient hides all the other examples."""
    model, x, weights = Ordered(order, noise=True), torch.randn(5, 5, 3), weights_of(outlier, 5, 5, 1e11)
    rows = oracle(_like(model, Ordered(order)), x, weights)
    tape, losses = recorded(model, Layouts(), x, weights)
    off = (flat(tape.jacobian(losses).rows(), 1) - rows).norm(dim=1)
    assert (off <= 1e-2 * rows.norm(dim=1)).all()


def _like(model: nn.Module, other: nn.Module) -> nn.Module:
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("order", ["examples first, flat", "time first, flat"])
def test_the_known_layout_or_none_is_taken_if_no_weights_decide(order, monkeypatch):
    model, x = Ordered(order, noise=True), torch.randn(5, 5, 3)
    weights = torch.ones(5, 5) + 1e22 * torch.eye(5)
    tape, losses = recorded(model, Layouts(), x, weights)
    with pytest.raises(
        tp.Refused, match=r"op 'linear' .* several orders of the 5 examples fit .* Nothing was released"
    ):
        tape.jacobian(losses)
    layouts = Counted()
    for _ in range(PROOFS):
        tape, losses = recorded(model, layouts, torch.randn(5, 5, 3), torch.ones(5, 5))
        tape.jacobian(losses)
    tape, losses = recorded(model, layouts, x, weights)
    tape.layouts._on_path.clear()
    monkeypatch.setattr(LayoutFinder, "_claim", lambda self: UNKNOWN)  # so that it measures
    tape.jacobian(losses)


@pytest.mark.parametrize("order", ["examples first, flat", "time first, flat"])
def test_no_order_is_needed_where_no_example_has_a_finite_gradient(order):
    """All are left out, and the training then says that the data hold NaN."""
    tape, losses = recorded(Ordered(order), Layouts(), torch.full((5, 5, 3), torch.nan), torch.ones(5, 5))
    assert tape.jacobian(losses).squared_norms().isnan().all()


SMALL = {torch.float32: [1e-20, 1e-24, 1e-30, 1e-42, 0.0], torch.float64: [1e-30, 1e-200, 1e-310, 0.0]}


@pytest.mark.thorough(but=4)
@pytest.mark.parametrize(("dtype", "size"), [(dtype, size) for dtype, sizes in SMALL.items() for size in sizes])
@pytest.mark.parametrize("order", Ordered.ORDERS)
def test_converged_models_are_not_refused(order, dtype, size):
    """Squares of gradients underflow, or gradients do, or they are zero: for all examples, or for all but one."""
    torch.set_default_dtype(dtype)
    for alone in (False, True):
        model, x = Ordered(order), torch.randn(5, 4, 3)
        weights = torch.full((5, 4), size)
        if alone:
            weights[torch.arange(5) != 3] = 0
        for layouts in (Layouts(), Counted()):
            for _ in range(PROOFS + 1):
                tape, losses = recorded(model, layouts, x, weights)
                rows = flat(tape.jacobian(losses, verify=True).rows(), 1).double()
                torch.testing.assert_close(rows, oracle(model, x, weights), rtol=1e-4, atol=1e-43)
                clipped(model, layouts, x, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_that_are_rounding_only_are_not_refused(dtype):
    torch.set_default_dtype(dtype)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    for scale in (20, 40, 100):
        layouts = Counted()
        for _ in range(PROOFS + 2):
            x = torch.randn(6, 3)
            y = model(x).argmax(1)
            with Tape(trained(model), (), layouts, 6) as tape:
                losses = F.cross_entropy(scale * model(x), y, reduction="none")
            names = {"all": tuple(trained(model))}
            tape.clipped_sum(losses, names, lambda jacobian, _: jacobian.weighted_sum(torch.ones(6)))


@pytest.mark.parametrize("groups", [1, 4])
def test_native_backwards_are_compared_on_the_first_batches_only(groups, monkeypatch):
    """Also if groups of parameters are clipped inside of the backward, which frees what the calls recorded."""
    model, layouts = Model(lambda h: h), Counted()
    names = tuple(trained(model))
    split = {str(k): names[k::groups] for k in range(groups)}
    count = backwards_through(model, monkeypatch)
    taken = []
    for _ in range(5):
        count.clear()
        clipped(model, layouts, torch.randn(N, T, 3), groups=split)
        taken.append(len(count))
    confirmed = 2 if groups == 1 else 3  # coded and native in one, that of the sum, and for groups one before it
    assert taken == [confirmed] * PROOFS + [1] * 3


@pytest.mark.parametrize("merging", [None, Merging(torch.tensor([0, 1, 1, 0, 2, 1]), 4)], ids=["rows", "micro-batches"])
@pytest.mark.parametrize("groups", [1, 4])
def test_rows_that_differ_from_the_native_gradient_are_refused_before_a_sum(groups, merging):
    model = Model(lambda h: h)
    names = tuple(trained(model))
    model.first.weight.register_hook(lambda g: 1.01 * g)
    with pytest.raises(tp.Refused, match=r"'first.weight' do not add up"):
        clipped(
            model,
            Counted(),
            torch.randn(N, T, 3),
            groups={str(k): names[k::groups] for k in range(groups)},
            merging=merging,
        )


SHAPES = [(5, 5), (6, 3), (3, 6), (4, 8), (40, 20)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("order", Ordered.ORDERS)
def test_first_batches_in_any_regular_order_are_confirmed_and_never_measured(order, shape):
    model, guessed, measured = Ordered(order), Counted(), Layouts()
    measured.guess = lambda *args: None
    for _ in range(PROOFS + 1):
        inputs = torch.randn(*shape, 3), torch.rand(shape) + 0.5
        assert_exact(model, guessed, *inputs)
        clipped(model, measured, *inputs)
    assert guessed.measured == 0
    footprints = [[known.footprint for known in of._on_path.values()] for of in (guessed, measured)]
    assert footprints[0] == footprints[1]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("how", REORDERINGS)
def test_a_first_batch_in_irregular_order_is_measured(how, order):
    model, layouts = Reordered(REORDERINGS[how]), Counted()
    assert_exact(model, layouts, torch.randn(N, T, 3), ORDERS[order])
    assert layouts.measured


def test_an_undefined_gradient_confirms_no_guess():
    model, layouts, x = Model(lambda h: h), Counted(), torch.randn(N, T, 3)
    x[1] = torch.inf
    tape, losses = recorded(model, layouts, x)
    assert tape.jacobian(losses).squared_norms().isfinite().sum() == N - 1
    assert layouts.measured == 1


def test_a_layer_without_a_gradient_is_not_measured():
    """Any layout fits: the next layer is zero at first."""
    model, layouts = Dropped(layers=2), Counted()
    nn.init.zeros_(model.layers[1].weight)
    for _ in range(PROOFS):
        assert_exact_rows(model, layouts, torch.randn(N, N, 3))
    assert layouts.measured == 0


def test_watched_nodes_are_freed_if_their_backward_ends_in_an_error():
    """Then nothing stops watching: a hook that held its node would keep the batch."""

    def watched():
        x, factor = torch.ones(3, requires_grad=True), torch.ones(3)
        losses = (x * factor).sin().sum()
        nodes = OpenNodes(Graph(losses).nodes())
        torch.autograd.grad(losses, x, retain_graph=True)
        assert not nodes.closed()
        return weakref.ref(factor)

    alive = watched()
    gc.collect()
    assert alive() is None
