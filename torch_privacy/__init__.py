# SPDX-License-Identifier: Apache-2.0
"""Trains PyTorch models with differential privacy: exact per-example gradients, certified accounting."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .support.version import __version__ as __version__

if TYPE_CHECKING:
    from . import huggingface as huggingface
    from . import privacy as privacy
    from .jacobian.public_record import record as record
    from .jacobian.rows.operator import Jacobian as Jacobian
    from .mechanisms.clipping import Adaptive as Adaptive
    from .mechanisms.clipping import Automatic as Automatic
    from .mechanisms.clipping import ClippingRule as ClippingRule
    from .mechanisms.clipping import EachLayer as EachLayer
    from .mechanisms.clipping import Flat as Flat
    from .mechanisms.clipping import Groups as Groups
    from .mechanisms.clipping import MicroBatches as MicroBatches
    from .mechanisms.clipping import PerLayer as PerLayer
    from .mechanisms.clipping import median_norm as median_norm
    from .mechanisms.estimated_norms.norms import estimate_norms as estimate_norms
    from .mechanisms.estimated_norms.settings import Sketched as Sketched
    from .mechanisms.gep.anchors import AnchorSubspace as AnchorSubspace
    from .mechanisms.gep.settings import BGEP as BGEP
    from .mechanisms.gep.settings import GEP as GEP
    from .mechanisms.votes import GNMax as GNMax
    from .mechanisms.votes import teachers_of as teachers_of
    from .model_check import Checkup as Checkup
    from .model_check import check as check
    from .privacy.audit import Audit as Audit
    from .privacy.audit import audit_scores as audit_scores
    from .privacy.budget import Budget as Budget
    from .privacy.loop_audit import LoopAudit as LoopAudit
    from .privacy.planning import plan as plan
    from .runs.report.model_card import model_card as model_card
    from .runs.verify import Verification as Verification
    from .runs.verify import verify as verify
    from .sampling.canaries import GradientCanaries as GradientCanaries
    from .sampling.caps import at_most as at_most
    from .sampling.examples import Examples as Examples
    from .sampling.fingerprint import matches_fingerprint as matches_fingerprint
    from .sampling.text_canaries import TextCanaries as TextCanaries
    from .support.validate import Refused as Refused
    from .training.audit import audit as audit
    from .training.averaging import MovingAverage as MovingAverage
    from .training.bound_data import bind_data as bind_data
    from .training.callbacks import Callback as Callback
    from .training.callbacks import StepLog as StepLog
    from .training.canaries import Observed as Observed
    from .training.correlation import Banded as Banded
    from .training.loop import PrivateTraining as PrivateTraining
    from .training.loop_trial import LoopTrial as LoopTrial
    from .training.loop_trial import audit_loop as audit_loop
    from .training.monitors import LoggingCallback as LoggingCallback
    from .training.monitors import TensorBoardCallback as TensorBoardCallback
    from .training.own_noise import OwnNoise as OwnNoise
    from .training.pca import PrivatePCA as PrivatePCA
    from .training.sampling import BallsAndBins as BallsAndBins
    from .training.sampling import Poisson as Poisson
    from .training.sampling import Truncated as Truncated
    from .training.sampling import Varying as Varying
    from .training.search import Found as Found
    from .training.search import search_privately as search_privately
    from .training.secret_file import load_secret as load_secret
    from .training.secret_file import save_secret as save_secret
    from .training.settings import Performance as Performance
    from .training.statement import Spent as Spent

# The public names, imported when first asked for: `torch_privacy.privacy` and the command's help never wait for torch.
_HOME = {
    "Adaptive": "mechanisms.clipping",
    "AnchorSubspace": "mechanisms.gep",
    "Audit": "privacy.audit",
    "Automatic": "mechanisms.clipping",
    "BGEP": "mechanisms.gep",
    "BallsAndBins": "training.sampling",
    "Banded": "training.correlation",
    "Budget": "privacy.budget",
    "Callback": "training.callbacks",
    "Checkup": "model_check",
    "ClippingRule": "mechanisms.clipping",
    "EachLayer": "mechanisms.clipping",
    "Flat": "mechanisms.clipping",
    "Examples": "sampling.examples",
    "Found": "training.search",
    "GEP": "mechanisms.gep",
    "GNMax": "mechanisms.votes",
    "GradientCanaries": "sampling.canaries",
    "Groups": "mechanisms.clipping",
    "Jacobian": "jacobian",
    "LoggingCallback": "training.monitors",
    "LoopAudit": "privacy.loop_audit",
    "LoopTrial": "training.loop_trial",
    "MicroBatches": "mechanisms.clipping",
    "MovingAverage": "training",
    "Observed": "training.canaries",
    "OwnNoise": "training.own_noise",
    "PerLayer": "mechanisms.clipping",
    "Poisson": "training.sampling",
    "Performance": "training.settings",
    "PrivatePCA": "training.pca",
    "PrivateTraining": "training",
    "Refused": "support.validate",
    "Sketched": "mechanisms.estimated_norms",
    "Spent": "training",
    "StepLog": "training.callbacks",
    "TensorBoardCallback": "training.monitors",
    "TextCanaries": "sampling.text_canaries",
    "Truncated": "training.sampling",
    "Varying": "training.sampling",
    "Verification": "runs.verify",
    "at_most": "sampling.caps",
    "audit": "training.audit",
    "audit_loop": "training.loop_trial",
    "audit_scores": "privacy.audit",
    "bind_data": "training.bound_data",
    "check": "model_check",
    "estimate_norms": "mechanisms.estimated_norms",
    "load_secret": "training.secret_file",
    "matches_fingerprint": "sampling.fingerprint",
    "median_norm": "mechanisms.clipping",
    "model_card": "runs.report.model_card",
    "plan": "privacy.planning",
    "record": "jacobian",
    "save_secret": "training.secret_file",
    "search_privately": "training.search",
    "teachers_of": "mechanisms.votes",
    "verify": "runs.verify",
}
__all__ = sorted([*_HOME, "privacy"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in ("huggingface", "privacy"):
        return import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
