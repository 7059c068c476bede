# SPDX-License-Identifier: Apache-2.0
"""Clipping rules: the bound holds for every norm, and the sensitivity is the bound's."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_privacy.clipping import Flat
from torch_privacy.privacy import NeighboringRelation


@given(st.floats(1e-6, 1e6), st.lists(st.floats(0, 1e18), min_size=1, max_size=9))
def test_flat_never_exceeds_the_clip_norm(clip_norm, norms):
    norms = torch.tensor(norms, dtype=torch.float32)
    factors = Flat(clip_norm).factors(norms)
    assert ((factors >= 0) & (factors <= 1)).all()
    assert (factors.double() * norms.double() <= clip_norm * (1 + 1e-5)).all()
    assert (factors[norms < clip_norm * (1 - 1e-6)] == 1).all()


def test_flat_gives_zero_to_what_is_not_finite_and_one_to_zero():
    factors = Flat(2.0).factors(torch.tensor([math.inf, math.nan, 0.0]))
    assert factors.tolist() == [0.0, 0.0, 1.0]


def test_flat_sensitivity_doubles_under_replacement():
    assert [Flat(3.0).sensitivity(relation) for relation in NeighboringRelation] == [3.0, 6.0, 3.0]


@pytest.mark.parametrize("clip_norm", [0, -1.0, math.nan, math.inf, "1", True])
def test_flat_refuses_a_bad_clip_norm(clip_norm):
    with pytest.raises(ValueError, match=r"Flat: clip_norm="):
        Flat(clip_norm)
