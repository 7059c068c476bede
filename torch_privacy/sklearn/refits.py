# SPDX-License-Identifier: Apache-2.0
"""Remembers which rows were trained on in this process, so that no fit spends privacy on them again unnoticed."""

from __future__ import annotations

import itertools
import os
import secrets
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import privacy
from ..privacy.rounding import round_up
from ..support.validate import Refused

Releases = Sequence[tuple[privacy.Event, int]]

CHOICES = ("refuse", "count", "separate")
RUNS = 10  # of the search that a refusal prices
COPIED, SHARE_OF_COPIES = 5, 0.01  # least number of rows that were copied, and share of all rows that are copies
NEARLY_ALL = 0.9  # share of different rows in which a feature has a value of its own, so that equal rows are copies

_KEY = secrets.token_bytes(32)  # so that the digests say nothing about the rows to who reads them
_PROCESS = f"{os.getpid()} {secrets.token_hex(8)}"


class Origin(NamedTuple):
    """Says where an estimator comes from; goes with its pickles."""

    process: str
    family: int  # shared by an estimator and its clones
    is_clone: bool


@dataclass(eq=False)
class Fit:
    """One fit: digests of its rows, and what it released."""

    rows: NDArray[np.uint64]
    family: int
    releases: Releases
    warning: str | None = None
    earlier: list[Fit] = field(default_factory=list)  # of the same data, if they are to be counted
    fingerprint: str = ""  # of the release of a scaler

    def end(self, releases: Releases, warning: str | None) -> None:
        """Notes what was released; forgets the fit if that is nothing."""
        self.releases, self.warning = releases, warning
        if not releases:
            with _KNOWN.lock:
                _KNOWN.fits.remove(self)


class _Known:
    """Holds what was fitted in this process, under one lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.fits: list[Fit] = []
        self.scaled: list[NDArray[np.uint64]] = []  # (rows, 2): digests of rows, and of what a scaler made of them
        self.families = itertools.count()


_KNOWN = _Known()


class RemembersFits:
    """Notes for an estimator where it comes from; in clones and pickles, too."""

    _origin: Origin

    def _known_origin(self) -> Origin:
        """Returns where the estimator comes from; one without an origin was made here."""
        if not hasattr(self, "_origin"):
            self._origin = Origin(_PROCESS, next(_KNOWN.families), False)
        return self._origin

    def __sklearn_clone__(self) -> Any:
        origin = self._known_origin()
        clone: Any = super().__sklearn_clone__()  # pyright: ignore[reportAttributeAccessIssue]
        clone._origin = origin._replace(is_clone=True)
        return clone

    def __getstate__(self) -> Any:
        self._known_origin()
        return super().__getstate__()


def digests(x: NDArray[Any]) -> NDArray[np.uint64]:
    """Returns the keyed digests of rows (n, d), as float32; equal rows have equal digests."""
    with np.errstate(over="ignore"):
        rows = np.ascontiguousarray(x.astype(np.float32) + np.float32(0))  # no negative zeros
    found = b"".join(blake2b(row.tobytes(), key=_KEY, digest_size=8).digest() for row in rows)
    return np.frombuffer(found, np.uint64)


def _are_copied(x: NDArray[Any], rows: NDArray[np.uint64]) -> bool:
    """Returns whether equal rows of x, which have equal digests, must be copies, and not other people's."""
    counts = np.unique(rows, return_counts=True)[1]
    if (counts > 1).sum() < COPIED or len(rows) - len(counts) < SHARE_OF_COPIES * len(rows):
        return False
    return any(len(np.unique(column)) >= NEARLY_ALL * len(counts) for column in x.T)


def note_scaled(x: NDArray[Any], scaled: NDArray[Any]) -> None:
    """Notes what a scaler makes of rows (n, d): a fit to the ones is a fit to the others."""
    pairs = np.stack([digests(x), digests(scaled)], 1)
    pairs = pairs[np.argsort(pairs[:, 0])]  # without the order of the rows
    with _KNOWN.lock:
        if not any(np.array_equal(pairs, known) for known in _KNOWN.scaled):
            _KNOWN.scaled.append(pairs)


def _in_all_scales(rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the digests of rows, and of what scalers made of them or made them of."""
    rows = np.sort(rows)
    more = [rows]
    while any(map(len, more)):
        known = [rows[np.searchsorted(rows, pairs).clip(max=len(rows) - 1)] == pairs for pairs in _KNOWN.scaled]
        # Of a pair in which one is known, the other one is new.
        more = [pairs[of[:, ::-1] & ~of] for pairs, of in zip(_KNOWN.scaled, known, strict=True)]
        rows = np.sort(np.concatenate([rows, *more]))
    return rows


def begin_fit(
    where: str,
    refits: str,
    origin: Origin,
    x: NDArray[Any],
    planned: Releases,
    delta: float,
    counted: Collection[str] = (),
) -> Fit:
    """Returns the fit of these rows, noted with what it will release at most; refuses it if ``refits`` says so.

    ``counted`` are the fingerprints of earlier releases that the fit's epsilon covers anyway.

    Raises:
        Refused: by default, if the estimator is a clone, comes from another process, or if it, a clone of it, or
            another estimator was fitted to some of these rows before. With "count" only if the process is another one,
            or rows were copied within x.
    """
    if refits not in CHOICES:
        raise ValueError(f"{where}: refits={refits!r} must be one of {', '.join(map(repr, CHOICES))}.")
    if refits == "refuse" and origin.is_clone:
        raise Refused(
            f"{where}: the estimator is a clone, as cross_val_score, grids and ensembles make them, and each of their "
            f"fits spends epsilon on the same data again. {_price(tuple(planned), delta)} {_choices(refits)}"
        )
    is_elsewhere = origin.process != _PROCESS or not _PROCESS.startswith(f"{os.getpid()} ")
    if refits != "separate" and is_elsewhere:
        raise Refused(
            f"{where}: the estimator was made in another process, as with n_jobs=2 or by pickle, so that earlier fits "
            "to the same data cannot be seen from here. Nothing was released. Make a new estimator here, or fit with "
            f"n_jobs=1. {_choices(refits)}"
        )
    rows = digests(x)
    if refits != "separate" and _are_copied(x, rows):
        raise Refused(
            f"{where}: many rows are in X more than once, though a feature has a value of its own in nearly every "
            "other one: they were copied, as by BaggingClassifier without bootstrap=False, or by an oversampler. Each "
            "copy would count as an example, and epsilon be that of one. Nothing was released. Leave out the copies. "
            f"{_choices('count')}"
        )
    with _KNOWN.lock:
        fit = Fit(_in_all_scales(rows), origin.family, planned)
        earlier = [
            past
            for past in _KNOWN.fits
            if (past.family == fit.family or np.isin(fit.rows, past.rows).any())
            and not (past.fingerprint and past.fingerprint in counted)
        ]
        if refits == "refuse" and earlier and earlier[-1].fingerprint and earlier[-1].family != fit.family:
            raise Refused(
                f"{where}: a PrivateScaler was fitted to rows that are in X, as they were or scaled, and that is a "
                "release, too. Nothing further was released. Pass prior_releases=[scaler], and epsilon covers both. "
                f"{_choices(refits)}"
            )
        if refits == "refuse" and earlier:
            how = "this estimator, or a clone of it," if earlier[-1].family == fit.family else "another estimator"
            raise Refused(
                f"{where}: {how} was fitted before to rows that are in X, and every further fit spends epsilon on "
                f"them again. {_price(tuple(planned), delta)} {_choices(refits)}"
            )
        fit.earlier = earlier if refits == "count" else []
        _KNOWN.fits.append(fit)
    return fit


def _choices(refits: str) -> str:
    count = "refits='count' allows further fits, and spent_ then covers all of them; " if refits == "refuse" else ""
    return f"{count}refits='separate' is for data that need no protection, or other people's with equal rows."


@lru_cache(maxsize=16)
def _price(planned: tuple[tuple[privacy.Event, int], ...], delta: float) -> str:
    """Returns the prices of several fits and of a search, in words."""
    try:
        all_fits = privacy.compose([(event, RUNS * count) for event, count in planned]).epsilon_high(delta)
        search = privacy.compose([(privacy.Repeated(planned, float(RUNS), "logarithmic"), 1)]).epsilon_high(delta)
    except (ValueError, OverflowError):
        prices = "A private search costs less than its fits one by one:"
    else:
        prices = (
            f"{RUNS} fits like this one cost epsilon = {round_up(all_fits)} together; a private search that makes "
            f"{RUNS} on average, among any number of settings, costs {round_up(search)}:"
        )
    return f"Nothing was released. {prices} tp.search_privately (docs/sklearn.md shows how)."
