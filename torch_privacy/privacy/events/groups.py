# SPDX-License-Identifier: Apache-2.0
"""Prices a person who has several examples: example-level steps for groups, and against sampling persons.

Two ways protect a person with up to G examples. *Example-level sampling* (ELS) trains as usual: every example joins
with probability q and is clipped by itself, and a person is a group of G examples (`SubsampledGroup`). *User-level
sampling* (ULS, ``Examples(dataset, owners=...)``) draws persons and clips the mean gradient of each: an ordinary
`SubsampledGaussian` with the person as its unit.
"""

from dataclasses import dataclass, replace
from typing import Any

from ...support.units import with_at_most
from ...support.validate import check_unit, plain_numbers, whole
from ..pairs.base import DominatingPair
from ..pairs.gaussian import SubsampledGaussianPair
from ..pairs.group import GroupPair
from .banded import BandedGaussian
from .base import REMOVALS, Event, NeighboringRelation, check_event, check_fields, check_removal, priced
from .claimed import Claimed
from .counts import Laplace
from .epochs import LaterBatch
from .gaussian import noise_of_one

LARGEST_GROUP = 10_000


def _group_pair(event: "SubsampledGroup") -> DominatingPair:
    shift, q, size = 1 / event.noise_multiplier, event.sampling_probability, event.group_size
    if size == 1 or q == 1:
        return SubsampledGaussianPair(size * shift, q)
    return GroupPair(shift, q, size)


@priced(_group_pair)
@dataclass(frozen=True, repr=False)
class SubsampledGroup(Event):
    """One step of DP-SGD, priced for a person who has up to G examples; each joins the sample independently.

    With z = 1 / noise_multiplier the pair is ``Σₖ Bin(G, q)(k) N(k z, 1)`` and ``N(0, 1)``, in either order.

    Args:
        noise_multiplier: standard deviation of the noise divided by the sensitivity to *one example*, in [1e-6, 1e6].
        sampling_probability: chance q that an example joins the sample, in (0, 1].
        group_size: G, at most 10,000: a cap that is enforced (`torch_privacy.at_most`), never the largest number of
            examples that a person happens to have, which is private.
        person: the word for a person in statements, such as "customer".
        neighboring_relation: add/remove one person by default, or zero out one.

    Guarantees:
        - exact for clipped sums, and never below the price for a person with fewer examples.

    Source: Ganesh (2024), arXiv:2401.10294; Charles et al. (2024), arXiv:2407.07737, "example-level sampling".

    Example:
        >>> from torch_privacy.privacy import compose
        >>> step = SubsampledGroup(noise_multiplier=1.0, sampling_probability=0.01, group_size=4)
        >>> print(compose([(step, 1000)]).statement(1e-5))
        epsilon in [8.899, 8.900] at delta = 1e-05 (add/remove one person with at most 4 examples, Poisson sampling)
    """

    noise_multiplier: float
    sampling_probability: float
    group_size: int
    person: str = "person"
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    sampler = "Poisson"

    def __post_init__(self) -> None:
        check_fields(self)
        whole("SubsampledGroup", at_least=1, at_most=LARGEST_GROUP, group_size=self.group_size)
        check_unit("SubsampledGroup", person=self.person)
        check_removal("SubsampledGroup", self.neighboring_relation)

    @property
    def unit(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The person, with the number of examples for which the price holds."""
        return with_at_most(self.person, self.group_size)


@plain_numbers
def for_group(event: Event, group_size: int, person: str = "person") -> Event:
    """Returns the event priced for a person with up to ``group_size`` examples, each sampled and clipped by itself.

    Raises:
        ValueError: the event's price for a group is not known: norms are estimated, examples are replaced or drawn
            otherwise; or the event protects persons already.

    Example:
        >>> from torch_privacy.privacy import SubsampledGaussian
        >>> for_group(SubsampledGaussian(1.0, 0.01), 8)
        SubsampledGroup(noise_multiplier=1.0, sampling_probability=0.01, group_size=8)
    """
    check_event("for_group", event)
    if isinstance(event, SubsampledGroup) or event.unit != Event.unit:
        raise ValueError(f"for_group: {event!r} protects one {event.unit} already, not one example.")
    if event.neighboring_relation not in REMOVALS:
        raise ValueError(
            f"for_group: {event!r} is priced for {event.neighboring_relation.in_words}: must be add/remove or zero out."
        )
    if isinstance(event, Laplace):
        smaller: Any = replace(event, noise_multiplier=event.noise_multiplier / group_size)
        return replace(smaller, unit=with_at_most(person, group_size))
    pair = None if isinstance(event, LaterBatch | BandedGaussian | Claimed) else event.dominating_pair()
    if not isinstance(pair, SubsampledGaussianPair):
        raise ValueError(
            f"for_group: {type(event).__name__} has no known price for a person with several examples. Take exact "
            "norms and sampling=tp.Poisson(), or sample persons: Examples(dataset, owners=...)."
        )
    return SubsampledGroup(noise_of_one(event), pair.probability, group_size, person, event.neighboring_relation)
