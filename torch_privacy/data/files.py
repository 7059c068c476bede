# SPDX-License-Identifier: Apache-2.0
"""What every data reader shares: finding a file, proving that it is the right one, splitting its examples."""

import hashlib
import lzma
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from torch_privacy import _check

FOLDER_VARIABLE = "TORCH_PRIVACY_DATA"


class DataError(ValueError):
    """Raised when a data file is missing or is not the file that it should be; the message says where it belongs."""


@dataclass(frozen=True)
class DataFile:
    """One xz-compressed text file of a data set, known by its checksum."""

    dataset: str  # also the name of the subfolder that may hold it
    name: str
    sha256: str
    licence: str

    def read_text(self, folder: Path) -> str:
        """The file's text, from ``folder/dataset/name`` or ``folder/name``.

        Raises:
            DataError: If the file is missing, cannot be read, or has another SHA-256.
        """
        path = self._find(folder)
        try:
            packed = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}). {self._cure(folder)}") from None
        found = hashlib.sha256(packed).hexdigest()
        if found != self.sha256:
            raise DataError(
                f"{path}: is truncated or changed ({len(packed)} bytes, SHA-256 {found[:12]}..., "
                f"expected {self.sha256[:12]}...). {self._cure(folder)}"
            )
        return lzma.decompress(packed).decode("ascii")

    def _find(self, folder: Path) -> Path:
        candidates = [folder / self.dataset / self.name, folder / self.name]
        for path in candidates:
            if path.is_file():
                return path
        raise DataError(f"{candidates[0]}: no such file. {self._cure(folder)}")

    def _cure(self, folder: Path) -> str:
        place = folder / self.dataset / self.name
        return f"Put the original {self.name} at {place} (licence: {self.licence}), or use the copy in the package."


def chosen_folder(folder: Path | None, shipped: Path) -> Path:
    """The folder to read from: the caller's, else the one in ``TORCH_PRIVACY_DATA``, else the one shipped."""
    if folder is not None:
        return Path(folder)
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else shipped


def random_split(num_examples: int, *, test_fraction: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row numbers of a random training part and of the test part, each in increasing order.

    The seed is public: it says nothing about any example, only which rows are held out.

    Args:
        num_examples: How many rows there are, at least 1.
        test_fraction: Share of rows in the test part, in (0, 1); the count is rounded to the nearest integer.
        seed: A non-negative integer; equal seeds give equal splits.

    Returns:
        Training rows and test rows; together they name every row once.

    Example:
        >>> train, test = random_split(10, test_fraction=0.2, seed=0)
        >>> len(train), len(test)
        (8, 2)
    """
    _check.whole("random_split", at_least=1, num_examples=num_examples)
    _check.whole("random_split", seed=seed)
    _check.strictly_between("random_split", 0, 1, test_fraction=test_fraction)
    order = np.random.default_rng(seed).permutation(num_examples)
    num_test = round(num_examples * test_fraction)
    return np.sort(order[num_test:]), np.sort(order[:num_test])
