# SPDX-License-Identifier: Apache-2.0
"""Draws which examples of a batch a rehearsal keeps."""

from __future__ import annotations

import numpy as np

FEW = 4  # examples


def draw_halves(count: int, generator: np.random.Generator, units: np.ndarray | None = None) -> list[np.ndarray]:
    """Returns masks (count,) of a random half of the examples and of the other half; one empty mask for one example.

    Examples of one unit stay together.
    """
    numbers = np.arange(count) if units is None else np.unique(units)
    if len(numbers) < 2:
        return [np.zeros(count, bool)]
    chosen = generator.permutation(numbers)[: len(numbers) // 2]
    keep = np.zeros(count, bool)
    keep[chosen if units is None else np.isin(units, chosen)] = True
    return [keep, ~keep]


def draw_few(
    count: int, generator: np.random.Generator, units: np.ndarray | None = None, sizes: np.ndarray | None = None
) -> np.ndarray:
    """Returns a mask of a few random examples, so few that the longest of the batch is rarely among them.

    With ``sizes`` (count,) it never is, unless all are as long: the shortest examples are kept. So what follows the
    padded length is seen even if nearly all examples are of the largest length.

    Examples of one unit stay together.
    """
    if units is not None:
        number = int(units.max()) + 1
        if sizes is not None:
            sizes = np.array([sizes[units == unit].max() for unit in range(number)])
        return draw_few(number, generator, None, sizes)[units]
    order, keep = generator.permutation(count), np.zeros(count, bool)
    if sizes is not None and (shorter := order[sizes[order] < sizes.max()]).size:
        order = shorter[np.argsort(sizes[shorter], kind="stable")]
    keep[order[: min(FEW, -(-count // 4), count // 2)]] = True
    return without_ends(keep) if count > 2 else keep


def without_ends(keep: np.ndarray, units: np.ndarray | None = None) -> np.ndarray:
    """Returns the mask without the first and the last example, which alone would also be first and last.

    With units (numbered without gaps) it is without theirs.
    """
    some = keep.copy()
    some[[0, -1] if units is None else np.isin(units, units[[0, -1]])] = False
    return some if some.any() else keep
