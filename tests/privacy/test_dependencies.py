# SPDX-License-Identifier: Apache-2.0
"""Accounting needs numpy and scipy alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from torch_privacy import privacy

FOLDER = Path(privacy.__file__).parent
MODULES = [
    ".".join(("torch_privacy", *path.relative_to(FOLDER.parent).with_suffix("").parts)).removesuffix(".__init__")
    for path in sorted(FOLDER.rglob("*.py"))
]
CODE = """
import sys

ALLOWED = {"numpy", "scipy", "torch_privacy"} | set(sys.stdlib_module_names)


def third_party(name):
    return name.partition(".")[0] not in ALLOWED and not name.startswith("_sysconfigdata")  # standard, but unlisted


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if third_party(name):
            raise ImportError(f"{name} is blocked")


sys.meta_path.insert(0, Blocked())
import importlib

for name in sys.argv[1:]:
    importlib.import_module(name)
from torch_privacy import privacy

step = privacy.SubsampledGaussian(1.1, 0.01)
for other in (privacy.SubsampledJL(1.3, 64, 0.01), privacy.Laplace(20.0)):
    low, high = privacy.compose([(step, 1000), (other, 1)]).epsilon(1e-5)
    assert 0 < low <= high < 5, (other, low, high)
assert 0 < privacy.compose([(step, 1000)]).true_positive_rate(0.01).high < 1
assert privacy.calibrate(2.0, 1e-5, sampling_probability=0.01, num_steps=100) > 0.3
ledger = privacy.Ledger()
ledger.record(step, 0, "fingerprint")
assert ledger.profile().statement(1e-5)
assert not {"torch", "matplotlib", "rich", "typer"} & set(sys.modules)
"""


@pytest.mark.thorough
def test_every_module_needs_numpy_and_scipy_alone():
    assert len(MODULES) > 30
    finished = subprocess.run([sys.executable, "-c", CODE, *MODULES], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
