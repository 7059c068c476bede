# SPDX-License-Identifier: Apache-2.0
"""Releases noisy marginals of a table, chosen privately (AIM, MST), and makes a generator of rows of them.

Noise on counts is that of every training: Gaussian, on a grid, from a secret key, so that a release can be repeated. A
choice is made by opendp's noisy maximum, which computes with exact numbers.

Source: McKenna, Mullins, Sheldon & Miklau (2022), arXiv:2201.12677 (AIM); McKenna, Miklau & Sheldon (2021),
    arXiv:2108.04978 (MST).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...mechanisms.base import PRICED_ROUNDING
from ...mechanisms.noise import Noise
from ..mechanisms import part_of_opendp
from .cells import Codes
from .chain import Chain, marginal
from .graph import ITERATIONS, Array, Columns, Measured, Model, num_cells
from .plan import Release

MOST_CELLS = 200_000  # of the groups of a model
LARGEST_MARGINAL = 50_000  # cells of one that may be chosen
MOST_CANDIDATES = 600
MERGED_BELOW = 3.0  # standard deviations of its noise, below which the count of a value is merged with that of others
LAST_ITERATIONS = 4 * ITERATIONS
FEWEST_DRAWN = 50_000  # rows, to compute what a model expects
OF_TARGET = 2.0  # weight of a marginal with the target, beside 1 of the others


class Marginals:
    """The releases of one generator, in the order of the plan.

    Args:
        generator: ``"aim"`` or ``"mst"``.
        codes: int64 (n, k), of at most ``rows`` rows of each person.
        fractions: bool (n, numbers): which numbers are not whole.
        sizes: number of values of each column.
        plan: all releases.
        key: 32 secret bytes.
        rows: of one person, 1 where a row is protected.
        total: number of rows if it is public, else None.
        target: place of the column to predict, if there is one.
        made: results of the first releases, of a run that is resumed.
    """

    def __init__(
        self,
        generator: str,
        codes: Codes,
        fractions: NDArray[np.bool_],
        sizes: Sequence[int],
        plan: Sequence[Release],
        key: bytes,
        *,
        rows: int = 1,
        total: int | None = None,
        target: int | None = None,
        made: Iterable[Mapping[str, Any]] = (),
    ):
        self._generator, self._codes, self._fractions, self._sizes = generator, codes, fractions, tuple(sizes)
        self._plan, self._noise, self._rows, self._total, self._target = plan, Noise(key), rows, total, target
        self.made: list[dict[str, Any]] = []
        self._merged: list[NDArray[np.int64]] = []
        self._within: list[Array] = []
        self._measured: list[Measured] = []
        self._chosen: list[Columns] = []
        self._fractional: list[float] = []
        self._model: Model | None = None
        self._fits = 0, 0  # to how many measurements, by how many iterations
        for result in made:
            self._take(dict(result))

    def make(self) -> dict[str, Any]:
        """Makes the next release, and returns its result as plain values and tensors. Its event is in the ledger."""
        step = len(self.made)
        release = self._plan[step]
        if release.kind == "choice":
            result: dict[str, Any] = {"chosen": list(self._choose(release))}
        else:
            result = {"counts": self._counts(step, release)}
        self._take(result)
        return result

    def chain(self) -> Chain:
        """Returns the generator, after the last release; function of the results alone."""
        return Chain(self._fitted(LAST_ITERATIONS).links(), tuple(self._merged), tuple(self._within))

    @property
    def fractional(self) -> list[bool]:
        """Returns for each number whether many of its cells are not whole."""
        stddev = self._stddev(self._plan[0], len(self._sizes) + self._fractions.shape[1])
        rows = self._measured[0].counts.sum()
        return [count > max(MERGED_BELOW * stddev, 0.01 * rows) for count in self._fractional]

    def scores(self, codes: Codes, others: Codes) -> Array:
        """Returns for rows the sum of what the noisy counts of their cells have beyond ``others``, over the variance.

        It is what an attacker who knows all other rows makes of the releases. Both are of original values.
        """
        codes, others = self._merge(codes), self._merge(others)
        found = np.zeros(len(codes))
        for one in self._measured:
            beyond = one.counts - marginal(others, one.columns, self._merged_sizes)
            found += beyond[tuple(codes[:, column] for column in one.columns)] / one.stddev**2
        return found

    # Releases

    def _stddev(self, release: Release, marginals: int) -> float:
        return PRICED_ROUNDING * release.noise * self._rows * math.sqrt(marginals)

    def _counts(self, step: int, release: Release) -> torch.Tensor:
        """Returns noisy counts, (cells of all marginals). A row changes each marginal in one cell by 1."""
        if release.kind == "one-way":
            parts = [np.bincount(self._codes[:, i], minlength=size) for i, size in enumerate(self._sizes)]
            parts += [self._fractions.sum(0)]  # at most one more count for each number
            marginals = len(self._sizes) + self._fractions.shape[1]
        else:
            chosen = self._to_measure()
            merged = self._merge(self._codes)
            parts = [marginal(merged, columns, self._merged_sizes).ravel() for columns in chosen]
            marginals = len(chosen)
        counts = torch.from_numpy(np.concatenate(parts).astype(np.float64))
        self._noise.add_to(step, {"counts": counts}, self._stddev(release, marginals))
        return counts

    def _choose(self, release: Release) -> Columns:
        """Returns a marginal that the model misses by much. Removing a row moves its distance by at most 1."""
        candidates = self._candidates()
        expected, merged = self._expected(candidates), self._merge(self._codes)
        weights = [self._weight(columns) for columns in candidates]
        noise = self._noise_of_chosen()
        scores = [
            weight * (np.abs(marginal(merged, columns, self._merged_sizes) - guess).sum() - noise * guess.size)
            for weight, columns, guess in zip(weights, candidates, expected, strict=True)
        ]
        sensitivity = (1 + 1e-6) * self._rows * max(weights)  # more than the rounding of sums
        return candidates[exponential_mechanism(scores, sensitivity, release.noise)]

    def _noise_of_chosen(self) -> float:
        """Returns the mean distance that the noise of a measurement makes in each cell; AIM alone asks for it."""
        if self._generator == "mst":
            return 0.0
        following = next(one for one in self._plan[len(self.made) :] if one.kind == "chosen")
        return math.sqrt(2 / math.pi) * self._stddev(following, 1)

    def _candidates(self) -> list[Columns]:
        pairs = list(itertools.combinations(range(len(self._sizes)), 2))
        if self._generator == "mst":
            joining = [pair for pair in pairs if not _joins(pair, self._chosen)]
            return joining or [self._chosen[0] if self._chosen else (0,)]  # columns were left out: nothing is chosen
        rounds = sum(one.kind == "choice" for one in self._plan)
        limit = MOST_CELLS * (len(self._chosen) + 1) / rounds
        triples = [
            columns
            for columns in itertools.combinations(range(len(self._sizes)), 3)
            if self._target is None or self._target in columns
        ]
        sizes = self._merged_sizes
        by_size = sorted([*pairs, *triples], key=lambda columns: (math.prod(sizes[c] for c in columns), columns))
        small = [c for c in by_size if math.prod(sizes[i] for i in c) <= LARGEST_MARGINAL][:MOST_CANDIDATES]
        known = [one.columns for one in self._measured]
        fitting = [c for c in small if num_cells(sizes, [*known, c]) <= limit]
        return fitting or [min(known, key=lambda c: (-len(c), c))]  # what is known can be measured again

    def _expected(self, candidates: Sequence[Columns]) -> list[Array]:
        """Returns what the model expects of marginals, from rows drawn of it: a function of earlier releases alone."""
        model = self._fitted()
        chain = Chain(model.links(), *_identity(self._merged_sizes))
        count = max(FEWEST_DRAWN, round(model.total))
        drawn = chain.draw(count, np.random.default_rng(len(self.made)))
        factor = model.total / count
        return [factor * marginal(drawn, columns, self._merged_sizes) for columns in candidates]

    def _weight(self, columns: Columns) -> float:
        if self._generator == "mst":
            return 1.0
        return len(columns) / 3 * (OF_TARGET if self._target in columns else 1.0)

    # Results

    def _take(self, result: dict[str, Any]) -> None:
        """Takes in a result: everything from here on is a function of released numbers."""
        release = self._plan[len(self.made)]
        if release.kind == "choice":
            self._chosen.append(tuple(result["chosen"]))
        elif release.kind == "one-way":
            self._take_one_way(result["counts"].numpy(), release)
        else:
            chosen, sizes, values, start = self._to_measure(), self._merged_sizes, result["counts"].numpy(), 0
            for columns in chosen:
                shape = tuple(sizes[column] for column in columns)
                counts = values[start : start + math.prod(shape)].reshape(shape)
                start += counts.size
                self._measured.append(Measured(columns, counts, self._stddev(release, len(chosen))))
        self.made.append(result)

    def _fitted(self, iterations: int = ITERATIONS) -> Model:
        """Returns the model of all that is measured; the search begins at the model before."""
        if self._fits != (len(self._measured), iterations):
            start = None if self._model is None else self._model.potentials
            self._model = Model(self._merged_sizes, self._measured, self._total, start).fit(iterations)
            self._fits = len(self._measured), iterations
        assert self._model is not None
        return self._model

    def _take_one_way(self, values: Array, release: Release) -> None:
        """Merges values with counts that are no more than noise, and notes the counts of the others."""
        stddev = self._stddev(release, len(self._sizes) + self._fractions.shape[1])
        *parts, fractional = np.split(values, np.cumsum(self._sizes))
        self._fractional = fractional.tolist()
        for place, counts in enumerate(parts):
            merged, within = _merging(counts, MERGED_BELOW * stddev)
            self._merged.append(merged)
            self._within.append(within)
            # the sum of m rare values has noise larger by √m, and is taken to be as certain as the others
            self._measured.append(Measured((place,), np.bincount(merged, weights=counts).astype(float), stddev))

    @property
    def _merged_sizes(self) -> tuple[int, ...]:
        return tuple(int(merged.max()) + 1 for merged in self._merged)

    def _merge(self, codes: Codes) -> Codes:
        return np.stack([of[codes[:, place]] for place, of in enumerate(self._merged)], 1)

    def _to_measure(self) -> list[Columns]:
        return list(dict.fromkeys(self._chosen)) if self._generator == "mst" else self._chosen[-1:]


def exponential_mechanism(scores: Sequence[float], sensitivity: float, epsilon: float) -> int:
    """Releases the place of a large score: with probability in proportion to ``exp(epsilon s / (2 sensitivity))``."""
    domains, metrics, measures = (part_of_opendp(name) for name in ("domains", "metrics", "measures"))
    space = domains.vector_domain(domains.atom_domain(T="f64", nan=False)), metrics.linf_distance(T="f64")
    scale = 2 * sensitivity / epsilon
    make = part_of_opendp("measurements").make_noisy_max
    release = make(*space, measures.zero_concentrated_divergence(), scale)  # Gumbel noise
    if not release.map(sensitivity) <= (1 + 1e-9) * epsilon**2 / 8:
        raise AssertionError("opendp prices a choice higher than was planned. Please report this.")
    return int(release([float(score) for score in scores]))


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
