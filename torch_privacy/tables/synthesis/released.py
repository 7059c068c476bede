# SPDX-License-Identifier: Apache-2.0
"""Makes a model of rows from released counts. Nothing here reads a row of the table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...mechanisms.base import PRICED_ROUNDING
from .cells import Codes
from .chain import Chain, marginal
from .graph import ITERATIONS, Array, Columns, Model, NoisyCounts, num_cells
from .plan import PlannedRelease

MOST_CELLS = 200_000  # of the groups of a model
LARGEST_MARGINAL = 50_000  # cells of one that may be chosen
MOST_CANDIDATES = 600
MERGED_BELOW = 3.0  # standard deviations of its noise, below which the count of a value is merged with that of others
LAST_ITERATIONS = 4 * ITERATIONS
FEWEST_DRAWN = 50_000  # rows, to compute what a model expects
OF_TARGET = 2.0  # weight of a marginal with the target, beside 1 of the others


@dataclass(frozen=True, kw_only=True)
class PublicSetup:
    """Holds what is public of the marginals of a table.

    ``generator`` is ``"aim"`` or ``"mst"``, ``sizes`` are the numbers of values of the columns, of which
    ``num_numeric`` are numbers, and ``releases`` are all in their order. ``rows`` is the most of one person, 1 where a
    row is protected; ``total`` the number of rows, or None if it is secret; ``target`` the place of the column to
    predict, if there is one.
    """

    generator: str
    sizes: tuple[int, ...]
    num_numeric: int
    releases: Sequence[PlannedRelease]
    rows: int = 1
    total: int | None = None
    target: int | None = None

    def stddev(self, release: PlannedRelease, marginals: int) -> float:
        """Returns the standard deviation of each count; a row changes each marginal in one cell by 1."""
        return PRICED_ROUNDING * release.noise * self.rows * math.sqrt(marginals)

    @property
    def num_one_way(self) -> int:
        """Returns the number of marginals of the first release: one for each column, and one for each number."""
        return len(self.sizes) + self.num_numeric


class Released:
    """The results of the releases so far, and what follows from them.

    Args:
        public: what is public.
    """

    def __init__(self, public: PublicSetup):
        self.public = public
        self.results: list[dict[str, Any]] = []
        self._merged: list[NDArray[np.int64]] = []
        self._within: list[Array] = []
        self._measured: list[NoisyCounts] = []
        self._chosen: list[Columns] = []
        self._fractional: list[float] = []
        self._model: Model | None = None
        self._fits = 0, 0  # to how many measurements, by how many iterations

    @property
    def following(self) -> PlannedRelease:
        """Returns the next release."""
        return self.public.releases[len(self.results)]

    def take(self, result: Mapping[str, Any]) -> None:
        """Takes in the result of the next release."""
        release, result = self.following, dict(result)
        if release.kind == "choice":
            self._chosen.append(tuple(result["chosen"]))
        elif release.kind == "one-way":
            self._take_one_way(result["counts"].numpy(), release)
        else:
            chosen, sizes, values, start = self.to_measure(), self.sizes, result["counts"].numpy(), 0
            for columns in chosen:
                shape = tuple(sizes[column] for column in columns)
                counts = values[start : start + math.prod(shape)].reshape(shape)
                start += counts.size
                self._measured.append(NoisyCounts(columns, counts, self.public.stddev(release, len(chosen))))
        self.results.append(result)

    def _take_one_way(self, values: Array, release: PlannedRelease) -> None:
        """Merges values with counts that are no more than noise, and notes the counts of the others."""
        stddev = self.public.stddev(release, self.public.num_one_way)
        *parts, fractional = np.split(values, np.cumsum(self.public.sizes))
        self._fractional = fractional.tolist()
        for place, counts in enumerate(parts):
            merged, within = _merging(counts, MERGED_BELOW * stddev)
            self._merged.append(merged)
            self._within.append(within)
            # the sum of m rare values has noise larger by √m, and is taken to be as certain as the others
            self._measured.append(NoisyCounts((place,), np.bincount(merged, weights=counts).astype(float), stddev))

    # Marginals of merged values

    @property
    def sizes(self) -> tuple[int, ...]:
        """Returns the number of merged values of each column."""
        return tuple(int(merged.max()) + 1 for merged in self._merged)

    def merge(self, codes: Codes) -> Codes:
        """Returns the merged values of rows."""
        return np.stack([of[codes[:, place]] for place, of in enumerate(self._merged)], 1)

    def to_measure(self) -> list[Columns]:
        """Returns the marginals of the next measurement."""
        return list(dict.fromkeys(self._chosen)) if self.public.generator == "mst" else self._chosen[-1:]

    def candidates(self) -> list[Columns]:
        """Returns the marginals of which the next choice is made."""
        public, sizes = self.public, self.sizes
        pairs = list(itertools.combinations(range(len(sizes)), 2))
        if public.generator == "mst":
            joining = [pair for pair in pairs if not _joins(pair, self._chosen)]
            return joining or [self._chosen[0] if self._chosen else (0,)]  # columns were left out: nothing is chosen
        rounds = sum(one.kind == "choice" for one in public.releases)
        limit = MOST_CELLS * (len(self._chosen) + 1) / rounds
        triples = [
            columns
            for columns in itertools.combinations(range(len(sizes)), 3)
            if public.target is None or public.target in columns
        ]
        by_size = sorted([*pairs, *triples], key=lambda columns: (math.prod(sizes[c] for c in columns), columns))
        small = [c for c in by_size if math.prod(sizes[i] for i in c) <= LARGEST_MARGINAL][:MOST_CANDIDATES]
        known = [one.columns for one in self._measured]
        fitting = [c for c in small if num_cells(sizes, [*known, c]) <= limit]
        return fitting or [min(known, key=lambda c: (-len(c), c))]  # what is known can be measured again

    def weight(self, columns: Columns) -> float:
        """Returns the weight of a candidate's distance."""
        if self.public.generator == "mst":
            return 1.0
        return len(columns) / 3 * (OF_TARGET if self.public.target in columns else 1.0)

    def noise_of_chosen(self) -> float:
        """Returns the mean distance that the noise of a measurement makes in each cell; AIM alone asks for it."""
        if self.public.generator == "mst":
            return 0.0
        following = next(one for one in self.public.releases[len(self.results) :] if one.kind == "chosen")
        return math.sqrt(2 / math.pi) * self.public.stddev(following, 1)

    def expected(self, candidates: Sequence[Columns]) -> list[Array]:
        """Returns what the model expects of marginals, from rows drawn of it."""
        model = self._fitted(ITERATIONS)
        chain = Chain(model.links(), *_identity(self.sizes))
        count = max(FEWEST_DRAWN, round(model.total))
        drawn = chain.draw(count, np.random.default_rng(len(self.results)))
        factor = model.total / count
        return [factor * marginal(drawn, columns, self.sizes) for columns in candidates]

    # After the last release

    def chain(self) -> Chain:
        """Returns the generator."""
        return Chain(self._fitted(LAST_ITERATIONS).links(), tuple(self._merged), tuple(self._within))

    @property
    def fractional(self) -> list[bool]:
        """Returns for each number whether many of its cells are not whole."""
        stddev = self.public.stddev(self.public.releases[0], self.public.num_one_way)
        rows = self._measured[0].counts.sum()
        return [count > max(MERGED_BELOW * stddev, 0.01 * rows) for count in self._fractional]

    def scores(self, codes: Codes, others: Codes) -> Array:
        """Returns for rows the sum of what the noisy counts of their cells have beyond ``others``, over the variance.

        It is what an attacker who knows all other rows makes of the releases. Both are of original values.
        """
        codes, others = self.merge(codes), self.merge(others)
        found = np.zeros(len(codes))
        for one in self._measured:
            beyond = one.counts - marginal(others, one.columns, self.sizes)
            found += beyond[tuple(codes[:, column] for column in one.columns)] / one.stddev**2
        return found

    def _fitted(self, iterations: int) -> Model:
        """Returns the model of all that is measured; the search begins at the model before."""
        if self._fits != (len(self._measured), iterations):
            start = None if self._model is None else self._model.potentials
            self._model = Model(self.sizes, self._measured, self.public.total, start).fit(iterations)
            self._fits = len(self._measured), iterations
        assert self._model is not None
        return self._model


def _identity(sizes: Sequence[int]) -> tuple[tuple[NDArray[np.int64], ...], tuple[Array, ...]]:
    return tuple(np.arange(size) for size in sizes), tuple(np.ones(size) for size in sizes)


def _merging(counts: Array, least: float) -> tuple[NDArray[np.int64], Array]:
    """Returns the merged value of each value, and the share of each value among those merged with it.

    All values with a count below ``least`` become one. Their shares are those of their counts, if these are positive.
    """
    kept = counts >= least
    if not kept.any():
        kept[int(counts.argmax())] = True
    merged = np.where(kept, np.cumsum(kept) - 1, kept.sum())
    positive = np.where(kept, 1.0, np.maximum(counts, 1e-9))
    sums = np.bincount(merged, weights=positive)
    return merged.astype(np.int64), positive / sums[merged]


def _joins(pair: Columns, chosen: Sequence[Columns]) -> bool:
    """True if both columns of a pair are connected by pairs that were chosen."""
    reached = {pair[0]}
    for _ in chosen:
        for other in chosen:
            if reached & {*other}:
                reached |= {*other}
    return pair[1] in reached
