# SPDX-License-Identifier: Apache-2.0
"""Parses the Adult data once for many tests, as it takes a third of a second; ``tests/data`` tests the parser."""

from collections.abc import Iterator

import numpy as np
import pytest

from torch_privacy.data import adult
from torch_privacy.data.files import File

_parsed: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}


@pytest.fixture(scope="module", autouse=True)
def adult_once() -> Iterator[None]:
    """Gives each reader of the same bytes arrays of its own."""
    read = adult.read_libsvm

    def read_once(file: File) -> tuple[np.ndarray, np.ndarray]:
        if file.content not in _parsed:
            _parsed[file.content] = read(file)
        features, labels = _parsed[file.content]
        return features.copy(), labels.copy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adult, "read_libsvm", read_once)
        yield
