# SPDX-License-Identifier: Apache-2.0
"""Provides the oracle, one ordinary backward per example, and comparisons against it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from parts import losses_of
from torch import Tensor, nn

import torch_privacy as tp

LossesOf = Callable[[nn.Module, Any], Tensor]


def one_backward_per_example(
    model: nn.Module, x: Tensor, losses_of: LossesOf, parts: Sequence[Any] | None = None
) -> Tensor:
    """Returns (n, p): row i is the gradient of example i's own loss; ``parts[i]`` is a batch of example i alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for part in x.split(1) if parts is None else parts:
        (loss,) = losses_of(model, part)
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        rows.append(
            torch.cat(
                [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, grads, strict=True)]
            )
        )
    return torch.stack(rows) if rows else x.new_zeros(0, sum(p.numel() for p in parameters))


def rows_of_one_graph(losses: Tensor, model: nn.Module) -> Tensor:
    """Returns (n, p): the gradient of each loss, all from one forward, in float64."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = [
        torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
        for loss in losses
    ]
    return torch.stack([torch.cat([g.double().flatten() for g in grad]) for grad in grads])


def rows_or_skip(model: nn.Module, x: Tensor) -> Tensor:
    """Returns `rows_of_one_graph` of the model; skips the test if torch has no op for the model's dtype."""
    try:
        return rows_of_one_graph(losses_of(model, x), model)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"torch itself: {str(error).splitlines()[0]}")


def length(parts: dict[str, Tensor]) -> float:
    """Returns the norm of all parts together, in float64."""
    return torch.cat([part.double().flatten() for part in parts.values()]).norm().item()


def flat(parts: dict[str, Tensor], start: int) -> Tensor:
    """Returns the parameters' parts, each flattened from dimension ``start``, concatenated."""
    return torch.cat([part.reshape(*part.shape[:start], -1) for part in parts.values()], dim=start)


def recorded_jacobian(model: nn.Module, x: Tensor, losses_of: LossesOf) -> tp.Jacobian:
    with tp.record(model) as tape:
        losses = losses_of(model, x)
    return tape.jacobian(losses, verify=True)


def assert_exact(model: nn.Module, x: Tensor, rtol: float = 1e-9) -> tp.Jacobian:
    """Asserts that the taped Jacobian equals one backward per example, and returns it."""
    rows = one_backward_per_example(model, x, losses_of)
    jacobian = recorded_jacobian(model, x, losses_of)
    assert_jacobian_equals_rows(jacobian, rows, rtol)
    return jacobian


def assert_jacobian_equals_rows(jacobian: tp.Jacobian, rows: Tensor, rtol: float = 1e-9) -> None:
    """Asserts that all three answers, the rows and a selection of them equal the explicit matrix."""
    n, p = rows.shape
    scale = rows.abs().max().item() if rows.numel() else 1.0

    def close(ours: Tensor, theirs: Tensor, unit: float) -> None:
        torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=rtol, atol=rtol * unit)

    close(flat(jacobian.rows(), 1), rows, scale)
    close(jacobian.squared_norms(), rows.square().sum(1), scale**2)
    c = torch.rand(n, dtype=rows.dtype)
    close(flat(jacobian.weighted_sum(c), 0), rows.T @ c, scale * max(n, 1))
    v = {name: torch.randn(3, *shape, dtype=rows.dtype) for name, shape in jacobian.shapes.items()}
    close(jacobian.project(v), rows @ flat(v, 1).T, scale * p**0.5)
    odd = slice(1, None, 2)
    close(jacobian.select(odd).squared_norms(), rows[odd].square().sum(1), scale**2)
