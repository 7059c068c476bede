# SPDX-License-Identifier: Apache-2.0
"""Made images: always the same, in range, with edges and the spectrum of photographs."""

import torch

from torch_privacy_papers.models.dead_leaves import dead_leaves


def test_made_images_are_those_of_their_seed_and_fall_off_like_photographs():
    images = dead_leaves(200, 32)
    assert torch.equal(images, dead_leaves(200, 32))
    assert not torch.equal(images, dead_leaves(200, 32, seed=1))
    assert images.min() >= 0
    assert images.max() <= 1
    assert images.std((1, 2, 3)).median() > 0.1  # few are empty
    window = torch.hann_window(32)
    power = torch.fft.fft2((images - images.mean((2, 3), keepdim=True)) * window * window[:, None]).abs().square()
    power = power.mean((0, 1))
    for fall in (power[0, 4] / power[0, 8], power[4, 0] / power[8, 0]):
        assert 4 < fall < 16  # of noise 1, of photographs of this size about 6
    edges = (images[..., 1:] - images[..., :-1]).abs()
    assert edges.median() < 0.01 < 0.1 < edges.quantile(0.95)  # flat between edges, which noise is not
