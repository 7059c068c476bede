# SPDX-License-Identifier: Apache-2.0
"""Trade-off functions: the smallest type II error of any test at a given type I error (f-differential privacy).

A trade-off function and a privacy profile δ(ε) are the same information: `TradeOff.delta` goes one way, `FromProfile`
the other. Operations make new trade-off functions, questions make numbers.
"""

from .base import Array as Array
from .base import Comparison as Comparison
from .base import TradeOff as TradeOff
from .base import compare as compare
from .bounds import from_bounds as from_bounds
from .bounds import of_profile as of_profile
from .closed import IDENTITY as IDENTITY
from .closed import EpsilonDelta as EpsilonDelta
from .closed import Gaussian as Gaussian
from .closed import Laplace as Laplace
from .dual import FromProfile as FromProfile
from .dual import Minimum as Minimum
from .dual import minimum as minimum
from .dual import symmetrized as symmetrized
from .pieces import PiecewiseLinear as PiecewiseLinear
from .pieces import double_conjugate as double_conjugate
from .projected import JL as JL
from .questions import advantage as advantage
from .questions import bayes_accuracy as bayes_accuracy
from .questions import mu as mu
from .questions import posterior as posterior
from .questions import true_positive_rate as true_positive_rate
from .sampled import Subsampled as Subsampled
from .sampled import SubsampledInverse as SubsampledInverse
from .sampled import subsampled as subsampled
from .tensor import enclosed as enclosed
from .tensor import tensor as tensor
