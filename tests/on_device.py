# SPDX-License-Identifier: Apache-2.0
"""Lists the tests that run on a device, under ``make test DEVICE=...``: torch's default device is then that one."""

import re

import pytest

# File, from tests/ on -> why tests whose name contains this cannot run there; None: all can.
FILES: dict[str, dict[str, str]] = {
    "test_gpu.py": {},
    "ops/test_contract.py": {},
    "ops/test_recurrent.py": {},
    "jacobian/test_clipped_sum.py": {},
    "jacobian/test_constants.py": {},
    "jacobian/test_in_place.py": {},
    "jacobian/test_layer_options.py": {},
    "jacobian/test_layout_measure.py": {},
    "jacobian/test_layout_verify.py": {},
    "jacobian/test_linear_options.py": {},
    "jacobian/test_norms_in_float32.py": {},
    "jacobian/test_one_example.py": {},
    "jacobian/test_operator.py": {},
    "jacobian/test_record.py": {},
    "jacobian/test_refusals.py": {},
    "jacobian/test_views.py": {},
    "estimated_norms/test_factored.py": {},
    "estimated_norms/test_sketched.py": {},
    "gep/test_basis.py": {},
    "gep/test_mechanism.py": {},
    "training/test_clipping_rules.py": {},
    "training/test_memory_and_layouts.py": {},
    "training/test_resume.py": {},
}


def runs_on_device(item: pytest.Item) -> bool:
    """True for a test that can run on a device."""
    file = item.path.as_posix().partition("/tests/")[2]
    return file in FILES and not any(re.search(part, item.name) for part in FILES[file])
