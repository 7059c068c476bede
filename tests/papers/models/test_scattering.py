# SPDX-License-Identifier: Apache-2.0
"""Scattering coefficients and augmentation: by definition, on small images."""

import numpy as np
import pytest
import torch

from torch_privacy_papers.models import scattering as module
from torch_privacy_papers.models.augmentation import cropped, flipped, relit
from torch_privacy_papers.models.scattering import scattering


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)


def circular(image, kernel):
    """Convolution on a torus, by its sum."""
    h, w = image.shape
    return sum(
        kernel[i, j] * np.roll(image, (i, j), (0, 1)) for i in range(h) for j in range(w) if abs(kernel[i, j]) > 1e-12
    )


def bell(h, w, deviation):
    y, x = (np.minimum(np.arange(side), side - np.arange(side)) for side in (h, w))
    return np.exp(-(y[:, None] ** 2 + x**2) / (2 * deviation**2)) / (2 * np.pi * deviation**2)


def test_coefficients_are_averages_of_moduli_of_wavelets():
    """Channels of all three orders of one image, without Fourier; the error is that of leaving out pixels."""
    image = torch.rand(1, 1, 8, 12)
    found = scattering(image)[0].numpy()
    padded = np.pad(image[0, 0].numpy().astype(float), 4, mode="reflect")
    h, w = padded.shape
    low = bell(h, w, 1.6)
    angle = [(3 - turn) * np.pi / 8 for turn in range(8)]
    first = abs(circular(padded, module._morlet(h, w, 0.8, angle[2], 0.75 * np.pi, 0.5)))
    second = abs(circular(first, module._morlet(h, w, 1.6, angle[5], 0.375 * np.pi, 0.5)))
    for channel, moduli in {0: padded, 1 + 2: first, 17 + 8 * 2 + 5: second}.items():
        expected = circular(moduli, low)[4:-4:4, 4:-4:4]
        np.testing.assert_allclose(found[channel], expected, atol=2e-3)


def test_sizes_and_channels_of_colors_and_scales():
    images = torch.rand(3, 2, 8, 16)
    assert scattering(images).shape == (3, 2 * 81, 2, 4)
    assert scattering(images, scales=1, angles=4).shape == (3, 2 * 5, 4, 8)
    one = scattering(images[1:2, 1:])
    torch.testing.assert_close(scattering(images)[1:2, 81:], one)  # each image and color by itself


def test_wavelets_see_no_constant():
    coefficients = scattering(torch.full((1, 1, 8, 8), 0.7))
    torch.testing.assert_close(coefficients[:, 0], torch.full((1, 2, 2), 0.7), atol=1e-3, rtol=0)
    assert coefficients[:, 1:].abs().max() < 1e-5


@pytest.mark.parametrize("size", [(7, 8), (8, 10), (4, 8)])
def test_sizes_that_do_not_fit_are_refused(size):
    with pytest.raises(ValueError, match="must have sides"):
        scattering(torch.rand(1, 1, *size))


def test_crops_are_squares_of_the_image():
    torch.manual_seed(0)
    images = torch.arange(1.0, 65.0).view(1, 1, 8, 8).expand(50, 1, 8, 8)
    parts = cropped(images, 6)
    corners = parts[:, 0, 0, 0].long() - 1
    for part, corner in zip(parts, corners.tolist(), strict=True):
        top, left = divmod(corner, 8)
        assert torch.equal(part, images[0, :, top : top + 6, left : left + 6])
    assert len(set(corners.tolist())) == 9
    shifted = cropped(images, 8, padding=1)
    assert shifted.shape == images.shape
    assert {int((image == 0).sum()) for image in shifted} == {0, 8, 15}


def test_changes_keep_each_image_to_itself():
    torch.manual_seed(0)
    images = torch.rand(40, 3, 6, 6)
    mirrored = flipped(images)
    same = (mirrored == images).flatten(1).all(1)
    assert 5 < same.sum() < 35
    assert torch.equal(mirrored[~same], images[~same].flip(3))
    assert torch.equal(
        relit(images, 0.0, 0.0), images - images.mean((2, 3), keepdim=True) + images.mean((2, 3), keepdim=True)
    )
    moved = relit(images, 0.3, 0.0) - images
    torch.testing.assert_close(moved, moved[:, :1, :1, :1].expand_as(moved))
