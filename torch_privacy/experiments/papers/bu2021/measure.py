# SPDX-License-Identifier: Apache-2.0
"""Time and memory of training steps, measured in one process by turns, or under a limit in one of its own."""

from __future__ import annotations

import multiprocessing
import os
import resource
import statistics
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

from torch.profiler import ProfilerActivity, profile

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before the first profile: else each one prints two lines

Step = Callable[[], object]

WARM_UP = 2  # steps of each contender that do not count: ours measures layouts in these


def seconds_by_turns(steps: Mapping[str, Step], budget: float) -> dict[str, float]:
    """Median seconds of each step, taken in turns until the time is up, three rounds at least.

    Args:
        steps: contenders by name.
        budget: seconds for all rounds together.
    """
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    taken: dict[str, list[float]] = {name: [] for name in steps}
    end = perf_counter() + budget
    while perf_counter() < end or min(map(len, taken.values())) < 3:
        for name, step in steps.items():
            start = perf_counter()
            step()
            taken[name].append(perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def peak_bytes(step: Step) -> int:
    """Bytes that a step takes at most beyond what it began with, as torch's allocator is asked for them on a CPU.

    The same on every run, whatever malloc makes of it.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events: list[Any] = profiler.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def memory_bytes() -> int:
    """Of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def largest_that_fits(try_size: Callable[[int], None], limit: int, most: int, least: int = 64) -> int:
    """The largest of ``least``, 2 ``least``, .. and ``most`` with which a call succeeds under a limit of memory.

    Args:
        try_size: a function of a module and picklable arguments; it is called in a process of its own, with larger and
            larger sizes, and raises where memory runs out.
        limit: bytes beyond what that process has before the first call.
        most: largest size.
        least: smallest size; 0 is returned where even this one fails.

    Raises:
        Exception: that of a call, unless it is one of memory.
    """
    sizes = [min(least << k, most) for k in range(max(0, -(-most // least) - 1).bit_length() + 1)]
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_try_sizes, args=(try_size, sizes, limit, sender), daemon=True)
    process.start()
    sender.close()
    found = 0
    try:
        while True:
            answer = receiver.recv()
            if isinstance(answer, Exception):
                raise answer
            found = answer
    except EOFError:  # it came to its end, or was ended
        return found
    finally:
        process.join()


def _try_sizes(try_size: Callable[[int], None], sizes: Sequence[int], limit: int, sender: Connection) -> None:
    """Send every size that succeeds, until one does not."""
    _limit_memory(limit)
    for size in sizes:
        try:
            try_size(size)
        except (RuntimeError, MemoryError):  # torch's allocator raises a RuntimeError
            return
        except Exception as error:
            sender.send(error)
            return
        sender.send(size)


def _limit_memory(more: int) -> None:
    """Let this process have so many bytes of data more than it has now, enforced by the system (Linux)."""
    line = next(text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith("VmData"))
    now = 1024 * int(line.split()[1])
    resource.setrlimit(resource.RLIMIT_DATA, (now + more, now + more))
