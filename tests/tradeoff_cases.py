# SPDX-License-Identifier: Apache-2.0
"""Provides trade-off functions to test with (hypothesis strategies), and grids of alpha and epsilon."""

import numpy as np
from hypothesis import strategies as st

from torch_privacy.privacy.tradeoff import (
    JL,
    EpsilonDelta,
    FromProfile,
    Gaussian,
    Laplace,
    PiecewiseLinear,
    minimum,
    subsampled,
    symmetrized,
)

ALPHA = np.concatenate([np.geomspace(1e-9, 1e-2, 30), np.linspace(0.01, 1, 200)])
EPSILON = np.concatenate([-np.geomspace(8, 0.01, 15), np.linspace(0, 12, 30)])


def dirichlet(seed, count=5):
    return PiecewiseLinear.from_masses(*np.random.default_rng(seed).dirichlet(np.ones(count), 2))


SIMPLE = st.one_of(
    st.builds(Gaussian, st.floats(0.05, 6)),
    st.builds(Laplace, st.floats(0.05, 6)),
    st.builds(EpsilonDelta, st.floats(0, 5), st.floats(0, 0.5)),
    st.builds(JL, st.floats(0.4, 4), st.integers(4, 64)),
    st.builds(dirichlet, st.integers(0, 10**6)),
)
PROBABILITY = st.floats(1e-3, 1)
SAMPLED = st.builds(subsampled, SIMPLE, PROBABILITY)
ANY = st.one_of(
    SIMPLE,
    SAMPLED,
    st.builds(lambda f: f.inverse(), SAMPLED),
    st.builds(symmetrized, SAMPLED),
    st.builds(minimum, SIMPLE, SIMPLE),
    st.builds(lambda f: FromProfile(f.delta, f.inverse().delta), SAMPLED),
)
SYMMETRIC = st.one_of(SIMPLE.filter(lambda f: f.inverse() is f), st.builds(symmetrized, SAMPLED))
