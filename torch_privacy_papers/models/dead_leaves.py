# SPDX-License-Identifier: Apache-2.0
"""Makes images that need no data at all: discs of random sizes and colors that cover each other, like fallen leaves.

Their edges, and the spectrum 1/frequency, are those of photographs; what they show is nothing.

Source: A. Lee, D. Mumford, J. Huang, "Occlusion models for natural images", IJCV 2001; as training images: M. Baradad,
J. Wulff, T. Wang, P. Isola, A. Torralba, "Learning to see by looking at noise", NeurIPS 2021, arXiv:2106.05963.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_privacy.data import PublicImages

NUMBER, SIDE, LEAVES = 2000, 32, 200  # images, their pixels, discs in each
SMALLEST = 2.0  # radius, in pixels; they are as frequent as 1 / radius^3
BRIGHTNESS, COLOR = 0.25, 0.08  # standard deviations of what the channels of a disc share, and of what differs
FINER = 2  # pixels for each one of the image, along each side


def made_images(folder: str | None = None) -> PublicImages:
    """Returns 2,000 made images in place of photographs; nothing is read."""
    return PublicImages("dead leaves", dead_leaves(NUMBER, SIDE), "none needed: made from random numbers", {})


def dead_leaves(number: int, side: int, *, seed: int = 0) -> Tensor:
    """Returns color images (number, 3, side, side) in [0, 1]; always the same ones for a seed."""
    random = torch.Generator().manual_seed(seed)
    share, x, y = torch.rand(3, LEAVES, number, 1, generator=random, dtype=torch.float32)
    least, most = SMALLEST**-2, float(side) ** -2
    squares = (least + share * (most - least)) ** -1  # of the radii
    places = torch.arange(FINER * side, dtype=torch.float32) / FINER
    on_top = torch.zeros(number, len(places), len(places), dtype=torch.int16)
    for leaf in range(1, LEAVES):
        across, down = ((places - side * center[leaf]) ** 2 for center in (x, y))
        on_top.masked_fill_(down[:, :, None] < (squares[leaf] - across)[:, None, :], leaf)
    shared, own = (torch.randn(number, n, LEAVES, generator=random, dtype=torch.float32) for n in (1, 3))
    colors = 0.5 + BRIGHTNESS * shared + COLOR * own
    leaves = on_top.flatten(1)[:, None].expand(-1, 3, -1).long()
    images = colors.gather(2, leaves).view(number, 3, *on_top.shape[1:])
    return F.avg_pool2d(images, FINER).clamp_(0, 1)
