# SPDX-License-Identifier: Apache-2.0
"""What few projections cost: the distribution of an estimate in closed form, and what the intervals say about order."""

from math import pi, sqrt

import numpy as np
import pytest

from torch_privacy.privacy import Bracket
from torch_privacy.runs.rows import EXACT, Context
from torch_privacy_papers.bu2021 import figures as jl_figures

CONTEXT = Context(quick=False, seed=0, data=None)


def test_estimates_of_few_projections_in_closed_form():
    one, two = (jl_figures.estimate(r, CONTEXT) for r in (1, 2))  # a folded normal, and Rayleigh's distribution
    assert one[jl_figures.DEVIATION] == pytest.approx(sqrt(1 - 2 / pi))
    assert one[jl_figures.WEIGHT] is None
    assert two[jl_figures.BELOW_HALF] == pytest.approx(1 - np.exp(-0.25))
    assert two[jl_figures.WEIGHT] == pytest.approx(sqrt(pi))
    x = np.linspace(0, 6, 4001)
    density = jl_figures.density(3, x)
    assert np.trapezoid(density, x) == pytest.approx(1, abs=1e-6)
    assert np.trapezoid(density * x**2, x) == pytest.approx(1, abs=1e-6)


def test_panels_have_the_papers_settings():
    found = {p.figure: (p.num_examples, p.expected_batch_size, p.noise_multiplier, p.epochs) for p in jl_figures.PANELS}
    assert found == {
        "figure-8-mnist": (60_000, 256, 1.3, 5),
        "figure-8-small-batches": (25_000, 64, 0.5, 5),
        "figure-3-imdb": (25_000, 256, 0.6, 20),
    }
    low, high = jl_figures.PANELS[2].epsilon(30, 20)  # 14.341: an independent lattice
    assert low <= 14.3414 <= high + 1e-4


def results(epsilons):
    rows = [
        {"row": jl_figures.row_name(panel, r), "runs": [{"numbers": dict.fromkeys((jl_figures.FIRST, EXACT), e)}]}
        for panel in jl_figures.PANELS
        for r, e in epsilons.items()
    ]
    return {"quick": True, "rows": rows}


def interval(low, high):
    return Bracket(low, high)._asdict()


def test_order_is_claimed_only_where_the_intervals_show_it():
    falls = {10: interval(5.0, 5.1), 30: interval(2.0, 2.1), 0: interval(1.9, 1.95)}
    assert all("falls with every step" in line for line in jl_figures.findings(results(falls)))
    overlap = falls | {30: interval(1.94, 2.1)}
    assert all("does NOT fall" in line for line in jl_figures.findings(results(overlap)))


def test_every_figure_is_drawn(monkeypatch, tmp_path):
    monkeypatch.setattr(
        jl_figures, "_epsilon", lambda noise, q, r, steps: Bracket(steps / (r or 99), steps / (r or 99))
    )
    drawn = jl_figures.figures({"quick": True}, tmp_path)
    assert set(drawn) == {"figure-8-mnist", "figure-8-small-batches", "figure-3-imdb", "figure-2-density"}
    lines = {line.get_label(): np.array(line.get_data()) for line in drawn["figure-3-imdb"].axes[0].lines}
    assert list(lines) == ["JL(10)", "JL(30)", "exact"]
    assert lines["exact"][0, -1] == 20
    assert lines["JL(10)"][1, -1] == pytest.approx(195.3)
