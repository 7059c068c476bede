# SPDX-License-Identifier: Apache-2.0
"""Provides the schemas of a run folder's files, as data; that of ``privacy.json`` is published with the package."""

from typing import Any

RESULTS_FORMAT = 2  # of results.json: with digests. Files of format 1, without them and without this number, are read

NUMBER: dict[str, Any] = {"type": "number"}
OPTIONAL_NUMBER = {"type": ["number", "null"]}
SCORE = {"type": ["number", "null"], "minimum": -1e30, "maximum": 1e30}
COUNT = {"type": "integer", "minimum": 0, "maximum": 10**12}
TEXT = {"type": "string"}
TEXTS = {"type": "array", "items": TEXT, "maxItems": 10_000}
NAME = {"type": "string", "maxLength": 200}
FLAG = {"type": "boolean"}
SECONDS = {"type": "number", "minimum": 0, "maximum": 1e10}
RANKS = {"type": "integer", "minimum": 2, "maximum": 10**6}  # number of processes, if there were several
DIGEST = {"type": "string", "pattern": "[0-9a-f]{64}"}
DELTA = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
SEEDS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
    "minItems": 1,
    "maxItems": 10_000,
}


def record(properties: dict[str, Any], *, optional: tuple[str, ...] = (), closed: bool = False) -> dict[str, Any]:
    """Returns the schema of an object with these entries, all required but the optional ones.

    A ``closed`` object has no others: we write it ourselves, and a version that adds entries changes the format.
    """
    required = [name for name in properties if name not in optional]
    found = {"type": "object", "required": required, "properties": properties}
    return {**found, "additionalProperties": False} if closed else found


BOUNDS = record({"low": OPTIONAL_NUMBER, "high": OPTIONAL_NUMBER}, closed=True)
RATES = record(
    {
        "low": {"type": "number", "minimum": -1e-6, "maximum": 1 + 1e-6},
        "high": {"type": "number", "minimum": -1e-6, "maximum": 1 + 1e-6},
    },
    closed=True,
)
RELEASES = {
    "type": "array",
    "minItems": 1,
    "maxItems": 100_000,
    "items": record(
        {
            "event": record({"type": NAME}),
            "count": {"type": "integer", "minimum": 1, "maximum": 10**9},
        },
        closed=True,
    ),
}
MEASURE = record(
    {"name": NAME, "percent": FLAG, "larger_is_better": FLAG}, optional=("percent", "larger_is_better"), closed=True
)
DIGESTS = {
    "format": {"const": RESULTS_FORMAT},
    "check": DIGEST,
    "files": {"type": "object", "additionalProperties": DIGEST},
}
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
        "fixed": {"type": "object", "additionalProperties": {"type": [*SETTING["type"], "object"]}},
    },
    "additionalProperties": SETTING,
    "if": {"required": ["fixed"]},
    "then": {"required": ["model", "num_trained_parameters", "optimizer", "dataset"]},
}
PATHS = record(  # settings that are paths of the user
    {"file": TEXT, "schema": TEXT, "data": TEXT, "budget": TEXT},
    optional=("file", "schema", "data", "budget"),
    closed=True,
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
    closed=True,
)
COUPLED = record(  # releases that may leak; see training/rehearsals.py
    {name: {"type": "integer", "minimum": 0} for name in ("first", "last", "found")}, closed=True
)
ATTACKER = record(
    {
        "false_positive_rate": NUMBER,  # this and the next: of earlier files, without the others
        "true_positive_rate": RATES,
        "advantage": RATES,
        "mu": record({**BOUNDS["properties"], "errors_at_least": NUMBER, "regret": RATES}, closed=True),
        "true_positive_rates": {
            "type": "array",
            "maxItems": 100,
            "items": record({"false_positive_rate": NUMBER, **RATES["properties"]}, closed=True),
        },
    },
    optional=("false_positive_rate", "true_positive_rate", "advantage", "mu", "true_positive_rates"),
    closed=True,
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
        "clt": record({"epsilon": OPTIONAL_NUMBER, "mu": OPTIONAL_NUMBER, "note": TEXT}, closed=True),
        "moments_accountant": record({"epsilon": OPTIONAL_NUMBER, "note": TEXT}, closed=True),
        "attacker": ATTACKER,
    },
    optional=("noise_multiplier", "sampling_probability"),
    closed=True,
)
SCORES = {"type": "object", "additionalProperties": SCORE}
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
    {"name": NAME, "value": NUMBER, "error": NUMBER, "baseline": OPTIONAL_NUMBER, "gain_error": OPTIONAL_NUMBER},
    closed=True,
)
QUALITY = record(  # of a training on a table: scores on test rows, each with its standard error and a constant's
    {
        "rows": COUNT,
        "measures": {"type": "array", "items": MEASURED, "maxItems": 20},
        "warnings": TEXTS,
        "classes": TEXTS,
        "base_rates": {"type": "array", "items": NUMBER, "maxItems": 10_000},
        "positive": {"type": ["string", "null"]},
        "calibration": {
            "type": "array",
            "maxItems": 100,
            "items": record({"predicted": NUMBER, "observed": NUMBER, "error": NUMBER, "count": COUNT}, closed=True),
        },
    },
    optional=("rows", "measures", "warnings", "classes", "base_rates", "positive", "calibration"),
    closed=True,
)
DECLARED = {
    "type": "array",
    "maxItems": 20_000,
    "items": record({"column": TEXT, "declared": TEXT, "source": TEXT}, closed=True),
}
COEFFICIENTS = {
    "type": "array",
    "maxItems": 10**6,
    "items": record(
        {"column": TEXT, "value": TEXT, "class": {"type": ["string", "null"]}, "coefficient": NUMBER}, closed=True
    ),
}
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
        "diverged": {"type": "array", "items": {"enum": ["private", "non-private"]}, "maxItems": 2},
        "seconds": record({"private": SECONDS, "non_private": SECONDS}, closed=True),
    },
    optional=("ranks", *OWNERS, "quality", "declared", "coefficients", "diverged", "seconds", *DIGESTS),
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
    closed=True,
)
ROW_NUMBERS = {
    "type": "object",
    "additionalProperties": {
        "type": ["number", "null", "object"],
        "if": {"type": "object"},
        "then": record({"low": {"type": "number", "minimum": -1e300}, "high": NUMBER}, closed=True),
    },
}
RATE = {"type": "number", "minimum": 0, "maximum": 1}
CURVE = {
    "type": "array",
    "minItems": 2,
    "maxItems": 2,
    "items": {"type": "array", "items": RATE, "minItems": 2, "maxItems": 1000},
}
OUTCOME = {"type": "object", "additionalProperties": COUNT}
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
    closed=True,
)
ROW_RESULTS = record(  # of a row that is computed
    {"numbers": ROW_NUMBERS, "seconds": SECONDS, **DIGESTS}, optional=tuple(DIGESTS), closed=True
)
EXPERIMENT_RESULTS = record(
    {
        "reproduce": NAME,
        "paper": record({"authors": TEXT, "title": TEXT, "source": TEXT}, optional=("title", "source")),
        "place": TEXT,
        "shows": {"type": "string", "pattern": "(?s).+"},
        "own_data": TEXT,  # name of data that are not the paper's
        "quick": FLAG,
        "seeds": SEEDS,
        "deltas": {"type": "array", "items": DELTA, "maxItems": 10_000},
        "only": TEXTS,
        "skip": TEXTS,
        "machine": TEXT,
        "ranks": RANKS,
        "versions": {"type": "object", "additionalProperties": TEXT},
        "columns": {
            "type": "object",
            "additionalProperties": record(
                {
                    "heading": TEXT,
                    "digits": {"type": "integer", "minimum": 0, "maximum": 30},
                    "percent": FLAG,
                    "scientific": FLAG,
                },
                optional=("digits", "percent", "scientific"),
                closed=True,
            ),
        },
        "rows": {
            "type": "array",
            "maxItems": 10_000,
            "items": record(
                {
                    "row": TEXT,
                    "seeded": FLAG,
                    "paper": {"type": "object", "additionalProperties": OPTIONAL_NUMBER},
                    "runs": {
                        "type": "array",
                        "maxItems": 10_000,
                        "items": record({"seed": COUNT, "numbers": ROW_NUMBERS, "seconds": SECONDS}),
                    },
                },
                closed=True,
            ),
        },
        "notes": TEXTS,
        **DIGESTS,
    },
    optional=("own_data", "deltas", "only", "skip", "ranks", "versions", *DIGESTS),
    closed=True,
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
IN_JSON = {"type": ["number", "null", "string"], "pattern": "nan|-?inf"}  # JSON has no other numbers
LOG = record(  # of a training, in its state
    {
        "num_drawn": COUNT,
        "num_examples": {"type": "number", "minimum": 0, "maximum": 1e12},
        "loss_sum": {**IN_JSON, "type": ["number", "string"]},
        "score_sum": {**IN_JSON, "type": ["number", "string"]},
        "seconds": SECONDS,
        "rows": {
            "type": "array",
            "maxItems": 2**12,
            "items": record(
                METRICS | dict.fromkeys(("loss", "train_score", "test_score", "epsilon_low", "epsilon_high"), IN_JSON),
                closed=True,
            ),
        },
    },
    optional=("score_sum", "seconds"),  # older states have none
    closed=True,
)
