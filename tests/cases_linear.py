# SPDX-License-Identifier: Apache-2.0
"""Provides more cases of multiplying by a parameter or looking one up, in the form of ``cases.CASES``."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from parts import Calls, tokens
from torch import Tensor, nn


def product(forward: Callable[[Tensor, Tensor], Tensor], weight: tuple[int, ...], x: tuple[int, ...]) -> Callable:
    """Returns a case: a function of x and one parameter of the given shape."""
    return lambda: (Calls(lambda m, x: forward(x, m.w), w=torch.randn(weight)), torch.randn(x))


def equation(text: str, weight: tuple[int, ...], x: tuple[int, ...]) -> Callable:
    """Returns a case: einsum of the parameter and x, in the order of the equation."""
    return product(lambda x, w: torch.einsum(text, x, w), weight, x)


def bag(x: tuple[int, ...] = (5, 6), **options: object) -> Callable:
    """Returns a case: nn.EmbeddingBag of seven vectors of four."""
    return lambda: (nn.EmbeddingBag(7, 4, **options), tokens(*x))


def ragged_bags(m: Calls, ids: Tensor, last: bool = False) -> Tensor:
    """Puts the first ids of each example in a bag; the first id is their number, which may be zero."""
    lengths = ids[:, 0].clamp(max=ids.shape[1])
    ends = lengths.cumsum(0)
    offsets = torch.cat([ends.new_zeros(1), ends]) if last else ends - lengths
    return m.bag(ids[torch.arange(ids.shape[1]) < lengths[:, None]], offsets)


def ragged(last: bool = False, **options: object) -> Callable:
    def case() -> tuple[nn.Module, Tensor]:
        part = nn.EmbeddingBag(7, 4, include_last_offset=last, **options)
        return Calls(lambda m, ids: ragged_bags(m, ids, last), bag=part), torch.cat(
            [tokens(4, 6), torch.zeros(1, 6)]
        ).long()

    return case


def several_bags(m: Calls, ids: Tensor) -> Tensor:
    return m.bag(ids.flatten(0, 1)).unflatten(0, ids.shape[:2])


def weighted_bags(m: Calls, ids: Tensor) -> Tensor:
    return F.embedding_bag(ids, m.e, mode="sum", per_sample_weights=torch.tanh(ids * 0.1), padding_idx=3)


def weights_by_token(m: Calls, ids: Tensor) -> Tensor:
    return F.embedding_bag(ids, m.e, mode="sum", per_sample_weights=F.embedding(ids, m.p).squeeze(-1))


def weights_by_place(m: Calls, ids: Tensor) -> Tensor:
    return F.embedding_bag(ids, m.e, mode="sum", per_sample_weights=m.p.expand(len(ids), -1), padding_idx=3)


def chosen_experts(m: Calls, x: Tensor) -> Tensor:
    """Multiplies each token by the matrix of its expert and adds its bias, both looked up for every token."""
    experts = (x.sum(-1) > 0).long() + (x[..., 0] > 0).long()
    w, b = m.w[experts], m.b[experts]
    return (x.unsqueeze(-2) @ w).squeeze(-2) + b


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "matmul, a matrix per head": product(lambda x, w: x @ w, (2, 3, 4), (5, 2, 6, 3)),
    "matmul, a matrix per head, on the left": product(lambda x, w: w @ x, (2, 4, 3), (5, 2, 3, 6)),
    "matmul, one input for all heads": product(lambda x, w: x.unsqueeze(1) @ w, (2, 3, 4), (5, 6, 3)),
    "matmul, a matrix per head and position": product(lambda x, w: x.unsqueeze(-2) @ w, (2, 6, 3, 4), (5, 2, 6, 3)),
    "matmul, a stack of one matrix": product(lambda x, w: x @ w, (1, 3, 4), (5, 6, 3)),
    "matmul, a stack of one matrix, many positions": product(lambda x, w: x @ w, (1, 20, 30), (3, 3, 20)),
    "matmul, heads in the middle": product(lambda x, w: x @ w, (2, 1, 3, 4), (5, 2, 6, 2, 3)),
    "matmul, head called twice": product(lambda x, w: torch.tanh(x @ w) @ w, (2, 3, 3), (5, 2, 6, 3)),
    "matmul, a matrix per head, batch of one": product(lambda x, w: x @ w, (2, 3, 4), (1, 2, 6, 3)),
    "matmul, a matrix per head, examples in the last dimension": product(
        lambda x, w: (w @ x.movedim(0, -1)).movedim(-1, 0), (2, 4, 3), (5, 2, 3)
    ),
    "matmul, single output": product(lambda x, w: x @ w, (3, 1), (5, 6, 3)),
    "matmul, single input": product(lambda x, w: x @ w, (1, 3), (5, 6, 1)),
    "matmul, as many heads as examples": product(lambda x, w: x @ w, (5, 3, 4), (5, 5, 6, 3)),
    "matmul, vector on the left": product(lambda x, w: w @ x, (3,), (5, 3, 6)),
    "matmul, vector and batch of vectors": product(lambda x, w: w @ x.T, (3,), (5, 3)),
    "matmul, reversed": product(lambda x, w: w.__rmatmul__(x), (3, 4), (5, 6, 3)),
    "matmul, in torch.linalg": product(lambda x, w: torch.linalg.matmul(x, w), (2, 3, 4), (5, 2, 6, 3)),
    "bmm, parameter expanded": product(lambda x, w: torch.bmm(x, w.expand(len(x), -1, -1)), (1, 3, 4), (5, 6, 3)),
    "bmm, parameter repeated": product(lambda x, w: torch.bmm(w.repeat(len(x), 1, 1), x), (4, 3), (5, 3, 6)),
    "bmm, heads and examples in one dimension": product(
        lambda x, w: torch.bmm(x.flatten(0, 1), w.expand(len(x), 2, 3, 4).flatten(0, 1)).unflatten(0, (len(x), 2)),
        (2, 3, 4),
        (5, 2, 6, 3),
    ),
    "bmm, groups first": product(lambda x, w: torch.bmm(x.transpose(0, 1), w).transpose(0, 1), (6, 3, 4), (5, 6, 3)),
    "bmm, groups first, several positions": product(
        lambda x, w: torch.bmm(x.movedim(2, 0).flatten(1, 2), w).unflatten(1, (len(x), 4)).transpose(0, 1),
        (2, 3, 4),
        (5, 4, 2, 3),
    ),
    "mv": product(lambda x, w: torch.mv(x, w), (3,), (5, 3)),
    "inner": product(lambda x, w: torch.inner(x, w), (2, 4, 3), (5, 6, 3)),
    "inner, vector": product(lambda x, w: w.inner(x), (3,), (5, 6, 3)),
    "outer": product(lambda x, w: torch.outer(x, w), (3,), (5,)),
    "outer, examples in columns": product(lambda x, w: torch.outer(w, x).T, (3,), (5,)),
    "vecdot": product(lambda x, w: torch.linalg.vecdot(x, w), (6, 3), (5, 6, 3)),
    "tensordot": product(lambda x, w: torch.tensordot(x, w, dims=2), (6, 3, 4), (5, 2, 6, 3)),
    "tensordot, dimensions given": product(
        lambda x, w: torch.tensordot(w, x, dims=([2, -3], [1, 2])).movedim(1, 0), (3, 4, 6), (5, 6, 3)
    ),
    "linear, parameter as the input": product(lambda x, w: F.linear(w, x).T, (4, 3), (5, 3)),
    "linear, vector as the weight": product(lambda x, w: F.linear(x, w), (3,), (5, 6, 3)),
    "linear, single output": lambda: (nn.Linear(3, 1), torch.randn(5, 6, 3)),
    "linear, single input": lambda: (nn.Linear(1, 3), torch.randn(5, 6, 1)),
    "addmm, scaled": lambda: (
        Calls(lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5, alpha=-2), b=torch.randn(4), w=torch.randn(3, 4)),
        torch.randn(5, 3),
    ),
    "addmm, parameter on the left": lambda: (
        Calls(lambda m, x: m.b.addmm(m.w, x.T, alpha=3).T, b=torch.randn(4, 1), w=torch.randn(4, 3)),
        torch.randn(5, 3),
    ),
    "addmv": lambda: (
        Calls(lambda m, x: torch.addmv(m.b, x, m.w, beta=2, alpha=3), b=torch.randn(1), w=torch.randn(3)),
        torch.randn(5, 3),
    ),
    "addr": lambda: (
        Calls(lambda m, x: torch.addr(m.b, x, m.w, alpha=3), b=torch.randn(4), w=torch.randn(4)),
        torch.randn(5),
    ),
    "baddbmm": lambda: (
        Calls(
            lambda m, x: torch.baddbmm(m.b, x.transpose(0, 1), m.w, beta=0.5, alpha=2).transpose(0, 1),
            b=torch.randn(6, 1, 4),
            w=torch.randn(6, 3, 4),
        ),
        torch.randn(5, 6, 3),
    ),
    "addbmm": lambda: (
        Calls(
            lambda m, x: torch.addbmm(m.b, x.transpose(0, 1), m.w, beta=0.5, alpha=2),
            b=torch.randn(4),
            w=torch.randn(6, 3, 4),
        ),
        torch.randn(5, 6, 3),
    ),
    "bilinear": lambda: (
        Calls(lambda m, x: m.f(x, x.flip(-1)), f=nn.Bilinear(3, 3, 4)),
        torch.randn(5, 3),
    ),
    "bilinear, many positions": lambda: (
        Calls(lambda m, x: m.f(x, x[..., :2]), f=nn.Bilinear(3, 2, 4)),
        torch.randn(5, 2, 6, 3),
    ),
    "bilinear, called twice": lambda: (
        Calls(lambda m, x: m.f(torch.tanh(m.f(x, x)), x), f=nn.Bilinear(3, 3, 3)),
        torch.randn(5, 6, 3),
    ),
    "einsum, linear": equation("btd,de->bte", (3, 4), (5, 6, 3)),
    "einsum, linear, transposed": equation("btd,ed->bte", (4, 3), (5, 6, 3)),
    "einsum, by default": equation("bd,de", (3, 4), (5, 3)),
    "einsum, spaces": equation(" b t d , d e -> b e t ", (3, 4), (5, 6, 3)),
    "einsum, split into heads": equation("btd,dhe->bhte", (3, 2, 4), (5, 6, 3)),
    "einsum, joined heads": equation("bhte,hed->btd", (2, 4, 3), (5, 2, 6, 4)),
    "einsum, one matrix per head": equation("bthd,hde->bthe", (2, 3, 4), (5, 6, 2, 3)),
    "einsum, one matrix per head, transposed": equation("bthd,ehd->bhet", (4, 2, 3), (5, 6, 2, 3)),
    "einsum, groups over two dimensions": equation("bgthd,dheg->btegh", (3, 2, 4, 2), (5, 2, 6, 2, 3)),
    "einsum, ellipsis": equation("...d,de->...e", (3, 4), (5, 2, 6, 3)),
    "einsum, ellipsis of the weight": equation("b...d,...de->b...e", (2, 6, 3, 4), (5, 2, 6, 3)),
    "einsum, ellipsis broadcast": equation("...td,...de->...te", (2, 3, 4), (5, 1, 6, 3)),
    "einsum, ellipsis summed": equation("b...d,de->be", (3, 4), (5, 2, 6, 3)),
    "einsum, one entry broadcast": equation("btd,tde->bte", (1, 3, 4), (5, 6, 3)),
    "einsum, positions summed before": equation("btd,de->be", (3, 4), (5, 6, 3)),
    "einsum, weight summed": equation("btd,dek->bte", (3, 4, 2), (5, 6, 3)),
    "einsum, scale": equation("btd,d->btd", (3,), (5, 6, 3)),
    "einsum, scalar weight": equation("btd,->btd", (), (5, 6, 3)),
    "einsum, weighted sum of positions": equation("btd,t->bd", (6,), (5, 6, 3)),
    "einsum, outer product": equation("bt,de->btde", (3, 4), (5, 6)),
    "einsum, diagonal of the input": equation("bttd,de->bte", (3, 4), (5, 6, 6, 3)),
    "einsum, examples last": product(
        lambda x, w: torch.einsum("de,tdb->teb", w, x.permute(2, 1, 0)).permute(2, 0, 1), (3, 4), (5, 3, 6)
    ),
    "einsum, parameter first": product(lambda x, w: torch.einsum("hde,bthd->bthe", w, x), (2, 3, 4), (5, 6, 2, 3)),
    "einsum, list of operands": product(lambda x, w: torch.einsum("btd,de->bte", [x, w]), (3, 4), (5, 6, 3)),
    "einsum, list of numbers": product(
        lambda x, w: torch.einsum(x, [0, ..., 1], w, [1, 2], [0, 2, ...]), (3, 4), (5, 6, 3)
    ),
    "einsum and linear": product(
        lambda x, w: torch.einsum("bte,ed->btd", torch.tanh(F.linear(x, w)), w), (4, 3), (5, 6, 3)
    ),
    "einsum, called twice": product(
        lambda x, w: torch.einsum("bthd,hde->bthe", torch.einsum("bthd,hde->bthe", x, w).tanh(), w),
        (2, 3, 3),
        (5, 6, 2, 3),
    ),
    "einsum, two ways of one weight": product(
        lambda x, w: torch.einsum("bthd,hed->bthe", torch.einsum("bthd,hde->bthe", x, w).tanh(), w),
        (2, 3, 3),
        (5, 6, 2, 3),
    ),
    "einsum, many positions": equation("bthd,hde->bthe", (2, 20, 30), (3, 3, 2, 20)),
    "chain: transposed before bmm": product(
        lambda x, w: torch.bmm(x.transpose(0, 1), w.mT).transpose(0, 1), (6, 4, 3), (5, 6, 3)
    ),
    "chain: viewed before einsum": product(
        lambda x, w: torch.einsum("btd,hed->bthe", x, w.view(2, 4, 3)), (8, 3), (5, 6, 3)
    ),
    "chain: sliced before matmul": product(lambda x, w: (x @ w[0]) * (x @ w[1]), (2, 3, 4), (5, 6, 3)),
    "chain: exp before einsum": product(lambda x, w: torch.einsum("btd,dhe->bthe", x, w.exp()), (3, 2, 4), (5, 6, 3)),
    "chain: stacked before matmul": lambda: (
        Calls(lambda m, x: x.unsqueeze(1) @ torch.stack([m.a, m.b]), a=torch.randn(3, 4), b=torch.randn(3, 4)),
        torch.randn(5, 6, 3),
    ),
    "chain: cast before matmul": product(lambda x, w: x.double() @ w.double(), (2, 3, 4), (5, 2, 6, 3)),
    "chain: permuted before einsum": product(
        lambda x, w: torch.einsum("bhtd,hde->bhte", x, w.permute(2, 0, 1)), (3, 4, 2), (5, 2, 6, 3)
    ),
    "chain: expanded, flattened before bmm": product(
        lambda x, w: torch.bmm(w.expand(len(x), -1, -1), x).transpose(1, 2), (4, 3), (5, 3, 6)
    ),
    "embedding bag": bag(mode="sum"),
    "embedding bag, mean": bag(mode="mean"),
    "embedding bag, mean without padding": bag(mode="mean", padding_idx=3),
    "embedding bag, sum without padding": bag(mode="sum", padding_idx=-2),
    "embedding bag, largest": bag(mode="max"),
    "embedding bag, largest without padding": bag(mode="max", padding_idx=3),
    "embedding bag, one token": bag((5, 1)),
    "embedding bag, several an example": lambda: (
        Calls(several_bags, bag=nn.EmbeddingBag(7, 4)),
        tokens(5, 2, 6),
    ),
    "embedding bag, several largest an example": lambda: (
        Calls(several_bags, bag=nn.EmbeddingBag(7, 4, mode="max")),
        tokens(5, 2, 6),
    ),
    "embedding bag, of two sizes": lambda: (
        Calls(lambda m, x: m.bag(x) * m.bag(x[:, :2]).tanh(), bag=nn.EmbeddingBag(7, 4)),
        tokens(5, 6),
    ),
    "embedding bag, two modes of one table": lambda: (
        Calls(
            lambda m, x: F.embedding_bag(x, m.e, mode="max") * F.embedding_bag(x, m.e, mode="sum"), e=torch.randn(7, 4)
        ),
        tokens(5, 6),
    ),
    "embedding bag, offsets": ragged(mode="sum"),
    "embedding bag, offsets, mean": ragged(mode="mean", padding_idx=3),
    "embedding bag, offsets, largest": ragged(mode="max"),
    "embedding bag, last offset": ragged(True, mode="sum"),
    "embedding bag, last offset, largest": ragged(True, mode="max", padding_idx=2),
    "embedding bag, weighted": lambda: (Calls(weighted_bags, e=torch.randn(7, 4)), tokens(5, 6)),
    "embedding bag, weights by token": lambda: (
        Calls(weights_by_token, e=torch.randn(7, 4), p=torch.randn(7, 1)),
        tokens(5, 6),
    ),
    "embedding bag, weights by place": lambda: (
        Calls(weights_by_place, e=torch.randn(7, 4), p=torch.randn(1, 6)),
        tokens(5, 6),
    ),
    "embedding, small table": lambda: (nn.Embedding(2, 4), torch.randint(0, 2, (5, 40))),
    "look-up by index": lambda: (Calls(lambda m, x: m.e[x], e=torch.randn(7, 4)), tokens(5, 6)),
    "look-up by negative index": lambda: (Calls(lambda m, x: m.e[x - 7], e=torch.randn(7, 4)), tokens(5, 6)),
    "look-up of numbers": lambda: (Calls(lambda m, x: m.e[x], e=torch.randn(7)), tokens(5, 6)),
    "look-up of matrices": lambda: (Calls(lambda m, x: m.e[x], e=torch.randn(7, 4, 3)), tokens(5, 6)),
    "look-up by two indices": lambda: (Calls(lambda m, x: m.e[x, 6 - x], e=torch.randn(7, 7, 3)), tokens(5, 6)),
    "look-up by index_select": lambda: (
        Calls(lambda m, x: m.e.index_select(0, x.flatten()).unflatten(0, x.shape), e=torch.randn(7, 4)),
        tokens(5, 6),
    ),
    "look-up by take": lambda: (Calls(lambda m, x: torch.take(m.e, x - 3), e=torch.randn(7, 4)), tokens(5, 6)),
    "look-up by gather": lambda: (Calls(lambda m, x: m.e.gather(0, x), e=torch.randn(7, 8)), tokens(5, 6)),
    "look-up by index and embedding": lambda: (
        Calls(lambda m, x: m.e[x] * F.embedding(6 - x, m.e).tanh(), e=torch.randn(7, 4)),
        tokens(5, 6),
    ),
    "tied embedding, used four times": lambda: (
        Calls(
            lambda m, x: F.linear(F.linear((F.embedding(x, m.e) * F.embedding(6 - x, m.e)), m.e).tanh() @ m.e, m.e),
            e=torch.randn(7, 4),
        ),
        tokens(5, 6),
    ),
    "tied embedding, product first": lambda: (
        Calls(lambda m, x: F.linear(x.sin()[..., None] * torch.ones(4), m.e)[..., :4] * m.e[x], e=torch.randn(7, 4)),
        tokens(5, 6),
    ),
    "experts looked up for every token": lambda: (
        Calls(chosen_experts, w=torch.randn(3, 3, 4), b=torch.randn(3, 4)),
        torch.randn(5, 6, 3),
    ),
}
