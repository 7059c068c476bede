# SPDX-License-Identifier: Apache-2.0
"""Converts releases to and from dp-accounting's ``DpEvent``, and provides the schema of the privacy statement.

The conversions need dp-accounting installed, the rest does not. A ``DpEvent`` has no neighboring relation: there it
belongs to the accountant, here to the event.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from types import ModuleType
from typing import Any

from ..support.validate import Refused
from .events.base import PAIRS, Event, NeighboringRelation
from .events.counts import Laplace
from .events.gaussian import Gaussian, SubsampledBlocks, SubsampledGaussian
from .ledger import Ledger
from .pairs.discrete import LaplacePair
from .pairs.gaussian import SubsampledGaussianPair

Releases = Iterable[tuple[Event, int]]


def to_dp_event(releases: Ledger | Releases) -> Any:
    """Converts releases to one ``dp_accounting.DpEvent``, for any of its accountants under add/remove one.

    Args:
        releases: a ledger, or pairs (event, how often) as for `compose`.

    Returns:
        A ``ComposedDpEvent`` of ``GaussianDpEvent``, ``PoissonSampledDpEvent`` of it and ``LaplaceDpEvent``, each
        with its count. Several blocks on one sample become one equivalent Gaussian.

    Raises:
        Refused: if an event has no counterpart: its pair is neither a Poisson-sampled Gaussian nor Laplace noise, or
            neighbors replace one example (there dp-accounting's accountants define the noise multiplier differently).
        ImportError: if dp-accounting is not installed.

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
    """Converts a ``dp_accounting.DpEvent`` to pairs (event, how often) for `compose`, under add/remove one.

    Compositions are flattened. Gaussians composed *within* a Poisson sample share it and become `SubsampledBlocks`.

    Raises:
        Refused: if an event has no counterpart here, or its Gaussian noise is zero.
        ImportError: if dp-accounting is not installed.

    Example:
        >>> from dp_accounting import dp_event
        >>> step = dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(1.1))
        >>> from_dp_event(dp_event.SelfComposedDpEvent(step, 100))
        [(SubsampledGaussian(noise_multiplier=1.1, sampling_probability=0.01), 100)]
    """
    _dp_event("from_dp_event")
    return list(_flattened(event, 1))


def ledger_from_dp_event(event: Any, path: str | os.PathLike[str] | None = None) -> Ledger:
    """Returns a new ledger with the releases of a ``DpEvent``, one step each, as if they had been recorded here.

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
    """Returns the JSON schema (draft 2020-12) of privacy statements: ``privacy.json`` and ``training.statement()``.

    Its ``format`` is a version number: it changes when a field is removed or changes its meaning. Fields may be added
    within a version, so readers should ignore unknown ones.

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
            f"{where}: needs dp-accounting, which is not installed. Install it with: pip install 'dp-accounting>=0.6'"
        ) from error
    return dp_event


def _no_counterpart(event: Event) -> str:
    """Returns the reason why an event cannot be converted; "" if it can."""
    if event.neighboring_relation is NeighboringRelation.REPLACE_ONE:
        return "is priced for replace-one, where dp-accounting's accountants take noise multipliers differently"
    return (
        ""
        if type(PAIRS[type(event)](event)) in DP_EVENTS
        else "is neither a Poisson-sampled Gaussian nor Laplace noise"
    )


def _one_dp_event(event: Event, dp_event: ModuleType) -> Any:
    pair = PAIRS[type(event)](event)
    return DP_EVENTS[type(pair)](pair, _noise(event, pair.shift), dp_event)  # pyright: ignore[reportAttributeAccessIssue]


def _noise(event: Event, shift: float) -> float:
    """Returns the noise multiplier of a pair, as given in the event if possible: 1 / (1 / 1.1) is not 1.1 in floats."""
    given = getattr(event, "noise_multiplier", None)
    return given if given and 1 / given == shift else 1 / shift


def _gaussian_dp_event(pair: SubsampledGaussianPair, noise: float, dp_event: ModuleType) -> Any:
    gaussian = dp_event.GaussianDpEvent(noise)
    return gaussian if pair.probability == 1 else dp_event.PoissonSampledDpEvent(pair.probability, gaussian)


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
        raise Refused(f"from_dp_event: {event!r} has no noise, so it is not private.")
    yield Gaussian(float(event.noise_multiplier)), count


# Conversions to a DpEvent by type of pair, and from a DpEvent by name. A new one is one more line here.
DP_EVENTS: dict[type, Callable[[Any, float, ModuleType], Any]] = {
    SubsampledGaussianPair: _gaussian_dp_event,
    LaplacePair: lambda pair, noise, dp_event: dp_event.LaplaceDpEvent(noise),
}
KINDS: dict[str, Callable[[Any, int], Iterator[tuple[Event, int]]]] = {
    "GaussianDpEvent": _gaussian,
    "LaplaceDpEvent": lambda event, count: iter([(Laplace(float(event.noise_multiplier)), count)]),
    "PoissonSampledDpEvent": _sampled,
    "ComposedDpEvent": lambda event, count: (pair for part in event.events for pair in _flattened(part, count)),
    "SelfComposedDpEvent": lambda event, count: _flattened(event.event, count * event.count),
    "NoOpDpEvent": lambda event, count: iter(()),
}
