# SPDX-License-Identifier: Apache-2.0
"""Releases noisy marginals of a table, chosen privately (AIM, MST).

Noise on counts is that of every training: Gaussian, on a grid, from a secret key, so that a release can be repeated. A
choice is made by opendp's noisy maximum, which computes with exact numbers.

Source: McKenna, Mullins, Sheldon & Miklau (2022), arXiv:2201.12677 (AIM); McKenna, Miklau & Sheldon (2021),
    arXiv:2108.04978 (MST).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...mechanisms.noise import Noise
from ..mechanisms import part_of_opendp
from .cells import Codes
from .chain import marginal
from .graph import Columns
from .plan import PlannedRelease
from .released import PublicSetup, Released


class Marginals:
    """Makes the releases of one generator, in the order of the plan.

    Args:
        codes: int64 (n, k), of at most ``public.rows`` rows of each person.
        fractions: bool (n, numbers): which numbers are not whole.
        public: what is public, the plan among it.
        key: 32 secret bytes.
        results: of the first releases, of a run that is resumed.

    Attributes:
        released: the results, and what follows from them alone.
    """

    def __init__(
        self,
        codes: Codes,
        fractions: NDArray[np.bool_],
        public: PublicSetup,
        key: bytes,
        results: Iterable[Mapping[str, Any]] = (),
    ):
        self._codes, self._fractions, self._noise = codes, fractions, Noise(key)
        self.released = Released(public)
        for result in results:
            self.released.take(result)

    def make(self) -> dict[str, Any]:
        """Makes the next release, and returns its result as plain values and tensors. Its event is in the ledger."""
        release = self.released.following
        if release.kind == "choice":
            result: dict[str, Any] = {"chosen": list(self._choose(release))}
        else:
            result = {"counts": self._counts(release)}
        self.released.take(result)
        return result

    def _counts(self, release: PlannedRelease) -> torch.Tensor:
        """Returns noisy counts, (cells of all marginals)."""
        known = self.released
        if release.kind == "one-way":
            sizes, num_marginals = known.public.sizes, known.public.num_one_way
            parts = [np.bincount(self._codes[:, i], minlength=size) for i, size in enumerate(sizes)]
            parts += [self._fractions.sum(0)]  # at most one more count for each number
        else:
            chosen, merged = known.to_measure(), known.merge(self._codes)
            parts, num_marginals = [marginal(merged, columns, known.sizes).ravel() for columns in chosen], len(chosen)
        counts = torch.from_numpy(np.concatenate(parts).astype(np.float64))
        self._noise.add_to(len(known.results), {"counts": counts}, known.public.stddev(release, num_marginals))
        return counts

    def _choose(self, release: PlannedRelease) -> Columns:
        """Returns a marginal that the model misses by much. Removing a row moves its distance by at most 1."""
        known = self.released
        candidates, merged = known.candidates(), known.merge(self._codes)
        weights, noise = [known.weight(columns) for columns in candidates], known.noise_of_chosen()
        scores = [
            weight * (np.abs(marginal(merged, columns, known.sizes) - guess).sum() - noise * guess.size)
            for weight, columns, guess in zip(weights, candidates, known.expected(candidates), strict=True)
        ]
        sensitivity = (1 + 1e-6) * known.public.rows * max(weights)  # more than the rounding of sums
        return candidates[exponential_mechanism(scores, sensitivity, release.noise)]


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
