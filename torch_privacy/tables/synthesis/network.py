# SPDX-License-Identifier: Apache-2.0
"""Provides a small autoregressive network over the values of a table's columns, one head for each column."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cells import Codes

EMBEDDING, HIDDEN = 8, 64
RARE = -4.0  # first logit of values that are rare in most tables; that of the others is 0
ROWS_AT_ONCE = 4096


class RowNetwork(nn.Module):
    """Gives each value of a row a probability, given the values of the columns before it.

    ``log p(row) = Σⱼ log softmax(headⱼ(embedding[code₁], ..., embedding[codeⱼ₋₁]))[codeⱼ]``; a head is a perceptron
    with one hidden layer, and its last layer begins at zero: then all values of a column are equally likely, but the
    first ``rare`` ones, with e⁻⁴ of that.

    Args:
        sizes: number of values of each column.
        order: places of the columns, in the order in which they are drawn.
        rare: how many of each column's values are rare, from the first: a missing cell, and one that no category names.

    Shapes: codes int64 (n, k); the output, minus log p of each row, (n,).
    """

    def __init__(self, sizes: Sequence[int], order: Sequence[int], rare: Sequence[int] = ()):
        super().__init__()
        self.sizes, self.order = tuple(sizes), tuple(order)
        self.register_buffer("starts", torch.tensor([0, *sizes]).cumsum(0)[:-1], persistent=False)
        self.embedding = nn.Embedding(sum(sizes), EMBEDDING)
        nn.init.normal_(self.embedding.weight, std=EMBEDDING**-0.5)
        self.embedding.requires_grad_(len(sizes) > 1)  # no other column depends on the only one
        self.first = nn.Embedding(1, sizes[self.order[0]])  # logits of the first column, the same for all rows
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(EMBEDDING * place, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, sizes[column]))
            for place, column in enumerate(self.order)
            if place
        )
        for parameter in [self.first.weight, *(p for head in self.heads for p in head[2].parameters())]:  # type: ignore
            nn.init.zeros_(parameter)
        with torch.no_grad():
            for place, column in enumerate(self.order) if rare else ():
                logits = self.heads[place - 1][2].bias if place else self.first.weight[0]  # type: ignore[index]
                logits[: rare[column]] = RARE

    def forward(self, codes: Tensor) -> Tensor:
        embedded = self._embedded(codes)
        losses = [
            F.cross_entropy(self._logits(place, embedded), codes[:, column], reduction="none")
            for place, column in enumerate(self.order)
        ]
        return torch.stack(losses).sum(0)

    @torch.no_grad()
    def draw(self, count: int, rng: np.random.Generator) -> Codes:
        """Returns rows, int64 (count, k), independent of each other."""
        return np.concatenate(
            [np.zeros((0, len(self.sizes)), np.int64)]
            + [self._drawn(min(ROWS_AT_ONCE, count - start), rng) for start in range(0, count, ROWS_AT_ONCE)]
        )

    @torch.no_grad()
    def log_chances(self, codes: Codes) -> np.ndarray:
        """Returns the logarithm of the probability of each row, (n,)."""
        parts = torch.from_numpy(codes).split(ROWS_AT_ONCE)
        return -torch.cat([self(part) for part in parts]).double().numpy()

    def _embedded(self, codes: Tensor) -> Tensor:
        """Returns the embeddings in the order of the columns, (n, k·EMBEDDING)."""
        return self.embedding((codes + self.get_buffer("starts"))[:, list(self.order)]).flatten(1)

    def _logits(self, place: int, embedded: Tensor) -> Tensor:
        if place == 0:
            return self.first(torch.zeros_like(embedded[:, 0], dtype=torch.int64))
        return self.heads[place - 1](embedded[:, : EMBEDDING * place])

    def _drawn(self, count: int, rng: np.random.Generator) -> Codes:
        codes = torch.zeros(count, len(self.sizes), dtype=torch.int64)
        for place, column in enumerate(self.order):
            chances = self._logits(place, self._embedded(codes)).double().softmax(1)
            uniform = torch.from_numpy(rng.random((count, 1)))
            codes[:, column] = torch.searchsorted(chances.cumsum(1), uniform, right=True)[:, 0]
            codes[:, column].clamp_(max=self.sizes[column] - 1)
        return codes.numpy()


def order_of(num_columns: int, target: int | None) -> list[int]:
    """Returns the order of the columns: that of the table, with the target first, so that all others depend on it."""
    rest = [column for column in range(num_columns) if column != target]
    return rest if target is None else [target, *rest]
