# SPDX-License-Identifier: Apache-2.0
"""The loop of the README under ``torchrun``: processes that share nothing but a process group."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranked import difference, trained

TESTS = Path(__file__).parents[1]
SCRIPT = """
import sys
sys.path[:0] = {paths!r}
import ranked, torch, torch.distributed as dist
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
dist.init_process_group("gloo")
for name, how in {cases!r}:
    result = ranked.trained(dist.get_rank(), name, how, "sgd", {settings!r})
    if dist.get_rank() == 0:
        torch.save(result.weights, sys.argv[1] + "/" + name + how)
dist.destroy_process_group()
"""
CASES = [("uneven", "layers"), ("one example a step", "ddp"), ("experts", "layers"), ("microbatches", "root")]


@pytest.mark.thorough
def test_processes_of_torchrun_give_the_weights_of_one(tmp_path):
    settings = {"noise_multiplier": 1e-6}
    code = SCRIPT.format(paths=[str(TESTS.parent), str(TESTS)], cases=CASES, settings=settings)
    (tmp_path / "script.py").write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(tmp_path / "script.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, how in CASES:
        expected = trained(None, name, None, "sgd", settings)
        assert difference(torch.load(tmp_path / (name + how)), expected.weights) < 1e-12
