# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import torch
from torch.utils.data import TensorDataset

from torch_privacy import privacy
from torch_privacy.data.dataset import Data
from torch_privacy.experiments.fitting import new_training
from torch_privacy.runs.rows import TrainingRow
from torch_privacy_papers.abadi2016 import mnist, projections
from torch_privacy_papers.abadi2016.mnist import LEARNED, NONE, RANDOM

ROWS = {row.name: row for row in projections.rows(quick=False) if isinstance(row, TrainingRow)}


@pytest.fixture(autouse=True)
def float32():
    torch.set_default_dtype(torch.float32)


def made_up():
    part = TensorDataset(torch.rand(200, 1, 28, 28), torch.randint(10, (200,)))
    return Data("MNIST", part, part, tuple(range(10)), "none", {"a": "b"})


@pytest.mark.parametrize("name", ROWS)
def test_every_row_ends_when_epsilon_is_spent_and_not_later(name):
    settings = replace(projections.DEFAULTS, **ROWS[name].settings)
    steps = round(100 * settings.epochs)
    step = privacy.SubsampledGaussian(settings.noise_multiplier, 0.01)
    prior = privacy.NoisyCovariance(settings.pca_noise_multiplier, settings.pca_sampling_probability)
    before = [(prior, 1)] if "components" in name else []
    spent = [privacy.compose([*before, (step, n)]).epsilon(1e-5).high for n in (steps, steps + 2)]
    assert spent[0] <= 2 < spent[1]


@pytest.mark.parametrize(
    ("projection", "shapes"),
    [
        (RANDOM, [(16, 8), (10, 16)]),
        (NONE, [(16, 784), (10, 16)]),
        (LEARNED, [(8, 784), (16, 8), (10, 16)]),
    ],
)
def test_other_projections_release_nothing_before_training(projection, shapes):
    settings = replace(
        projections.DEFAULTS, projection=projection, num_components=8, hidden_units=16, expected_batch_size=20,
        epochs=0.2, delta=1e-3,
    )  # fmt: skip
    task = mnist.task_on(made_up(), settings)
    training = new_training(settings, task, None)
    assert [tuple(p.shape) for p in training.model.parameters() if p.requires_grad] == shapes
    assert not training.settings.prior_releases
    assert not task.released
    for x, y in training:
        training.step(task.losses(training.model(x), y))
    step = privacy.SubsampledGaussian(settings.noise_multiplier, 0.1, privacy.NeighboringRelation.REPLACE_SPECIAL)
    assert training.ledger.events == [(step, 2)]


def test_random_directions_keep_lengths_and_depend_on_the_seed_alone():
    settings = replace(projections.DEFAULTS, projection=RANDOM, num_components=49)
    first, again, other = (mnist.public_model(784, replace(settings, seed=seed))[1].weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    torch.testing.assert_close(first @ first.T, 16 * torch.eye(49), atol=1e-4, rtol=0)  # 784 / 49


def test_unknown_projection_is_refused():
    with pytest.raises(ValueError, match="projection='pca' must be one of"):
        mnist.task_on(made_up(), replace(projections.DEFAULTS, projection="pca"))


def test_noise_of_every_layer_of_two_hidden_ones_is_that_of_the_paper():
    settings = replace(projections.DEFAULTS, **ROWS["two hidden layers"].settings)
    task = mnist.task_on(made_up(), replace(settings, hidden_units=16, num_components=8))
    rule = task.private(task.new_model())["clipping"].bind(["1.weight", "3.weight", "5.weight"])
    sensitivity = rule.sensitivity(privacy.NeighboringRelation.ADD_OR_REMOVE_ONE)
    assert settings.noise_multiplier * sensitivity == pytest.approx(16.0)  # 4 sigma


def test_speedup_is_the_ratio_of_the_times(monkeypatch):
    taken = {RANDOM: iter([9.0, 0.1, 0.3, 0.2]), NONE: iter([9.0, 0.9, 0.7, 0.8])}
    monkeypatch.setattr(projections, "ROUNDS", 3)
    monkeypatch.setattr(projections, "_training", lambda settings: lambda: next(taken[settings.projection]))
    numbers = projections.times(None)
    assert numbers == pytest.approx({"milliseconds": 20.0, "milliseconds_pixels": 80.0, "speedup": 4.0})
