# SPDX-License-Identifier: Apache-2.0
"""Runs every test in float64, with fixed seeds and one thread (the models are tiny); some on a GPU, if asked to."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import drawn as drawn  # registers the profiles
import gloo_pool
import pretended_gpu
import pytest
import torch
from chosen import file_needs_ranks, is_thorough, of_make_test, of_make_thorough
from fixed_state import fixed_state
from hypothesis import settings
from on_device import runs_on_device

OF_MAKE_TEST = pytest.StashKey[int]()  # the number of its cases

settings.load_profile("fixed")  # before pytest obeys --hypothesis-profile


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--device``: the tests that can, run on this device; the others are left out."""
    parser.addoption("--device", default="cpu", help="cuda, or pretend (a GPU in pure Python); by default all, on cpu")
    parser.addoption("--thorough", action="store_true", help="run what is left out by default")
    parser.addoption("--all", action="store_true", help="run every case of every test, those of `make test` first")


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


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """Makes no cases of a test that `make test` leaves out as a whole: to make them takes as long as to run some."""
    asked = collector.config.getoption("--all") or collector.config.getoption("--thorough")
    is_left_out = not asked and not is_named(collector.config) and is_thorough(obj)
    return [] if is_left_out else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests that cannot run on the device, and those of `make test` or of `make thorough`.

    A test that is named with its file (``path::test``) runs with every case.
    """
    if not config.getoption("--all") and not is_named(config):
        chosen = of_make_test(items)
        if config.getoption("--thorough"):
            chosen = of_make_thorough(item for item in items if item not in chosen)
        _leave_out(config, items, [item for item in items if item not in chosen])
    elif config.getoption("--all"):
        few = of_make_test(items)
        items.sort(key=lambda item: item not in few)
        config.stash[OF_MAKE_TEST] = len(few)
    if config.getoption("--device") != "cpu":
        _leave_out(config, items, [item for item in items if not runs_on_device(item)])


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives the files that need several processes to one worker, where these start once for all."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "files that need ranks" if file_needs_ranks(config.rootpath / file) else file

    is_other = config.getoption("--all") or config.getvalue("dist") != "loadfile"
    return None if is_other else ByFile(config, log)


def pytest_collection_finish() -> None:
    """Leaves what is there by now out of garbage collections, which would look at millions of objects each time."""
    gc.collect()
    gc.freeze()


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Says how many of all cases are those of `make test`."""
    return (
        [f"of make test: {config.stash[OF_MAKE_TEST]} cases, which come first"] if OF_MAKE_TEST in config.stash else []
    )


def is_named(config: pytest.Config) -> bool:
    """True if a test was named with its file."""
    return any("::" in argument for argument in config.args)


def _leave_out(config: pytest.Config, items: list[pytest.Item], left_out: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


@pytest.fixture(autouse=True)
def float64_and_seeds(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fixes seeds, dtype and threads, and what the library draws from the system: keys and the seeds of its checks."""
    device = request.config.getoption("--device")
    no_device = device == "cpu" or request.path.name == "test_gpu.py"
    with fixed_state(request.node.nodeid, None if no_device else device):
        yield


@pytest.fixture(scope="session")
def launcher() -> Iterator[gloo_pool.Launcher]:
    """Returns what starts pools of ranks; begins at the first test that needs one."""
    with gloo_pool.Launcher() as launcher:
        yield launcher


@pytest.fixture(scope="module")  # ranks that wait take a hundredth of a core each, because threads of torch wake up
def ranks2(launcher: gloo_pool.Launcher) -> Iterator[gloo_pool.Pool]:
    """Returns a pool of two ranks, which the tests of a file share."""
    with launcher.pool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def ranks4(launcher: gloo_pool.Launcher) -> Iterator[gloo_pool.Pool]:
    """Returns a pool of four ranks, for slow tests."""
    with launcher.pool(4) as pool:
        yield pool
