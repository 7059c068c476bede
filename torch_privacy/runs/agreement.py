# SPDX-License-Identifier: Apache-2.0
"""Holds the privacy statement and the results of a run folder against the ledger beside them."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from torch_privacy import privacy
from torch_privacy.privacy.summary import Releases, releases_from_json
from torch_privacy.runs.folder import Digests, RunFolder

CHANGED = "One of them was changed, or is of another run: restore it."


def check_ledger(folder: RunFolder, statement: dict[str, Any], priced: Releases, digests: Digests) -> None:
    """Refuses a folder if its statement or results leave out a release that the ledger beside them has.

    Raises:
        ValueError: with the file that differs from the ledger, or a ledger that cannot be read.
    """
    if not folder.ledger.exists() and folder.ledger.name not in digests:
        return
    try:
        made = counted(privacy.Ledger.read(folder.ledger).events)
    except OSError as error:
        raise ValueError(f"{folder.ledger}: cannot be read ({error.strerror}).") from None
    stated = counted(releases_from_json(statement)) if statement["releases"] else Counter()
    if stated != made:
        raise ValueError(
            f"{folder.privacy}: states {stated.total()} releases, not the {made.total()} in {folder.ledger}. {CHANGED}"
        )
    if lacking := made - counted(priced):
        raise ValueError(
            f"{folder.results}: prices {lacking.total()} releases less than {folder.ledger} has. {CHANGED}"
        )


def counted(releases: Releases) -> Counter[str]:
    """Returns how often each release was made, by its description."""
    counts: Counter[str] = Counter()
    for event, count in releases:
        counts[json.dumps(privacy.event_to_dict(event), sort_keys=True)] += count
    return counts
