# SPDX-License-Identifier: Apache-2.0
"""Reads SVHN: 32x32 color images of house numbers' digits, in MATLAB's format."""

from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from torch_privacy.data.arrays import read_matlab
from torch_privacy.data.dataset import Data, images
from torch_privacy.data.files import File, Source, digests

SOURCE = Source(
    name="SVHN",
    folders=("svhn", "SVHN"),
    checksums={
        "train_32x32.mat": "md5:e26dedcc434d2e4c54c9b2d4a06d8373",
        "test_32x32.mat": "md5:eb5a983be6a315427106f1b164d9cef3",
        "extra_32x32.mat": "md5:a93ce644f1a588dc4d68dda5feec44a7",
    },
    origin="http://ufldl.stanford.edu/housenumbers/",
    licence="non-commercial use only",
)


def load_svhn(folder: str | Path | None = None, *, extra: bool = False, verify: bool = True) -> Data:
    """Returns SVHN, cropped digits: 73,257 and 26,032 images, float32 (n, 3, 32, 32) in [0, 1], and their digits.

    Args:
        folder: The folder of all data, with ``train_32x32.mat`` and ``test_32x32.mat`` in ``svhn/`` or itself. Without
            it ``TORCH_PRIVACY_DATA`` names it, else ``../shared/data`` beside a checkout is taken.
        extra: Whether the 531,131 images of ``extra_32x32.mat`` join the training part, after the others: 604,388 in
            all, 7 GiB of memory.
        verify: Whether the files must be the published ones.

    Raises:
        DataError: If a file is missing, truncated, changed or malformed; the message names it and says where to get it.

    Source: Y. Netzer, T. Wang, A. Coates, A. Bissacco, B. Wu, A. Y. Ng, "Reading digits in natural images with
    unsupervised feature learning", NIPS workshop, 2011.
    """
    place = SOURCE.folder(folder, verify=verify)
    train, test = place.read("train_32x32.mat"), place.read("test_32x32.mat")
    files, part = [train, test], _part(train)
    if extra:
        files.append(place.read("extra_32x32.mat"))
        pairs = zip(part.tensors, _part(files[-1]).tensors, strict=True)
        part = TensorDataset(*(torch.cat(pair) for pair in pairs))
    return Data("SVHN", part, _part(test), tuple(range(10)), SOURCE.licence, digests(*files))


def _part(file: File) -> TensorDataset:
    """Converts images (32, 32, 3, n) and labels (n, 1), in which 10 is the digit 0."""
    x, y = read_matlab(file, "X", "y")
    right = x.dtype == np.uint8 and x.shape[:-1] == (32, 32, 3) and y.shape == (x.shape[-1], 1)
    file.check(right, f"holds X {x.shape} and y {y.shape}, not (32, 32, 3, n) bytes and (n, 1)")
    file.check(bool(np.isin(y, range(1, 11)).all()), "has labels that are not 1 to 10")
    return images(np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y[:, 0] % 10)
