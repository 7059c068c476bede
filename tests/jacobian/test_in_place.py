# SPDX-License-Identifier: Apache-2.0
"""Changes in place, views, and parameters used in pieces are exact, or refused if an input is lost."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_exact, recorded_jacobian
from parts import Calls, losses_of
from torch import Tensor, nn

import torch_privacy as tp

Statement = Callable[[Tensor, Tensor], object]


def written(h: Tensor, key: object, value: Tensor) -> None:
    h[key] = value


def added(h: Tensor, key: object, value: Tensor) -> None:
    h[key] += value


def scaled(h: Tensor, key: object, value: Tensor) -> None:
    h[key] *= value


def vector(statement: Statement) -> tuple[Statement, tuple[int, ...]]:
    return statement, (4,)


def number(statement: Statement) -> tuple[Statement, tuple[int, ...]]:
    return statement, ()


def matrix(statement: Statement) -> tuple[Statement, tuple[int, ...]]:
    return statement, (6, 4)


EVERY = slice(None)
STATEMENTS: dict[str, tuple[Statement, tuple[int, ...]]] = {  # h (n, 6, 4) is changed, with parameter p
    "h += p": vector(lambda h, p: h.__iadd__(p)),
    "h -= p": vector(lambda h, p: h.__isub__(p)),
    "h *= p": vector(lambda h, p: h.__imul__(p)),
    "h /= p": vector(lambda h, p: h.__itruediv__(p)),
    "h.add_(p, alpha=3)": matrix(lambda h, p: h.add_(p, alpha=3)),
    "h.sub_(p, alpha=3)": matrix(lambda h, p: h.sub_(p, alpha=3)),
    "h.mul_(p)": number(lambda h, p: h.mul_(p)),
    "h.div_(p)": matrix(lambda h, p: h.div_(p)),
    "h.mul_(p) twice": vector(lambda h, p: h.mul_(p).neg_().mul_(p)),
    "h += p, then h *= p": vector(lambda h, p: h.add_(p).mul_(p)),
    "h[:, 1:] += p": vector(lambda h, p: added(h, (EVERY, slice(1, None)), p)),
    "h[:, 1:] *= p": vector(lambda h, p: scaled(h, (EVERY, slice(1, None)), p)),
    "h[..., 1] += p": number(lambda h, p: added(h, (..., 1), p)),
    "h[:, 0] = p": vector(lambda h, p: written(h, (EVERY, 0), p)),
    "h[:, ::2] = p": vector(lambda h, p: written(h, (EVERY, slice(None, None, 2)), p)),
    "h[:, 0] = p with dimensions in front": vector(lambda h, p: written(h, (EVERY, 0), p[None, None])),
    "h[mask of numpy] = p": vector(lambda h, p: written(h, (h.detach()[..., 0] > 0).numpy(), p)),
    "h[:] = p": matrix(lambda h, p: written(h, EVERY, p)),
    "h[mask of entries] = p": number(lambda h, p: written(h, h > 0, p)),
    "h[mask of positions] = p": vector(lambda h, p: written(h, h[..., 0] > 0, p)),
    "h[mask of positions] += p": vector(lambda h, p: added(h, h[..., 0] > 0, p)),
    "h[numbers] = p": vector(lambda h, p: written(h, (EVERY, torch.tensor([0, 3])), p)),
    "h.copy_(p)": vector(lambda h, p: h.copy_(p)),
    "part of h.copy_(p)": number(lambda h, p: h[..., 0].copy_(p)),
    "h.fill_(p)": number(lambda h, p: h[:, 2:].fill_(p)),
    "h.masked_fill_(mask, p)": number(lambda h, p: h.masked_fill_(h.detach() > 0.3, p)),
    "h.lerp_(p, 0.3)": matrix(lambda h, p: h.lerp_(p, 0.3)),
    "h.clamp_(min=p)": vector(lambda h, p: h.clamp_(min=p)),
    "h.index_add_": vector(lambda h, p: h.index_add_(1, torch.tensor([0, 2]), p.expand(len(h), 2, 4))),
    "h.index_copy_": vector(lambda h, p: h.index_copy_(1, torch.tensor([0, 2]), p.expand(len(h), 2, 4))),
    "h.index_put_": vector(lambda h, p: h.index_put_((torch.arange(len(h)), torch.zeros(len(h)).long()), p)),
    "h.scatter_": vector(lambda h, p: h.scatter_(1, torch.zeros(len(h), 1, 4).long(), p.expand(len(h), 1, 4))),
    "view of h.add_(p)": vector(lambda h, p: h.view(len(h), 24)[:, :4].add_(p)),
    "transposed h.add_(p)": vector(lambda h, p: h.transpose(0, 1).add_(p)),
    "transposed h.mul_(p)": number(lambda h, p: h.transpose(1, 2).mul_(p)),
    "transposed view of h.add_(p)": vector(lambda h, p: h.transpose(1, 2)[..., 1:5].add_(p)),
    "views of h, one after another": vector(lambda h, p: (h[:, :2].add_(p), h[:, 1:3].mul_(p), h[..., :2].relu_())),
    "h.clamp_() between": vector(lambda h, p: h.mul_(p).clamp_(min=-0.5).add_(p)),
}
FIRST: dict[str, Callable[[Calls, Tensor], Tensor]] = {  # makes h; linear returns a view for rank 3
    "linear": lambda m, x: m.f(x),
    "scale": lambda m, x: x * m.f.bias,
    "transposed": lambda m, x: m.f(x.transpose(0, 1)).transpose(0, 1),
}


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("statement", STATEMENTS)
def test_parameter_used_in_place_matches_one_backward_per_example(statement, first):
    change, shape = STATEMENTS[statement]

    def forward(m: Calls, x: Tensor) -> Tensor:
        h = FIRST[first](m, x)
        h = h.contiguous() if statement == "view of h.add_(p)" else h
        change(h, m.p)
        return h * (m.f.weight.sum() if first == "scale" else 1)

    model = Calls(forward, f=nn.Linear(4, 4), p=torch.rand(shape) + 0.5)
    assert_exact(model, torch.randn(5, 6, 4))


def tokens_in_front(m: Calls, x: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 7, 4)
    h[:, 0] = m.p
    h[:, 1:] = x
    return h


def halves(m: Calls, x: Tensor) -> Tensor:
    h = torch.empty_like(x)
    h[:, :3] = m.p
    h[:, 3:] = x[:, 3:] * m.p
    return h


def filled_in_steps(m: Calls, x: Tensor) -> Tensor:
    h = x.new_full((len(x), 9, 4), torch.nan)  # what torch.empty may find
    h[:, 0] = m.p
    h[:, 1:3] = m.q
    h[:, 3:] = x
    return h


def added_in_steps(m: Calls, x: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 9, 4)
    h[:, 0] += m.p
    h[:, 1:3] += m.q
    h[:, 3:] += x
    return h


def product_in_place(m: Calls, x: Tensor) -> Tensor:
    h = x[:, 0].clone()
    return h.addmm_(x[:, 1], m.w)


def bad_then_overwritten(m: Calls, x: Tensor) -> Tensor:
    h = m.f(x)
    h.zero_()
    return h + m.f(x + 1)


FORWARDS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "written into zeros": lambda: (Calls(tokens_in_front, p=torch.randn(4)), torch.randn(5, 6, 4)),
    "written into an empty tensor": lambda: (Calls(halves, p=torch.randn(4)), torch.randn(5, 6, 4)),
    **{
        f"{name}, {n} examples": lambda n=n, f=f: (
            Calls(f, p=torch.randn(4), q=torch.randn(2, 4)),
            torch.randn(n, 6, 4),
        )
        for name, f in [("filled in steps", filled_in_steps), ("added in steps", added_in_steps)]
        for n in (1, 5)
    },
    "addmm_": lambda: (Calls(product_in_place, w=torch.randn(4, 4)), torch.randn(5, 2, 4)),
    "output overwritten": lambda: (Calls(bad_then_overwritten, f=nn.Linear(4, 4)), torch.randn(5, 6, 4)),
    **{
        f"{type(f()).__name__}, then {name}": lambda f=f, x=x, change=change: (
            Calls(lambda m, x: changed(m.f(x), change), f=f()),
            torch.randn(x),
        )
        for f, x in [
            (lambda: nn.Linear(3, 4), (5, 3)),
            (lambda: nn.Linear(3, 4), (5, 6, 3)),
            (lambda: nn.Conv1d(3, 4, 3), (5, 3, 6)),
            (lambda: nn.Conv2d(3, 4, 3), (5, 3, 5, 5)),
            (lambda: nn.ConvTranspose1d(3, 4, 3), (5, 3, 6)),
            (lambda: nn.GroupNorm(1, 3), (5, 3, 6)),
            (lambda: nn.LayerNorm(4), (5, 6, 4)),
            (lambda: nn.PReLU(3), (5, 3, 6)),
            (lambda: nn.Bilinear(3, 3, 4), (5, 6, 3)),
        ]
        for name, change in {
            "relu_": lambda y: y.relu_(),
            "relu_ of a part": lambda y: y[:, :2].relu_(),
            "mul_ of a transposed view": lambda y: y.transpose(0, 1)[1:].mul_(2),
            "dropout": lambda y: F.dropout(y, 0.0, inplace=True),
        }.items()
    },
}


def changed(y: Tensor, change: Callable[[Tensor], object]) -> Tensor:
    change(y)
    return y * 1


def with_two_inputs(model: nn.Module) -> nn.Module:
    if not isinstance(model.f, nn.Bilinear):
        return model
    f = model.f
    model.f = Calls(lambda m, x: m.f(x, x), f=f)
    return model


@pytest.mark.parametrize("case", FORWARDS)
def test_output_changed_in_place_matches_one_backward_per_example(case):
    model, x = FORWARDS[case]()
    model = with_two_inputs(model) if case.startswith("Bilinear") else model
    assert_exact(model, x)


PIECES: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "halves": lambda w: (w[:2], w[2:]),
    "overlapping": lambda w: (w[:3], w[2:]),
    "the same twice": lambda w: (w[:2], w[:2]),
    "every other": lambda w: (w[::2], w[1::2]),
    "whole and a part": lambda w: (w, w[1:]),
    "chunk": lambda w: w.chunk(3),
    "split": lambda w: w.split(1),
    "split by sizes": lambda w: w.split([1, 3]),
    "torch.split": lambda w: torch.split(w, 2),
    "tensor_split": lambda w: w.tensor_split(3),
    "narrow": lambda w: (w.narrow(0, 0, 3), w.narrow(0, 1, 2)),
    "one": lambda w: (w[0:1], w[3].unsqueeze(0)),
    "by a list": lambda w: (w[[0, 0, 2]], w[[1]]),
    "by a mask": lambda w: (w[torch.tensor([True, False, True, True])],),
    "index_select": lambda w: (w.index_select(0, torch.tensor([3, 3, 1])),),
    "flipped": lambda w: (w.flip(0), w[1:]),
    "unbound": lambda w: tuple(piece.unsqueeze(0) for piece in w.unbind()),
    "iterated": lambda w: tuple(piece[None] for piece in w),
    "repeated": lambda w: (w.repeat(2, 1) if w.ndim == 2 else w.repeat(2), w[:1]),
}


@pytest.mark.parametrize("used", ["matrix", "vector", "both ways"])
@pytest.mark.parametrize("pieces", PIECES)
def test_pieces_of_a_parameter_match_one_backward_per_example(pieces, used):
    def forward(m: Calls, x: Tensor) -> Tensor:
        cut = PIECES[pieces](m.w)
        if used == "matrix":
            return torch.cat([F.linear(x, piece) for piece in cut], -1)
        if used == "vector":
            return torch.cat([x[..., : len(piece)].repeat(1, 1, 2)[..., : len(piece)] * piece for piece in cut], -1)
        return sum(torch.tanh(F.linear(x, piece)) @ piece for piece in cut)

    model = Calls(forward, w=torch.randn(4) if used == "vector" else torch.randn(4, 4))
    assert_exact(model, torch.randn(5, 6, 4))


def test_matrices_in_one_parameter_match_one_backward_per_example():
    def forward(m: Calls, x: Tensor) -> Tensor:
        query, key, _ = m.w
        return F.linear(x, query) * F.linear(x, key) * m.w[0].diagonal() + m.w[2, 0]

    assert_exact(Calls(forward, w=torch.randn(3, 4, 4)), torch.randn(5, 6, 4))


USES: dict[str, Callable[[Calls, Tensor], Tensor]] = {  # uses of the parameter w (4, 4) with h, made from x
    "linear": lambda m, h: F.linear(h, m.w),
    "matmul": lambda m, h: h @ m.w,
    "einsum": lambda m, h: torch.einsum("btd,de->bte", h, m.w),
    "conv1d": lambda m, h: F.conv1d(h.mT, m.w.unsqueeze(2)),
    "mul": lambda m, h: h * m.w[0],
    "layer_norm": lambda m, h: F.layer_norm(h, (4,), m.w[0]),
    "prelu": lambda m, h: F.prelu(h.mT, m.w[0]),
    "atan2": lambda m, h: torch.atan2(h, m.w[0]),
}


@pytest.mark.parametrize("use", USES)
def test_input_changed_after_its_use_is_refused(use):
    """The change goes through ``detach``, so that autograd itself would not check the version."""

    def forward(m: Calls, x: Tensor) -> Tensor:
        h = x * 2
        y = USES[use](m, h)
        h.detach().mul_(2)
        return y

    message = "was changed in place"
    with pytest.raises(tp.Refused, match=message):
        recorded_jacobian(Calls(forward, w=torch.randn(4, 4)), torch.randn(5, 6, 4), losses_of)


@pytest.mark.parametrize("use", USES)
def test_parameter_changed_between_use_and_backward_is_refused(use):
    model, x = Calls(USES[use], w=torch.randn(4, 4)), torch.randn(5, 6, 4)
    with tp.record(model) as tape:
        losses = losses_of(model, x)
    with torch.no_grad():
        model.w.add_(1)
    with pytest.raises(tp.Refused, match="was changed in place after its use"):
        tape.jacobian(losses)


def test_data_written_into_a_part_of_a_parameters_copy_is_refused():
    def forward(m: Calls, x: Tensor) -> Tensor:
        w = m.w * 2
        w[:, 0] = x.mean((0, 1))
        return F.linear(x, w)

    with pytest.raises(tp.Refused):
        recorded_jacobian(Calls(forward, w=torch.randn(4, 4)), torch.randn(5, 6, 4), losses_of)


def test_parameters_written_into_a_buffer_are_recorded():
    """The buffer made in the forward holds no data: it is a function of the parameters alone."""

    def forward(m: Calls, x: Tensor) -> Tensor:
        w = torch.eye(4)
        w[:2] = m.a
        w[2:] = m.b
        return F.linear(x, w)

    assert_exact(Calls(forward, a=torch.randn(2, 4), b=torch.randn(4)), torch.randn(5, 6, 4))


WRITERS: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {  # make the weight w (4, 4) of a and b (2, 4)
    "copied into views": lambda w, a, b: (w[:2].copy_(a), w[2:].copy_(b)),
    "added to views": lambda w, a, b: (w.narrow(0, 0, 2).add_(a), w.narrow(0, 2, 2).add_(b)),
    "added to slices": lambda w, a, b: (added(w, slice(2), a), added(w, slice(2, None), b), added(w, EVERY, 1)),
    "changed by parts": lambda w, a, b: (w.copy_(torch.cat([a, b])), w[:2].mul_(2), w[2:].tanh_()),
    "assigned": lambda w, a, b: (written(w, slice(2), a), written(w, slice(2, None), b)),
}


@pytest.mark.parametrize("n", [4, 5])  # 4: the weight might have a part for each example
@pytest.mark.parametrize("writer", WRITERS)
def test_a_weight_that_is_written_in_pieces_is_exact(writer, n):
    def forward(m: Calls, x: Tensor) -> Tensor:
        w = torch.zeros_like(m.start)
        WRITERS[writer](w, m.a, m.b)
        return F.linear(x, w) @ w

    model = Calls(forward, a=torch.randn(2, 4), b=torch.randn(2, 4))
    model.register_buffer("start", torch.zeros(4, 4))
    assert_exact(model, torch.randn(n, 6, 4))


def test_a_weight_that_gets_a_further_parameter_in_place_keeps_both():
    model = nn.Module()
    model.a, model.b = (nn.Parameter(torch.randn(3, 2)) for _ in range(2))
    x = torch.randn(4, 3)

    def losses() -> torch.Tensor:
        weight = model.a * 2
        first = weight * 1  # asks for the parameters behind the weight, before there are two
        weight.add_(model.b)
        return (x @ (weight * 3) + x @ first).square().sum(1)

    with tp.record(model) as tape:
        found = tape.jacobian(losses()).squared_norms()
    rows = [torch.autograd.grad(loss, [model.a, model.b], retain_graph=True) for loss in losses()]
    torch.testing.assert_close(found, torch.stack([sum(part.square().sum() for part in row) for row in rows]))


KEYWORDS = {
    "a look-up": lambda h, w: F.embedding(input=torch.arange(2).expand(len(h), 2), weight=w).sum(1) * h,
    "initial values": lambda h, w: (nn.Linear(2, 2), h * w[0])[1],
    "where": lambda h, w: torch.where(condition=h > 0, input=h, other=w[0]),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_calls_by_keywords_alone_match_one_backward_per_example(name):
    torch.manual_seed(0)
    model = Calls(lambda m, x: KEYWORDS[name](m.first(x), m.w), first=nn.Linear(3, 3), w=torch.randn(5, 3)).double()
    assert_exact(model, torch.randn(4, 3).double())
