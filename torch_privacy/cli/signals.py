# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM, put off to a moment when everything is in order."""

import signal
from types import FrameType
from typing import Any


class DeferredSignals:
    """Within the ``with`` block SIGINT and SIGTERM are only noted in ``received``; a second one acts at once."""

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
