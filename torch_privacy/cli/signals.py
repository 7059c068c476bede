# SPDX-License-Identifier: Apache-2.0
"""Defers Ctrl-C and SIGTERM until a run can stop safely."""

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Any

ONCE_MORE = "torch-privacy: stops where it can go on later, which may take a while; once more stops at once."


class DeferredSignals:
    """Notes SIGINT and SIGTERM in ``received`` within the ``with`` block; a second signal acts at once.

    The ``hint`` is printed on stderr at the first signal: it may take minutes until the run can stop.
    """

    def __init__(self, hint: str = "") -> None:
        self.received: signal.Signals | None = None
        self._hint = hint
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "DeferredSignals":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()
        if self._hint:
            with suppress(OSError):
                os.write(2, f"\n{self._hint}\n".encode())  # print may be at work, and is not reentrant

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
