# SPDX-License-Identifier: Apache-2.0
"""Computes features of images by filters that are whitened patches of public images.

Source: A. Coates and A. Ng, "The importance of encoding versus training with sparse coding and vector quantization",
ICML 2011.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_privacy.support import validate as _check

SIZE = 6  # pixels, the side of a patch
NUM_PATCHES = 50_000  # from which the covariance is estimated
LEAST_VARIANCE = 0.1  # added to the variances of the whitened directions
FLAT = 1e-3  # added to the variance of a patch of pixels in [0, 1]
THRESHOLD = 0.25  # subtracted from responses, which have a standard deviation of about 1
CHUNK = 10  # images at a time, few enough for malloc to reuse their memory


class Patches:
    """Maps images to the responses of filters, rectified at both signs and averaged over the cells of a grid.

    Patches are centered, scaled and whitened with the covariance of the public patches; some of these are the filters.
    Each example's features are a function of that example and of the public images, so that training on them has the
    privacy of training on the images.

    Args:
        public: images (m, c, h, w) in [0, 1], taken to be of no one in the private data.
        filters: number of filters, at most 50,000.
        stride: distance in pixels of the patches that are looked at.
        cells: rows and columns of the grid.
    """

    def __init__(self, public: Tensor, *, filters: int, stride: int, cells: int = 2):
        _check.whole("Patches", at_least=1, filters=filters, stride=stride, cells=cells)
        _check.in_range("Patches", 0, NUM_PATCHES, filters=filters)
        self._stride, self._cells = stride, cells
        generator = torch.Generator().manual_seed(0)
        n, _, height, width = public.shape
        which, top, left = (
            torch.randint(high, (NUM_PATCHES,), generator=generator) for high in (n, height - SIZE, width - SIZE)
        )
        windows = public.unfold(2, SIZE, 1).unfold(3, SIZE, 1)  # (n, c, h, w, SIZE, SIZE)
        patches = _normalized(windows[which, :, top, left].flatten(1))
        covariance = patches.T @ patches / NUM_PATCHES
        variances, directions = torch.linalg.eigh(covariance)
        whitening = directions / (variances + LEAST_VARIANCE).sqrt() @ directions.T
        found = F.normalize(patches[:filters] @ whitening) @ whitening  # to be applied to patches before whitening
        found -= found.mean(1, keepdim=True)  # and before centering
        self._filters = found.view(filters, -1, SIZE, SIZE)

    def __call__(self, images: Tensor) -> Tensor:
        """Returns features (n, 2 * filters, cells, cells) of images (n, c, h, w)."""
        return torch.cat([self._of_few(part) for part in images.split(CHUNK)])

    def _of_few(self, images: Tensor) -> Tensor:
        mean, square = (F.avg_pool2d(x.mean(1, keepdim=True), SIZE, self._stride) for x in (images, images.square()))
        responses = F.conv2d(images, self._filters, stride=self._stride)
        responses /= (square - mean.square()).clamp(min=0).add(FLAT).sqrt()
        signs = (F.relu(sign * responses - THRESHOLD) for sign in (1, -1))
        return torch.cat([F.adaptive_avg_pool2d(part, self._cells) for part in signs], 1)


def _normalized(patches: Tensor) -> Tensor:
    """Returns every patch with mean 0 and, unless it is constant, variance about 1."""
    centered = patches - patches.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + FLAT).sqrt()
