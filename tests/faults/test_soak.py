# SPDX-License-Identifier: Apache-2.0
"""Memory does not grow with the number of steps, except by the releases that a ledger must know."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

ALL = "TORCH_PRIVACY_ALL_FAULTS" in os.environ  # set by ``make faults``
PER_STEP = 1.0  # KiB of a release in memory, in its ledger and in the allocator


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.skipif(not ALL, reason="takes a minute; make faults runs it")
def test_memory_stays_flat(tmp_path):
    path = Path(__file__).parents[2] / "benchmarks" / "soak.py"
    spec = importlib.util.spec_from_file_location("soak", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.set_default_dtype(torch.float32)
    rows = module.soak(tmp_path / "run", 6000, 1000)
    steps, memory = [row[0] for row in rows], [row[1] for row in rows]
    growth = 1024 * (memory[-1] - memory[1]) / (steps[-1] - steps[1])
    assert growth < PER_STEP, rows
