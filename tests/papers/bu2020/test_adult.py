# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from torch_privacy.experiments.task import number_of_steps
from torch_privacy.runs.rows import TrainingRow
from torch_privacy_papers.bu2020 import adult


def test_training_ends_at_an_epsilon_that_one_may_show():
    settings = adult.DEFAULTS
    assert (settings.noise_multiplier, settings.target_epsilon, settings.delta) == (None, 2.0, 1e-5)
    assert number_of_steps(settings, 29305) == 1374  # 12 * 29305 / 256 = 1373.7


@pytest.mark.parametrize(("quick", "epochs", "steps"), [(False, 18, 2061), (True, 2, 229)])
def test_reproduction_has_the_papers_settings(quick, epochs, steps):
    row = adult.rows(quick)[0]
    assert isinstance(row, TrainingRow)
    settings = adult.STUDY.settings(**row.settings)
    assert (settings.noise_multiplier, settings.target_epsilon, settings.epochs) == (0.55, None, epochs)
    assert (settings.expected_batch_size, settings.learning_rate, settings.clip_norm) == (256, 0.15, 1.0)
    assert (settings.hidden_units, settings.delta, settings.baseline) == (16, 1e-5, True)
    assert number_of_steps(settings, 29305) == steps  # 18 * 29305 / 256 = 2060.5


def test_task_has_the_papers_split_and_network():
    task = adult.build_task(adult.DEFAULTS)
    assert (len(task.train), len(task.test)) == (29305, 3256)
    model = task.new_model()
    assert sum(p.numel() for p in model.parameters()) == 123 * 16 + 16 + 16 * 2 + 2
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), task.new_model().parameters(), strict=True))
