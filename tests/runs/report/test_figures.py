# SPDX-License-Identifier: Apache-2.0
import re

import numpy as np
import pytest

from torch_privacy.runs.report import figures


@pytest.mark.parametrize("number", [1, 7, 13])
def test_every_curve_is_drawn_and_told_apart(number, tmp_path):
    curves = {f"curve {i}": (np.array([0.0, 1.0]), np.array([i, i + 1.0])) for i in range(number)}
    figure = figures.epsilon_plot(curves, title="many")
    figures.save(figure, tmp_path / "many.svg")
    lines = re.findall(r'clip-path="[^"]*" style="(fill: none; [^"]*)"', (tmp_path / "many.svg").read_text())
    assert len(lines) == len(set(lines)) == number
