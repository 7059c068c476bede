# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from torch_privacy_papers.bu2020 import sparse_norms
from torch_privacy_papers.models.networks import AveragedWords


def test_authors_norms_are_exact_only_where_no_word_stands_twice():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = AveragedWords(50).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    labels = torch.tensor([0])

    def norms(words):
        """Of what is added up, and of the exact gradient, at a clip norm far below."""
        total = torch.cat([part.flatten() for part in sparse_norms.clipped_sums(model, words, labels, 1e-3)])
        exact = torch.autograd.grad(torch.nn.functional.cross_entropy(model(words), labels), list(model.parameters()))
        direction = torch.cat([part.flatten() for part in exact])
        torch.testing.assert_close(total / total.norm(), direction / direction.norm())
        return float(total.norm())

    assert norms(torch.randperm(50)[None, :8]) == pytest.approx(1e-3)
    assert norms(torch.full((1, 8), 3)) > 1.1e-3
