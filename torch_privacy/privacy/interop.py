# SPDX-License-Identifier: Apache-2.0
"""Releases to and from dp-accounting's ``DpEvent``, and the schema of the privacy statement.

dp-accounting need not be installed, except to call the functions that speak its language. A ``DpEvent`` says nothing of
the neighboring relation: that belongs to its accountant there, and to the event here.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from types import ModuleType
from typing import Any

from .._validate import Refused
from .events.base import LAWS, Event, NeighboringRelation
from .events.counts import Laplace
from .events.gaussian import Gaussian, SubsampledBlocks, SubsampledGaussian
from .ledger import Ledger
from .pairs.base import SubsampledNormal
from .pairs.discrete import LaplacePair

Releases = Iterable[tuple[Event, int]]


def to_dp_event(releases: Ledger | Releases) -> Any:
    """The same releases as one ``dp_accounting.DpEvent``, for any of its accountants under add/remove one.

    Args:
        releases: a ledger, or pairs (event, how often) as for `compose`.

    Returns:
        A ``ComposedDpEvent`` of ``GaussianDpEvent``, ``PoissonSampledDpEvent`` of it and ``LaplaceDpEvent``, each
        with its count. Several blocks on one sample become the one Gaussian that they amount to.

    Raises:
        Refused: an event has no counterpart: its law is neither a Poisson-sampled Gaussian nor Laplace noise, or
            neighbors replace one example (then dp-accounting's accountants disagree on what a noise multiplier is
            relative to).
        ImportError: dp-accounting is not installed.

    Example:
        >>> to_dp_event([(SubsampledGaussian(1.1, 0.01), 100)]).events[0].count
        100
    """
    dp_event = _dp_event("to_dp_event")
    pairs = releases.events if isinstance(releases, Ledger) else list(releases)
    refused = {repr(event): reason for event, _ in pairs if (reason := _no_counterpart(event))}
    if refused:
        listed = "; ".join(f"{event} {reason}" for event, reason in refused.items())
        raise Refused(f"to_dp_event: {listed}.")
    return dp_event.ComposedDpEvent(
        [dp_event.SelfComposedDpEvent(_one_dp_event(event, dp_event), count) for event, count in pairs]
    )


def from_dp_event(event: Any) -> list[tuple[Event, int]]:
    """A ``dp_accounting.DpEvent`` as pairs (event, how often), for `compose`; neighbors differ by one example more.

    Compositions are flattened. Gaussians composed *within* a Poisson sample share it and become `SubsampledBlocks`.

    Raises:
        Refused: an event of a kind that has no counterpart here, or Gaussian noise of zero.
        ImportError: dp-accounting is not installed.

    Example:
        >>> from dp_accounting import dp_event
        >>> step = dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(1.1))
        >>> from_dp_event(dp_event.SelfComposedDpEvent(step, 100))
        [(SubsampledGaussian(noise_multiplier=1.1, sampling_probability=0.01), 100)]
    """
    _dp_event("from_dp_event")
    return list(_flattened(event, 1))


def ledger_from_dp_event(event: Any, path: str | os.PathLike[str] | None = None) -> Ledger:
    """A new ledger with the releases of a ``DpEvent``, one step each, as if they had been recorded here.

    Args:
        event: a ``dp_accounting.DpEvent``.
        path: file of the ledger; None keeps it in memory.
    """
    ledger = Ledger(path)
    for release, count in from_dp_event(event):
        for _ in range(count):
            ledger.record(release, len(ledger), "from dp-accounting")
    return ledger


def statement_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a privacy statement: ``privacy.json`` of a run, ``training.statement()``.

    Its ``format`` is a version: whatever removes a field or changes what it means makes a new one. A field may be added
    within a version, so readers should pass over those that they do not know.

    Example:
        >>> statement_schema()["properties"]["format"]
        {'const': 2}
    """
    return json.loads(
        resources.files("torch_privacy.privacy").joinpath("statement.schema.json").read_text(encoding="utf-8")
    )


def _dp_event(where: str) -> ModuleType:
    try:
        from dp_accounting import dp_event
    except ImportError as error:
        raise ImportError(
            f"{where}: needs dp-accounting, which is not installed. Get it with: pip install 'dp-accounting>=0.6'"
        ) from error
    return dp_event


def _no_counterpart(event: Event) -> str:
    """Why an event cannot be told to dp-accounting; "" if it can."""
    if event.neighboring_relation is NeighboringRelation.REPLACE_ONE:
        return "is priced for replace-one, where dp-accounting's accountants take noise multipliers differently"
    return (
        "" if type(LAWS[type(event)](event)) in DP_EVENTS else "is neither a Poisson-sampled Gaussian nor Laplace noise"
    )


def _one_dp_event(event: Event, dp_event: ModuleType) -> Any:
    law = LAWS[type(event)](event)
    return DP_EVENTS[type(law)](law, _noise(event, law.shift), dp_event)  # pyright: ignore[reportAttributeAccessIssue]


def _noise(event: Event, shift: float) -> float:
    """The noise multiplier of a law; as given in the event if it is the same, for 1 / (1 / 1.1) is not 1.1."""
    given = getattr(event, "noise_multiplier", None)
    return given if given and 1 / given == shift else 1 / shift


def _gaussian_dp_event(law: SubsampledNormal, noise: float, dp_event: ModuleType) -> Any:
    gaussian = dp_event.GaussianDpEvent(noise)
    return gaussian if law.probability == 1 else dp_event.PoissonSampledDpEvent(law.probability, gaussian)


def _flattened(event: Any, count: int) -> Iterator[tuple[Event, int]]:
    name = type(event).__name__
    if name not in KINDS:
        raise Refused(f"from_dp_event: {event!r} has no counterpart. Known are {', '.join(KINDS)}.")
    yield from KINDS[name](event, count)


def _sampled(event: Any, count: int) -> Iterator[tuple[Event, int]]:
    if event.sampling_probability == 0:
        return
    inner = list(_flattened(event.event, 1))
    others = [release for release, _ in inner if not isinstance(release, Gaussian)]
    if others:
        raise Refused(f"from_dp_event: a Poisson sample of {others[0]!r} has no counterpart, only of Gaussians.")
    noises = tuple(release.noise_multiplier for release, times in inner for _ in range(times))  # pyright: ignore
    if len(noises) == 1:
        yield SubsampledGaussian(noises[0], event.sampling_probability), count
    elif noises:
        yield SubsampledBlocks(noises, event.sampling_probability), count


def _gaussian(event: Any, count: int) -> Iterator[tuple[Event, int]]:
    if event.noise_multiplier == 0:
        raise Refused(f"from_dp_event: {event!r} is without noise, hence not private.")
    yield Gaussian(float(event.noise_multiplier)), count


# From one-step laws to a DpEvent, and from kinds of DpEvent, by name. One more is one more line here.
DP_EVENTS: dict[type, Callable[[Any, float, ModuleType], Any]] = {
    SubsampledNormal: _gaussian_dp_event,
    LaplacePair: lambda law, noise, dp_event: dp_event.LaplaceDpEvent(noise),
}
KINDS: dict[str, Callable[[Any, int], Iterator[tuple[Event, int]]]] = {
    "GaussianDpEvent": _gaussian,
    "LaplaceDpEvent": lambda event, count: iter([(Laplace(float(event.noise_multiplier)), count)]),
    "PoissonSampledDpEvent": _sampled,
    "ComposedDpEvent": lambda event, count: (pair for part in event.events for pair in _flattened(part, count)),
    "SelfComposedDpEvent": lambda event, count: _flattened(event.event, count * event.count),
    "NoOpDpEvent": lambda event, count: iter(()),
}
