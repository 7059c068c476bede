# SPDX-License-Identifier: Apache-2.0
"""Norms estimated outside of training: their distribution, fresh directions, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from oracle import rows_of_one_graph
from parts import losses_of, trained
from scipy import stats
from torch import nn

import torch_privacy as tp
from torch_privacy.mechanisms.estimated_norms import norms
from torch_privacy.mechanisms.estimated_norms.directions import Directions
from torch_privacy.mechanisms.estimated_norms.settings import Projections

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
METHODS = "forward mode", "double vjp"


def small():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.0), nn.Linear(4, 2))


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("method", [None, *METHODS])
def test_squared_estimates_are_unbiased(method):
    torch.manual_seed(0)
    model, x = small(), torch.randn(5, 3)
    exact = rows_of_one_graph(losses_of(model, x), model).norm(dim=1)
    draws = torch.stack([tp.estimate_norms(model, losses_of, x, num_projections=40, method=method) for _ in range(20)])
    error = (draws.square().mean(0) / exact.square() - 1).abs().max()
    assert error < 5 * (2 / (40 * 20)) ** 0.5
    assert draws.std(0).min() > 0


@pytest.mark.parametrize("r", [1, 5])
def test_estimates_have_the_stated_distribution(r):
    """Rows that share no parameter have independent estimates, so that one batch gives many draws."""
    model, x = nn.Embedding(20_000, 2), torch.arange(20_000)
    with tp.record(model) as tape:
        losses = losses_of(model, x)
    exact = tape.jacobian(losses).squared_norms().sqrt()
    found = tp.estimate_norms(model, losses_of, x, num_projections=r)
    assert stats.kstest((found / exact).numpy(), stats.chi(r, scale=r**-0.5).cdf).pvalue > 1e-4
    assert stats.kstest((1.05 * found / exact).numpy(), stats.chi(r, scale=r**-0.5).cdf).pvalue < 1e-4


def test_both_methods_give_the_same_estimates_along_the_same_directions(monkeypatch):
    torch.manual_seed(1)
    model, x = small(), torch.randn(6, 3)
    monkeypatch.setattr(norms.secrets, "token_bytes", bytes)  # the same key at each call
    v = Directions(bytes(32), 0, 0).draw(range(7), trained(model))
    rows = rows_of_one_graph(losses_of(model, x), model)
    expected = (rows @ torch.cat([d.flatten(1) for d in v.values()], 1).double().T).square().mean(1).sqrt()
    for method in METHODS:
        for group_size in (None, 1, 3):
            setting: Any = {"num_projections": 7, "group_size": group_size, "method": method}
            found = tp.estimate_norms(model, losses_of, x, **setting)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
            assert norms._projector(model, Projections(**setting)).explain().startswith(f"7 projections by {method}")


def test_directions_are_fresh_and_nothing_is_left_behind():
    model, x = small(), torch.randn(4, 3)
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(tp.estimate_norms(model, losses_of, x, num_projections=4))
    assert not np.isclose(found[0], found[1], rtol=1e-6).any()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert all(p.grad is None for p in model.parameters())
    assert not found[0].requires_grad


@pytest.mark.thorough
def test_dropout_of_the_forward_is_that_of_the_estimate():
    torch.manual_seed(2)
    model, x = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)), torch.randn(4, 3)
    rows = []

    def losses(model, x):
        found = losses_of(model, x)
        rows.append(rows_of_one_graph(found, model))
        return found

    found = tp.estimate_norms(model, losses, x, num_projections=200)
    torch.testing.assert_close(found, rows[0].norm(dim=1), rtol=5 * 400**-0.5, atol=1e-9)


class Liar(torch.autograd.Function):
    """Computes ``2 w x`` and says in its backward that it was ``claimed w x``; its forward mode is right."""

    claimed = 2

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return 2 * x * w

    @staticmethod
    def backward(ctx, b):
        return None, Liar.claimed * (b * ctx.saved_tensors[0]).sum(0)

    @staticmethod
    def jvp(ctx, dx, dw):
        return 2 * ctx.saved_tensors[0] * dw


class Lies(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(3))

    def forward(self, x):
        return Liar.apply(x, self.w)


def test_a_backward_that_is_no_derivative_is_refused_on_any_batch(monkeypatch):
    model, x = Lies(), torch.randn(4, 3)
    assert tp.estimate_norms(model, losses_of, x, method="forward mode").isfinite().all()
    monkeypatch.setattr(Liar, "claimed", 3)
    with pytest.raises(tp.Refused, match="does not match its random projections"):
        tp.estimate_norms(model, losses_of, x, method="forward mode")


def test_what_cannot_be_estimated_is_refused_in_words():
    model, x = small(), torch.randn(4, 3)
    with pytest.raises(tp.Refused, match="losses"):
        tp.estimate_norms(model, lambda m, x: losses_of(m, x).mean(), x)
    with pytest.raises(ValueError, match="Sketched: method='jvp' must be one of None, 'forward mode', 'double vjp'"):
        tp.estimate_norms(model, losses_of, x, method="jvp")
    with pytest.raises(ValueError, match="num_projections"):
        tp.estimate_norms(model, losses_of, x, num_projections=0)
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        tp.estimate_norms(model.requires_grad_(False), losses_of, x)
