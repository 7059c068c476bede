# SPDX-License-Identifier: Apache-2.0
"""Runs every test in float64, with fixed seeds and one thread (the models are tiny)."""

import random
import secrets
from collections.abc import Iterator

import drawn as drawn  # registers the profiles
import pytest
import torch
from hypothesis import settings

settings.load_profile("fixed")  # before pytest obeys --hypothesis-profile


@pytest.fixture(autouse=True)
def float64_and_seeds(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fixes seeds, dtype and threads, and what the library draws from the system: keys and the seeds of its checks.

    Every test gets its own keys, because the library remembers the keys with which it has released something.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    drawn_by_system = random.Random(request.node.nodeid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "token_bytes", drawn_by_system.randbytes)
        patch.setattr(secrets, "randbits", drawn_by_system.getrandbits)
        patch.setattr("torch_privacy.jacobian.codes.system_seed", lambda: drawn_by_system.getrandbits(53))
        yield
    torch.set_default_dtype(torch.float32)
