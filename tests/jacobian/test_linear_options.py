# SPDX-License-Identifier: Apache-2.0
"""Compares random products with a parameter, and routed products, with one backward per example."""

from dataclasses import dataclass
from itertools import product

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from cases import Calls, losses_of
from cases_linear import CASES
from drawn import draws
from hypothesis import given
from oracle import assert_exact, assert_jacobian_equals_rows, one_backward_per_example, recorded_jacobian
from parts import tokens
from torch import Tensor, nn

import torch_privacy as tp
from torch_privacy.jacobian.rows.norms import squared_norms
from torch_privacy.ops.embedding import Embedding, TiedEmbedding
from torch_privacy.ops.linear import Bilinear, GroupedLinear, Linear
from torch_privacy.ops.routed import RoutedLinear, RoutedUse

SIZES = dict(zip("bghtsdcef", (5, 2, 3, 2, 3, 3, 2, 2, 3), strict=True))


def assert_methods_agree(jacobian: tp.Jacobian) -> None:
    for op in (op for block in jacobian._blocks for op in block.ops):
        expected = op.rows().reshape(op.num_examples, -1).square().sum(1)
        for method in op.methods():
            torch.testing.assert_close(squared_norms(op, method), expected, msg=f"{type(op).__name__} {method.name}")


@st.composite
def equations(draw: st.DrawFn) -> tuple[str, str, str]:
    """Draws labels of x, weight and y: b numbers examples; g, h matrices; t, s positions; d, c in; e, f out."""
    some = lambda letters: draw(st.lists(st.sampled_from(letters), unique=True))  # noqa: E731
    shared, positions, inputs, outputs = some("gh"), some("ts"), some("dc"), some("ef")
    x = ["b", *shared, *positions, *inputs]
    y = ["b", *shared, *positions, *outputs]
    return tuple("".join(draw(st.permutations(labels))) for labels in (x, [*shared, *inputs, *outputs], y))


@pytest.mark.thorough
@draws(60)
@given(labels=equations(), weight_first=st.booleans(), ellipsis=st.booleans())
def test_einsum_matches_one_backward_per_example(labels, weight_first, ellipsis):
    x_labels, w_labels, y_labels = labels
    x_labels, y_labels = "b" + x_labels.replace("b", ""), y_labels
    if ellipsis and y_labels.startswith("b"):  # the dots stand for the examples
        x_labels, y_labels = (text.replace("b", "...") for text in (x_labels, y_labels))
    operands = f"{w_labels},{x_labels}" if weight_first else f"{x_labels},{w_labels}"

    def forward(m: Calls, x: Tensor) -> Tensor:
        y = torch.einsum(f"{operands}->{y_labels}", *((m.w, x) if weight_first else (x, m.w)))
        return y.movedim(y_labels.replace("...", "b").index("b"), 0)

    shape = [SIZES[label] for label in labels[0].replace("b", "")]
    model = Calls(forward, w=torch.randn([SIZES[label] for label in w_labels]))
    assert_methods_agree(assert_exact(model, torch.randn(5, *shape)))


@draws(60)
@given(
    batch=st.lists(st.integers(1, 3), max_size=2),
    present=st.lists(st.sampled_from(["both", "x", "weight", "neither"]), min_size=2, max_size=2),
    weight_batch=st.integers(0, 2),
    sizes=st.tuples(*[st.integers(1, 4)] * 3),
    left=st.booleans(),
)
def test_matmul_matches_one_backward_per_example(batch, present, weight_batch, sizes, left):
    t, d, e = sizes
    of_x = [size if where in ("both", "x") else 1 for size, where in zip(batch, present, strict=False)]
    of_w = [size if where in ("both", "weight") else 1 for size, where in zip(batch, present, strict=False)]
    of_w = of_w[len(of_w) - min(weight_batch, len(of_w)) :]
    model = Calls(lambda m, x: m.w @ x.mT if left else x @ m.w, w=torch.randn(*of_w, *((e, d) if left else (d, e))))
    assert_methods_agree(assert_exact(model, torch.randn(5, *of_x, t, d)))


@dataclass(frozen=True)
class Listed:
    """Returns an irregular layout: ``places`` (n, most) are the entries of each example, padded with -1."""

    dim: int
    places: Tensor

    @property
    def num_examples(self) -> int:
        return len(self.places)

    def examples_first(self, tensor: Tensor) -> Tensor:
        tensor = tensor.movedim(self.dim, 0)
        there = (self.places >= 0).view(*self.places.shape, *(1,) * (tensor.ndim - 1))
        first = torch.where(there, tensor[self.places.clamp(min=0)], 0)
        return first.movedim(1, self.dim + 1)


def routed_by_loop(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    starts = [0, *offsets.tolist()]
    parts = [x[start:end] @ w for start, end, w in zip(starts, starts[1:], weight, strict=False)]
    return torch.cat([*parts, x.new_zeros(len(x) - starts[-1], weight.shape[2])])


@pytest.mark.parametrize("offsets", [(2, 5, 5, 9), (0, 0, 9, 9), (3, 6, 8, 8)])
def test_routed_tokens_in_any_order_match_one_backward_per_example(offsets):
    weight, x, offsets = torch.randn(4, 3, 2, requires_grad=True), torch.randn(9, 3), torch.tensor(offsets).int()
    places = torch.tensor([[7, 0, 3, 8], [1, 2, -1, -1], [4, 5, 6, -1]])
    y = routed_by_loop(x, weight, offsets)
    losses = torch.stack([y.sin()[mine[mine >= 0]].sum() for mine in places])
    rows = torch.stack([torch.autograd.grad(loss, weight, retain_graph=True)[0] for loss in losses])
    (b,) = torch.autograd.grad(losses.sum(), y)
    op = RoutedUse(weight, x, offsets).op(b, Listed(0, places))
    assert_op_equals_rows(op, rows)
    twice = op.merge(RoutedUse(weight, 2 * x, offsets).op(b, Listed(0, places)))
    assert_op_equals_rows(twice, 3 * rows)


def assert_op_equals_rows(op: RoutedLinear, rows: Tensor) -> None:
    n = len(rows)
    c, v = torch.rand(n), torch.randn(2, *rows.shape[1:])
    torch.testing.assert_close(op.rows(), rows)
    torch.testing.assert_close(op.weighted_sum(c), torch.einsum("n,n...->...", c, rows))
    torch.testing.assert_close(op.project(v), rows.flatten(1) @ v.flatten(1).T)
    torch.testing.assert_close(op.select(slice(1, None)).rows(), rows[1:])
    for method in op.methods():
        torch.testing.assert_close(squared_norms(op, method), rows.flatten(1).square().sum(1), msg=method.name)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="an older version of torch")
def test_grouped_mm_matches_one_backward_per_example():
    """Every place in the sequence has a different expert; torch has this in float32 only."""
    torch.set_default_dtype(torch.float32)

    def forward(m: Calls, x: Tensor) -> Tensor:
        offsets = torch.arange(1, x.shape[1] + 1, dtype=torch.int32) * len(x)
        y = torch._grouped_mm(x.transpose(0, 1).flatten(0, 1), m.w, offs=offsets)
        return y.unflatten(0, (x.shape[1], len(x))).transpose(0, 1)

    assert_exact(Calls(forward, w=torch.randn(3, 8, 4)), torch.randn(5, 3, 8), rtol=1e-5)


@pytest.mark.parametrize("name", ["matmul, a matrix per head", "bilinear, many positions", "embedding, small table"])
def test_norms_are_the_same_in_chunks(name, monkeypatch):
    model, x = CASES[name]()
    whole = recorded_jacobian(model, x, losses_of).squared_norms()
    monkeypatch.setattr("torch_privacy.jacobian.rows.norms.CHUNK_FLOATS", 50)
    torch.testing.assert_close(recorded_jacobian(model, x, losses_of).squared_norms(), whole)


def test_bilinear_gram_is_computed_again_if_positions_cancel():
    b = torch.ones(4, 2, 5, dtype=torch.float32)
    b[:, 1] = -1 + 1e-5
    op = Bilinear(torch.ones(4, 2, 30).float(), torch.ones(4, 2, 20).float(), b)
    torch.testing.assert_close(op._gram(), op._rows_norms(), rtol=1e-5, atol=0)


def test_tied_embedding_takes_rows_if_its_two_parts_cancel():
    ids, x, b = torch.tensor([[1], [2]]), torch.ones(2, 1, 50).float(), torch.zeros(2, 1, 7).float()
    b[0, 0, 1] = b[1, 0, 2] = -1 + 1e-5
    op = Embedding(ids, torch.ones(2, 1, 50).float(), torch.Size((7, 50))).merge(Linear(x, b))
    norms, *_ = (squared_norms(op, method) for method in op.methods())
    torch.testing.assert_close(norms, op.rows().square().sum((1, 2)), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("einsum, two ways of one weight", GroupedLinear),
        ("look-up by index and embedding", Embedding),
        ("tied embedding, used four times", TiedEmbedding),
    ],
)
def test_uses_of_one_weight_are_merged(name, kind):
    model, x = CASES[name]()
    (block,) = recorded_jacobian(model, x, losses_of)._blocks
    assert [type(op) for op in block.ops] == [kind]


ORDERS = ["".join(uses) for count in (2, 3, 4) for uses in product("lp", repeat=count) if len(set(uses)) == 2]


def in_order(uses: str, padding_idx: int | None) -> nn.Module:
    """A table that is looked up (l) and multiplied by (p) in this order."""

    def forward(m: Calls, ids: Tensor) -> Tensor:
        h = (ids[..., None] / 7).to(m.e.weight.dtype).expand(-1, -1, 4)
        for k, use in enumerate(uses):
            h = h * m.e((ids + k) % 7) if use == "l" else torch.tanh(F.linear(h, m.e.weight)[..., :4])
        return h

    return Calls(forward, e=nn.Embedding(7, 4, padding_idx=padding_idx))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("uses", ORDERS)
def test_tied_embedding_is_one_op_in_whatever_order_it_is_used(uses, padding_idx, dtype):
    torch.set_default_dtype(dtype)
    model, ids = in_order(uses, padding_idx), tokens(5, 6)
    jacobian = recorded_jacobian(model, ids, losses_of)
    (block,) = jacobian._blocks
    assert [type(op) for op in block.ops] == [TiedEmbedding]
    assert_methods_agree(jacobian)
    rows, rtol = one_backward_per_example(model, ids, losses_of), 1e-9
    if dtype == torch.bfloat16:  # the ordinary backward adds up in it
        rows, rtol = rows.float(), 0.03
    assert_jacobian_equals_rows(jacobian, rows, rtol)


def test_weight_with_entries_per_example_is_refused_when_too_large(monkeypatch):
    monkeypatch.setattr("torch_privacy.ops.elementwise.MAX_ENTRIES", 100)
    model, x = CASES["bmm, parameter repeated"]()
    with pytest.raises(tp.Refused, match=r"ops\.einsum: .*\(5, 4, 3\) has separate entries .*Used with parameter 'w'"):
        recorded_jacobian(model, x, losses_of)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_norm": 1.0}, r"ops\.embedding_bag: max_norm=1\.0 rewrites the table"),
        ({"scale_grad_by_freq": True}, r"ops\.embedding_bag: scale_grad_by_freq=True divides by counts"),
        ({"sparse": True}, r"ops\.embedding_bag: sparse=True makes a gradient that shows"),
    ],
)
def test_embedding_bag_refuses_options_that_leak(options, message):
    with pytest.raises(tp.Refused, match=message):
        recorded_jacobian(nn.EmbeddingBag(7, 4, **options), torch.randint(0, 7, (5, 6)), losses_of)
