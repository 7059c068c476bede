# SPDX-License-Identifier: Apache-2.0
import torch

from torch_privacy.experiments.papers.bu2020 import adult
from torch_privacy.experiments.task import number_of_steps


def test_settings_are_the_papers():
    settings = adult.DEFAULTS
    assert (settings.noise_multiplier, settings.expected_batch_size, settings.learning_rate) == (0.55, 256, 0.15)
    assert (settings.clip_norm, settings.epochs, settings.hidden_units, settings.delta) == (1.0, 18, 16, 1e-5)
    assert number_of_steps(settings, 29305) == 2061  # 18 * 29305 / 256 = 2060.5


def test_task_has_the_papers_split_and_network():
    task = adult.build_task(adult.DEFAULTS)
    assert (len(task.train), len(task.test)) == (29305, 3256)
    model = task.new_model()
    assert sum(p.numel() for p in model.parameters()) == 123 * 16 + 16 + 16 * 2 + 2
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), task.new_model().parameters(), strict=True))
