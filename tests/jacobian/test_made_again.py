# SPDX-License-Identifier: Apache-2.0
"""Tests parts under activation checkpointing that are called in odd ways, or that run differently the second time."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_jacobian_equals_rows, flat, one_backward_per_example, rows_of_one_graph
from parts import Calls
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_privacy as tp
from torch_privacy.jacobian.layouts.known import Layouts
from torch_privacy.jacobian.tape import Tape

BUDGETS = (1e-9, 1.2, 10**12)
N, T, D = 5, 3, 4


def again(function: Callable, *args: Tensor, **settings: bool):
    return checkpoint(function, *args, use_reentrant=False, **settings)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).mean(1)


def sum_of(model: nn.Module, x: Tensor, layouts: Layouts, budget: float) -> Tensor:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with Tape(trained, [p for p in model.parameters() if not p.requires_grad], layouts, len(x)) as tape:
        losses = squares(model, x)

    def clip(jacobian: tp.Jacobian, group: str) -> dict[str, Tensor]:
        return jacobian.weighted_sum((0.1 / jacobian.squared_norms().sqrt()).clamp(max=1))

    return flat(tape.clipped_sum(losses, {"all": [*trained]}, clip, memory_budget=budget), 0)


def clipped(rows: Tensor) -> Tensor:
    return rows.T @ (0.1 / rows.norm(dim=1)).clamp(max=1)


def three_layers(forward: Callable[[Any, Tensor], Tensor], **parts: nn.Module | Tensor) -> nn.Module:
    return Calls(forward, **{name: nn.Linear(D, D) for name in "abc"} | parts)


def on_a_frozen_embedding(m: Any, ids: Tensor) -> Tensor:
    """As transformers do it (``enable_input_require_grads``): the input of the first part is a leaf with a gradient."""
    return again(lambda h: m.b(m.a(h).tanh()), m.e(ids).requires_grad_()) + m.c(m.e(ids))


def from_a_leaf_in_the_part(m: Any, x: Tensor) -> Tensor:
    def part(h: Tensor) -> Tensor:
        g = m.a(h)
        return m.b(g.detach().requires_grad_()) + g

    return again(part, m.c(x))


def with_two_results(m: Any, x: Tensor) -> Tensor:
    def part(h: Tensor) -> tuple[Tensor, Tensor]:
        g = m.a(h)
        return g, m.b(g)

    first, second = again(part, m.c(x))
    return first + again(m.a, second)


def with_a_gradient_inside(m: Any, x: Tensor) -> Tensor:
    def part(h: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(m.a(h).square().sum(), h, create_graph=True)
        return m.b(h + slope)

    return again(part, m.c(x))


ODD = {
    "frozen embedding": lambda: (
        three_layers(on_a_frozen_embedding, e=nn.Embedding(7, D).requires_grad_(False)),
        torch.randint(7, (N, T)),
    ),
    "leaf in the part": lambda: (three_layers(from_a_leaf_in_the_part), torch.randn(N, T, D)),
    "two results": lambda: (three_layers(with_two_results), torch.randn(N, T, D)),
    "gradient inside": lambda: (three_layers(with_a_gradient_inside), torch.randn(N, T, D)),
    "weight used both ways": lambda: (
        Calls(lambda m, x: again(lambda h: F.linear(m.a(h), m.a.weight.T * 2), m.a(x)), a=nn.Linear(D, D)),
        torch.randn(N, T, D),
    ),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", ODD)
def test_parts_called_in_odd_ways_match_one_backward_per_example(name):
    model, x = ODD[name]()
    rows = one_backward_per_example(model, x, squares)
    with tp.record(model) as tape:
        losses = squares(model, x)
    assert_jacobian_equals_rows(tape.jacobian(losses, verify=True), rows)
    for budget in BUDGETS:
        layouts = Layouts()
        for _ in range(3):
            torch.testing.assert_close(sum_of(model, x, layouts, budget), clipped(rows), rtol=1e-9, atol=1e-11)


def stirred(change: Callable[[Tensor], Tensor], where: str, **settings: bool) -> nn.Module:
    """Returns a model that changes an input or the output of a checkpointed part."""

    def forward(m: Any, x: Tensor) -> Tensor:
        def part(h: Tensor) -> Tensor:
            factor = change(torch.ones_like(h)) if where == "beside" else 1
            h = m.b(m.a(change(h) if where == "before" else h).tanh()) + m.p * factor
            return change(h) if where == "after" else h

        return m.c(again(part, m.c(x), **settings))

    return three_layers(forward, p=torch.randn(D))


WHERE = ("before", "after", "beside")


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("where", WHERE)
def test_dropout_is_that_of_the_losses(where, budget):
    model, x, layouts = stirred(lambda h: F.dropout(h, 0.5), where), torch.randn(N, T, D), Layouts()
    for seed in range(4):
        torch.manual_seed(seed)
        rows = rows_of_one_graph(squares(model, x), model)
        torch.manual_seed(seed)
        torch.testing.assert_close(sum_of(model, x, layouts, budget), clipped(rows), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("where", WHERE)
def test_dropout_that_is_drawn_again_is_refused_on_every_batch(where, budget):
    dropout = nn.Dropout(0.0)
    model, x, layouts = stirred(dropout, where, preserve_rng_state=False), torch.randn(N, T, D), Layouts()
    sum_of(model, x, layouts, budget)
    sum_of(model, x, layouts, budget)
    dropout.p = 0.5  # the path is known by now
    with pytest.raises(tp.Refused, match="drew random numbers when it ran again in the backward"):
        sum_of(model, x, layouts, budget)


def by_own_generator(h: Tensor, source=torch.Generator()) -> Tensor:  # noqa: B008
    return h[torch.randperm(len(h), generator=source)]


def by_python(h: Tensor, source=random.Random(3)) -> Tensor:  # noqa: B008
    return h[torch.tensor(source.sample(range(len(h)), len(h)))]


def by_own_mask(h: Tensor, source=torch.Generator()) -> Tensor:  # noqa: B008
    return h * (torch.rand(h.shape, generator=source) < 0.5)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("change", [by_own_generator, by_python, by_own_mask])
def test_input_that_differs_when_it_is_made_again_is_refused_on_every_batch(change, budget):
    changing = [False]
    model = stirred(lambda h: change(h) if changing[0] else h[torch.arange(len(h))] * 1, "before")
    x, layouts = torch.randn(N, T, D), Layouts()
    sum_of(model, x, layouts, budget)
    changing[0] = True
    # With the least budget layouts are measured first, by backwards that end above the part's ops.
    reason = "examples of the batch cannot be separated" if budget < 1 else "another input than in the forward"
    for _ in range(2):
        with pytest.raises(tp.Refused, match=reason):
            sum_of(model, x, layouts, budget)


def test_reentrant_checkpointing_is_refused():
    def forward(m: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda h: m.b(m.a(h)), m.c(x), use_reentrant=True)

    model = three_layers(forward)
    with tp.record(model) as tape:
        losses = squares(model, torch.randn(N, T, D))
    with pytest.raises(tp.Refused, match="use_reentrant=False"):
        tape.jacobian(losses)
