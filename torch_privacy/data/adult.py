# SPDX-License-Identifier: Apache-2.0
"""Adult census income (LIBSVM a9a): 123 binary features, and whether a person earns more than 50,000 dollars a year."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from torch_privacy import _check
from torch_privacy.data.files import DataFile, chosen_folder

NUM_FEATURES = 123
SHIPPED = Path(__file__).parent / "adult_files"
LICENCE = "CC BY 4.0, B. Becker and R. Kohavi, UCI Machine Learning Repository"
FILES = {
    "train": DataFile("adult", "a9a.xz", "cea7c541c650d123ac692cb8e2244d1c2e82f67c75cbfeccdb25a4b6fc88ef72", LICENCE),
    "test": DataFile("adult", "a9a.t.xz", "11dcdf09d2c3502c1e972986b8d8022b5adf895311e41e37e06e26ebc1ef45f3", LICENCE),
}


def load_adult(folder: Path | None = None, *, part: str = "train") -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Features and labels of Adult, read from the files shipped with the package unless told otherwise.

    Args:
        folder: Where to read instead: ``folder/adult/a9a.xz`` or ``folder/a9a.xz``. Without it the environment variable
            ``TORCH_PRIVACY_DATA`` may name such a folder.
        part: ``"train"``, the 32,561 people that the papers split at random, or ``"test"``, the 16,281 others.

    Returns:
        Features, float32 of shape (n, 123), each 0 or 1, and labels, int64 of shape (n,), 1 for a high income.

    Guarantees:
        - The file's SHA-256 is checked before anything is parsed.

    Raises:
        DataError: If the file is missing, truncated or changed; the message says where it belongs.

    Source: B. Becker and R. Kohavi (1996), UCI Machine Learning Repository; licence CC BY 4.0.

    Example:
        >>> features, labels = load_adult()
        >>> features.shape, int(labels.sum())
        ((32561, 123), 7841)
    """
    _check.one_of("load_adult", FILES, part=part)
    lines = FILES[part].read_text(chosen_folder(folder, SHIPPED)).splitlines()
    return _parse(lines)


def _parse(lines: list[str]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Lines of ``label index:1 index:1 ...``, indices from 1, as a dense matrix and a vector."""
    rows = [line.split() for line in lines]
    features = np.zeros((len(rows), NUM_FEATURES), np.float32)
    for i, (_, *fields) in enumerate(rows):
        features[i, [int(field.partition(":")[0]) - 1 for field in fields]] = 1
    return features, np.array([label == "+1" for label, *_ in rows], np.int64)
