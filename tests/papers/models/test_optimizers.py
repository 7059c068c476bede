# SPDX-License-Identifier: Apache-2.0
"""Adam as the papers print it: its formula, and how it differs from torch's."""

import pytest
import torch

from torch_privacy_papers.models.optimizers import UncorrectedAdam


def steps(make, gradients, **settings):
    """The weight after each gradient."""
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    unused = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer, found = make([weight, unused], lr=0.1, **settings), []
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
        found.append(weight.detach().clone())
    assert unused == 1
    return found


def test_steps_are_those_of_the_printed_formula():
    gradients = torch.randn(6, 2, dtype=torch.float64)
    weight, m, u = torch.tensor([1.0, -2.0], dtype=torch.float64), 0.0, 0.0
    for gradient, after in zip(gradients, steps(UncorrectedAdam, gradients, betas=(0.8, 0.95)), strict=True):
        m, u = 0.8 * m + 0.2 * gradient, 0.95 * u + 0.05 * gradient**2
        weight = weight - 0.1 * m / (u.sqrt() + 1e-8)
        torch.testing.assert_close(after, weight)


@pytest.mark.thorough
def test_first_step_is_longer_than_torchs_and_late_ones_are_the_same():
    (ours,), (theirs,) = (steps(make, torch.ones(1, 2).double()) for make in (UncorrectedAdam, torch.optim.Adam))
    start = torch.tensor([1.0, -2.0]).double()
    assert ((ours - start) / (theirs - start)).tolist() == pytest.approx([0.1 / 0.001**0.5] * 2, rel=1e-6)
    gradients = torch.randn(9000, 2).double()
    last = [
        (found[-1] - found[-2]) for found in (steps(make, gradients) for make in (UncorrectedAdam, torch.optim.Adam))
    ]
    torch.testing.assert_close(*last, rtol=1e-3, atol=1e-9)
