# SPDX-License-Identifier: Apache-2.0
"""The group of the messages between ranks, beside what tests/training/test_ranks_*.py show of them in a training."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torch_privacy.support.ranks import MessageGroup

THREADS = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc, which Linux has")


def num_threads_of_gloo() -> int:
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            names.append((task / "comm").read_text())
    return sum("gloo" in name for name in names)


def closed(rank: int) -> list[int]:
    """Returns the number of threads after a message in a group, and when it is closed."""
    messages = MessageGroup(dist.new_group(backend="gloo"))
    dist.all_reduce(torch.zeros(1), group=messages.group)
    during = num_threads_of_gloo()
    messages.close()
    messages.close()  # a second time does nothing
    return [during, num_threads_of_gloo()]


@THREADS
def test_a_closed_group_has_waited_for_its_threads(ranks2):
    """A thread that frees a tensor when the interpreter has ended aborts the process."""
    for during, after in ranks2.run(closed):
        assert 0 < after < during  # those of the default group stay


AT_EXIT = """
import atexit, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_ranks import num_threads_of_gloo
atexit.register(lambda: print(num_threads_of_gloo()))  # runs last
import torch.distributed as dist
from torch_privacy.support.ranks import MessageGroup
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
kept = MessageGroup(dist.new_group(backend="gloo"))
while not num_threads_of_gloo():  # a new thread has no name yet
    time.sleep(0.01)
print(num_threads_of_gloo())
dist.destroy_process_group()
"""


@pytest.mark.thorough
@THREADS
def test_the_group_is_closed_before_the_interpreter_ends():
    program = AT_EXIT.format(tests=str(Path(__file__).parent))
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    during, after = map(int, ended.stdout.split())
    assert after == 0 < during
