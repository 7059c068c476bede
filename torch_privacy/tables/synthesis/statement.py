# SPDX-License-Identifier: Apache-2.0
"""States the privacy of a generator, as plain data in the format of a training's statement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ... import privacy
from ...mechanisms.noise import generators
from ...privacy.events.base import releases_to_json
from ...privacy.spent import ALWAYS_PUBLIC, NEVER_COVERED
from ...privacy.summary import attacker_as_json, interval_as_json
from ...support.units import now
from ...training.statement import versions
from .plan import RELATION, SynthesisSettings

POST_PROCESSING = (
    "Any number of rows may be drawn from the generator, now or later, by anyone who has generator.safetensors and "
    "schema.toml: they are a function of the releases above and of public random numbers, so that they cost no more "
    "epsilon (post-processing)."
)
NOT_COVERED = (
    "the number of rows of the table",
    "the page synthesis.html: exact comparisons with real rows, and models that are trained to compare",
)


def of_marginals(
    settings: SynthesisSettings, ledger: privacy.Ledger, num_units: int, data_budget: dict[str, Any]
) -> dict[str, Any]:
    """Returns the statement on noisy marginals of ``num_units`` rows or people, and on the choices between them."""
    profile, rows = ledger.profile(), settings.per_owner or 1
    noises = [event.noise_multiplier for event, _ in ledger.events if isinstance(event, privacy.Gaussian)]
    return {
        "format": 2,
        "date": now(),
        "private": True,
        "neighboring_relation": RELATION.value,
        "sampler": ledger.events[-1][0].sampler,  # of the counts; what was learnt of the schema has its own
        "unit": settings.protected,
        **(
            {"num_examples": num_units}
            if settings.per_owner is None
            else {"owner": settings.unit, "num_owners": num_units, "examples_per_owner": rows}
        ),
        "expected_batch_size": num_units,
        "sampling_probability": 1.0,
        "num_steps_planned": len(ledger),
        "num_steps_made": len(ledger),
        "stop": {"independent_of_data": False, "reason": None},
        "clipping": {"rule": "Counts", "rows_per_person": rows},
        "sensitivity": float(rows),
        "noise_multiplier": min(noises),
        "noise": "Gaussian, float64 on a grid, key from the operating system: "
        f"{generators([torch.zeros(1)])}; choices by opendp's noisy maximum",
        "target_epsilon": settings.epsilon,
        "budget": None,
        **data_budget,
        "delta": settings.delta,
        "epsilon": interval_as_json(profile.epsilon(settings.delta)),
        "attacker": attacker_as_json(profile),
        "releases": releases_to_json(ledger.events),
        "treated_as_public": ["num_examples" if settings.per_owner is None else "num_owners", *ALWAYS_PUBLIC],
        "not_covered": [*NEVER_COVERED],
        "versions": versions(),
    }


def with_generator(
    statement: dict[str, Any], settings: SynthesisSettings, not_covered: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns a statement with what it says of the generator and of the rows that are drawn from it."""
    return {
        **statement,
        "unit": settings.protected,
        "treated_as_public": [*statement["treated_as_public"], "what the schema declares"],
        "not_covered": [*statement["not_covered"], *NOT_COVERED, *not_covered],
        "synthetic_rows": {"generator": settings.generator, "post_processing": POST_PROCESSING},
    }
