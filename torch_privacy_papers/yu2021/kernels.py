# SPDX-License-Identifier: Apache-2.0
"""Provides ridge regression with a Gaussian kernel, and label propagation on a graph of neighbors.

Points are float32 of shape (n, d); labels are scores (n, classes).
"""

from dataclasses import dataclass

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

RIDGE = 0.03
NEIGHBORS, SPREAD, ROUNDS = 10, 0.9, 50


def principal(points: Tensor, components: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns the mean (d,) and the principal directions (d, components) of the points."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the algorithm is randomized
        mean = points.mean(0)
        return mean, torch.svd_lowrank(points - mean, q=min(components, *points.shape), niter=3)[2]


def width(points: Tensor) -> float:
    """Returns the kernel's width: the median distance between the first thousand points."""
    return float(torch.pdist(points[:1000]).median())


@dataclass(frozen=True, eq=False)
class Ridge:
    """Ridge regression: scores ``k(x, X) (k(X, X) + RIDGE I)^-1 Y`` with the kernel ``exp(-|x - y|² / width²)``."""

    points: Tensor
    weights: Tensor
    width: float

    @classmethod
    def fitted(cls, points: Tensor, labels: Tensor, width: float, classes: int = 10) -> "Ridge":
        """Returns the regression fitted to points (n, d) and their classes (n,)."""
        targets = torch.nn.functional.one_hot(labels, classes).to(points) - 1 / classes
        kernel = _kernel(points, points, width)
        kernel.diagonal().add_(RIDGE)
        return cls(points, torch.cholesky_solve(targets, torch.linalg.cholesky(kernel)), width)

    def predicted(self, points: Tensor) -> Tensor:
        """Returns the class with the largest score, (m,)."""
        parts = [_kernel(part, self.points, self.width) @ self.weights for part in points.split(1000)]
        return torch.cat(parts).argmax(1)


def _kernel(x: Tensor, y: Tensor, width: float) -> Tensor:
    return torch.cdist(x, y).square_().div_(-(width**2)).exp_()


def neighborhood(points: Tensor) -> sparse.csr_array:
    """Returns the symmetric graph (n, n) of nearest neighbors, weighted by distance and normalized by degrees."""
    distances, nearest = _nearest(points)
    weights = torch.exp(-distances.square() / distances[:, -1:].square()).flatten().numpy()
    rows = np.repeat(np.arange(len(points)), NEIGHBORS)
    graph = sparse.coo_array((weights, (rows, nearest.flatten().numpy())), shape=(len(points),) * 2).tocsr()
    graph = graph + graph.T
    scale = sparse.diags_array(graph.sum(1) ** -0.5)
    return (scale @ graph @ scale).tocsr()


def _nearest(points: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the distances and indices (n, NEIGHBORS) of every point's nearest neighbors."""
    found = [torch.cdist(part, points).topk(NEIGHBORS + 1, largest=False) for part in points.split(1000)]
    distances, nearest = (torch.cat(parts)[:, 1:] for parts in zip(*found, strict=True))
    return distances, nearest


def spread(graph: sparse.csr_array, known: Tensor, labels: Tensor, classes: int = 10) -> Tensor:
    """Returns the class (n,) of every point, propagated from the labels (m,) of the known ones.

    Each round sets ``F <- SPREAD S F + (1 - SPREAD) Y``; at the end all classes are weighted as equally frequent.

    Source: D. Zhou, O. Bousquet, T. Lal, J. Weston, B. Schölkopf, "Learning with local and global consistency", 2004.
    """
    given = np.zeros((len(graph.indptr) - 1, classes), np.float32)
    given[known.numpy(), labels.numpy()] = 1
    scores = given
    for _ in range(ROUNDS):
        scores = SPREAD * (graph @ scores) + (1 - SPREAD) * given
    return torch.from_numpy((scores / np.maximum(scores.sum(0), 1e-12)).argmax(1))
