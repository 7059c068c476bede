# SPDX-License-Identifier: Apache-2.0
"""Judges generated texts by three measures: what a classifier learns from them, how they lie, and how new they are."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torch_privacy_papers.text.encoder import load_encoder
from torch_privacy_papers.text.features import features

LENGTH = 128  # tokens of the encoder; a text of the language model has fewer
RIDGE = 1.0


def embedded(texts: Sequence[str]) -> Tensor:
    """Returns the features of texts by the public encoder, float64 of shape (n, means, units)."""
    encoder = load_encoder()
    return features(encoder, encoder.tokens(texts), LENGTH).double()


def accuracy(train: Tensor, labels: Tensor, test: Tensor, test_labels: Tensor) -> float:
    """Returns how often least squares, learned from features (n, ...) and labels (n,) of 0 or 1, is right on others.

    Mean and standard deviation of the first features make all comparable.
    """
    x, x_test = train.flatten(1), test.flatten(1)
    mean, scale = x.mean(0), x.std(0) + 1e-6
    x, x_test = (x - mean) / scale, (x_test - mean) / scale
    weight = RIDGE * x.shape[1] * torch.eye(x.shape[1], dtype=x.dtype)
    weights = torch.linalg.solve(x.T @ x + weight, x.T @ (2 * labels.double() - 1))
    return float(((x_test @ weights > 0) == test_labels.bool()).double().mean())


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Returns ``|m - m'|² + tr(S + S' - 2 (S S')^(1/2))`` of the means and covariances of two sets of points (n, d).

    Source: M. Heusel et al. (2017), "GANs trained by a two time-scale update rule", arXiv:1706.08500.
    """
    (mean, of_first), (other, of_second) = ((x.mean(0), torch.cov(x.T)) for x in (first, second))
    values, vectors = torch.linalg.eigh(of_first)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    common = torch.linalg.eigvalsh(root @ of_second @ root).clamp(min=0).sqrt().sum()
    return float((mean - other).square().sum() + of_first.trace() + of_second.trace() - 2 * common)


def novelty(texts: Iterable[str], known: Iterable[str], length: int = 5) -> float:
    """Returns the share of the runs of ``length`` words of texts that are in no known text.

    It is computed from the known texts without noise: if these are private, it is for their owner alone.
    """
    seen = {run for text in known for run in _runs(text, length)}
    found = [run not in seen for text in texts for run in _runs(text, length)]
    return sum(found) / max(1, len(found))


def _runs(text: str, length: int) -> Iterable[tuple[str, ...]]:
    words = text.split()
    return zip(*(words[start:] for start in range(length)), strict=False)
