# SPDX-License-Identifier: Apache-2.0
"""Converts releases to and from dp-accounting's ``DpEvent``, and provides the schema of the privacy statement.

The conversions need dp-accounting installed, the rest does not. A ``DpEvent`` has no neighboring relation: there it
belongs to the accountant, here to the event.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from math import inf, nextafter, sqrt
from types import ModuleType
from typing import Any

from ..support.validate import Refused, plain_number, whole
from .events.base import Event, NeighboringRelation, checked_releases
from .events.charged import charged
from .events.concentrated import ZeroConcentrated
from .events.counts import DiscreteLaplace, Laplace
from .events.custom import FinitePair
from .events.gaussian import Gaussian, SubsampledBlocks, SubsampledGaussian, TruncatedGaussian
from .events.mixtures import GaussianMixture, PoissonSampled
from .ledger import Ledger
from .pairs.discrete import LaplacePair
from .pairs.gaussian import SubsampledGaussianPair
from .pairs.group import GroupPair
from .release import Release, new_fingerprint
from .selection import Repeated

Releases = Iterable[tuple[Event, int]]


def to_dp_event(releases: Ledger | Releases) -> Any:
    """Converts releases to one ``dp_accounting.DpEvent``, for any of its accountants under add/remove one.

    Args:
        releases: a ledger, or pairs (event, how often) as for `compose`.

    Returns:
        A ``ComposedDpEvent`` of ``GaussianDpEvent``, ``LaplaceDpEvent``, ``PoissonSampledDpEvent`` of these two,
        ``DiscreteLaplaceDpEvent`` and ``MixtureOfGaussiansDpEvent`` (also for a `SubsampledGroup`), each with its
        count. Several blocks on one sample become one equivalent Gaussian. A ``DpEvent`` has no unit of privacy: it is
        that of the releases.

    Raises:
        Refused: if an event has no counterpart, or neighbors replace one example (there dp-accounting's accountants
            define the noise multiplier differently).
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
    What dp-accounting prices only where an example is replaced with nothing (randomized response, where a random value
    is answered then, and trees) is under zero-out.

    Raises:
        Refused: if an event has no counterpart here, by name and with the reason, or its noise is zero.
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
            ledger.record(release, len(ledger), new_fingerprint("from dp-accounting"))
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
    known = type(event) in OF_EVENTS or type(event.dominating_pair()) in DP_EVENTS or _sampled_laplace(event)
    return "" if known else "is no Gaussian or Laplace noise, on all data or a Poisson sample, nor a mixture of these"


def _sampled_laplace(event: Event) -> bool:
    return isinstance(event, PoissonSampled) and isinstance(event.event, Laplace)


def _one_dp_event(event: Event, dp_event: ModuleType) -> Any:
    if type(event) in OF_EVENTS:
        return OF_EVENTS[type(event)](event, dp_event)
    if isinstance(event, PoissonSampled):
        return dp_event.PoissonSampledDpEvent(event.sampling_probability, _one_dp_event(event.event, dp_event))
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
        reason = WITHOUT_COUNTERPART.get(name, f"has no counterpart. Known are {', '.join(KINDS)}.")
        raise Refused(f"from_dp_event: {event!r} {reason}")
    yield from KINDS[name](event, count)


def _sampled(event: Any, count: int) -> Iterator[tuple[Event, int]]:
    if event.sampling_probability == 0:
        return
    inner = list(_flattened(event.event, 1))
    if len(inner) == 1 and inner[0][1] == 1 and isinstance(inner[0][0], Laplace | DiscreteLaplace):
        yield PoissonSampled(inner[0][0], event.sampling_probability), count
        return
    others = [
        release
        for release, _ in inner
        if not isinstance(release, Gaussian) or release.neighboring_relation is NeighboringRelation.REPLACE_SPECIAL
    ]
    if others:
        known = "only of Gaussians, or of a single Laplace noise"
        raise Refused(f"from_dp_event: a Poisson sample of {others[0]!r} has no counterpart, {known}.")
    noises = tuple(release.noise_multiplier for release, times in inner for _ in range(times))  # pyright: ignore
    if len(noises) == 1:
        yield SubsampledGaussian(noises[0], event.sampling_probability), count
    elif noises:
        yield SubsampledBlocks(noises, event.sampling_probability), count


def _gaussian(event: Any, count: int) -> Iterator[tuple[Event, int]]:
    if event.noise_multiplier == 0:
        raise Refused(f"from_dp_event: {event!r} has no noise, so it is not private.")
    yield Gaussian(float(event.noise_multiplier)), count


def _discrete_laplace(event: Any, count: int) -> Iterator[tuple[Event, int]]:
    if event.noise_parameter <= 0:
        raise Refused(f"from_dp_event: {event!r} has unlimited noise or none.")
    scale = 1 / event.noise_parameter
    scale = scale if 1 / scale >= event.noise_parameter else nextafter(scale, 0.0)
    yield DiscreteLaplace(scale, int(event.sensitivity)), count


def _response(event: Any, count: int) -> Iterator[tuple[Event, int]]:
    """Yields the answer against one of equally likely values, which dp-accounting takes where there is no example."""
    buckets, noise = int(event.num_buckets), float(event.noise_parameter)
    if buckets == 1 or noise == 1:
        return
    if noise == 0:
        raise Refused(f"from_dp_event: {event!r} has no noise, so it is not private.")
    others = noise * (buckets - 1) / buckets
    answer, random = (1 - others, others), (1 / buckets, 1 - 1 / buckets)
    yield FinitePair(answer, random, NeighboringRelation.REPLACE_SPECIAL), count


def _mixture(event: Any, count: int) -> Iterator[tuple[Event, int]]:
    sizes, chances = (tuple(map(float, values)) for values in (event.sensitivities, event.sampling_probs))
    if not any(size * chance for size, chance in zip(sizes, chances, strict=True)):
        return
    if event.standard_deviation == 0:
        raise Refused(f"from_dp_event: {event!r} has no noise, so it is not private.")
    yield GaussianMixture(float(event.standard_deviation), sizes, chances), count


def _concentrated(event: Any, count: int) -> Iterator[tuple[Event, int]]:
    if event.xi:
        raise Refused(f"from_dp_event: {event!r} has xi={event.xi!r}, and only 0 has a price here.")
    if event.rho:
        yield ZeroConcentrated(float(event.rho)), count


def _tree(event: Any, count: int) -> Iterator[tuple[Event, int]]:
    """Yields one Gaussian: an example is in as many nodes of one tree as the tree of most steps has levels."""
    steps = event.step_counts if isinstance(event.step_counts, Iterable) else [event.step_counts]
    levels = max((int(number).bit_length() for number in steps), default=0)
    if not levels:
        return
    if event.noise_multiplier == 0:
        raise Refused(f"from_dp_event: {event!r} has no noise, so it is not private.")
    yield Gaussian(float(event.noise_multiplier) / sqrt(levels), NeighboringRelation.REPLACE_SPECIAL), count


def _repeated(event: Any, count: int) -> Iterator[tuple[Event, int]]:
    names = {inf: "poisson", 1: "geometric", 0: "logarithmic"}
    if event.shape not in names:
        raise Refused(f"from_dp_event: {event!r} has no counterpart: shape must be inf, 1 or 0.")
    yield Repeated(tuple(_flattened(event.event, 1)), float(event.mean), names[event.shape]), count


def _truncated(event: Any, count: int) -> Iterator[tuple[Event, int]]:
    if 0 in (event.sampling_probability, event.truncated_batch_size, event.dataset_size):
        return
    if event.noise_multiplier == 0:
        raise Refused(f"from_dp_event: {event!r} has no noise, so it is not private.")
    sizes = int(event.dataset_size), int(event.truncated_batch_size)
    yield TruncatedGaussian(float(event.noise_multiplier), float(event.sampling_probability), *sizes), count


# Conversions to a DpEvent by type of event or of pair, and from a DpEvent by name. A new one is one more line here.
DP_EVENTS: dict[type, Callable[[Any, float, ModuleType], Any]] = {
    SubsampledGaussianPair: _gaussian_dp_event,
    GroupPair: _group_dp_event,
    LaplacePair: lambda pair, noise, dp_event: dp_event.LaplaceDpEvent(noise),
}
OF_EVENTS: dict[type[Event], Callable[[Any, ModuleType], Any]] = {
    DiscreteLaplace: lambda event, dp_event: dp_event.DiscreteLaplaceDpEvent(1 / event.noise_scale, event.sensitivity),
    GaussianMixture: lambda event, dp_event: dp_event.MixtureOfGaussiansDpEvent(
        event.noise_stddev, event.sensitivities, event.probabilities
    ),
}
KINDS: dict[str, Callable[[Any, int], Iterator[tuple[Event, int]]]] = {
    "GaussianDpEvent": _gaussian,
    "LaplaceDpEvent": lambda event, count: iter([(Laplace(float(event.noise_multiplier)), count)]),
    "PoissonSampledDpEvent": _sampled,
    "ComposedDpEvent": lambda event, count: (pair for part in event.events for pair in _flattened(part, count)),
    "SelfComposedDpEvent": lambda event, count: _flattened(event.event, count * event.count),
    "TruncatedSubsampledGaussianDpEvent": _truncated,
    "DiscreteLaplaceDpEvent": _discrete_laplace,
    "RandomizedResponseDpEvent": _response,
    "MixtureOfGaussiansDpEvent": _mixture,
    "ZCDpEvent": _concentrated,
    "SingleEpochTreeAggregationDpEvent": _tree,
    "RepeatAndSelectDpEvent": _repeated,
    "NoOpDpEvent": lambda event, count: iter(()),
}
WITHOUT_COUNTERPART = {
    "NonPrivateDpEvent": "is not private: no epsilon holds for it.",
    "UnsupportedDpEvent": "has no price in any accountant.",
    "SampledWithoutReplacementDpEvent": (
        "is priced where one example is replaced, where dp-accounting takes the noise multiplier differently. Use "
        "FixedSizeGaussian, with noise over twice the clip norm."
    ),
    "SampledWithReplacementDpEvent": "draws examples with replacement, which has no certified price here.",
}
