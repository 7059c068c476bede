# SPDX-License-Identifier: Apache-2.0
"""Runs every test in float64, with fixed seeds and one thread (the models are tiny); some on a GPU, if asked to."""

import random
import secrets
from collections.abc import Iterator
from pathlib import Path

import drawn as drawn  # registers the profiles
import pretended_gpu
import pytest
import torch
from hypothesis import settings
from on_device import runs_on_device

settings.load_profile("fixed")  # before pytest obeys --hypothesis-profile


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--device``: the tests that can, run on this device; the others are left out."""
    parser.addoption("--device", default="cpu", help="cuda, or pretend (a GPU in pure Python); by default all, on cpu")


def pytest_configure(config: pytest.Config) -> None:
    """Makes the device known, or says that there is none."""
    device = config.getoption("--device")
    if device == pretended_gpu.NAME:
        pretended_gpu.register()
    elif device.startswith("cuda") and not torch.cuda.is_available():
        raise pytest.UsageError(
            f"--device={device}: torch finds no CUDA device on this machine. DEVICE={pretended_gpu.NAME} runs the same "
            "tests on a device that only pretends to be one."
        )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out what needs the pretended device, which changes torch for the whole process."""
    needs_it = collection_path.name == "test_gpu.py" and config.getoption("--device") != pretended_gpu.NAME
    return True if needs_it else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests that cannot run on the device."""
    if config.getoption("--device") != "cpu":
        left_out = [item for item in items if not runs_on_device(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if runs_on_device(item)]


@pytest.fixture(autouse=True)
def float64_and_seeds(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fixes seeds, dtype and threads, and what the library draws from the system: keys and the seeds of its checks.

    Every test gets its own keys, because the library remembers the keys with which it has released something.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    device = request.config.getoption("--device")
    torch.set_default_device(None if device == "cpu" or request.path.name == "test_gpu.py" else device)
    drawn_by_system = random.Random(request.node.nodeid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "token_bytes", drawn_by_system.randbytes)
        patch.setattr(secrets, "randbits", drawn_by_system.getrandbits)
        patch.setattr("torch_privacy.jacobian.codes.system_seed", lambda: drawn_by_system.getrandbits(53))
        yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
