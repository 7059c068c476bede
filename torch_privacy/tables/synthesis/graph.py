# SPDX-License-Identifier: Apache-2.0
"""Estimates a distribution of rows from noisy marginals: the graphical model of largest entropy that fits them best.

Columns are eliminated one after the other. Each one and its neighbors at that time are a group of the junction tree, so
that the model is also a chain: the eliminated column, given its neighbors. Messages between groups give all marginals
within groups exactly; potentials on the measured marginals are found by mirror descent.

Source: McKenna, Sheldon & Miklau (2019), arXiv:1901.09136, Algorithm 1; Koller & Friedman (2009), chapters 9 and 10.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .chain import Link

Array = NDArray[np.float64]
Columns = tuple[int, ...]  # places, in increasing order
ITERATIONS = 400
ENOUGH = 1e-5  # relative decrease of the loss in 20 iterations, from which on the model fits


@dataclass(frozen=True)
class NoisyCounts:
    """Noisy counts of the combinations of values of some columns, and the standard deviation of each."""

    columns: Columns
    counts: Array
    stddev: float


def elimination(sizes: Sequence[int], cliques: Iterable[Columns]) -> list[tuple[int, Columns]]:
    """Returns each column with its neighbors when it is eliminated, in this order: the cheapest group comes first."""
    neighbors: dict[int, set[int]] = {column: set() for column in range(len(sizes))}
    for clique in cliques:
        for column in clique:
            neighbors[column].update(clique)
    for column, of in neighbors.items():
        of.discard(column)
    order = []
    while neighbors:
        chosen = min(neighbors, key=lambda one: (math.prod(sizes[c] for c in neighbors[one]) * sizes[one], one))
        around = neighbors.pop(chosen)
        for column in around:
            neighbors[column] |= around
            neighbors[column] -= {column, chosen}
        order.append((chosen, tuple(sorted(around))))
    return order


def num_cells(sizes: Sequence[int], cliques: Iterable[Columns]) -> int:
    """Returns the number of cells of all groups of the model of these marginals."""
    return sum(sizes[one] * math.prod(sizes[c] for c in around) for one, around in elimination(sizes, cliques))


class Model:
    """The graphical model of some marginals, with potentials for each.

    Args:
        sizes: number of values of each column.
        measured: noisy marginals; each column is in one at least.
        total: number of rows; None to estimate it.
        start: potentials by columns, such as those of an earlier model.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        measured: Sequence[NoisyCounts],
        total: float | None = None,
        start: Mapping[Columns, Array] | None = None,
    ):
        self._order = elimination(sizes, [one.columns for one in measured])
        self._groups = [tuple(sorted((one, *around))) for one, around in self._order]
        place = {one: number for number, (one, _) in enumerate(self._order)}
        self._parents = [min((place[column] for column in around), default=None) for _, around in self._order]
        self._sizes, self._measured = tuple(sizes), joined(measured)
        # the group of the column that is eliminated first holds all columns of a marginal
        self._home = {one.columns: min(place[column] for column in one.columns) for one in self._measured}
        self.total = max(1.0, _total(measured) if total is None else total)
        known = start or {}
        self.potentials = {one.columns: known.get(one.columns, np.zeros(one.counts.shape)) for one in self._measured}

    def fit(self, iterations: int = ITERATIONS) -> Model:
        """Finds the potentials; returns the model."""
        targets = {one.columns: one.counts / self.total for one in self._measured}
        weights = {one.columns: one.stddev**-2 for one in self._measured}
        largest = max(weights.values())

        def at(potentials: Mapping[Columns, Array]) -> tuple[float, dict[Columns, Array], dict[Columns, Array]]:
            marginals = self._marginals(potentials)
            errors = {columns: found - targets[columns] for columns, found in marginals.items()}
            gradient = {columns: weights[columns] / largest * error for columns, error in errors.items()}
            loss = sum(float((gradient[columns] * error).sum()) for columns, error in errors.items()) / 2
            return loss, gradient, marginals

        step, (loss, gradient, marginals) = 2.0, at(self.potentials)
        before = loss
        for number in range(1, iterations + 1):
            tried = {columns: value - step * gradient[columns] for columns, value in self.potentials.items()}
            new_loss, new_gradient, new_marginals = at(tried)
            promised = sum(float((gradient[c] * (marginals[c] - new_marginals[c])).sum()) for c in tried)
            if loss - new_loss >= 0.5 * promised:
                self.potentials, loss, gradient, marginals = tried, new_loss, new_gradient, new_marginals
                step *= 1.2
            else:
                step *= 0.5
            if number % 20 == 0:
                if before - loss <= ENOUGH * loss:
                    break
                before = loss
        return self

    def links(self) -> tuple[Link, ...]:
        """Returns the model as a chain: the column that was eliminated last comes first."""
        conditionals = self._upwards(self.potentials)
        found = []
        for (one, around), group, chances in zip(self._order, self._groups, conditionals, strict=True):
            found.append(Link(one, around, np.moveaxis(chances, group.index(one), -1)))
        return tuple(reversed(found))

    def _upwards(self, potentials: Mapping[Columns, Array]) -> list[Array]:
        """Returns for each group the distribution of its own column, given the others."""
        sums = [np.zeros([self._sizes[column] for column in group]) for group in self._groups]
        for columns, potential in potentials.items():
            sums[self._home[columns]] += _spread(potential, columns, self._groups[self._home[columns]])
        for number, (one, around) in enumerate(self._order):
            axis = self._groups[number].index(one)
            largest = sums[number].max(axis, keepdims=True)
            chances = np.exp(sums[number] - largest)
            total = chances.sum(axis, keepdims=True)
            sums[number] = chances / total
            parent = self._parents[number]
            if parent is not None:
                message = (largest + np.log(total)).squeeze(axis)
                sums[parent] += _spread(message, around, self._groups[parent])
        return sums

    def _marginals(self, potentials: Mapping[Columns, Array]) -> dict[Columns, Array]:
        """Returns the probabilities of the measured combinations."""
        groups = self._upwards(potentials)
        for number in reversed(range(len(groups))):
            parent = self._parents[number]
            if parent is not None:
                around = self._order[number][1]
                groups[number] *= _spread(
                    _kept(groups[parent], self._groups[parent], around), around, self._groups[number]
                )
        return {columns: _kept(groups[home], self._groups[home], columns) for columns, home in self._home.items()}


def joined(measured: Sequence[NoisyCounts]) -> list[NoisyCounts]:
    """Returns one measurement for each set of columns: the mean of all of them, weighted by their precision."""
    found: dict[Columns, NoisyCounts] = {}
    for one in measured:
        if (other := found.get(one.columns)) is not None:
            first, second = other.stddev**-2, one.stddev**-2
            mean = (first * other.counts + second * one.counts) / (first + second)
            one = NoisyCounts(one.columns, mean, (first + second) ** -0.5)
        found[one.columns] = one
    return list(found.values())


def _total(measured: Sequence[NoisyCounts]) -> float:
    """Returns the number of rows, as the mean of all sums of counts, weighted by their precision."""
    weights = [1 / (one.counts.size * one.stddev**2) for one in measured]
    return sum(w * float(one.counts.sum()) for w, one in zip(weights, measured, strict=True)) / sum(weights)


def _spread(values: Array, columns: Columns, group: Columns) -> Array:
    """Returns values by ``columns`` with an axis for each column of the group, of size 1 where it is missing."""
    sizes = dict(zip(columns, values.shape, strict=True))
    return values.reshape([sizes.get(column, 1) for column in group])


def _kept(values: Array, group: Columns, columns: Columns) -> Array:
    """Returns values by a group, summed over all but these columns."""
    return values.sum(tuple(axis for axis, column in enumerate(group) if column not in columns))
