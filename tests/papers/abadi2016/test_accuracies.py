# SPDX-License-Identifier: Apache-2.0
"""Figures 3 and 4 of 2016: what accounting alone reads from trainings that are recorded here."""

import pytest

from torch_privacy import privacy
from torch_privacy.runs.folder import RunFolder
from torch_privacy.runs.metrics import Metrics
from torch_privacy.runs.rows import Context, folder_name, rows_folder
from torch_privacy_papers.abadi2016 import accuracies
from torch_privacy_papers.abadi2016.levels import LEVELS, most_steps


@pytest.fixture
def recorded(tmp_path):
    """Returns a made-up run: accuracy is 50 % plus 0.1 % per epoch, and 10 % more with less noise."""
    for number, level in enumerate(LEVELS):
        folder = RunFolder(rows_folder(tmp_path) / folder_name(level.certified_name, 0))
        folder.path.mkdir(parents=True)
        scores = [0.5 + 0.1 * number + epoch / 1000 for epoch in range(1, int(level.certified_epochs) + 1)]
        folder.write_metrics(
            [Metrics("private", e, 100 * e, 1.0, s + 0.01, s, 0.0, 1.0) for e, s in enumerate(scores, 1)]
        )
    return tmp_path


def test_delta_by_moments_inverts_their_epsilon():
    level = LEVELS[1]
    delta = level.moments_delta(107.5, 2.0)
    assert privacy.moments_of(level.releases(107.5), delta) == pytest.approx(2.0, abs=1e-4)
    assert level.delta(107.5, 2.0).high < delta
    assert LEVELS[2].moments_delta(353, 0.01) == 1.0


@pytest.mark.parametrize(("level", "epsilon", "delta"), [(LEVELS[0], 0.5, 1e-4), (LEVELS[2], 2, 1e-5)])
def test_steps_within_a_budget_are_as_many_as_it_allows(level, epsilon, delta):
    steps = most_steps(level, epsilon, delta)
    longest = round(100 * level.certified_epochs)
    assert 0 < steps <= longest
    spent = [privacy.compose(level.releases((steps + more) / 100)).epsilon(delta).high for more in (0, 1)]
    assert spent[0] <= epsilon
    assert steps == longest or spent[1] > epsilon


def test_components_alone_may_cost_too_much():
    assert most_steps(LEVELS[2], 0.25, 1e-5) == 0


@pytest.mark.thorough
def test_best_accuracy_is_of_the_last_epoch_within_epsilon_and_delta(recorded):
    context = Context(quick=False, seed=0, data=None, run=recorded)
    found = accuracies.best_within(2, context)
    medium = 0.6 + most_steps(LEVELS[1], 2, 1e-5) // 100 / 1000
    little = 0.7 + most_steps(LEVELS[2], 2, 1e-5) // 100 / 1000
    assert found["delta 1e-05"] == pytest.approx(max(medium, little))
    assert [found[key] for key in accuracies.COLUMNS] == sorted(found.values())
    assert accuracies.best_within(0.25, context)["delta 1e-05"] < 0.6  # only with much noise


def test_row_of_one_epsilon_needs_the_trainings(tmp_path):
    with pytest.raises(ValueError, match=r"computed from 'sigma 8, sigma_p 16, to epsilon 0.5'; run it as well"):
        accuracies.best_within(2, Context(quick=False, seed=0, data=None, run=tmp_path))


def test_figures_draw_both_accuracies_and_every_delta(recorded):
    rows = [
        {"row": row.name, "runs": [{"numbers": dict.fromkeys(accuracies.COLUMNS, 0.9)}]} for row in accuracies.rows()
    ]
    drawn = accuracies.figures({"quick": False, "seeds": [0], "rows": rows}, recorded)
    epochs, within = drawn["figure-3"].axes[0], drawn["figure-4"].axes[0]
    assert len(epochs.lines) == 6
    assert len(within.lines) == 4
    assert list(within.lines[0].get_ydata()) == pytest.approx([90.0] * 6)
    assert epochs.lines[1].get_ydata()[0] - epochs.lines[0].get_ydata()[0] == pytest.approx(1.0)
