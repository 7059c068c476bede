# SPDX-License-Identifier: Apache-2.0
"""Lists the tests that run on a device, under ``make test DEVICE=...``: torch's default device is then that one."""

import re

import pytest

# File, from tests/ on -> part of a test's name -> why those tests cannot run there.
FILES: dict[str, dict[str, str]] = {
    "test_gpu.py": {},
    "ops/test_contract.py": {},
    "ops/test_recurrent.py": {"packed": "the tests compare with lengths that torch keeps on the CPU"},
    "jacobian/test_clipped_sum.py": {},
    "jacobian/test_constants.py": {
        "sparse": "a device in Python has no sparse layout",
        "nested": "a device in Python has no nested tensors",
    },
    "jacobian/test_in_place.py": {},
}


def runs_on_device(item: pytest.Item) -> bool:
    """True for a test that can run on a device."""
    file = item.path.as_posix().partition("/tests/")[2]
    return file in FILES and not any(re.search(part, item.name) for part in FILES[file])
