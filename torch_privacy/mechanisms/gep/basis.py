# SPDX-License-Identifier: Apache-2.0
"""Represents a subspace of gradients: groups of parameters, the number of directions of each, and their basis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from ...jacobian.rows.operator import Jacobian
from ...ops.dense import flat_in_order, memory_order
from ...support.torch_modes import exact
from .orthonormal import OrthonormalBasis

NOTHING = 1e-6  # share of squared norms that may be rounding


def balanced_groups(sizes: Mapping[str, int], count: int) -> dict[str, tuple[str, ...]]:
    """Divides the parameters into at most ``count`` consecutive runs with the smallest possible largest run.

    >>> balanced_groups({"a": 3, "b": 1, "c": 2, "d": 2}, 2)
    {'a ... b': ('a', 'b'), 'c ... d': ('c', 'd')}
    """
    ends = [0]
    for size in sizes.values():
        ends.append(ends[-1] + size)
    low, high = max(sizes.values()), ends[-1]
    while low < high:  # the smallest bound with which a greedy walk needs no more than ``count`` runs
        middle = (low + high) // 2
        low, high = (low, middle) if len(_runs(list(sizes.values()), middle)) <= count else (middle + 1, high)
    names = list(sizes)
    runs = [tuple(names[a:b]) for a, b in _runs(list(sizes.values()), low)]
    return {run[0] if len(run) == 1 else f"{run[0]} ... {run[-1]}": run for run in runs}


def _runs(sizes: list[int], bound: int) -> list[tuple[int, int]]:
    starts, total = [0], 0
    for k, size in enumerate(sizes):
        if total + size > bound:
            starts.append(k)
            total = 0
        total += size
    return list(pairwise([*starts, len(sizes)]))


def groups_by_prefix(sizes: Mapping[str, int], prefixes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Puts every parameter in the group of the longest matching prefix of its name, like `Groups`.

    Raises:
        ValueError: a parameter without a matching prefix, or a prefix that matches no parameter.
    """

    def group_of(name: str) -> str | None:
        return max((p for p in prefixes if p in ("", name) or name.startswith(f"{p}.")), key=len, default=None)

    members: dict[str | None, list[str]] = {prefix: [] for prefix in prefixes}
    for name in sizes:
        members.setdefault(group_of(name), []).append(name)
    without, unused = members.pop(None, []), [prefix for prefix, inside in members.items() if not inside]
    if without or unused:
        raise ValueError(
            f"AnchorSubspace: groups={list(prefixes)!r} must sort the trained parameters by prefix. "
            f"Matched by none: {without or 'no parameter'}; matching none: {unused or 'no prefix'}. "
            "Pass names of modules, '' for all remaining parameters, or a number of groups."
        )
    return {str(prefix): tuple(inside) for prefix, inside in members.items()}


def quotas(num_basis: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the number of directions of each group, in proportion to the root of its size: from one to its size.

    >>> quotas(12, {"small": 4, "large": 100, "tiny": 1})
    {'small': 2, 'large': 9, 'tiny': 1}
    """
    roots = {group: math.sqrt(size) for group, size in sizes.items()}
    found = {group: 1 for group in sizes}
    for _ in range(min(num_basis, sum(sizes.values())) - len(sizes)):
        # The next direction goes to the group with room that is farthest below its share.
        neediest = max((g for g in sizes if found[g] < sizes[g]), key=lambda g: roots[g] / (found[g] + 0.5))
        found[neediest] += 1
    return found


@dataclass(frozen=True)
class Columns:
    """The order of some parameters' entries in one long row: parameter by parameter, each without a copy.

    Args:
        shapes: name -> shape.
        orders: name -> dimensions, slowest first; by default in their own order.
    """

    shapes: Mapping[str, torch.Size]
    orders: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Mapping[str, Tensor]) -> Columns:
        """Returns the columns in the memory order of rows (n, *shape)."""
        orders = {name: memory_order(of_name) for name, of_name in rows.items()}
        return cls({name: of_name.shape[1:] for name, of_name in rows.items()}, orders)

    def flat(self, rows: Mapping[str, Tensor]) -> list[Tensor]:
        """Flattens rows by name, (n, *shape), to (n, size) each."""
        return [flat_in_order(rows[name], self._order(name)) for name in self.shapes]

    def split(self, vectors: Tensor) -> dict[str, Tensor]:
        """Splits (n, p) into views (n, *shape) by name."""
        parts = vectors.split([shape.numel() for shape in self.shapes.values()], 1)
        return {name: self._shaped(name, part) for name, part in zip(self.shapes, parts, strict=True)}

    def _order(self, name: str) -> Sequence[int]:
        return self.orders.get(name, range(len(self.shapes[name])))

    def _shaped(self, name: str, part: Tensor) -> Tensor:
        shape, order = self.shapes[name], self._order(name)
        arranged = part.view(len(part), *(shape[dim] for dim in order))
        return arranged.permute(0, *(1 + order.index(dim) for dim in range(len(shape))))


@dataclass(frozen=True)
class Basis:
    """Orthonormal directions of gradients; each direction lies in the parameters of one group.

    Args:
        columns: label -> the parameters of the group.
        directions: label -> the directions of the group.
    """

    columns: Mapping[str, Columns]
    directions: Mapping[str, OrthonormalBasis]

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Names of the parameters of each group."""
        return {group: tuple(columns.shapes) for group, columns in self.columns.items()}

    @property
    def num_directions(self) -> dict[str, int]:
        """Number of directions of each group."""
        return {group: len(directions) for group, directions in self.directions.items()}

    def zeros(self) -> dict[str, Tensor]:
        """Returns zero coordinates, label -> (k,)."""
        return {group: directions.mixing.new_zeros(len(directions)) for group, directions in self.directions.items()}

    @property
    def _device(self) -> torch.device:
        return next(iter(self.directions.values())).mixing.device

    @exact
    def embed(self, jacobian: Jacobian, group: str) -> Tensor:
        """Returns J Vᵀ, (n, k), in one group."""
        basis = self.directions[group]
        if not len(basis):
            return basis.mixing.new_zeros(jacobian.num_examples, 0)
        vectors = self.columns[group].split(basis.vectors)
        return jacobian.restricted(vectors).project(vectors).to(basis.mixing) @ basis.mixing.mT

    def _check(self, jacobian: Jacobian) -> None:
        """Raises unless the gradients are of this basis' parameters, and at least one."""
        shapes = {name: shape for columns in self.columns.values() for name, shape in columns.shapes.items()}
        if dict(jacobian.shapes) != shapes:
            raise ValueError(
                f"Basis: the gradients are of {list(jacobian.shapes)}, and the basis is of {list(shapes)}: names and "
                "shapes must be equal. Compute both for one model, with the same parameters trained."
            )
        if not jacobian.num_examples:
            raise ValueError("Basis: these are the gradients of no example. Pass those of at least one.")

    @exact
    def stable_ranks(self, jacobian: Jacobian, *, residuals: bool = False) -> dict[str, float]:
        """Returns ``‖G‖_F² / ‖G‖₂²`` of the gradients G in each group, or of what the subspace leaves of them.

        It lies between 1 and the rank; 0 if nothing is left. Of private gradients it is a release without a price.

        Raises:
            ValueError: the gradients are of other parameters, or of no example.

        Source: Yu, Zhang, Chen & Liu (2021), arXiv:2102.12677, Figures 2 and 5.
        """
        self._check(jacobian)
        found = {}
        for group, names in self.groups.items():
            rows = (jacobian.restricted([name]).rows()[name].flatten(1).double() for name in names)
            gram = torch.stack([part @ part.mT for part in rows]).sum(0)
            total, w = float(gram.trace()), self.embed(jacobian, group).to(gram)
            gram = gram - w @ w.mT if residuals else gram
            left = float(gram.trace())
            found[group] = left / float(torch.linalg.eigvalsh(gram)[-1]) if left > NOTHING * total else 0.0
        return found

    def projection_errors(self, jacobian: Jacobian) -> dict[str, float]:
        """Returns the share of the mean gradient's norm that lies outside of the subspace, in each group.

        Of private gradients it is a release without a price.

        Raises:
            ValueError: as `stable_ranks`.

        Source: Yu, Zhang, Chen & Liu (2021), arXiv:2102.12677, Figures 4 and 7.
        """
        self._check(jacobian)
        n = jacobian.num_examples
        mean = jacobian.weighted_sum(torch.full((n,), 1 / n, device=self._device))
        inside = {group: float(w.double().square().sum()) for group, w in self.coordinates(mean).items()}
        norms = {
            g: sum(float(mean[name].double().square().sum()) for name in names) for g, names in self.groups.items()
        }
        return {group: max(0.0, 1 - w / norms[group]) ** 0.5 if norms[group] else 0.0 for group, w in inside.items()}

    def captured_energy(self, jacobian: Jacobian) -> dict[str, float]:
        """Returns the share of the gradients' squared norms that lies in the subspace, ``Σ ‖wᵢ‖² / Σ ‖gᵢ‖²``, by group.

        Of private gradients it is a release without a price.

        Raises:
            ValueError: as `stable_ranks`.
        """
        self._check(jacobian)
        found = {}
        for group, names in self.groups.items():
            total = float(jacobian.squared_norms(names).double().sum())
            found[group] = float(self.embed(jacobian, group).double().square().sum()) / total if total else 0.0
        return found

    @exact
    def coordinates(self, gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns V g by label, for a gradient by name."""
        rows = {name: g.unsqueeze(0) for name, g in gradient.items()}
        found = {}
        for group, basis in self.directions.items():
            parts = self.columns[group].flat(rows)
            found[group] = basis.coordinates([part.to(basis.mixing) for part in parts])[0]
        return found

    @exact
    def expand(self, coordinates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns Vᵀ w by name."""
        expanded = {}
        for group, w in coordinates.items():
            basis = self.directions[group]
            parts = self.columns[group].split(basis.expand(w.to(basis.mixing)).unsqueeze(0))
            expanded |= {name: part[0].contiguous() for name, part in parts.items()}
        return expanded
