# SPDX-License-Identifier: Apache-2.0
"""Binds the budget of a data set to its data, by a fingerprint under a secret key beside the budget's file."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import privacy
from ..privacy.budget_runs import Reservation
from ..privacy.rounding import short
from ..sampling.fingerprint import fingerprint, new_key, read_key
from ..support.validate import Refused
from ..support.write_file import write_whole

AGAIN = (
    "Whoever is in both data sets is protected by the sum of both epsilons and both deltas: open a new budget with "
    "what may still be spent ({command}), or for the new rows alone."
)


def bind_data(budget: privacy.DataBudget, data: Any, *, num_owners: int | None = None) -> privacy.DataBudget:
    """Binds a budget to its data, or refuses other data than those that it is bound to.

    Args:
        budget: from ``Budget.open``.
        data: map-style, such as a data set or an array of rows: same items in the same order, every time.
        num_owners: number of owners, where these are protected and not items.

    Returns:
        The budget for runs on these data in any form. Without this call the first run binds its own data, and later
        ones must have the same, in the same form; so call it where some runs get other features of the same rows.

    Guarantees:
        - The fingerprint shows nothing without its key, which is in a file of its own, readable by its owner only.

    Raises:
        Refused: the budget is bound to other data; the data have no fingerprint; delta is not below 1/n; the key is
            missing.

    Example:
        >>> import tempfile
        >>> import torch_privacy as tp
        >>> budget = tp.Budget.open(Path(tempfile.mkdtemp()) / "people.budget", epsilon=3, delta=1e-6)
        >>> budget = tp.bind_data(budget, [[23, 1], [45, 0], [31, 1]])
        >>> tp.bind_data(budget, [[23, 1], [45, 0], [31, 0]])
        Traceback (most recent call last):
            ...
        torch_privacy.support.validate.Refused: Budget: the data are not those that ...people.budget' is bound to: ...
    """
    n = len(data) if num_owners is None else num_owners

    def make() -> dict[str, Any]:
        if budget.delta * n >= 1:
            raise Refused(
                f"Budget: delta={short(budget.delta)} is not below 1/n for these {n} data: it would permit publishing "
                "somebody's whole record. Open a budget with a smaller delta; 1 / (10 n) or less is usual."
            )
        key = read_key(budget.key_path) if budget.key_path.exists() else new_key()
        found = fingerprint(data, key, num_owners=num_owners)
        if found["fingerprint"] is None:
            raise Refused(
                f"Budget: the data cannot be bound, as they have no fingerprint: {found['not_made_because']}. Bind "
                "them in another form: budget = tp.bind_data(budget, rows), with an array or a list of rows."
            )
        write_whole(budget.key_path, lambda file: file.write(key.hex().encode() + b"\n"))
        return found

    _check_same(budget, budget.bind(make), data, num_owners)
    return replace(budget, is_bound=True)


def reserve(
    budget: privacy.DataBudget,
    releases: Iterable[tuple[privacy.Event, int]],
    what: str,
    data: Any,
    *,
    num_owners: int | None = None,
    run: str | None = None,
    ledger: Path | None = None,
) -> Reservation:
    """Reserves the price of a run, and compares its data; a run that does not fit is refused before a row is read."""
    releases = list(releases)
    if run is None or budget.state.run(run) is None:
        budget.check(releases)
    if not budget.is_bound:
        bind_data(budget, data, num_owners=num_owners)
    return budget.reserve(releases, what, run=run, ledger=ledger)


def _check_same(budget: privacy.DataBudget, known: Any, data: Any, num_owners: int | None) -> None:
    place = f"{str(budget.path)!r}"
    if not budget.key_path.exists():
        raise Refused(
            f"Budget: {place} is bound to data, but its key {str(budget.key_path)!r} is missing, so that they cannot "
            "be compared. Restore it from a copy."
        )
    key, command = read_key(budget.key_path), f"torch-privacy budget status {budget.path.name}"
    n = known.get("num_examples", len(data))
    if n != len(data):
        grown = "have grown" if len(data) > n else "are fewer"
        raise Refused(
            f"Budget: {place} is bound to {n} items, and the data {grown}: they have {len(data)}. A budget belongs to "
            f"one data set, which stays as it is. {AGAIN.format(command=command)} If these are the same rows in "
            "another form, bind the form that all share: budget = tp.bind_data(budget, rows)."
        )
    found = fingerprint(data, key, known["num_items"])
    if found["key_id"] != known["key_id"]:
        raise Refused(f"Budget: {str(budget.key_path)!r} is the key of another budget. Restore that of {place}.")
    if not hmac.compare_digest(str(found["fingerprint"]), str(known["fingerprint"])):
        raise Refused(
            f"Budget: the data are not those that {place} is bound to: of {known['num_items']} items that were "
            f"compared some differ. Pass the same rows, in the same order. If they are the same rows in another form, "
            f"bind the form that all runs share: budget = tp.bind_data(budget, rows). {AGAIN.format(command=command)}"
        )
