# SPDX-License-Identifier: Apache-2.0
"""The choice of settings on public photographs: its data, its noise, and that mirrored images look the same."""

import pytest
import torch

from torch_privacy.data import PublicImages
from torch_privacy.experiments.papers.best import cifar10, tuning
from torch_privacy.privacy import SubsampledGaussian, compose


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
def test_mean_gradients_have_the_noise_that_the_private_data_need(epsilon):
    batch = tuning.TARGET.expected_batch_size
    noise = tuning.noise_multiplier(epsilon) / tuning.NUM_EXAMPLES * batch
    event = SubsampledGaussian(noise, batch / 50_000)
    found = compose([(event, tuning.num_steps())]).epsilon(1e-5)
    assert found.high <= epsilon
    assert found.low > epsilon - 0.01
    settings = [row.settings for row in tuning.rows(False) if row.name.startswith(f"epsilon {epsilon}")]
    assert {row["noise_multiplier"] for row in settings} == {tuning.noise_multiplier(epsilon)}


def test_mirror_images_have_the_same_features():
    images = torch.rand(4, 3, 32, 32)
    features = cifar10.mirrored_patches(torch.rand(30, 3, 32, 32))
    found = features(images)
    assert found[0].numel() == cifar10.NUM_PATCHES
    torch.testing.assert_close(features(images.flip(3)), found)
    assert not torch.allclose(features(images.flip(2)), found)
