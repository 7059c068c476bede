# SPDX-License-Identifier: Apache-2.0
"""Provides the colors and matplotlib settings of all figures, for files of their own and inside a page."""

from typing import Any

FILE_INK, FILE_FAINT = "#1c1c1c", "#8a8a8a"
FILE_COLORS = ("#0067a8", "#b84a00", "#00785a", "#8a4f9e", "#6b5b00", "#a3002c")  # distinct for the color-blind, too

# Inside a page each color stands for a variable of the style sheet, which replaces it in the finished SVG.
PAGE_INK, PAGE_FAINT = "#010101", "#020202"
PAGE_COLORS = ("#030303", "#040404", "#050505", "#060606", "#070707", "#080808")
PAGE_VARIABLES = dict(
    zip(
        (PAGE_INK, PAGE_FAINT, *PAGE_COLORS),
        ("--ink", "--faint", "--first", "--second", "--third", "--fourth", "--fifth", "--sixth"),
        strict=True,
    )
)


def _settings(ink: str, faint: str) -> dict[Any, Any]:
    """Returns the matplotlib settings in these colors."""
    return {
        "svg.fonttype": "none",  # text stays text: it takes the page's font and can be read aloud
        "svg.hashsalt": "torch_privacy",  # the same figure gives the same bytes
        "font.size": 10,
        "axes.edgecolor": faint,
        "axes.labelcolor": ink,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "lines.linewidth": 2,
        "text.color": ink,
        "xtick.color": faint,
        "xtick.labelcolor": ink,
        "ytick.color": faint,
        "ytick.labelcolor": ink,
    }


FILE_STYLE: dict[Any, Any] = _settings(FILE_INK, FILE_FAINT) | {"font.family": ["DejaVu Sans", "sans-serif"]}
PAGE_STYLE: dict[Any, Any] = _settings(PAGE_INK, PAGE_FAINT) | {
    "axes.titlecolor": PAGE_INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
}
