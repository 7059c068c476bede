# SPDX-License-Identifier: Apache-2.0
import pytest

from torch_privacy.report import figures

X = [0.0, 1.0]


@pytest.mark.parametrize("number", [1, 7, 36, 40])
def test_up_to_36_curves_are_told_apart_and_none_is_left_out(number):
    figure = figures.epsilon_plot({f"curve {i}": (X, [i, i]) for i in range(number)}, title="many")
    lines = figure.axes[0].get_lines()
    looks = [(line.get_color(), line.get_linestyle(), line._unscaled_dash_pattern) for line in lines]
    assert len(lines) == number
    assert len({repr(look) for look in looks}) == min(number, 36)
