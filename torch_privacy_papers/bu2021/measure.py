# SPDX-License-Identifier: Apache-2.0
"""Measures time, memory and largest batch size of training steps."""

from __future__ import annotations

import multiprocessing  # pickle: of numbers and errors, from a process that this one has started, by a pipe
import os
import resource
import statistics
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection  # pickle: as above
from pathlib import Path
from time import perf_counter
from typing import Any

from torch.profiler import ProfilerActivity, profile

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # set before the first profile; otherwise each profile prints two lines

Step = Callable[[], object]

WARM_UP = 2  # rounds that do not count; ours measures layouts in them, and rehearses what is called from a new line
ROUNDS = 3  # that count, at least


def seconds_by_turns(
    steps: Mapping[str, Step], budget: float, clock: Callable[[], float] = perf_counter
) -> dict[str, float]:
    """Returns the median seconds of each step, measured alternately.

    Args:
        steps: steps to compare, by name.
        budget: seconds for all rounds together; the first two do not count, and at least three do.
        clock: ``time.process_time`` measures processor time, which other programs disturb less.
    """
    taken: dict[str, list[float]] = {name: [] for name in steps}
    end = perf_counter() + budget
    while perf_counter() < end or min(map(len, taken.values())) < WARM_UP + ROUNDS:
        for name, step in steps.items():
            start = clock()
            step()
            taken[name].append(clock() - start)
    return {name: statistics.median(seconds[WARM_UP:]) for name, seconds in taken.items()}


def peak_bytes(step: Step) -> int:
    """Returns the peak of a step's memory beyond its start, in bytes requested from torch's CPU allocator.

    The number is the same in every run, since it does not depend on malloc. It is the median of five steps, as
    batches differ in size and ours rehearses the first step, which is called from a new line, and takes more then.
    """
    return statistics.median_low(_peak_of(step) for _ in range(5))


def _peak_of(step: Step) -> int:
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
    """Returns the size of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def largest_that_fits(try_size: Callable[[int], None], limit: int, most: int, least: int = 64) -> int:
    """Returns the largest of ``least``, 2 ``least``, .. and ``most`` with which a call fits into a memory limit.

    Args:
        try_size: a picklable function; it is called in a process of its own with increasing sizes, and raises where
            memory runs out.
        limit: bytes beyond the memory of that process before the first call.
        most: largest size.
        least: smallest size; 0 is returned where even this one fails.

    Raises:
        Exception: If a call raises an error that is not about memory.
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
    except EOFError:  # the process has finished or was killed
        return found
    finally:
        process.join()


def _try_sizes(try_size: Callable[[int], None], sizes: Sequence[int], limit: int, sender: Connection) -> None:
    """Sends every size that succeeds, until one fails."""
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
    """Limits this process to ``more`` bytes of data beyond its present use, enforced by the system (Linux)."""
    line = next(text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith("VmData"))
    now = 1024 * int(line.split()[1])
    resource.setrlimit(resource.RLIMIT_DATA, (now + more, now + more))
