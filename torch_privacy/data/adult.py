# SPDX-License-Identifier: Apache-2.0
"""Reads Adult census income: 123 binary features, and whether a person earns more than 50,000 dollars a year."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from torch_privacy.data.adult_csv import encode
from torch_privacy.data.dataset import Data, random_split, rows
from torch_privacy.data.files import File, Folder, Source, digests

NUM_FEATURES = 123
COLUMNS = {f"{i + 1}:1": i for i in range(NUM_FEATURES)}  # what sets a feature in LIBSVM's form
LABELS = {"-1": 0, "+1": 1, "1": 1}
SOURCE = Source(
    name="Adult",
    folders=("adult",),
    checksums={
        "a9a.xz": "sha256:f5d5ffd8d865ff41328e7ee043e4b020816914ff6843ff15b98905ddbedce906",
        "a9a.t.xz": "sha256:1f448a153f0320399a7e40836eb207655b0bde0f21fc941cc472193daa9f5de9",
        "adult.data": "md5:5d7c39d7b8804f071cdd1f2a7c460872",
        "adult.test": "md5:35238206dfdf7f1fe215bbb874adecdc",
    },
    origin="https://doi.org/10.24432/C5XW20 or, as a9a, https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/",
    licence="CC BY 4.0, B. Becker and R. Kohavi, UCI Machine Learning Repository",
    shipped=Path(__file__).parent / "adult_files",
)


def load_adult(
    folder: str | Path | None = None, *, test_fraction: float | None = None, seed: int = 0, verify: bool = True
) -> Data:
    """Returns Adult, by default from the files shipped with the package.

    It reads either of two formats: LIBSVM's ``a9a`` and ``a9a.t``, or the census bureau's own ``adult.data`` and
    ``adult.test``, which are turned into the same features, digit for digit.

    Args:
        folder: Another folder of data sets, with the files in ``adult/`` or in itself; by default the one that the
            environment variable ``TORCH_PRIVACY_DATA`` names, if any.
        test_fraction: Share of the training file's 32,561 people to hold out at random, as the papers do (0.1); None
            takes the 16,281 people of the test file.
        seed: Public seed of that split.
        verify: Whether a file must be the published one, byte for byte.

    Returns:
        Features, float32 of shape (n, 123), each 0 or 1, and labels, 1 for an income above 50,000 dollars.

    Guarantees:
        - The content's checksum is verified before anything is parsed, unless ``verify`` is off.

    Raises:
        DataError: If a file is missing, truncated, changed or malformed; the message says where it belongs.

    Source: B. Becker and R. Kohavi (1996), UCI Machine Learning Repository, CC BY 4.0; features by J. Platt (1998).

    Example:
        >>> data = load_adult(test_fraction=0.1)
        >>> len(data.train), len(data.test), data.num_classes
        (29305, 3256, 2)
    """
    place = SOURCE.folder(folder, verify=verify)
    read, names = _form(place)
    train = place.read(names[0])
    features, labels = map(torch.from_numpy, read(train))
    shared = {"name": "Adult", "classes": ("<=50K", ">50K"), "licence": SOURCE.licence}
    if test_fraction is not None:
        split = random_split(len(labels), test_fraction=test_fraction, seed=seed)
        parts = [rows(features, labels, chosen) for chosen in split]
        return Data(**shared, train=parts[0], test=parts[1], files=digests(train))
    test = place.read(names[1])
    parts = TensorDataset(features, labels), TensorDataset(*map(torch.from_numpy, read(test)))
    return Data(**shared, train=parts[0], test=parts[1], files=digests(train, test))


def _form(place: Folder) -> tuple[Callable[[File], tuple[NDArray[np.float32], NDArray[np.int64]]], tuple[str, str]]:
    """Returns the format of the files in this folder: their names and their parser."""
    if not place.has("a9a.xz") and place.has("adult.data"):
        return encode, ("adult.data", "adult.test")
    return read_libsvm, ("a9a.xz", "a9a.t.xz")


def read_libsvm(file: File) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Parses lines of ``label index:1 index:1 ...``, indices from 1, to a dense matrix and a vector."""
    lines = [line.split() for line in file.content.decode("ascii", "replace").splitlines()]
    features, labels = np.zeros((len(lines), NUM_FEATURES), np.float32), np.zeros(len(lines), np.int64)
    for i, line in enumerate(lines):
        try:
            label, *fields = line
            labels[i] = LABELS[label]
            features[i, [COLUMNS[field] for field in fields]] = 1
        except (KeyError, ValueError):
            file.refuse(f"line {i + 1} is not of the form '+1 3:1 11:1 ...' with indices of 1 to {NUM_FEATURES}")
    return features, labels
