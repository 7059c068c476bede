# SPDX-License-Identifier: Apache-2.0
"""Provides wide residual networks for private training, with group normalization and standardized weights.

Source: S. Zagoruyko, N. Komodakis (2016, arXiv:1605.07146); S. De, L. Berrada, J. Hayes, S. Smith, B. Balle (2022,
arXiv:2204.13650), section 3, for what is changed.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class StandardizedConv2d(nn.Conv2d):
    """A convolution with weights standardized to mean 0, variance 1 / inputs per output channel, times a scale.

    Source: Qiao et al. (2019, arXiv:1903.10520); the scale is that of Brock et al. (2021, arXiv:2101.08692).
    """

    def __init__(self, before: int, after: int, kernel: int, stride: int = 1, padding: int = 0):
        super().__init__(before, after, kernel, stride, padding)
        self.scale = nn.Parameter(torch.ones(after, 1, 1, 1))

    def forward(self, input: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), keepdim=True, unbiased=False)
        inputs = self.weight[0].numel()
        weight = (self.weight - mean) * torch.rsqrt(inputs * variance + 1e-4) * self.scale
        return F.conv2d(input, weight, self.bias, self.stride, self.padding)


class WideResNet(nn.Module):
    """WRN-depth-width: a stem, three stages with 16, 32 and 64 times ``width`` channels, a dense layer.

    Each stage has (depth - 4) / 6 blocks of two convolutions. Inputs (n, 3, 32, 32), logits (n, classes).
    """

    def __init__(self, depth: int = 16, width: int = 4, classes: int = 10, groups: int = 16):
        super().__init__()
        channels, blocks = 16, []
        for stage in range(3):
            for block in range((depth - 4) // 6):
                after, stride = 16 * 2**stage * width, 2 if stage and not block else 1
                blocks.append(WideBlock(channels, after, stride, groups))
                channels = after
        self.stem = StandardizedConv2d(3, 16, 3, padding=1)
        self.blocks = nn.Sequential(*blocks, nn.GroupNorm(groups, channels), nn.ReLU())
        last = nn.Linear(channels, classes)
        nn.init.zeros_(last.weight)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), last)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(2 * x - 1)))


class WideBlock(nn.Module):
    """Applies normalization, ReLU and convolution twice, and adds the input, convolved if the shape changes."""

    def __init__(self, before: int, after: int, stride: int, groups: int):
        super().__init__()
        self.norm = nn.Sequential(nn.GroupNorm(min(groups, before), before), nn.ReLU())
        self.body = nn.Sequential(
            StandardizedConv2d(before, after, 3, stride, 1),
            nn.GroupNorm(groups, after),
            nn.ReLU(),
            StandardizedConv2d(after, after, 3, padding=1),
        )
        self.shortcut = None if before == after else StandardizedConv2d(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return self.body(normed) + (x if self.shortcut is None else self.shortcut(normed))
