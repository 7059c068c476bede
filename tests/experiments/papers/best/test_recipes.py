# SPDX-License-Identifier: Apache-2.0
"""The recipes of today, on images made up here: what the network sees, and that every network trains privately."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.data import TensorDataset

from torch_privacy.data.dataset import Data
from torch_privacy.experiments.models.scattering import scattering
from torch_privacy.experiments.models.wide_resnet import WideResNet
from torch_privacy.experiments.papers.best import cifar10 as best_cifar10
from torch_privacy.experiments.papers.best import common as best
from torch_privacy.experiments.papers.best import mnist as best_mnist
from torch_privacy.experiments.runner import losses_and_scores, new_average, new_training

SMALL = {"expected_batch_size": 4, "epochs": 0.2, "microbatch_size": 4, "delta": 1e-3}


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    best.with_inputs.cache_clear()


def made_up(channels, size):
    part = TensorDataset(torch.rand(40, channels, size, size), torch.randint(10, (40,)))
    data = Data("made up", part, part, tuple(range(10)), "none", {"a": "b"})
    return lambda folder: data


@pytest.mark.parametrize(
    ("module", "shape", "recipe"),
    [
        *((best_mnist, (1, 28), recipe) for recipe in best_mnist.RECIPES.recipes),
        *((best_cifar10, (3, 32), recipe) for recipe in best_cifar10.RECIPES.recipes),
    ],
)
def test_every_recipe_trains_privately(module, shape, recipe):
    recipes = {**module.RECIPES.recipes}
    if recipe.startswith("WRN"):
        recipes[recipe] = replace(recipes[recipe], new_model=partial(WideResNet, 10, 1))  # seconds instead of minutes
    study = replace(module.RECIPES, load=made_up(*shape), recipes=recipes).study(recipe)
    settings = study.settings(**{**study.rows(False)[0].settings, **SMALL, "views": 2})
    task = study.task(settings)
    training = new_training(settings, task, None)
    average = new_average(task, training.model, training.optimizer)
    for batch in training:
        losses, scores = losses_and_scores(task, training.model, batch, task.views)
        assert losses.shape == (len(losses), 2)
        assert scores.shape == (2 * len(losses),)
        training.step(losses)
    assert training.step_count == training.settings.num_steps == 2
    assert average is not None
    assert training.spent().epsilon.high <= 1
    assert "the choice of the settings" in task.not_covered


def test_features_are_normalized_scattering_coefficients():
    load = made_up(1, 28)
    data = best.with_inputs(load, best.scattered, None, 7)
    assert [len(data.train), len(data.test)] == [7, 7]
    coefficients = scattering(load(None).train.tensors[0][:7]).view(7, best.GROUPS, -1)
    deviation = (coefficients.var(2, keepdim=True, correction=0) + 1e-5).sqrt()
    expected = (coefficients - coefficients.mean(2, keepdim=True)) / deviation
    torch.testing.assert_close(data.train.tensors[0].view(7, best.GROUPS, -1), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(best.with_inputs(load, None, None, None).train.tensors[0], load(None).train.tensors[0])
