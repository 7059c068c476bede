# SPDX-License-Identifier: Apache-2.0
"""Frozen descriptions of releases: what was done to the data, not yet what it costs."""

from collections.abc import Callable
from dataclasses import MISSING, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from ..._validate import one_of, positive

if TYPE_CHECKING:
    from ..engines.dispatch import Between
    from ..pairs.base import Law

# Beyond these there is no privacy or no signal left, and floating point gives out.
SMALLEST_NOISE, LARGEST_NOISE = 1e-6, 1e6


class NeighboringRelation(Enum):
    """Which two data sets count as neighbors; an epsilon means nothing without it."""

    def __repr__(self) -> str:
        return f"NeighboringRelation.{self.name}"

    ADD_OR_REMOVE_ONE = "add_or_remove_one"
    """One data set is the other plus one example."""

    REPLACE_ONE = "replace_one"
    """Same size, one example differs."""

    REPLACE_SPECIAL = "replace_special"
    """Same size, one example is swapped for a null record that contributes nothing."""


def check_noise(where: str, noise_multiplier: float) -> None:
    """Raise unless the noise multiplier is a number that can be priced."""
    positive(where, noise_multiplier=noise_multiplier)
    if not SMALLEST_NOISE <= noise_multiplier <= LARGEST_NOISE:
        raise ValueError(
            f"{where}: noise_multiplier={noise_multiplier!r} must lie in [{SMALLEST_NOISE:g}, {LARGEST_NOISE:g}]. "
            "Usual values lie between 0.3 and 10; it is relative to the sensitivity."
        )


def check_relation(where: str, neighboring_relation: NeighboringRelation) -> None:
    """Raise unless it is a `NeighboringRelation`."""
    if not isinstance(neighboring_relation, NeighboringRelation):
        allowed = ", ".join(f"NeighboringRelation.{relation.name}" for relation in NeighboringRelation)
        raise ValueError(f"{where}: neighboring_relation={neighboring_relation!r} must be one of {allowed}.")


class Event:
    """One release. The fields are public information and all that its price may depend on.

    Each type has a ``neighboring_relation``, as a field or for all of its kind, under which its sensitivity is taken; a
    ``sampler``, the word for how examples were drawn; and is registered by `priced`.
    """

    neighboring_relation: NeighboringRelation
    sampler: str

    def __repr__(self) -> str:
        """As Python writes it, but for fields left at their default."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in _chosen(self).items())})"

    @property
    def assumption(self) -> str:
        """What the price takes for granted beyond the relation and the sampler, for the statement; "" if nothing."""
        return ""


EVENTS: dict[str, type[Event]] = {}
"""Every event type by its name, for `event_from_dict`."""

LAWS: dict[type[Event], Callable[[Any], "Law | Between"]] = {}
"""What one release of each type costs: its one-step law, or laws on both sides of it."""

Kind = TypeVar("Kind", bound=type[Event])


def priced(law: "Callable[[Any], Law | Between]") -> Callable[[Kind], Kind]:
    """Class decorator that makes an event type known: how one release is priced, and its name for ledgers.

    The one thing to do for a new event type, beside the class itself; it may be in anyone's file.

    Example:
        >>> from dataclasses import dataclass
        >>> from torch_privacy.privacy.pairs.base import SubsampledNormal
        >>> @priced(lambda event: SubsampledNormal(event.distance, 1.0))
        ... @dataclass(frozen=True, repr=False)
        ... class Shifted(Event):
        ...     distance: float
        ...     neighboring_relation = NeighboringRelation.REPLACE_ONE
        ...     sampler = "full batch"
        >>> event_from_dict({"type": "Shifted", "distance": 0.5})
        Shifted(distance=0.5)
        >>> _ = EVENTS.pop("Shifted"), LAWS.pop(Shifted)  # of no further use here

    Raises:
        ValueError: another event type has that name.
    """

    def register(kind: Kind) -> Kind:
        if kind.__name__ in EVENTS:
            raise ValueError(f"priced: an event type named {kind.__name__!r} exists: {EVENTS[kind.__name__]!r}.")
        EVENTS[kind.__name__] = kind
        LAWS[kind] = law
        return kind

    return register


def event_to_dict(event: Event) -> dict[str, Any]:
    """The event as plain JSON: its type's name under ``"type"``, then its fields, but for those left at their default.

    Example:
        >>> from torch_privacy.privacy import Gaussian
        >>> event_to_dict(Gaussian(2.0))
        {'type': 'Gaussian', 'noise_multiplier': 2.0}
    """
    one_of("event_to_dict", EVENTS, type=type(event).__name__)
    return {"type": type(event).__name__, **{name: _plain(value) for name, value in _chosen(event).items()}}


def _chosen(event: Event) -> dict[str, Any]:
    """The fields that differ from their default, or have none."""
    values = {field: getattr(event, field.name) for field in fields(event)}  # pyright: ignore[reportArgumentType]
    return {field.name: value for field, value in values.items() if value != field.default}


def _plain(value: Any) -> Any:
    """A field's value as JSON has it."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Event):
        return event_to_dict(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _rich(name: str, value: Any) -> Any:
    """The inverse of `_plain` for the field ``name``."""
    if name == "neighboring_relation":
        one_of("event_from_dict", [relation.value for relation in NeighboringRelation], neighboring_relation=value)
        return NeighboringRelation(value)
    if isinstance(value, dict) and "type" in value:
        return event_from_dict(value)
    return tuple(_rich("", item) for item in value) if isinstance(value, list) else value


def event_from_dict(description: dict[str, Any]) -> Event:
    """The event that `event_to_dict` described.

    Raises:
        ValueError: the type is not known, a field is missing or unknown, or a value is not allowed.
    """
    values = dict(description)
    name = values.pop("type", None)
    one_of("event_from_dict", EVENTS, type=name)
    kind = EVENTS[name]
    allowed = {field.name: field.default is MISSING for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    needed = {field for field, without_default in allowed.items() if without_default}
    if not needed <= set(values) <= set(allowed):
        raise ValueError(f"event_from_dict: {name} has fields {sorted(allowed)}, but got {sorted(values)}.")
    return kind(**{field: _rich(field, value) for field, value in values.items()})
