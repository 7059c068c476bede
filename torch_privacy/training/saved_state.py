# SPDX-License-Identifier: Apache-2.0
"""Checks the state of a training, as state_dict returns it, before any of it is used."""

from __future__ import annotations

from typing import Any

from ..mechanisms.base import Mechanism
from ..runs.schemas import COUPLED, LOG, TEXT, record
from ..sampling.fingerprint import STATE_FINGERPRINT
from ..support.schema import violation
from ..support.validate import Refused, quoted
from .schedule import WHERE
from .settings import TrainingSettings

KEY = {"type": "string", "pattern": "[0-9a-f]{64}"}
COUNT = {"type": "integer", "minimum": 0}
STATE = record(  # what state_dict returns; mechanism and ledger check their own parts further
    {
        "format": {"const": 1},
        "settings": {"type": "object"},
        "trained": {"type": "object"},
        "step_count": COUNT,
        "num_non_finite": COUNT,
        "moved_otherwise": {"type": "string"},
        "last_rehearsed": {"type": "integer", "minimum": -1},
        "coupled": {"oneOf": [COUPLED, {"type": "null"}]},
        "noise_key": KEY,
        "sampler_key": KEY,
        "ledger": {
            "type": "object",
            "required": ["ledger", "events", "releases"],
            "properties": {"releases": {"type": "array", "maxItems": 10**9}},
        },
        "machine": record(
            {**dict.fromkeys(("torch", "processor", "generator"), TEXT), "threads": {"type": "integer", "minimum": 1}}
        ),
        "num_lost": COUNT,
        "keys_since": COUNT,
        "placement": {"type": "string"},
        "losses": LOG,
        "data": STATE_FINGERPRINT,
        "clipping": {"type": "object"},
        "projections": {"type": ["string", "null"]},
    },
    optional=("losses", "data", "clipping", "projections"),
    closed=False,
)


def check_state(state: Any, settings: TrainingSettings, mechanism: Mechanism) -> None:
    """Refuses a state that no training has saved: other entries, types or numbers, or steps that no ledger holds."""
    wrong = violation(STATE, state)
    if not wrong and not _is_plain(state["settings"]):
        wrong = "settings must hold numbers, texts, lists and dictionaries"
    of_another = not wrong and any(state["settings"].get(key) != value for key, value in mechanism.settings().items())
    if not wrong and not of_another and (lacking := mechanism.state().keys() - state.keys()):
        wrong = f"it has no {quoted(sorted(lacking))}"
    if not wrong and state["step_count"] > settings.num_steps:
        wrong = f"step_count is {state['step_count']}: must be at most {settings.num_steps}"
    if not wrong:
        made, needed = len(state["ledger"]["releases"]), state["step_count"] + len(settings.prior_releases)
        wrong = f"the ledger holds {made} releases, and {needed} were made" if made < needed else ""
    if wrong:
        raise Refused(f"{WHERE}.load_state_dict: {wrong}. Load a state that state_dict returned.")


def _is_plain(value: Any, depth: int = 6) -> bool:
    """True for numbers, texts and None in lists and dictionaries of a few levels."""
    if isinstance(value, dict):
        return depth > 0 and all(isinstance(key, str) and _is_plain(part, depth - 1) for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return depth > 0 and all(_is_plain(part, depth - 1) for part in value)
    return value is None or type(value) in (int, float, str, bool)
