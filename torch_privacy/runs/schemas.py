# SPDX-License-Identifier: Apache-2.0
"""Provides the schemas of a run folder's files, as data; that of ``privacy.json`` is published with the package."""

from typing import Any

RESULTS_FORMAT = 2  # of results.json: with digests. Files of format 1, without them and without this number, are read


def record(properties: dict[str, Any], *, optional: tuple[str, ...] = (), closed: bool = True) -> dict[str, Any]:
    """Returns the schema of an object with these entries, all required but the optional ones.

    A ``closed`` object has no others: we write it ourselves, and a version that adds entries changes the format.
    """
    required = [name for name in properties if name not in optional]
    found = {"type": "object", "required": required, "properties": properties}
    return {**found, "additionalProperties": False} if closed else found


def array(items: dict[str, Any], most: int, least: int = 0) -> dict[str, Any]:
    """Returns the schema of a list with ``least`` to ``most`` items."""
    return {"type": "array", "items": items, "maxItems": most, **({"minItems": least} if least else {})}


def by_name(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of an object with any names."""
    return {"type": "object", "additionalProperties": values}


NUMBER: dict[str, Any] = {"type": "number"}
OPTIONAL_NUMBER = {"type": ["number", "null"]}
SCORE = {"type": ["number", "null"], "minimum": -1e30, "maximum": 1e30}
COUNT = {"type": "integer", "minimum": 0, "maximum": 10**12}
TEXT = {"type": "string"}
TEXTS = array(TEXT, 10_000)
NAME = {"type": "string", "maxLength": 200}
FLAG = {"type": "boolean"}
SECONDS = {"type": "number", "minimum": 0, "maximum": 1e10}
RANKS = {"type": "integer", "minimum": 2, "maximum": 10**6}  # number of processes, if there were several
DIGEST = {"type": "string", "pattern": "[0-9a-f]{64}"}
DELTA = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
SEEDS = array({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, 10_000, least=1)
BOUNDS = record({"low": OPTIONAL_NUMBER, "high": OPTIONAL_NUMBER})
SHARE = {"type": "number", "minimum": -1e-6, "maximum": 1 + 1e-6}  # from 0 to 1, but for rounding
RATES = record({"low": SHARE, "high": SHARE})
RELEASES = array(
    record(
        {"event": record({"type": NAME}, closed=False), "count": {"type": "integer", "minimum": 1, "maximum": 10**9}}
    ),
    100_000,
    least=1,
)
MEASURE = record({"name": NAME, "percent": FLAG, "larger_is_better": FLAG}, optional=("percent", "larger_is_better"))
DIGESTS = {"format": {"const": RESULTS_FORMAT}, "check": DIGEST, "files": by_name(DIGEST)}
SETTING = {"type": ["number", "string", "boolean", "null", "array"], "maxItems": 10_000}
SETTINGS = {  # of a training; the checkpoint and the digest in results.json say what the values must be
    "type": "object",
    "properties": {
        "experiment": NAME,
        "model": NAME,  # this and the next four: of a training in a loop of one's own
        "num_trained_parameters": COUNT,
        "optimizer": NAME,
        "dataset": NAME,
        # What the releases depend on: a training goes on only with the same.
        "fixed": by_name({"type": [*SETTING["type"], "object"]}),
    },
    "additionalProperties": SETTING,
    "if": {"required": ["fixed"]},
    "then": {"required": ["model", "num_trained_parameters", "optimizer", "dataset"]},
}
PATHS = record(  # settings that are paths of the user
    {"file": TEXT, "schema": TEXT, "data": TEXT, "budget": TEXT}, optional=("file", "schema", "data", "budget")
)
REQUEST = record(  # the settings of an experiment
    {
        "reproduce": NAME,
        "quick": FLAG,
        "seeds": SEEDS,
        "data": {"type": ["string", "null"]},
        "only": TEXTS,
        "skip": TEXTS,
        "format": {"const": RESULTS_FORMAT},
        "check": DIGEST,
    },
    optional=("only", "skip", "format", "check"),
)
COUPLED = record(  # releases that may leak; see training/rehearsals.py
    {name: {"type": "integer", "minimum": 0} for name in ("first", "last", "found")}
)
ATTACKER = record(
    {
        "false_positive_rate": NUMBER,  # this and the next: of earlier files, without the others
        "true_positive_rate": RATES,
        "advantage": RATES,
        "mu": record({**BOUNDS["properties"], "errors_at_least": NUMBER, "regret": RATES}),
        "true_positive_rates": array(record({"false_positive_rate": NUMBER, **RATES["properties"]}), 100),
    },
    optional=("false_positive_rate", "true_positive_rate", "advantage", "mu", "true_positive_rates"),
)
PRIVACY = record(
    {
        "neighboring_relation": {"enum": ["add_or_remove_one", "replace_one", "replace_special"]},
        "sampler": TEXT,
        "noise_multiplier": NUMBER,
        "sampling_probability": NUMBER,
        "num_steps": COUNT,
        "releases": RELEASES,
        "delta": DELTA,
        "epsilon": BOUNDS,
        "clt": record({"epsilon": OPTIONAL_NUMBER, "mu": OPTIONAL_NUMBER, "note": TEXT}),
        "moments_accountant": record({"epsilon": OPTIONAL_NUMBER, "note": TEXT}),
        "attacker": ATTACKER,
    },
    optional=("noise_multiplier", "sampling_probability"),
)
SCORES = by_name(SCORE)
OWNERS = {"num_owners": {**COUNT, "minimum": 1}, "examples_per_owner": {**COUNT, "minimum": 1}}
OF_ANY_TRAINING = {
    "ranks": RANKS,
    "num_examples": {**COUNT, "minimum": 1},  # with owners that of owners: the number of examples is private
    **OWNERS,
    "num_test_examples": COUNT,
    "privacy": PRIVACY,
    **DIGESTS,
}
MEASURED = record(
    {"name": NAME, "value": NUMBER, "error": NUMBER, "baseline": OPTIONAL_NUMBER, "gain_error": OPTIONAL_NUMBER}
)
QUALITY = record(  # of a training on a table: scores on test rows, each with its standard error and a constant's
    {
        "rows": COUNT,
        "measures": array(MEASURED, 20),
        "warnings": TEXTS,
        "classes": TEXTS,
        "base_rates": array(NUMBER, 10_000),
        "positive": {"type": ["string", "null"]},
        "calibration": array(record({"predicted": NUMBER, "observed": NUMBER, "error": NUMBER, "count": COUNT}), 100),
    },
    optional=("rows", "measures", "warnings", "classes", "base_rates", "positive", "calibration"),
)
DECLARED = array(record({"column": TEXT, "declared": TEXT, "source": TEXT}), 20_000)
COEFFICIENTS = array(
    record({"column": TEXT, "value": TEXT, "class": {"type": ["string", "null"]}, "coefficient": NUMBER}), 10**6
)
OF_EXPERIMENT = record(
    {
        **OF_ANY_TRAINING,
        "experiment": NAME,
        "score": MEASURE,
        "test_score": SCORE,
        "baseline_test_score": SCORE,
        "quality": QUALITY,
        "declared": DECLARED,
        "coefficients": COEFFICIENTS,
        "diverged": array({"enum": ["private", "non-private"]}, 2),
        "seconds": record({"private": SECONDS, "non_private": SECONDS}),
    },
    optional=("ranks", *OWNERS, "quality", "declared", "coefficients", "diverged", "seconds", *DIGESTS),
    closed=False,
)
OF_LOOP = record(  # of a training in a loop of one's own
    {
        **OF_ANY_TRAINING,
        "model": NAME,
        "num_steps": {**COUNT, "minimum": 1},
        "num_steps_made": {**COUNT, "minimum": 1},
        "scores": SCORES,  # on test data, by name; null stands for one that is not finite
        "baseline_scores": SCORES,
        "diverged": FLAG,
    },
    optional=("ranks", *OWNERS, "num_test_examples", "check"),
)
ROW_NUMBERS = by_name(
    {
        "type": ["number", "null", "object"],
        "if": {"type": "object"},
        "then": record({"low": {"type": "number", "minimum": -1e300}, "high": NUMBER}),
    }
)
RATE = {"type": "number", "minimum": 0, "maximum": 1}
CURVE = array(array(RATE, 1000, least=2), 2, least=2)
OUTCOME = by_name(COUNT)
EPSILON = {"type": ["number", "null"], "minimum": 0}
AUDIT = record(
    {
        "games": {"enum": ["one run", "independent"]},
        "num_canaries": {**COUNT, "minimum": 1},
        "num_inside": COUNT,
        "outcome": OUTCOME,
        "outcome_ideal": OUTCOME,
        "significance": DELTA,
        "p_value": RATE,
        "rejected": FLAG,
        "delta": DELTA,
        "epsilon_claimed": EPSILON,
        "epsilon_low": EPSILON,
        "epsilon_low_any_mechanism": EPSILON,
        "epsilon_low_ideal": EPSILON,
        "sums": OUTCOME,
        "sums_ideal": OUTCOME,
        "epsilon_low_sums": EPSILON,
        "area_under_curve": RATE,
        "roc": CURVE,
        "claimed_curve": CURVE,
        "notes": TEXTS,
        **DIGESTS,
    },
    optional=(*DIGESTS, "sums", "sums_ideal", "epsilon_low_sums"),
)
ROW_RESULTS = record(  # of a row that is computed
    {"numbers": ROW_NUMBERS, "seconds": SECONDS, **DIGESTS}, optional=tuple(DIGESTS)
)
EXPERIMENT_RESULTS = record(
    {
        "reproduce": NAME,
        "paper": record({"authors": TEXT, "title": TEXT, "source": TEXT}, optional=("title", "source"), closed=False),
        "place": TEXT,
        "shows": {"type": "string", "pattern": "(?s).+"},
        "own_data": TEXT,  # name of data that are not the paper's
        "quick": FLAG,
        "seeds": SEEDS,
        "deltas": array(DELTA, 10_000),
        "only": TEXTS,
        "skip": TEXTS,
        "machine": TEXT,
        "ranks": RANKS,
        "versions": by_name(TEXT),
        "columns": by_name(
            record(
                {
                    "heading": TEXT,
                    "digits": {"type": "integer", "minimum": 0, "maximum": 30},
                    "percent": FLAG,
                    "scientific": FLAG,
                },
                optional=("digits", "percent", "scientific"),
            )
        ),
        "rows": array(
            record(
                {
                    "row": TEXT,
                    "seeded": FLAG,
                    "paper": by_name(OPTIONAL_NUMBER),
                    "runs": array(
                        record({"seed": COUNT, "numbers": ROW_NUMBERS, "seconds": SECONDS}, closed=False), 10_000
                    ),
                }
            ),
            10_000,
        ),
        "notes": TEXTS,
        **DIGESTS,
    },
    optional=("own_data", "deltas", "only", "skip", "ranks", "versions", *DIGESTS),
)
OF_SEARCH = {"type": "object", "required": ["epsilon", "delta", "noise_multiplier"]}  # its statement has the same
RESULTS = {  # of every kind, by an entry that only it has
    "reproduce": EXPERIMENT_RESULTS,
    "numbers": ROW_RESULTS,
    "scores": OF_LOOP,
    "score": OF_EXPERIMENT,
}
ANY_NUMBER = {"type": "any number", "minimum": -1e30, "maximum": 1e30}  # NaN where a training has diverged
METRICS = {  # by column of metrics.csv; an empty cell is null
    "training": {"enum": ["private", "non-private"]},
    "epoch": {"type": "number", "exclusiveMinimum": 0, "maximum": 1e12},
    "step": {"type": "integer", "minimum": 1, "maximum": 10**12},
    "loss": {"type": ["any number", "null"]},
    "train_score": {**ANY_NUMBER, "type": ["any number", "null"]},
    "test_score": {**ANY_NUMBER, "type": ["any number", "null"]},
    "epsilon_low": {"type": ["any number", "null"], "minimum": 0},
    "epsilon_high": {"type": ["any number", "null"], "minimum": 0},
}
SALT, SALT_BYTES = "salt", 16  # the last column, which earlier files lack
IN_JSON = {"type": ["number", "null", "string"], "pattern": "nan|-?inf"}  # JSON has no other numbers
LOG = record(  # of a training, in its state
    {
        "num_drawn": COUNT,
        "num_examples": {"type": "number", "minimum": 0, "maximum": 1e12},
        "loss_sum": {**IN_JSON, "type": ["number", "string"]},
        "score_sum": {**IN_JSON, "type": ["number", "string"]},
        "seconds": SECONDS,
        "rows": array(
            record(
                METRICS | dict.fromkeys(("loss", "train_score", "test_score", "epsilon_low", "epsilon_high"), IN_JSON)
            ),
            2**12,
        ),
    },
    optional=("score_sum", "seconds"),  # older states have none
)
