# SPDX-License-Identifier: Apache-2.0
"""Every test runs in float64, with a fixed seed and one thread (the models are tiny), unless it says otherwise."""

from collections.abc import Iterator

import drawn as drawn  # how hypothesis draws
import pytest
import torch


@pytest.fixture(autouse=True)
def float64_and_seed() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
