# SPDX-License-Identifier: Apache-2.0
"""The choice of settings on public photographs: its data, its noise, and that mirrored images look the same."""

from dataclasses import replace

import pytest
import torch

from torch_privacy.data import PublicImages
from torch_privacy.privacy import SubsampledGaussian, compose
from torch_privacy_papers.best import cifar10, tuning


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)


def test_photographs_are_held_out_in_both_positions(monkeypatch):
    images = torch.rand(8, 3, 32, 32)
    monkeypatch.setattr(tuning, "NUM_IMAGES", 8)
    public = PublicImages("photographs", images, "free", {"file": "1"})
    monkeypatch.setattr(tuning, "load_public_images", lambda folder, num_images: public)
    data = tuning.load(None)
    train, test = data.train.tensors, data.test.tensors
    assert test[0].equal(torch.stack([images[0], images[4], images[0].flip(1), images[4].flip(1)]))
    assert test[1].tolist() == [0, 0, 1, 1]
    assert train[0][:6].equal(images[[1, 2, 3, 5, 6, 7]])
    assert train[0][6:].equal(train[0][:6].flip(2))
    assert train[1].tolist() == [0] * 6 + [1] * 6
    assert (data.classes, data.files) == (("upright", "upside down"), {"file": "1"})


@pytest.mark.parametrize("epsilon", [1, 8])
@pytest.mark.parametrize("choice", [tuning.PATCHES, tuning.SCATTERING, tuning.CHANGED[-1]], ids=lambda x: x.features)
def test_mean_gradients_have_the_noise_that_the_private_data_need(epsilon, choice):
    noise = choice.noise_multiplier(epsilon) / tuning.NUM_EXAMPLES * choice.batch_size
    event = SubsampledGaussian(noise, choice.batch_size / 50_000)
    found = compose([(event, round(choice.epochs * 50_000 / choice.batch_size))]).epsilon(1e-5)
    assert found.high <= epsilon
    assert found.low > epsilon - 0.01


def test_rows_have_the_noise_and_the_steps_of_their_choice():
    rows = {row.name: row.settings for row in tuning.rows(False)}
    assert len(rows) == len(tuning.TRIED)  # no two names are equal
    halved = rows["epsilon 3, 3 x 3 cells, shrinkage 0.4, batches of 8,192, 12 epochs, rate 0.25"]
    choice = replace(tuning.PATCHES, epochs=12)
    assert halved["noise_multiplier"] == choice.noise_multiplier(3)
    assert halved["epochs"] == choice.num_steps == 73
    assert halved["recipe"] == tuning.PATCHES.features
    usual = rows["epsilon 3, 3 x 3 cells, shrinkage 0.4, rate 0.25"]
    assert usual["noise_multiplier"] == tuning.PATCHES.noise_multiplier(3)
    assert usual["epochs"] == 153
    assert {row["recipe"] for row in rows.values()} == set(tuning.RECIPES.recipes)


@pytest.mark.thorough
@pytest.mark.parametrize("choice", [tuning.CHANGED[0], tuning.SCATTERING], ids=lambda choice: choice.features)
def test_networks_take_the_features_of_their_choice(choice):
    recipe = choice.recipe()
    inputs = recipe.inputs(torch.rand(2, 3, 32, 32), public=torch.rand(20, 3, 32, 32))
    assert recipe.new_model()(inputs).shape == (2, 2)


def test_mirror_images_have_the_same_features():
    images, public = torch.rand(4, 3, 32, 32), torch.rand(30, 3, 32, 32)
    features, plain = (cifar10.new_patches(public, mirrored=mirrored) for mirrored in (True, False))
    found = features(images)
    assert found[0].numel() == cifar10.NUM_PATCHES
    torch.testing.assert_close(features(images.flip(3)), found)
    assert not torch.allclose(features(images.flip(2)), found)
    assert not torch.allclose(plain(images.flip(3)), plain(images))
