# SPDX-License-Identifier: Apache-2.0
"""Draws the calibration curve of a training on a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_privacy.runs.report.style import PAGE_FAINT
from torch_privacy.runs.report.training_plots import FIRST, as_svg, new_axes


def calibration_plots(results: Mapping[str, Any]) -> list[str]:
    """Returns the calibration curve as SVG: observed over predicted shares, with standard errors; [] if it has none."""
    quality = results.get("quality", {})
    curve = quality.get("calibration")
    if not curve:
        return []
    positive = quality.get("positive")
    what = "of the predicted class" if positive is None else f"of {positive!r}"
    figure, axes = new_axes("Calibration on the test rows", f"predicted probability {what}, %", "observed, %")
    predicted, observed, error = ([100 * one[name] for one in curve] for name in ("predicted", "observed", "error"))
    end = 1.08 * max(*predicted, *observed, 1e-6)
    axes.plot([0, end], [0, end], color=PAGE_FAINT, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.errorbar(predicted, observed, error, color=FIRST, marker="o", markersize=5, linewidth=1.2, capsize=2)
    axes.set(xlim=(0, end), ylim=(0, end))
    return [as_svg(figure)]
