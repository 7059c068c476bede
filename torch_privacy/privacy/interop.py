# SPDX-License-Identifier: Apache-2.0
"""Converts releases to and from dp-accounting's ``DpEvent``, and provides the schema of the privacy statement.

The conversions need dp-accounting installed, the rest does not. A ``DpEvent`` has no neighboring relation: there it
belongs to the accountant, here to the event.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from types import ModuleType
from typing import Any

from ..support.validate import Refused, plain_number, whole
from .events.base import Event, NeighboringRelation, checked_releases
from .events.charged import charged
from .events.counts import Laplace
from .events.gaussian import Gaussian, SubsampledBlocks, SubsampledGaussian, TruncatedGaussian
from .ledger import Ledger, Release
from .pairs.discrete import LaplacePair
from .pairs.gaussian import SubsampledGaussianPair
from .pairs.group import GroupPair

Releases = Iterable[tuple[Event, int]]


def to_dp_event(releases: Ledger | Releases) -> Any:
    """Converts releases to one ``dp_accounting.DpEvent``, for any of its accountants under add/remove one.

    Args:
        releases: a ledger, or pairs (event, how often) as for `compose`.

    Returns:
        A ``ComposedDpEvent`` of ``GaussianDpEvent``, ``PoissonSampledDpEvent`` of it, ``MixtureOfGaussiansDpEvent``
        (a `SubsampledGroup`) and ``LaplaceDpEvent``, each with its count. Several blocks on one sample become one
        equivalent Gaussian. A ``DpEvent`` has no unit of privacy: it is that of the releases.

    Raises:
        Refused: if an event has no counterpart: its pair is neither a Poisson-sampled Gaussian nor Laplace noise, or
            neighbors replace one example (there dp-accounting's accountants define the noise multiplier differently).
        ImportError: if dp-accounting is not installed.

    Example:
        >>> to_dp_event([(SubsampledGaussian(1.1, 0.01), 100)]).events[0].count
        100
    """
    dp_event = _dp_event("to_dp_event")
    pairs = charged(checked_releases("to_dp_event", releases.events if isinstance(releases, Ledger) else releases))
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


def releases_from_opacus(history: Any) -> list[Release]:
    """Converts the history of an Opacus accountant to releases, for ``prior_releases`` of a training on the same data.

    Each step becomes ``SubsampledGaussian(noise_multiplier, sample_rate)``, exact for Opacus' Poisson sampling. A
    history does not say if ``poisson_sampling=False`` was used; then it has no price here, and none in Opacus.

    Args:
        history: ``[(noise_multiplier, sample_rate, num_steps), ...]``; or what holds it: an accountant, its
            ``state_dict()``, a ``PrivacyEngine``, or the dictionary of an Opacus checkpoint.

    Returns:
        One release for each step.

    Raises:
        Refused: a step has no noise, or this is no history.
        ValueError: a number is out of range.

    Example:
        >>> releases = releases_from_opacus([(1.1, 0.01, 100)])
        >>> len(releases), releases[0].event
        (100, SubsampledGaussian(noise_multiplier=1.1, sampling_probability=0.01))
    """
    where = "releases_from_opacus"
    for holder in ("accountant", "history"):
        history = getattr(history, holder, history)
    for key in ("privacy_accountant_state_dict", "history"):
        if isinstance(history, Mapping):
            history = history.get(key, history)
    if not isinstance(history, list | tuple) or not all(isinstance(e, list | tuple) and len(e) == 3 for e in history):
        raise Refused(
            f"{where}: {type(history).__name__} is no history of Opacus. Pass accountant.history, which is a list of "
            "(noise_multiplier, sample_rate, num_steps)."
        )
    releases: list[Release] = []
    for entry in history:
        noise, rate, steps = map(plain_number, entry)
        if noise == 0:
            raise Refused(f"{where}: {entry!r} has noise_multiplier 0: these steps have no noise and are not private.")
        whole(where, num_steps=steps)
        event = SubsampledGaussian(noise, rate)
        first = len(releases)
        releases += [Release(event, f"opacus history {number}") for number in range(first, first + steps)]
    return releases


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
        "" if type(event.dominating_pair()) in DP_EVENTS else "is neither a Poisson-sampled Gaussian nor Laplace noise"
    )


def _one_dp_event(event: Event, dp_event: ModuleType) -> Any:
    pair = event.dominating_pair()
    return DP_EVENTS[type(pair)](pair, _noise(event, pair.shift), dp_event)  # pyright: ignore[reportAttributeAccessIssue]


def _noise(event: Event, shift: float) -> float:
    """Returns the noise multiplier of a pair, as given in the event if possible: 1 / (1 / 1.1) is not 1.1 in floats."""
    given = getattr(event, "noise_multiplier", None)
    return given if given and 1 / given == shift else 1 / shift


def _gaussian_dp_event(pair: SubsampledGaussianPair, noise: float, dp_event: ModuleType) -> Any:
    gaussian = dp_event.GaussianDpEvent(noise)
    return gaussian if pair.probability == 1 else dp_event.PoissonSampledDpEvent(pair.probability, gaussian)


def _group_dp_event(pair: GroupPair, noise: float, dp_event: ModuleType) -> Any:
    return dp_event.MixtureOfGaussiansDpEvent(noise, list(range(pair.group_size + 1)), pair.weights)


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


def _truncated(event: Any, count: int) -> Iterator[tuple[Event, int]]:
    if 0 in (event.sampling_probability, event.truncated_batch_size, event.dataset_size):
        return
    if event.noise_multiplier == 0:
        raise Refused(f"from_dp_event: {event!r} has no noise, so it is not private.")
    sizes = int(event.dataset_size), int(event.truncated_batch_size)
    yield TruncatedGaussian(float(event.noise_multiplier), float(event.sampling_probability), *sizes), count


# Conversions to a DpEvent by type of pair, and from a DpEvent by name. A new one is one more line here.
DP_EVENTS: dict[type, Callable[[Any, float, ModuleType], Any]] = {
    SubsampledGaussianPair: _gaussian_dp_event,
    GroupPair: _group_dp_event,
    LaplacePair: lambda pair, noise, dp_event: dp_event.LaplaceDpEvent(noise),
}
KINDS: dict[str, Callable[[Any, int], Iterator[tuple[Event, int]]]] = {
    "GaussianDpEvent": _gaussian,
    "LaplaceDpEvent": lambda event, count: iter([(Laplace(float(event.noise_multiplier)), count)]),
    "PoissonSampledDpEvent": _sampled,
    "ComposedDpEvent": lambda event, count: (pair for part in event.events for pair in _flattened(part, count)),
    "SelfComposedDpEvent": lambda event, count: _flattened(event.event, count * event.count),
    "TruncatedSubsampledGaussianDpEvent": _truncated,
    "NoOpDpEvent": lambda event, count: iter(()),
}
