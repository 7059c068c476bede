# SPDX-License-Identifier: Apache-2.0
"""Provides differential privacy accounting: events, profiles with certified bounds, calibration and the ledger.

This folder needs numpy and scipy alone.
"""

from . import tradeoff as tradeoff
from .approximate import CLT as CLT
from .approximate import clt as clt
from .approximate import clt_noise as clt_noise
from .approximate import moments as moments
from .approximate import moments_delta as moments_delta
from .approximate import moments_noise as moments_noise
from .approximate import moments_of as moments_of
from .approximate import rdp as rdp
from .approximate import rdp_noise as rdp_noise
from .approximate import rdp_of as rdp_of
from .approximate import sampled_epsilon as sampled_epsilon
from .approximate import scaled_epsilon as scaled_epsilon
from .approximate import strong_composition as strong_composition
from .bracket import Bracket as Bracket
from .budget import Budget as Budget
from .budget import DataBudget as DataBudget
from .calibrate import calibrate as calibrate
from .calibrate import calibrate_schedule as calibrate_schedule
from .calibrate import fewest_projections as fewest_projections
from .calibrate import largest_sampling_probability as largest_sampling_probability
from .calibrate import most_steps as most_steps
from .compose import Profile as Profile
from .compose import compose as compose
from .correlated import Workload as Workload
from .correlated import best_coefficients as best_coefficients
from .correlated import mean_error as mean_error
from .events.banded import BandedGaussian as BandedGaussian
from .events.base import Event as Event
from .events.base import NeighboringRelation as NeighboringRelation
from .events.base import event_from_dict as event_from_dict
from .events.base import event_to_dict as event_to_dict
from .events.base import priced as priced
from .events.concentrated import ZeroConcentrated as ZeroConcentrated
from .events.counts import Laplace as Laplace
from .events.counts import RandomizedResponse as RandomizedResponse
from .events.custom import FinitePair as FinitePair
from .events.custom import KnownProfile as KnownProfile
from .events.epochs import BallsAndBins as BallsAndBins
from .events.epochs import LaterBatch as LaterBatch
from .events.epochs import in_bins as in_bins
from .events.estimated_norms import SubsampledJL as SubsampledJL
from .events.gaussian import FixedSizeGaussian as FixedSizeGaussian
from .events.gaussian import Gaussian as Gaussian
from .events.gaussian import NoisyCovariance as NoisyCovariance
from .events.gaussian import SubsampledBlocks as SubsampledBlocks
from .events.gaussian import SubsampledGaussian as SubsampledGaussian
from .events.gaussian import SubsampledGEP as SubsampledGEP
from .events.gaussian import TruncatedGaussian as TruncatedGaussian
from .events.gaussian import truncated as truncated
from .events.groups import SubsampledGroup as SubsampledGroup
from .events.groups import for_group as for_group
from .interop import from_dp_event as from_dp_event
from .interop import ledger_from_dp_event as ledger_from_dp_event
from .interop import releases_from_opacus as releases_from_opacus
from .interop import statement_schema as statement_schema
from .interop import to_dp_event as to_dp_event
from .ledger import Ledger as Ledger
from .ledger import Release as Release
from .persons import Persons as Persons
from .persons import compare_persons as compare_persons
from .selection import Repeated as Repeated
