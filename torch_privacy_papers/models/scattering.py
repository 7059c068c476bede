# SPDX-License-Identifier: Apache-2.0
"""Computes the scattering transform, fixed features of images by two rounds of wavelets, moduli and averages.

Source: J. Bruna, S. Mallat, "Invariant scattering convolution networks", TPAMI 2013, arXiv:1203.1513; wavelets, borders
and the order of the channels are those of kymatio (M. Andreux et al., JMLR 2020), with which ours agree to 1e-5.
"""

import math
from functools import lru_cache, reduce

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from torch_privacy.support import validate as _check

WRAPS = range(-2, 3)  # copies of a wavelet beyond each border, as the convolutions are circular
CHUNK = 8  # images at once


def scattering(images: Tensor, *, scales: int = 2, angles: int = 8) -> Tensor:
    """Returns scattering coefficients of order 0, 1 and 2: x * phi, |x * psi| * phi and ||x * psi| * psi'| * phi.

    Nothing is learnt from data: each example's features are a function of that example alone, so that training on
    them has the privacy of training on the images.

    Args:
        images: (n, c, h, w) float32, h and w multiples of 2**scales.
        scales: J; averages are over about 2**J pixels, and every 2**J-th is kept.
        angles: L, of the wavelets at every scale.

    Returns:
        (n, c * (1 + J L + L² J (J - 1) / 2), h / 2**J, w / 2**J): with two scales and eight angles 81 channels each.

    Raises:
        ValueError: If sizes are no multiples of 2**scales, or too small for the borders.
    """
    _check.whole("scattering", at_least=1, scales=scales, angles=angles)
    n, c, h, w = images.shape
    if h % 2**scales or w % 2**scales or min(h, w) <= 2**scales:
        raise ValueError(f"scattering: images of {h} x {w} pixels must have sides of 2, 3, ... times {2**scales}.")
    parts = [_of_planes(part, scales, angles) for part in images.reshape(n * c, h, w).split(CHUNK)]
    return torch.cat(parts).view(n, -1, h >> scales, w >> scales)


def _of_planes(planes: Tensor, scales: int, angles: int) -> Tensor:
    """Maps (n, h, w) to (n, channels, h / 2**J, w / 2**J)."""
    _, h, w = planes.shape
    border = 2**scales
    padded = F.pad(planes, (border,) * 4, mode="reflect")
    spectrum = torch.fft.fft2(padded)[:, None]
    first, second = [], []
    for j in range(scales):
        moduli = _moduli(spectrum, _wavelets(h, w, j, 0, scales, angles), j)
        first.append(_average(moduli, h, w, j, scales))
        deeper = torch.fft.fft2(moduli)[:, :, None]
        finer = [
            _average(_moduli(deeper, _wavelets(h, w, k, j, scales, angles), k - j), h, w, k, scales)
            for k in range(j + 1, scales)
        ]
        second += [torch.cat(finer, 2).flatten(1, 2)] if finer else []
    return torch.cat([_average(padded[:, None], h, w, 0, scales), *first, *second], 1)


def _moduli(spectrum: Tensor, wavelets: Tensor, halvings: int) -> Tensor:
    """Returns |x * psi| at every 2**halvings-th pixel, for spectra (..., 1, a, b) and wavelets (L, a, b)."""
    product = spectrum * wavelets
    step, (a, b) = 2**halvings, (side >> halvings for side in product.shape[-2:])
    tiles = [product[..., i * a : (i + 1) * a, k * b : (k + 1) * b] for i in range(step) for k in range(step)]
    folded = reduce(torch.add, tiles) / step**2
    return torch.fft.ifft2(folded).abs()


def _average(x: Tensor, h: int, w: int, halvings: int, scales: int) -> Tensor:
    """Returns x * phi at every 2**J-th pixel of the image, without its borders."""
    return _averaging(h, halvings, scales) @ x @ _averaging(w, halvings, scales).T


@lru_cache(maxsize=32)
def _averaging(size: int, halvings: int, scales: int) -> Tensor:
    """Returns a Gaussian average along one side, (size / 2**J, padded size / 2**halvings); std 0.8 * 2**(J - 1)."""
    padded = size + 2 ** (scales + 1)
    places, deviation = np.arange(padded), 0.8 * 2 ** (scales - 1)
    bell = sum(np.exp(-((places + wrap * padded) ** 2) / (2 * deviation**2)) for wrap in WRAPS)
    kernel = np.fft.ifft(_folded(np.fft.fft(bell / (math.sqrt(2 * math.pi) * deviation)).real, halvings)).real
    kept = np.arange(2**scales, 2**scales + size, 2**scales) >> halvings
    rows = kernel[(kept[:, None] - np.arange(len(kernel))) % len(kernel)]
    return torch.from_numpy(rows.astype(np.float32))


@lru_cache(maxsize=32)
def _wavelets(h: int, w: int, scale: int, halvings: int, scales: int, angles: int) -> Tensor:
    """Returns the Fourier transforms (L, ...) of one scale's Morlet wavelets, for subsampled images."""
    h, w = (side + 2 ** (scales + 1) for side in (h, w))
    spectra = []
    for turn in range(angles):
        angle = ((angles - 2) // 2 - turn) * math.pi / angles
        spectrum = np.fft.fft2(_morlet(h, w, 0.8 * 2**scale, angle, 0.75 * math.pi / 2**scale, 4 / angles)).real
        spectra.append(_folded(_folded(spectrum, halvings).T, halvings).T)
    return torch.from_numpy(np.stack(spectra).astype(np.float32))


def _morlet(h: int, w: int, deviation: float, angle: float, frequency: float, slant: float) -> NDArray[np.complex128]:
    """Returns a Gaussian, 1 / slant times as wide across, times a wave along the angle, corrected to mean 0."""
    bell, wave = np.zeros((h, w), complex), np.zeros((h, w), complex)
    for down in WRAPS:
        for right in WRAPS:
            y, x = np.mgrid[down * h : (down + 1) * h, right * w : (right + 1) * w]
            along, across = y * math.cos(angle) + x * math.sin(angle), x * math.cos(angle) - y * math.sin(angle)
            part = np.exp(-(along**2 + (slant * across) ** 2) / (2 * deviation**2))
            bell += part
            wave += part * np.exp(1j * frequency * along)
    return (wave - wave.sum() / bell.sum() * bell) * slant / (2 * math.pi * deviation**2)


def _folded(spectrum: NDArray[np.float64], halvings: int) -> NDArray[np.float64]:
    """Folds a spectrum's first axis as for subsampling by 2**halvings, after removing frequencies that would alias."""
    n = len(spectrum)
    kept = spectrum.copy()
    kept[n >> (halvings + 1) : n - (n >> (halvings + 1))] = 0
    return kept.reshape(2**halvings, n >> halvings, *spectrum.shape[1:]).sum(0)
