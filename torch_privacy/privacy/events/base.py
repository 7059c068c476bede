# SPDX-License-Identifier: Apache-2.0
"""Provides `Event`, the frozen description of one release, and the registry that prices event types."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from ...support.read_file import shown
from ...support.units import ONE_EXAMPLE, plural
from ...support.validate import InvalidValue, check_unit, in_range, one_of, plain_number, plain_numbers, positive, whole

if TYPE_CHECKING:
    from ..pairs.base import DominatingPair, PairBounds

# Outside this range no privacy or no signal is left, and floating point fails.
SMALLEST_NOISE, LARGEST_NOISE = 1e-6, 1e6
SMALLEST_PROBABILITY = 1e-315
WITHOUT_NOISE = (
    "To debug almost without noise, pass noise_multiplier=1e-6 with test_seed=0, and a large clip norm to leave "
    "gradients unclipped: every statement then says NOT PRIVATE."
)
REPLACED = (
    "To replace an example is to zero it out and to put another one in its place. So price the whole training for "
    "zero-out: privacy.tradeoff.group(profile.tradeoffs['symmetrized'].low, 2).low holds where an example is replaced."
)
MAX_COUNT = 2**53  # a larger number of releases is no exact floating-point number


class NeighboringRelation(Enum):
    """The relation under which two data sets count as neighbors; an epsilon means nothing without it."""

    def __repr__(self) -> str:
        return f"NeighboringRelation.{self.name}"

    ADD_OR_REMOVE_ONE = "add_or_remove_one"
    """One data set is the other plus one example."""

    REPLACE_ONE = "replace_one"
    """Same size, one example differs."""

    REPLACE_SPECIAL = "replace_special"
    """Zero-out: same size, which is public, and one example is replaced with nothing, which adds 0 to every sum.

    A training with a sampling probability of batch size over number of examples holds under this relation.
    Each sum then moves as if the example were removed, so the price is that of add/remove one at the same probability.
    """

    @property
    def in_words(self) -> str:
        """The relation as it is printed in statements and tables, for a unit of one example."""
        return self.words(ONE_EXAMPLE)

    def words(self, unit: str) -> str:
        """Returns the relation in words for any unit of privacy, such as "customer"."""
        return RELATIONS_IN_WORDS[self].format(unit=unit)

    def explained(self, unit: str) -> str:
        """Returns the relation in words, with what zero-out means and takes as public."""
        public = f" (replace it with nothing; how many {plural(unit)} there are is public)"
        return self.words(unit) + (public if self is NeighboringRelation.REPLACE_SPECIAL else "")


RELATIONS_IN_WORDS = {
    NeighboringRelation.ADD_OR_REMOVE_ONE: "add/remove one {unit}",
    NeighboringRelation.REPLACE_ONE: "replace one {unit}",
    NeighboringRelation.REPLACE_SPECIAL: "zero out one {unit}",
}
REMOVALS = NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_SPECIAL  # one example's part is gone


def check_noise(where: str, noise_multiplier: float) -> None:
    """Raises a ``ValueError`` unless the noise multiplier is a number that can be priced."""
    positive(where, noise_multiplier=noise_multiplier)
    if not SMALLEST_NOISE <= noise_multiplier <= LARGEST_NOISE:
        hint = f" {WITHOUT_NOISE}" if noise_multiplier < 1 else ""
        allowed = (
            f"must lie in [{SMALLEST_NOISE:g}, {LARGEST_NOISE:g}]. It is the noise's standard deviation divided by the "
            f"sensitivity; usual values lie between 0.3 and 10.{hint}"
        )
        raise InvalidValue(where, "noise_multiplier", noise_multiplier, allowed)


def check_relation(where: str, neighboring_relation: NeighboringRelation) -> None:
    """Raises a ``ValueError`` unless the relation is a `NeighboringRelation`."""
    if not isinstance(neighboring_relation, NeighboringRelation):
        allowed = ", ".join(f"NeighboringRelation.{relation.name}" for relation in NeighboringRelation)
        raise ValueError(f"{where}: neighboring_relation={neighboring_relation!r} must be one of {allowed}.")


def check_removal(where: str, neighboring_relation: NeighboringRelation) -> None:
    """Raises a ``ValueError`` unless an example is added, removed or zeroed out, not replaced by another one."""
    check_relation(where, neighboring_relation)
    if neighboring_relation not in REMOVALS:
        raise ValueError(
            f"{where}: neighboring_relation={neighboring_relation!r} has no known price here: no pair is proved to "
            f"cover any two examples, one in place of the other. Allowed: {', '.join(map(repr, REMOVALS))}. {REPLACED}"
        )


def check_probability(where: str, sampling_probability: float) -> None:
    """Raises a ``ValueError`` unless the sampling probability lies in (0, 1]; 1e-315 and less count as 0."""
    hint = "For a mean batch of 256 out of 60000 pass 256 / 60000."
    in_range(where, 0, 1, sampling_probability=sampling_probability, hint=hint)
    if sampling_probability <= SMALLEST_PROBABILITY:  # its products underflow
        in_range(where, SMALLEST_PROBABILITY, 1, sampling_probability=sampling_probability, hint=hint)


class Event:
    """One release. Its fields are public information, and its price depends on nothing else.

    Each event type has a ``neighboring_relation`` (a field, or the same for the whole type), under which its
    sensitivity is taken; a ``sampler``, the word for how examples are drawn; a ``unit``, the word for what is added,
    removed or replaced; and is registered by `priced`. Releases of different units have no joint price.
    """

    neighboring_relation: NeighboringRelation
    sampler: str
    unit: str = ONE_EXAMPLE
    has_runs: bool = False  # True if each entry of a list is a run of its own, which is priced as a whole

    def __repr__(self) -> str:
        """Returns what Python prints for a dataclass, without the fields left at their default."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in chosen_fields(self).items())})"

    def dominating_pair(self) -> "DominatingPair | PairBounds":
        """Returns the pair of distributions that prices the event, or bounds on it; `priced` states it."""
        raise NotImplementedError

    @property
    def assumption(self) -> str:
        """The assumption of the price beyond the relation and the sampler, for the privacy statement; "" if none."""
        return ""


def check_fields(event: Event) -> None:
    """Raises a ``ValueError`` if a field that many event types have is not valid: noise, sampling, relation, unit."""
    for name, check in _checks_of(type(event)):
        check(type(event).__name__, getattr(event, name))


@cache
def _checks_of(kind: type[Event]) -> list[tuple[str, Callable[[str, Any], None]]]:
    return [(field.name, CHECKS[field.name]) for field in fields(kind) if field.name in CHECKS]  # pyright: ignore


CHECKS: dict[str, Callable[[str, Any], None]] = {
    "noise_multiplier": check_noise,
    "sampling_probability": check_probability,
    "neighboring_relation": check_relation,
    "unit": lambda where, unit: check_unit(where, unit=unit),
}


EVENTS: dict[str, type[Event]] = {}
"""Every event type by its name, for `event_from_dict`."""

Kind = TypeVar("Kind", bound=type[Event])


def priced(dominating_pair: "Callable[[Any], DominatingPair | PairBounds]") -> Callable[[Kind], Kind]:
    """Registers an event type: a class decorator that states how one release is priced.

    A new event type needs this decorator and nothing else; it may be defined in any file. The class's name identifies
    the type in ledgers. Fields given as scalars of numpy or torch become Python's numbers.

    Args:
        dominating_pair: function from an event to its pair (P, Q): the outcome's distribution with the example and
            without it, for the two worst neighboring data sets. See ``privacy.pairs`` for ready-made pairs.

    Example:
        >>> from dataclasses import dataclass
        >>> from torch_privacy.privacy.pairs.gaussian import SubsampledGaussianPair
        >>> @priced(lambda event: SubsampledGaussianPair(event.distance, 1.0))
        ... @dataclass(frozen=True, repr=False)
        ... class Shifted(Event):
        ...     distance: float
        ...     neighboring_relation = NeighboringRelation.REPLACE_ONE
        ...     sampler = "full batch"
        >>> event_from_dict({"type": "Shifted", "distance": 0.5})
        Shifted(distance=0.5)
        >>> _ = EVENTS.pop("Shifted")  # unregisters it after this example

    Raises:
        ValueError: if another event type has that name.
    """

    def register(kind: Kind) -> Kind:
        if kind.__name__ in EVENTS:
            known = EVENTS[kind.__name__]
            raise ValueError(
                f"priced: an event type named {kind.__name__!r} exists already: {known!r}. Choose another name."
            )
        EVENTS[kind.__name__] = plain_numbers(kind)
        kind.dominating_pair = lambda self: dominating_pair(self)  # binds any callable, such as a partial or a class
        return kind

    return register


def check_event(where: str, event: Any) -> None:
    """Raises a ``ValueError`` unless the event's type is registered and its fields pass the type's own checks.

    Whatever takes in an event calls this: composition, ledgers, and with them statements and cards.
    """
    if EVENTS.get(type(event).__name__) is not type(event):
        known = ", ".join(EVENTS)
        raise ValueError(
            f"{where}: cannot price {shown(event)}. Known events: {known}. Describe other mechanisms as "
            "KnownProfile or FinitePair."
        )
    try:
        getattr(event, "__post_init__", lambda: None)()  # again: a copy, a pickle or an assignment makes no checks
    except (TypeError, AttributeError, ArithmeticError, LookupError) as error:
        raise ValueError(f"{where}: {type(event).__name__} cannot have these values ({error}).") from error


def checked_releases(where: str, events: Any) -> list[tuple[Event, int]]:
    """Returns the pairs (event, count); raises a ``ValueError`` if an event or a count cannot be priced."""
    pairs = list(events) if isinstance(events, Iterable) else [events]
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"{where}: got {shown(events)}: must be pairs (event, how often).")
    for event, count in pairs:
        if isinstance(count, Event) and not isinstance(event, Event):
            raise ValueError(
                f"{where}: got the pair ({shown(event)}, {shown(count)}): the event comes first, then how often."
            )
    pairs = [(event, plain_number(count)) for event, count in pairs]
    for event, count in pairs:
        check_event(where, event)
        if type(count) is not int or not 0 <= count <= MAX_COUNT:
            whole(f"{where}, {event!r}", count=count, at_most=MAX_COUNT)
    return pairs


def releases_to_json(releases: Iterable[tuple[Event, int]]) -> list[dict[str, Any]]:
    """Returns releases as plain JSON: each event once, with how often it occurs in all, and each run by itself."""
    counts: Counter[tuple[Event, int]] = Counter()
    for place, (event, count) in enumerate(releases):
        counts[event, place if event.has_runs else 0] += count
    return [{"event": event_to_dict(event), "count": count} for (event, _), count in counts.items()]


def event_to_dict(event: Event) -> dict[str, Any]:
    """Returns the event as plain JSON: its type's name under ``"type"``, then its fields that differ from the default.

    Example:
        >>> from torch_privacy.privacy import Gaussian
        >>> event_to_dict(Gaussian(2.0))
        {'type': 'Gaussian', 'noise_multiplier': 2.0}
    """
    one_of("event_to_dict", EVENTS, type=type(event).__name__)
    return {"type": type(event).__name__, **{name: _plain(value) for name, value in chosen_fields(event).items()}}


def chosen_fields(event: Event) -> dict[str, Any]:
    """Returns the fields that differ from their default or have no default."""
    values = {field: getattr(event, field.name) for field in fields(event)}  # pyright: ignore[reportArgumentType]
    return {field.name: value for field, value in values.items() if value != field.default}


def _plain(value: Any) -> Any:
    """Returns a field's value as JSON represents it."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Event):
        return event_to_dict(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _parsed(name: str, value: Any) -> Any:
    """Returns the value of the field ``name`` from JSON: the inverse of `_plain`."""
    if name == "neighboring_relation":
        one_of("event_from_dict", [relation.value for relation in NeighboringRelation], neighboring_relation=value)
        return NeighboringRelation(value)
    if isinstance(value, dict) and "type" in value:
        return event_from_dict(value)
    return tuple(_parsed("", item) for item in value) if isinstance(value, list) else value


def event_from_dict(description: dict[str, Any]) -> Event:
    """Returns the event that `event_to_dict` described.

    Raises:
        ValueError: if the type is unknown, a field is missing or unknown, or a value is not allowed.
    """
    if not isinstance(description, dict):
        raise ValueError(f"event_from_dict: {shown(description)} must be the dict of an event.")
    values = dict(description)
    name = values.pop("type", None)
    if not isinstance(name, str):
        raise ValueError(f"event_from_dict: type={shown(name)} must be the name of an event type.")
    if name not in EVENTS:
        own, known = "import the module of an event of your own first", ", ".join(map(repr, EVENTS))
        raise InvalidValue("event_from_dict", "type", name, f"must be one of those known here ({own}): {known}.")
    kind = EVENTS[name]
    allowed = {field.name: field.default is MISSING for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    needed = {field for field, without_default in allowed.items() if without_default}
    if not needed <= set(values) <= set(allowed):
        raise ValueError(f"event_from_dict: {name} has the fields {sorted(allowed)}, but got {sorted(values)}.")
    try:
        return kind(**{field: _parsed(field, value) for field, value in values.items()})
    except (TypeError, AttributeError, ArithmeticError, LookupError) as error:  # a value of another type
        raise ValueError(f"event_from_dict: {name} cannot have these values ({error}).") from error
