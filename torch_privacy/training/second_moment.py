# SPDX-License-Identifier: Apache-2.0
"""The mechanism of private principal components: exact second moments, symmetric noise, eigenvectors."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import scipy
import torch
from numpy.typing import NDArray

from ..mechanisms.noise import Noise, grid_unit

Array = NDArray[Any]

_CHUNK = 2048  # rows converted to float64 at a time
MAX_BITS = 16  # fractional bits of a coordinate


def second_moment(rows: Array, chosen: Array, bits: int = MAX_BITS) -> NDArray[np.float64]:
    """Returns ``Σ uuᵀ`` over the chosen rows x, with ``u = x/‖x‖``: (n, d), (m,) -> (d, d).

    Each u is rounded toward zero to multiples of 2^-bits. Then all products and sums are integer multiples of 4^-bits,
    and exact in any order: the change by one row has no rounding error, and the sum is the same, bit for bit, for any
    number of threads.

    Guarantees:
        - ``‖u‖ <= 1`` (to 1e-12) for entries of any size; a row of zeros has u = 0.
        - Adding or removing one row changes the sum by exactly its ``uuᵀ``, up to 2^(53 - 2 bits) rows (2 million for
          16 bits); with more rows, up to the rounding of float64.
    """
    return unscaled(scaled_second_moment(rows, chosen, bits), bits)


def scaled_second_moment(rows: Array, chosen: Array, bits: int) -> NDArray[np.int64]:
    """Returns ``4^bits`` times `second_moment`, in integers: sums of several processes are exact, too."""
    total = np.zeros((rows.shape[1], rows.shape[1]), dtype=np.int64)
    for start in range(0, len(chosen), _CHUNK):
        u = rows[chosen[start : start + _CHUNK]]
        u = (
            _scaled(u, _largest(u)) if u.dtype == np.float64 else u.astype(np.float64)
        )  # squares of float64 may overflow
        u = _scaled(u, _norm(u) * 2.0**-bits)
        total += (u.T @ np.trunc(u, out=u)).astype(np.int64)
    return total


def unscaled(total: NDArray[np.int64], bits: int) -> NDArray[np.float64]:
    """Returns ``4^-bits total`` in float64."""
    return np.ldexp(total.astype(np.float64), -2 * bits)


def checksum(rows: Array) -> bytes:
    """Returns a digest of at least one row that is the same for the same rows in another order."""
    total = np.zeros(rows.shape[1], dtype=np.uint64)
    for start in range(0, len(rows), _CHUNK):
        bits = rows[start : start + _CHUNK].view(f"u{rows.itemsize}")
        total += bits.sum(axis=0, dtype=np.uint64)  # mod 2^64
    return hashlib.blake2b(len(rows).to_bytes(8, "big") + total.tobytes(), digest_size=16).digest()


def bits_for(noise: float) -> int:
    """Returns the fractional bits of a coordinate with which the exact sum lies on the grid of the release."""
    return min(MAX_BITS, max(0, -math.frexp(grid_unit(noise))[1] + 1) // 2)


def _scaled(rows: Array, lengths: Array) -> Array:
    """Divides every row by its length, in place; leaves rows of length 0 unchanged."""
    rows /= np.where(lengths > 0, lengths, 1.0)[:, None]
    return rows


def _largest(rows: Array) -> Array:
    return np.maximum(rows.max(axis=1), -rows.min(axis=1))


def _norm(rows: Array) -> Array:
    return np.sqrt(np.einsum("ij,ij->i", rows, rows))


def add_symmetric_noise(matrix: NDArray[np.float64], stddev: float, noise: Noise) -> None:
    """Adds a symmetric Gaussian matrix in place: ``stddev`` on the diagonal, ``stddev/√2`` off it.

    In the coordinates ``(A₁₁, √2·A₁₂, ..., A₂₂, ...)`` the Euclidean norm is the Frobenius norm. In them the noise is
    independent with equal variances, so that the price depends only on the norm of a change.
    """
    above = np.triu_indices(len(matrix), 1)
    parts = {"diagonal": torch.from_numpy(matrix.diagonal().copy()), "off_diagonal": torch.from_numpy(matrix[above])}
    noise.add_to(0, parts, {"diagonal": stddev, "off_diagonal": stddev / 2**0.5})
    matrix[above] = matrix.T[above] = parts["off_diagonal"].numpy()
    np.fill_diagonal(matrix, parts["diagonal"].numpy())


def leading_eigenvectors(matrix: NDArray[np.float64], k: int) -> tuple[Array, Array]:
    """Returns all eigenvalues of a symmetric matrix, largest first, and the first k eigenvectors: (d,), (k, d)."""
    eigenvalues, vectors = scipy.linalg.eigh(matrix, driver="evd")
    components = vectors.T[::-1][:k]
    largest = np.take_along_axis(components, np.abs(components).argmax(axis=1)[:, None], axis=1)
    return eigenvalues[::-1].copy(), np.ascontiguousarray(components * np.sign(largest))
