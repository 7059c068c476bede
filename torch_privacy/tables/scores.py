# SPDX-License-Identifier: Apache-2.0
"""Scores predictions on held-out rows: each score with its standard error, beside what a constant would reach.

Every score is smooth in the distribution of the rows, so that its error follows from *influences*: numbers psi_i with
``score(sample) - score = mean(psi) + o(1/√n)``. The standard error is ``√(Σ psi_i²) / n``; where several rows belong to
one person, their influences are summed first, since such rows are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .threshold import Threshold, positive

Array = NDArray[Any]

BINS = 10  # of the calibration curve, with nearly equal numbers of rows
WHAT_HELPS = "Take more rows or a larger epsilon, or declare what is public in a schema."
ERRORS = 2.0  # standard errors that a score must be better than a constant's
SMALLEST = 1e-15  # probability, below which the logarithm is not taken


@dataclass(frozen=True)
class Measured:
    """One score: its value, standard error, and the value and advantage of the best constant."""

    name: str
    value: float
    error: float
    baseline: float | None = None  # of the best constant on the same rows
    gain_error: float | None = None  # standard error of the difference from the baseline, on the same rows


def scores_of_classes(
    probabilities: Array,
    targets: Array,
    classes: Sequence[str],
    *,
    threshold: Threshold | None = None,
    owners: Array | None = None,
) -> dict[str, Any]:
    """Returns scores of a classification as plain data, for ``results.json``.

    Accuracy, balanced accuracy (mean over the classes of the share recognized), AUC (chance that a row of the class has
    a larger probability of it than a row of another; of more than two classes, the mean over the classes), log loss
    (mean of ``-log p(class)``) and calibration error (mean over bins of ``|predicted - observed|``). The constant
    predicts the shares of the classes on these rows.

    Args:
        probabilities: float64 (n, classes), rows of which add up to 1.
        targets: int (n,), the place of each row's class.
        classes: their names.
        threshold: decides the class for accuracies; by default the most probable one is predicted.
        owners: (n,), the person of each row.

    Returns:
        ``{"rows", "classes", "base_rates", "positive", "measures": [...], "calibration": [...], "warnings": [...]}``.
    """
    p, y, n, k = np.asarray(probabilities, np.float64), np.asarray(targets), len(targets), len(classes)
    shares = np.bincount(y, minlength=k) / n
    predicted = p.argmax(1) if threshold is None else threshold.decide(p)
    right, major = (predicted == y).astype(float), int(shares.argmax())
    losses = -np.log(np.maximum(p[np.arange(n), y], SMALLEST))
    base = -np.log(np.maximum(shares, SMALLEST))[y]
    present = np.flatnonzero(shares)

    def measured(name: str, each: Array, baseline: Array | None = None, constant: float | None = None) -> Measured:
        error = _error(each - each.mean(), owners)
        if baseline is None:
            return Measured(name, float(each.mean()), error, constant)
        gain = each - baseline
        return Measured(name, float(each.mean()), error, float(baseline.mean()), _error(gain - gain.mean(), owners))

    accuracy = measured("accuracy", right, (y == major).astype(float))
    recalls = np.array([right[y == i].mean() if shares[i] else 0.0 for i in range(k)])
    balanced = recalls[present].mean() + (right - recalls[y]) / (len(present) * shares[y])
    log_loss = measured("log loss", losses, base)
    measures = [accuracy, measured("balanced accuracy", balanced, constant=1 / len(present))]
    if len(present) > 1:
        areas = [_area(p[:, i], y == i) for i in (present if k > 2 else [positive(classes)])]
        measures.append(measured("AUC", np.mean(areas, 0), constant=0.5))
    shown, happened = (p[:, positive(classes)], y == positive(classes)) if k == 2 else (p.max(1), p.argmax(1) == y)
    curve, gap = _calibration(shown, happened.astype(float), owners)
    measures += [log_loss, measured("calibration error", gap)]
    return {
        "rows": n,
        "classes": list(classes),
        "base_rates": shares.tolist(),
        "positive": classes[positive(classes)] if k == 2 else None,
        "measures": [asdict(one) for one in measures],
        "calibration": curve,
        "warnings": _warnings_of_classes(p, y, classes, shares, accuracy, log_loss, threshold),
    }


def scores_of_numbers(predicted: Array, targets: Array, *, owners: Array | None = None) -> dict[str, Any]:
    """Returns scores of a regression as plain data: R², RMSE and mean absolute error.

    The constants are the mean of these rows, and for the absolute error their median.

    Args:
        predicted: float64 (n,), in the unit of the target.
        targets: float64 (n,).
        owners: (n,), the person of each row.
    """
    y, n = np.asarray(targets, np.float64), len(targets)
    errors = y - np.asarray(predicted, np.float64)
    variance, mean_square = float(y.var()), float((errors**2).mean())
    absolute, from_median = abs(errors), abs(y - np.median(y))
    measures = [
        Measured(
            "RMSE",
            math.sqrt(mean_square),
            _error(errors**2 - mean_square, owners) / max(2 * math.sqrt(mean_square), SMALLEST),
            math.sqrt(variance),
        ),
        Measured(
            "mean absolute error",
            float(absolute.mean()),
            _error(absolute - absolute.mean(), owners),
            float(from_median.mean()),
        ),
    ]
    warnings = []
    if not variance > 0:
        warnings.append(
            f"All {n:,} test rows have the same target, {y[0]:.4g}, so that scores say nothing. The bounds of the "
            "target clip what lies beyond: see schema.toml."
        )
    else:
        ratio = mean_square / variance
        squared = Measured("R²", 1 - ratio, _error((errors**2 - ratio * (y - y.mean()) ** 2) / variance, owners), 0.0)
        measures.insert(0, squared)
        if not squared.value > 0:
            warnings.append(
                f"The model is no better than a constant: R² is {_text(squared)}, and 0 is that of the mean of the "
                f"test rows. {WHAT_HELPS}"
            )
        elif not squared.value > ERRORS * squared.error:
            warnings.append(
                f"The {n:,} test rows do not show that the model is better than a constant: R² is {_text(squared)}, "
                f"which is less than two standard errors from 0. {WHAT_HELPS}"
            )
    return {"rows": n, "measures": [asdict(one) for one in measures], "warnings": warnings}


def _error(influences: Array, owners: Array | None) -> float:
    """Returns the standard error of a mean with these influences."""
    if owners is not None:
        _, codes = np.unique(owners, return_inverse=True)
        return float(np.sqrt((np.bincount(codes, influences) ** 2).sum()) / len(influences))
    return float(np.sqrt((influences**2).sum()) / len(influences))


def _area(chances: Array, happened: Array) -> Array:
    """Returns numbers, (n,), with the area under the ROC curve as mean and its influences as deviations (DeLong)."""
    m, n = int(happened.sum()), len(happened)
    above = np.empty(n)  # of a row, the rows of the other group below it, ties by half
    for group in (happened, ~happened):
        others = np.sort(chances[~group])
        below, up_to = (np.searchsorted(others, chances[group], side) for side in ("left", "right"))
        above[group] = (below + up_to) / 2
    placements = np.where(happened, above / (n - m), 1 - above / m)
    area = placements[happened].mean()
    return area + (placements - area) / np.where(happened, m / n, 1 - m / n)


def _calibration(chances: Array, happened: Array, owners: Array | None) -> tuple[list[dict[str, Any]], Array]:
    """Returns the calibration curve, and numbers with the calibration error as mean."""
    ends = np.unique(np.quantile(chances, np.linspace(0, 1, BINS + 1)))
    bins = np.clip(np.searchsorted(ends, chances, side="right") - 1, 0, max(len(ends) - 2, 0))
    curve, gap = [], np.zeros(len(chances))
    for place in np.unique(bins):
        chosen = bins == place
        predicted, observed = float(chances[chosen].mean()), float(happened[chosen].mean())
        error = _error(happened[chosen] - observed, None if owners is None else owners[chosen])
        curve.append({"predicted": predicted, "observed": observed, "error": error, "count": int(chosen.sum())})
        gap[chosen] = np.sign(predicted - observed) * (chances[chosen] - happened[chosen])
    return curve, gap


def _warnings_of_classes(
    p: Array,
    y: Array,
    classes: Sequence[str],
    shares: Array,
    accuracy: Measured,
    log_loss: Measured,
    threshold: Threshold | None,
) -> list[str]:
    """Returns sentences on scores that say less than they seem to."""
    most = classes[int(shares.argmax())]
    assert accuracy.baseline is not None
    assert log_loss.baseline is not None
    assert log_loss.gain_error is not None
    gain = log_loss.baseline - log_loss.value
    if not gain > 0:
        return [
            f"The model is no better than the base rate: its log loss is {_text(log_loss)}, and the shares of the "
            f"classes alone have {log_loss.baseline:.3f}. {WHAT_HELPS}"
        ]
    if not gain > ERRORS * log_loss.gain_error:
        return [
            f"The {len(y):,} test rows do not show that the model is better than the base rate: its log loss is "
            f"smaller by {gain:.3f} ± {log_loss.gain_error:.3f}, which is less than two standard errors. {WHAT_HELPS}"
        ]
    if threshold is not None or accuracy.value - accuracy.baseline > ERRORS * (accuracy.gain_error or 0.0):
        return []
    said = f"Accuracy says little here: always {most!r} has {100 * accuracy.baseline:.1f} %."
    if len(classes) > 2:
        return [f"{said} See AUC, balanced accuracy and log loss."]
    place = positive(classes) if most != classes[positive(classes)] else 1 - positive(classes)
    at = float(f"{max(shares[place], 1e-6):.2g}")
    chosen = Threshold(place, at).decide(p) == place
    found = chosen[y == place].mean() if shares[place] else 0.0
    return [
        f"{said} See AUC, balanced accuracy and log loss. With --threshold '{classes[place]}={at:g}' the model says "
        f"{classes[place]!r} for {100 * chosen.mean():.1f} % of the test rows, and for {100 * found:.0f} % "
        "of those that have it."
    ]


def _text(measured: Measured) -> str:
    return f"{measured.value:.3f} ± {measured.error:.3f}"
