# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from torch_privacy_papers.models.wide_resnet import StandardizedConv2d, WideResNet


@pytest.fixture(autouse=True)
def float32():
    torch.set_default_dtype(torch.float32)


def test_standardized_weights_ignore_shift_and_scale():
    layer, x = StandardizedConv2d(3, 4, 3), torch.rand(2, 3, 6, 6)
    before = layer(x)
    with torch.no_grad():
        layer.weight.mul_(50).add_(0.3)
    torch.testing.assert_close(layer(x), before, atol=2e-3, rtol=1e-3)


def test_wide_network_has_the_published_size():
    """2.75 million weights, as De et al. count; scales, biases and groups change it by little."""
    assert sum(p.numel() for p in WideResNet(16, 4).parameters()) == pytest.approx(2.75e6, rel=0.01)
