# SPDX-License-Identifier: Apache-2.0
"""What was released, and what it costs: events, profiles with certified bounds, calibration and the ledger."""

from . import tradeoff as tradeoff
from .approximate import CLT as CLT
from .approximate import clt as clt
from .approximate import moments as moments
from .approximate import rdp as rdp
from .approximate import sampled_epsilon as sampled_epsilon
from .approximate import scaled_epsilon as scaled_epsilon
from .approximate import strong_composition as strong_composition
from .calibrate import calibrate as calibrate
from .compose import Profile as Profile
from .compose import compose as compose
from .curve import Bracket as Bracket
from .event import Event as Event
from .event import NeighboringRelation as NeighboringRelation
from .event import event_from_dict as event_from_dict
from .event import event_to_dict as event_to_dict
from .event import priced as priced
from .gaussian import FixedSizeGaussian as FixedSizeGaussian
from .gaussian import Gaussian as Gaussian
from .gaussian import NoisyCovariance as NoisyCovariance
from .gaussian import SubsampledAdaptiveClip as SubsampledAdaptiveClip
from .gaussian import SubsampledBlocks as SubsampledBlocks
from .gaussian import SubsampledGaussian as SubsampledGaussian
from .gaussian import SubsampledGEP as SubsampledGEP
from .interop import from_dp_event as from_dp_event
from .interop import ledger_from_dp_event as ledger_from_dp_event
from .interop import statement_schema as statement_schema
from .interop import to_dp_event as to_dp_event
from .ledger import Ledger as Ledger
from .sketch import SubsampledJL as SubsampledJL
from .sketch import SubsampledSketch as SubsampledSketch
from .sketch import SubsampledSketchConjectured as SubsampledSketchConjectured
