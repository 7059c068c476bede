# SPDX-License-Identifier: Apache-2.0
"""Writes the present time."""

from datetime import UTC, datetime


def now() -> str:
    """Returns the time in UTC, by ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def dated(name: str) -> str:
    """Returns a name for a new folder: this one and the local time."""
    return f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
