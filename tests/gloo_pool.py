# SPDX-License-Identifier: Apache-2.0
"""Runs functions of tests in several processes of ``torch.distributed`` (gloo), which start once for all tests.

Processes that have imported torch and the package, one for each rank, fork the ranks, so that a new pool takes a tenth
of a second. A pool is made anew after a rank hung or died, and after some calls. Each call gets a process group of its
own and the state that each test begins with (see ``fixed_state.py``), and turns the same warnings into errors.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

PATIENCE = 300.0  # seconds until a call counts as a hang; a busy machine may need some minutes
CALLS = 24  # of a rank; torch keeps some process groups alive, and the threads of each wake 100 times a second
BYTES = 1 << 16  # of a message to the launcher, at most
NEEDED = (  # by many calls of ranks: each new rank would import them again, which takes longer than most calls
    "torch_privacy.training.loop",
    "torch_privacy.training.placement.choose",
    "torch_privacy.training.placement.sharded",
    "torch_privacy.training.placement.tensor_parallel",
    "torch_privacy.training.secret_file",
    "torch_privacy.runs.report.render",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.distributed.tensor.debug",
    "torch._decomp.decompositions_for_jvp",
    "matplotlib.backends.backend_svg",
    "scipy.optimize",
    "scipy.interpolate",
    "fixed_state",
    "ranked",
)


@dataclass(frozen=True)
class Outcome:
    """What became of a call on one rank: a value, an exception, or the end of the process."""

    value: Any = None
    kind: str = ""  # name of the exception's type
    text: str = ""
    traceback: str = ""
    exit_code: int | None = None  # of a rank that ended; minus the signal's number

    @property
    def failed(self) -> bool:
        return bool(self.kind) or self.exit_code is not None

    def __str__(self) -> str:
        if self.exit_code is not None:
            return f"ended with exit code {self.exit_code}\n{self.text}"
        return self.traceback if self.failed else f"returned {self.value!r:.200}"


class RanksFailed(AssertionError):
    """Raised for a call that failed on some rank; ``outcomes`` holds one for each rank."""

    def __init__(self, outcomes: list[Outcome]):
        super().__init__("\n".join(f"rank {rank} {outcome}" for rank, outcome in enumerate(outcomes)))
        self.outcomes = outcomes


class Hang(AssertionError):
    """Raised for a call that did not end in time; the text shows the stack of each rank."""


class Launcher:
    """Starts pools: one process for each rank has imported what a rank needs, and forks it.

    These processes hash strings in different ways, as those of ``torchrun`` do, so that sets have different orders.
    """

    def __init__(self) -> None:
        self._processes: list[tuple[subprocess.Popen, socket.socket]] = []

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in self._processes:
            connection.close()  # at which it ends
            process.wait()

    def pool(self, size: int) -> Pool:
        """Returns a pool of this number of ranks; they start at its first call."""
        return Pool(self, size)

    def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONHASHSEED": str(len(self._processes) + 1),
        }
        command = [sys.executable, __file__, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, start_new_session=True)
        theirs.close()
        self._processes.append((process, ours))

    def _ask(self, rank: int, request: Any, files: tuple[int, ...] = ()) -> Any:
        _, connection = self._processes[rank]
        socket.send_fds(connection, [pickle.dumps(request)], files)
        answer = connection.recv(BYTES)
        assert answer, "the launcher has ended"
        return pickle.loads(answer)

    def start(self, size: int, folder: str) -> list[tuple[int, Connection]]:
        """Returns process id and connection of new ranks."""
        while len(self._processes) < size:
            self._begin()
        return [self._start(rank, size, folder) for rank in range(size)]

    def _start(self, rank: int, size: int, folder: str) -> tuple[int, Connection]:
        ours, theirs = Pipe()
        process = self._ask(rank, ("start", rank, size, folder), (theirs.fileno(),))
        theirs.close()
        return process, ours

    def end(self, rank: int, process: int) -> int:
        """Ends a rank unless it has ended, and returns its exit code."""
        return self._ask(rank, ("end", process))


class Pool:
    """A number of ranks that wait for calls. Use it in a ``with`` block."""

    def __init__(self, launcher: Launcher, size: int):
        self.launcher, self.size = launcher, size
        self._ranks: list[tuple[int, Connection]] = []
        self._folder: tempfile.TemporaryDirectory | None = None
        self._calls = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = PATIENCE) -> list[Any]:
        """Returns what ``function(rank, *arguments)`` returns on each rank; arguments and values are pickled.

        Args:
            function: of a module; its file is imported by the ranks.
            arguments: the same for all ranks.
            timeout: seconds until the call counts as a hang.

        Raises:
            RanksFailed: the function raised an exception on some rank, or a rank ended.
            Hang: it did not end in time on some rank.
        """
        outcomes = self.outcomes(function, *arguments, timeout=timeout)
        if any(outcome.failed for outcome in outcomes):
            raise RanksFailed(outcomes)
        return [outcome.value for outcome in outcomes]

    def refusal(self, function: Callable[..., Any], *arguments: Any, timeout: float = PATIENCE) -> str:
        """Returns the text of the refusal that ``function`` raises, which must be the same on all ranks."""
        outcomes = self.outcomes(function, *arguments, timeout=timeout)
        if {outcome.kind for outcome in outcomes} - {"Refused", "RefusedTogether"}:
            raise RanksFailed(outcomes)
        if len({outcome.text for outcome in outcomes}) > 1:
            raise RanksFailed(outcomes)
        return outcomes[0].text

    def outcomes(self, function: Callable[..., Any], *arguments: Any, timeout: float = PATIENCE) -> list[Outcome]:
        """Returns what became of a call on each rank; raises ``Hang`` if it did not end in time."""
        if not self._ranks:
            self._folder = tempfile.TemporaryDirectory(prefix="gloo_pool_")
            self._ranks = self.launcher.start(self.size, self._folder.name)
        self._calls += 1
        name = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        where = function.__module__, inspect.getfile(function), function.__qualname__
        call = pickle.dumps((f"{name} {self._calls}", warnings.filters, *where, pickle.dumps(arguments)))
        for _, connection in self._ranks:
            with contextlib.suppress(BrokenPipeError):
                connection.send_bytes(call)
        found = self._wait(timeout)
        outcomes = [found[rank] for rank in range(self.size)]
        if any(outcome.exit_code is not None for outcome in outcomes) or self._calls % CALLS == 0:
            self.end()
        return outcomes

    def _wait(self, timeout: float) -> dict[int, Outcome]:
        found: dict[int, Outcome] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        end = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                raise Hang(self._stacks(found, timeout))
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    found[rank] = Outcome(**pickle.loads(connection.recv_bytes()))
                except (EOFError, ConnectionResetError):
                    found[rank] = Outcome(exit_code=self.launcher.end(rank, self._ranks[rank][0]), text=self._log(rank))
        return found

    def _stacks(self, found: dict[int, Outcome], timeout: float) -> str:
        """Returns where each rank is, and ends the pool."""
        for rank in set(range(self.size)) - set(found):
            os.kill(self._ranks[rank][0], signal.SIGUSR1)
        time.sleep(0.3)  # until they have written
        shown = [f"rank {rank} {found.get(rank, 'is here: ' + self._log(rank))}" for rank in range(self.size)]
        for process, _ in self._ranks:
            with contextlib.suppress(ProcessLookupError):  # one that has died
                os.kill(process, signal.SIGKILL)
        self.end()
        return f"the call did not end within {timeout:g} seconds\n" + "\n".join(shown)

    def _log(self, rank: int) -> str:
        assert self._folder is not None
        return _log_of(self._folder.name, rank).read_text(errors="replace")[-20_000:]

    def end(self) -> None:
        """Ends the ranks; a later call starts new ones."""
        for _, connection in self._ranks:
            connection.close()
        for rank, (process, _) in enumerate(self._ranks):
            self.launcher.end(rank, process)
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = None


def _log_of(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.log"


# In the launcher ---------------------------------------------------------------------------------------------------


def _launch(file: int) -> None:
    """Forks ranks until the tests end, and ends them."""
    _warm_up()
    assert len(os.listdir("/proc/self/task")) == 1, "a process with one thread may fork"
    gc.freeze()
    connection, ended = socket.socket(fileno=file), dict[int, int]()
    ranks: set[int] = set()
    while True:
        message, files, _, _ = socket.recv_fds(connection, BYTES, 1)
        if not message:
            break
        request, *arguments = pickle.loads(message)
        if request == "start":
            process = os.fork()
            if not process:
                connection.close()
                rank, size, folder = arguments
                _be_rank(rank, size, folder, Connection(files[0]))
            os.close(files[0])
            ranks.add(process)
            answer = process
        else:
            answer = _ended(arguments[0], ended)
            ranks.discard(arguments[0])
        connection.send(pickle.dumps(answer))
    for process in ranks:
        _ended(process, ended)


def _warm_up() -> None:
    """Imports, and makes torch import, what distributed training needs, so that no rank has to."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from torch_privacy.mechanisms.noise.processor import tables

    for module in NEEDED:
        importlib.import_module(module)
    tables()

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    model = nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # a backward pass would start threads, in a build for GPUs also for each of these
    model(torch.ones(1, 2))
    optimizer.step()
    nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    dist.destroy_process_group()


def _ended(process: int, ended: dict[int, int]) -> int:
    """Returns the exit code of a rank, which ends by itself within ten seconds, or is ended."""
    end = time.monotonic() + 10
    while process not in ended:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            ended[process] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > end:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.002)
    return ended[process]


# In the ranks ------------------------------------------------------------------------------------------------------


def _be_rank(rank: int, size: int, folder: str, connection: Connection) -> None:
    """Answers calls until the pool ends."""
    log = os.open(_log_of(folder, rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    number = 0
    while True:
        try:
            call = connection.recv_bytes()
        except EOFError:
            os._exit(0)
        number += 1
        connection.send_bytes(_answer(call, rank, size, f"{folder}/store{number}"))


def _answer(call: bytes, rank: int, size: int, store: str) -> bytes:
    name, filters, module, file, qualified_name, pickled = pickle.loads(call)
    try:
        with _fresh(f"{name} {rank}", filters, rank, size, store):
            function: Any = _module(module, file)
            for part in qualified_name.split("."):
                function = getattr(function, part)
            answer = pickle.dumps({"value": function(rank, *pickle.loads(pickled))})
    except BaseException as error:
        failure = {"kind": type(error).__name__, "text": str(error), "traceback": traceback.format_exc()}
        answer = pickle.dumps(failure)
        del error
    gc.collect()
    return answer


def _module(name: str, file: str) -> Any:
    """Returns the module of a test, under the name that it has in the tests' process."""
    if name not in sys.modules:
        specification = importlib.util.spec_from_file_location(name, file)
        assert specification is not None
        assert specification.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
    return sys.modules[name]


@contextlib.contextmanager
def _fresh(name: str, filters: list[Any], rank: int, size: int, store: str) -> Iterator[None]:
    """Gives a call a process group of its own, and seeds, settings and filters of warnings as the test has them."""
    import torch
    import torch.distributed as dist
    from fixed_state import fixed_state
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.nn.modules import module

    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()  # it holds meshes of groups that are gone
    for hooks in (value for key, value in vars(module).items() if key.startswith("_global_") and "hooks" in key):
        if isinstance(hooks, dict):
            hooks.clear()
    torch.set_grad_enabled(True)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    dist.barrier()  # a rank that leaves the group at once would break those that still connect
    with warnings.catch_warnings(), fixed_state(name):
        warnings.resetwarnings()
        warnings.filters.extend(filters)  # type: ignore[attr-defined]
        yield


if __name__ == "__main__":
    _launch(int(sys.argv[1]))
