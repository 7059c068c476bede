# SPDX-License-Identifier: Apache-2.0
"""Tests how curves are combined."""

import pytest

from torch_privacy.privacy.engines.combine import Envelope
from torch_privacy.privacy.engines.curve import ClosedFormCurve
from torch_privacy.privacy.pairs.gaussian import SubsampledGaussianPair


@pytest.mark.parametrize("shifts", [(0.5, 1.0), (1.0, 0.5)])
def test_an_envelope_has_the_largest_bounds_in_any_order(shifts):
    curves = [ClosedFormCurve(SubsampledGaussianPair(shift, 1.0), swapped=False) for shift in shifts]
    envelope, largest = Envelope(curves, curves), max(curve.epsilon(1e-5) for curve in curves)
    assert envelope.epsilon(1e-5) == largest
    assert envelope.epsilon_high(1e-5) == largest.high
