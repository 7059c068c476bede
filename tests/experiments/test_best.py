# SPDX-License-Identifier: Apache-2.0
"""The recipes of today, on images made up here: what the network sees, and that every network trains privately."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy.data.dataset import Data
from torch_privacy.experiments.models.scattering import scattering
from torch_privacy.experiments.models.wide_resnet import StandardizedConv2d, WideResNet
from torch_privacy.experiments.papers.abadi2016 import cifar10 as abadi_cifar10
from torch_privacy.experiments.papers.abadi2016 import sweep as abadi_sweep
from torch_privacy.experiments.papers.abadi2016.sweep import DEFAULTS, EPSILON, FACTORS, epochs_within_budget
from torch_privacy.experiments.papers.best import cifar10 as best_cifar10
from torch_privacy.experiments.papers.best import common as best
from torch_privacy.experiments.papers.best import mnist as best_mnist
from torch_privacy.experiments.runner import losses_and_scores, new_average, new_training
from torch_privacy.privacy import NoisyCovariance, SubsampledGaussian, compose

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
    assert training.step_count == training.num_steps == 2
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


def test_standardized_weights_ignore_shift_and_scale():
    layer, x = StandardizedConv2d(3, 4, 3), torch.rand(2, 3, 6, 6)
    before = layer(x)
    with torch.no_grad():
        layer.weight.mul_(50).add_(0.3)
    torch.testing.assert_close(layer(x), before, atol=2e-3, rtol=1e-3)


def test_wide_network_has_the_published_size():
    """2.75 million weights, as De et al. count; scales, biases and groups change it by little."""
    assert sum(p.numel() for p in WideResNet(16, 4).parameters()) == pytest.approx(2.75e6, rel=0.01)


@pytest.mark.parametrize("factor", FACTORS, ids=lambda factor: factor.setting)
def test_sweep_ends_when_epsilon_is_spent_and_not_later(factor):
    for value in factor.values[:: len(factor.values) - 1]:
        kind = type(getattr(DEFAULTS, factor.setting))
        settings = replace(DEFAULTS, **{factor.setting: kind(value * factor.unit)})
        probability = settings.expected_batch_size / 60_000
        steps = round(epochs_within_budget(settings) / probability)
        step = SubsampledGaussian(settings.noise_multiplier, probability)
        spent = [compose([(NoisyCovariance(7.0), 1), (step, n)]).epsilon(1e-5).high for n in (steps, steps + 2)]
        assert spent[0] <= EPSILON < spent[1]


def test_sweep_draws_every_setting_with_the_reference_among_its_values(tmp_path):
    rows = [
        {"row": row.name, "runs": [{"numbers": {"score": 0.5 + number / 1000}}]}
        for number, row in enumerate(abadi_sweep.rows(quick=False))
    ]
    (figure,) = abadi_sweep.figures({"rows": rows}, tmp_path).values()
    assert len(figure.axes) == len(FACTORS) == 6
    for axes, factor in zip(figure.axes, FACTORS, strict=True):
        x, y = axes.lines[0].get_data()
        assert axes.get_xlabel() == factor.title
        assert list(x) == sorted([factor.reference, *factor.values])
        assert y[list(x).index(factor.reference)] == pytest.approx(50.0)


def test_pretrained_convolutions_stay_and_the_last_layer_trains(monkeypatch):
    public = type("Public", (), {"images": torch.rand(20, 3, 32, 32), "files": {}})
    monkeypatch.setattr(abadi_cifar10, "load_public_images", lambda folder: public)
    monkeypatch.setattr(abadi_cifar10, "load_cifar10", made_up(3, 32))
    abadi_cifar10.pretrained.cache_clear()
    settings = replace(abadi_cifar10.DEFAULTS, expected_batch_size=4, epochs=0.1, pretraining_steps=2, delta=1e-3)
    task = abadi_cifar10.build_task(settings)
    training = new_training(settings, task, None)
    model, learnt = training.model, abadi_cifar10.pretrained(None, 2)
    assert isinstance(training.clipping, tp.Groups)
    assert training.clipping.clip_norms == {"8": 3.0, "10": 3.0, "12": 6.0}
    assert torch.equal(model.state_dict()["8.weight"], learnt["8.weight"])
    for batch in training:
        training.step(losses_and_scores(task, model, batch)[0])
    assert torch.equal(model.state_dict()["1.weight"], learnt["1.weight"])
    assert not torch.equal(model.state_dict()["8.weight"], learnt["8.weight"])
    images = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(model(images), model(images[:, :, 4:28, 4:28]))
    abadi_cifar10.pretrained.cache_clear()
