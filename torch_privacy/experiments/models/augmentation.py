# SPDX-License-Identifier: Apache-2.0
"""Images changed at random, each by itself: (n, c, h, w) -> (n, c, h', w'). Draws from torch's random state."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def cropped(images: Tensor, size: int, padding: int = 0) -> Tensor:
    """A square of ``size`` pixels from a random place of each image, which has so many black pixels around it.

    With ``size`` the image's own this is a shift by at most ``padding`` pixels.
    """
    padded = F.pad(images, (padding,) * 4)
    n, _, h, w = padded.shape
    top, left = (torch.randint(side - size + 1, (n, 1), device=images.device) for side in (h, w))
    along = torch.arange(size, device=images.device)
    each = torch.arange(n, device=images.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[each, (top + along)[:, :, None], (left + along)[:, None, :]].permute(0, 3, 1, 2)


def flipped(images: Tensor) -> Tensor:
    """Half of the images mirrored, left to right."""
    chosen = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return torch.where(chosen, images.flip(3), images)


def turned(images: Tensor, degrees: float, scale: float) -> Tensor:
    """Turned about the middle by up to so many degrees, and enlarged or shrunk by up to so large a share."""
    n = len(images)
    angle, growth = (2 * torch.rand(2, n, device=images.device) - 1).unbind()
    angle, size = angle * math.radians(degrees), 1 + scale * growth
    cosine, sine, zero = torch.cos(angle) / size, torch.sin(angle) / size, torch.zeros_like(angle)
    matrix = torch.stack([torch.stack([cosine, -sine, zero], 1), torch.stack([sine, cosine, zero], 1)], 1)
    return F.grid_sample(images, F.affine_grid(matrix, list(images.shape), align_corners=False), align_corners=False)


def relit(images: Tensor, brightness: float, contrast: float) -> Tensor:
    """Another brightness, up to so much more or less, and contrast, up to 1 ± so much, for each image."""
    light, spread = (2 * torch.rand(2, len(images), 1, 1, 1, device=images.device) - 1).unbind()
    mean = images.mean((2, 3), keepdim=True)
    return (images - mean) * (1 + contrast * spread) + mean + brightness * light
