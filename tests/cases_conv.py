# SPDX-License-Identifier: Apache-2.0
"""Provides convolutions and normalizations with all their options: name -> (model, input)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from parts import Calls
from torch import Tensor, nn


def channels_last(m: Calls, x: Tensor) -> Tensor:
    return m.two(torch.tanh(m.one(x.contiguous(memory_format=torch.channels_last))))


def fixed_statistics(norm: nn.Module) -> nn.Module:
    """Returns the norm in eval mode, with running statistics as after some training."""
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return norm.eval()


def two_images(f: nn.Module) -> nn.Module:
    return Calls(lambda m, x: m.f(x.flatten(0, 1)).unflatten(0, x.shape[:2]), f=f)


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "conv1d, as wide as the input": lambda: (nn.Conv1d(4, 6, 8), torch.randn(5, 4, 8)),
    "conv1d, depthwise": lambda: (nn.Conv1d(4, 4, 3, padding=2, groups=4), torch.randn(5, 4, 8)),
    "conv1d, kernel 1": lambda: (nn.Conv1d(4, 6, 1), torch.randn(5, 4, 8)),
    "conv1d, kernel 1 with stride": lambda: (nn.Conv1d(4, 6, 1, 2), torch.randn(5, 4, 8)),
    "conv1d, kernel 1 with padding and groups": lambda: (nn.Conv1d(4, 6, 1, padding=1, groups=2), torch.randn(5, 4, 8)),
    "conv1d, several signals an example": lambda: (two_images(nn.Conv1d(4, 6, 3, 2, 1)), torch.randn(5, 2, 4, 9)),
    "conv1d, stride beyond the kernel": lambda: (nn.Conv1d(4, 6, 2, 3), torch.randn(5, 4, 11)),
    "conv1d, circular": lambda: (nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"), torch.randn(5, 4, 8)),
    "conv2d, kernel 1": lambda: (nn.Conv2d(3, 4, 1), torch.randn(5, 3, 6, 7)),
    "conv2d, kernel 1 with groups": lambda: (nn.Conv2d(4, 6, 1, groups=2), torch.randn(5, 4, 6, 7)),
    "conv2d, one place": lambda: (nn.Conv2d(3, 4, (6, 7)), torch.randn(5, 3, 6, 7)),
    "conv2d, one channel with stride": lambda: (nn.Conv2d(1, 4, 4, 2, 3), torch.randn(5, 1, 9, 9)),
    "conv2d, stride leaves cells over": lambda: (nn.Conv2d(3, 4, 3, 3), torch.randn(5, 3, 8, 7)),
    "conv2d, same with dilation": lambda: (
        nn.Conv2d(3, 4, (2, 3), padding="same", dilation=(3, 2)),
        torch.randn(5, 3, 6, 7),
    ),
    "conv2d, stride shares factors with dilation": lambda: (
        nn.Conv2d(3, 4, 3, (2, 4), (3, 2), (2, 2)),
        torch.randn(5, 3, 9, 10),
    ),
    "conv2d, replicated": lambda: (nn.Conv2d(3, 4, 3, padding=1, padding_mode="replicate"), torch.randn(5, 3, 6, 7)),
    "conv2d, depthwise with padding": lambda: (nn.Conv2d(6, 6, 3, 2, 1, groups=6), torch.randn(5, 6, 7, 8)),
    "conv2d, channels last": lambda: (
        Calls(channels_last, one=nn.Conv2d(4, 6, 3, padding=1), two=nn.Conv2d(6, 4, 3, 2, groups=2)),
        torch.randn(5, 4, 6, 7),
    ),
    "conv2d, several images an example, groups": lambda: (
        two_images(nn.Conv2d(4, 6, 3, 2, 1, groups=2)),
        torch.randn(5, 2, 4, 6, 7),
    ),
    "conv2d, several images an example, dilation": lambda: (
        two_images(nn.Conv2d(3, 4, (3, 2), (1, 2), 2, (2, 1))),
        torch.randn(5, 2, 3, 6, 7),
    ),
    "conv2d, images before examples": lambda: (
        Calls(
            lambda m, x: m.f(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (2, -1)).transpose(0, 1),
            f=nn.Conv2d(3, 4, 3),
        ),
        torch.randn(5, 2, 3, 6, 7),
    ),
    "conv2d, one example": lambda: (nn.Conv2d(3, 4, 3), torch.randn(1, 3, 6, 7)),
    "conv2d, tied to its transpose": lambda: (
        Calls(lambda m, x: F.conv_transpose2d(torch.tanh(F.conv2d(x, m.w)), m.w), w=torch.randn(4, 3, 2, 2)),
        torch.randn(5, 3, 4, 5),
    ),
    "conv2d, blocks of native channels": lambda: (
        nn.Conv2d(16, 16, 3, padding=1, bias=False),
        torch.randn(4, 16, 5, 6),
    ),
    "conv3d": lambda: (nn.Conv3d(2, 3, 2), torch.randn(5, 2, 3, 4, 4)),
    "conv3d, everything": lambda: (
        nn.Conv3d(4, 6, (2, 3, 1), (1, 2, 2), (1, 2, 0), (2, 1, 1), groups=2),
        torch.randn(5, 4, 4, 5, 4),
    ),
    "conv3d, same": lambda: (nn.Conv3d(2, 3, (2, 3, 3), padding="same"), torch.randn(5, 2, 3, 4, 4)),
    "conv3d, depthwise": lambda: (nn.Conv3d(3, 6, 2, groups=3), torch.randn(5, 3, 3, 4, 4)),
    "conv3d, several volumes an example": lambda: (two_images(nn.Conv3d(2, 3, 2, 2, 1)), torch.randn(5, 2, 2, 3, 4, 4)),
    "conv_transpose1d": lambda: (nn.ConvTranspose1d(4, 6, 3), torch.randn(5, 4, 8)),
    "conv_transpose1d, everything": lambda: (
        nn.ConvTranspose1d(4, 6, 3, 3, 2, 2, groups=2, dilation=2),
        torch.randn(5, 4, 6),
    ),
    "conv_transpose1d, output padding beyond the stride": lambda: (
        nn.ConvTranspose1d(4, 6, 3, 1, 1, 2, dilation=3),
        torch.randn(5, 4, 6),
    ),
    "conv_transpose2d": lambda: (nn.ConvTranspose2d(3, 4, 3, 2, 1), torch.randn(5, 3, 4, 5)),
    "conv_transpose2d, no bias": lambda: (nn.ConvTranspose2d(3, 4, 2, bias=False), torch.randn(5, 3, 4, 5)),
    "conv_transpose2d, kernel 1": lambda: (nn.ConvTranspose2d(3, 4, 1), torch.randn(5, 3, 4, 5)),
    "conv_transpose2d, everything": lambda: (
        nn.ConvTranspose2d(4, 6, (3, 2), (2, 3), (1, 2), (1, 2), groups=2, dilation=(2, 3)),
        torch.randn(5, 4, 4, 5),
    ),
    "conv_transpose2d, output padding beyond stride and padding": lambda: (
        nn.ConvTranspose2d(4, 6, 2, (1, 2), (0, 1), (2, 2), groups=2, dilation=3),
        torch.randn(5, 4, 3, 4),
    ),
    "conv_transpose2d, depthwise": lambda: (nn.ConvTranspose2d(4, 8, 3, 2, groups=4), torch.randn(5, 4, 3, 4)),
    "conv_transpose2d, output size": lambda: (
        Calls(lambda m, x: m.f(x, output_size=(8, 10)), f=nn.ConvTranspose2d(3, 4, 3, 2, 1)),
        torch.randn(5, 3, 4, 5),
    ),
    "conv_transpose2d, called twice": lambda: (
        Calls(lambda m, x: m.f(torch.tanh(m.f(x))), f=nn.ConvTranspose2d(3, 3, 3, padding=1)),
        torch.randn(5, 3, 4, 5),
    ),
    "conv_transpose2d, several images an example": lambda: (
        two_images(nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2)),
        torch.randn(5, 2, 4, 3, 4),
    ),
    "conv_transpose3d": lambda: (nn.ConvTranspose3d(2, 3, 2, 2), torch.randn(5, 2, 2, 3, 3)),
    "conv_transpose3d, everything": lambda: (
        nn.ConvTranspose3d(4, 2, (2, 1, 3), (1, 2, 2), (0, 0, 1), (0, 1, 1), groups=2, dilation=(2, 1, 1)),
        torch.randn(5, 4, 2, 3, 2),
    ),
    "group norm, several images an example": lambda: (two_images(nn.GroupNorm(2, 4)), torch.randn(5, 2, 4, 3, 3)),
    "group norm, channels last": lambda: (
        Calls(channels_last, one=nn.Conv2d(4, 6, 2), two=nn.GroupNorm(2, 6)),
        torch.randn(5, 4, 4, 4),
    ),
    "instance norm": lambda: (nn.InstanceNorm2d(4, affine=True), torch.randn(5, 4, 3, 3)),
    "instance norm, one dimension": lambda: (nn.InstanceNorm1d(4, affine=True, eps=0.1), torch.randn(5, 4, 6)),
    "instance norm, without parameters": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4)),
        torch.randn(5, 3, 6, 7),
    ),
    "instance norm, fixed statistics": lambda: (
        fixed_statistics(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
        torch.randn(5, 4, 3, 3),
    ),
    "batch norm, fixed statistics": lambda: (fixed_statistics(nn.BatchNorm2d(4, eps=0.1)), torch.randn(5, 4, 3, 3)),
    "batch norm, fixed statistics, no positions": lambda: (fixed_statistics(nn.BatchNorm1d(4)), torch.randn(5, 4)),
    "batch norm, fixed statistics, behind a convolution": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), fixed_statistics(nn.BatchNorm2d(4)), nn.ReLU()),
        torch.randn(5, 3, 6, 7),
    ),
    "rms norm": lambda: (nn.RMSNorm(4), torch.randn(5, 6, 4)),
    "rms norm over two dimensions": lambda: (nn.RMSNorm([6, 4], eps=0.1), torch.randn(5, 6, 4)),
    "rms norm, used twice": lambda: (
        Calls(lambda m, x: m.f(torch.tanh(m.f(x))), f=nn.RMSNorm(4)),
        torch.randn(5, 6, 4),
    ),
}

REFUSED = {  # name -> (model, input, the names that the message must contain), as in test_refusals.py
    "batch norm's scale": lambda: (
        nn.BatchNorm1d(48),
        torch.randn(5, 48),
        r"batch_norm in training mode .* Use GroupNorm\(1, 48\) instead.* Used with parameter 'bias', 'weight'",
    ),
    "instance norm that learns statistics": lambda: (
        nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        torch.randn(5, 4, 6),
        r"instance_norm in training mode .* Pass track_running_stats=False.* GroupNorm\(1, 4\).* 'bias', 'weight'",
    ),
}
