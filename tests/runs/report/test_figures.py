# SPDX-License-Identifier: Apache-2.0
import re

import numpy as np
import pytest

from torch_privacy.privacy import Bracket
from torch_privacy.runs.report import accounting_plots, figures


@pytest.mark.parametrize("number", [1, 7, 13])
def test_every_curve_is_drawn_and_told_apart(number, tmp_path):
    curves = {f"curve {i}": (np.array([0.0, 1.0]), np.array([i, i + 1.0])) for i in range(number)}
    figure = figures.epsilon_plot(curves, title="many")
    figures.save(figure, tmp_path / "many.svg")
    lines = re.findall(r'clip-path="[^"]*" style="(fill: none; [^"]*)"', (tmp_path / "many.svg").read_text())
    assert len(lines) == len(set(lines)) == number


def test_marked_points_are_rounded_up_in_epsilon_and_delta():
    """δ at an ε is that of no smaller ε."""
    assert accounting_plots.delta_mark(1.23456, Bracket(1e-6, 1.0001e-6)).text == "at most 1.01e-6 at 1.235"
    assert accounting_plots.epsilon_mark(Bracket(1.0, 1.23456), 1 / 290_160).text == "at most 1.235 at 3.44638e-06"
