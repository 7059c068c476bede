# SPDX-License-Identifier: Apache-2.0
"""Defers Ctrl-C and SIGTERM until a run can stop safely."""

import signal
from types import FrameType
from typing import Any


class DeferredSignals:
    """Notes SIGINT and SIGTERM in ``received`` within the ``with`` block; a second signal acts at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
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

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
