# SPDX-License-Identifier: Apache-2.0
"""Augments images (n, c, h, w), each independently, with torch's global random state."""

import torch
from torch import Tensor
from torch.nn import functional as F


def cropped(images: Tensor, size: int, padding: int = 0) -> Tensor:
    """Returns a random square crop of each image, padded with ``padding`` black pixels on every side.

    If ``size`` is the image's own, this is a shift by at most ``padding`` pixels.
    """
    padded = F.pad(images, (padding,) * 4)
    n, _, h, w = padded.shape
    top, left = (torch.randint(side - size + 1, (n, 1), device=images.device) for side in (h, w))
    along = torch.arange(size, device=images.device)
    each = torch.arange(n, device=images.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[each, (top + along)[:, :, None], (left + along)[:, None, :]].permute(0, 3, 1, 2)


def flipped(images: Tensor) -> Tensor:
    """Mirrors each image, left to right, with probability 1/2."""
    chosen = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return torch.where(chosen, images.flip(3), images)


def relit(images: Tensor, brightness: float, contrast: float) -> Tensor:
    """Shifts each image's brightness by up to ``brightness``, and scales its contrast by 1 ± ``contrast``."""
    light, spread = (2 * torch.rand(2, len(images), 1, 1, 1, device=images.device) - 1).unbind()
    mean = images.mean((2, 3), keepdim=True)
    return (images - mean) * (1 + contrast * spread) + mean + brightness * light
