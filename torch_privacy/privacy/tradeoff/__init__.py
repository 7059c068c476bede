# SPDX-License-Identifier: Apache-2.0
"""Provides trade-off functions: the smallest type II error of any test at a given type I error (f-DP).

A trade-off function and a privacy profile δ(ε) hold the same information: `TradeOff.delta` converts to the profile,
`FromProfile` converts back. Operations return new trade-off functions, metrics return numbers.
"""

from .base import Array as Array
from .base import Comparison as Comparison
from .base import TradeOff as TradeOff
from .base import compare as compare
from .bounds import from_bounds as from_bounds
from .bounds import of_profile as of_profile
from .closed_form import IDENTITY as IDENTITY
from .closed_form import EpsilonDelta as EpsilonDelta
from .closed_form import Gaussian as Gaussian
from .closed_form import Laplace as Laplace
from .duality import FromProfile as FromProfile
from .duality import Minimum as Minimum
from .duality import minimum as minimum
from .duality import symmetrized as symmetrized
from .group import group as group
from .jl import JL as JL
from .metrics import advantage as advantage
from .metrics import bayes_accuracy as bayes_accuracy
from .metrics import mu as mu
from .metrics import posterior as posterior
from .metrics import regret as regret
from .metrics import true_positive_rate as true_positive_rate
from .piecewise_linear import PiecewiseLinear as PiecewiseLinear
from .piecewise_linear import double_conjugate as double_conjugate
from .subsampled import Subsampled as Subsampled
from .subsampled import SubsampledInverse as SubsampledInverse
from .subsampled import subsampled as subsampled
from .tensor import enclosed as enclosed
from .tensor import tensor as tensor
