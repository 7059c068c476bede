# SPDX-License-Identifier: Apache-2.0
"""Tests features by patches: against loops in float64, for each image by itself, and what is refused."""

import itertools

import numpy as np
import pytest
import torch
from scipy.linalg import inv, sqrtm

from torch_privacy_papers.models import patches
from torch_privacy_papers.models.patches import Patches


def in_loops(public, images, filters, stride, cells):
    """Returns the features in float64, one patch at a time."""
    drawn, size = torch.Generator().manual_seed(0), patches.SIZE
    n, _, h, w = public.shape
    places = [torch.randint(high, (patches.NUM_PATCHES,), generator=drawn) for high in (n, h - size, w - size)]

    def scaled(image, top, left):
        patch = image[:, top : top + size, left : left + size].double().flatten().numpy()
        return (patch - patch.mean()) / np.sqrt(patch.var() + patches.FLAT)

    known = np.stack([scaled(public[i], top, left) for i, top, left in zip(*places, strict=True)])
    covariance = known.T @ known / len(known)
    whitening = inv(sqrtm(covariance + patches.LEAST_VARIANCE * np.eye(len(covariance)))).real
    rows = [row / np.linalg.norm(row) for row in known[:filters] @ whitening]
    found = torch.zeros(len(images), 2 * filters, cells, cells, dtype=torch.float64)
    side = (images.shape[-1] - size) // stride + 1
    assert side % cells == 0
    cell = side // cells
    for i, j, k in itertools.product(range(len(images)), range(side), range(side)):
        response = np.array(rows) @ whitening @ scaled(images[i], stride * j, stride * k)
        both = np.concatenate([np.maximum(sign * response - patches.THRESHOLD, 0) for sign in (1, -1)])
        found[i, :, j // cell, k // cell] += torch.from_numpy(both) / cell**2
    return found


@pytest.mark.parametrize(("channels", "stride", "cells"), [(3, 2, 2), (1, 1, 3)])
def test_features_equal_loops_over_patches(monkeypatch, channels, stride, cells):
    monkeypatch.setattr(patches, "NUM_PATCHES", 400)
    side = 12 if stride == 2 else 11
    public, images = torch.rand(9, channels, 20, 20) ** 2, torch.rand(3, channels, side, side)
    found = Patches(public, filters=5, stride=stride, cells=cells)(images)
    expected = in_loops(public, images, 5, stride, cells)
    assert expected.count_nonzero() > expected.numel() / 2
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


def test_features_are_of_one_image_alone(monkeypatch):
    monkeypatch.setattr(patches, "CHUNK", 2)
    images = torch.rand(5, 3, 32, 32)
    features = Patches(torch.rand(20, 3, 32, 32), filters=7, stride=3)
    found = features(images)
    assert found.shape == (5, 14, 2, 2)
    torch.testing.assert_close(features(images[3:4])[0], found[3])


@pytest.mark.parametrize("wrong", [{"filters": 0}, {"filters": 50_001}, {"stride": 0}, {"cells": 1.5}])
def test_patches_refuse_numbers_that_make_no_features(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Patches(torch.rand(2, 1, 8, 8), **{"filters": 3, "stride": 1, **wrong})
