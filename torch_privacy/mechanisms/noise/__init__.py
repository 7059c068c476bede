# SPDX-License-Identifier: Apache-2.0
"""Noise from cryptographic generators, on a grid: a function of key, step and place."""

from .banded import BandedNoise as BandedNoise
from .banded import InverseBandedNoise as InverseBandedNoise
from .chunks import MIN_STDDEV as MIN_STDDEV
from .chunks import grid_unit as grid_unit
from .gaussian import Noise as Noise
from .gaussian import generators as generators
from .gaussian import is_made_here as is_made_here
from .gaussian import key_from_test_seed as key_from_test_seed
from .processor import KEY_BYTES as KEY_BYTES
from .tail import SMALLEST_TAIL as SMALLEST_TAIL
from .tail import TailNoise as TailNoise
from .tail import TailNumbers as TailNumbers
