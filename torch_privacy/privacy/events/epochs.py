# SPDX-License-Identifier: Apache-2.0
"""Provides the events of epochs in which every example is in exactly one batch."""

from dataclasses import dataclass

from ...support.units import ONE_EXAMPLE
from ...support.validate import whole
from ..pairs.balls_and_bins import epoch_pair
from ..pairs.base import DominatingPair, PairBounds
from .base import Event, NeighboringRelation, check_fields, check_removal, priced
from .gaussian import noise_of_one

MOST_BINS = 10**6


@priced(lambda event: epoch_pair(event.noise_multiplier, event.num_bins))
@dataclass(frozen=True, repr=False)
class BallsAndBins(Event):
    """One epoch of DP-SGD in which every example is in exactly one batch: each draws one of t batches, or bins.

    Released are the noisy sums ``sum over the batch + N(0, (noise_multiplier * sensitivity)² I)`` of all t batches, one
    after the other; each may depend on those before. The bins are drawn anew for every epoch, so E epochs are E of
    these releases. With σ the noise multiplier, the pair of an epoch is

    - add/remove one: the mixture ``(1/t) Σ_i N(e_i, σ² I)`` and ``N(0, σ² I)`` in t dimensions, in either order;
    - zero out one (replace it with nothing; the number of examples is public): the same.

    An epoch that was broken off costs a whole one. It costs less than t Poisson samples of the same mean size in all of
    200 settings but one, in which epsilon is 222. Others draw the bins once for the whole run, which costs more, and
    call it balls-in-bins, too.

    Args:
        noise_multiplier: standard deviation of the noise divided by the sensitivity, in [1e-6, 1e6].
        num_bins: t, the number of batches of an epoch, from 1 to 1e6.
        neighboring_relation: add/remove one example by default, or zero-out.

    Guarantees:
        - certified: a law of the likelihood ratio with more spread bounds ε from above, one with less from below. The
          bracket of an epoch is narrower than 1e-3, relatively, where ε is above 1e-4. For noise below 0.25 it is wide:
          the upper end is the price without sampling.

    The price of E epochs holds, too, where every example is in exactly E of E t steps, chosen uniformly.

    Source: Chua et al. (2024), arXiv:2412.16802, for the sampler and its pair.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> epoch = BallsAndBins(noise_multiplier=1.0, num_bins=100)
        >>> f"{compose([(epoch, 10)]).epsilon(1e-5).high:.3f}"  # of Poisson samples: 1.828
        '1.702'
    """

    noise_multiplier: float
    num_bins: int
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    unit: str = ONE_EXAMPLE
    sampler = "balls and bins"

    def __post_init__(self) -> None:
        check_fields(self)
        whole("BallsAndBins", at_least=1, at_most=MOST_BINS, num_bins=self.num_bins)
        check_removal("BallsAndBins", self.neighboring_relation)


def _paid_by_its_epoch(event: "LaterBatch") -> DominatingPair | PairBounds:
    raise ValueError(f"{event!r} has no price of its own: its epoch, {event.epoch!r}, pays for all of its batches.")


@priced(_paid_by_its_epoch)
@dataclass(frozen=True, repr=False)
class LaterBatch(Event):
    """A batch of an epoch after its first one, for which the epoch's own event has paid.

    A ledger has one entry for each release. Of an epoch of t batches, the first is recorded as `BallsAndBins` and costs
    the whole epoch, and up to t - 1 others are recorded as this and cost nothing more. `compose` refuses more.

    Args:
        epoch: the event of the epoch.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> epoch = BallsAndBins(noise_multiplier=1.0, num_bins=100)
        >>> alone, made = (compose([(epoch, 10), (LaterBatch(epoch), count)]).epsilon(1e-5) for count in (0, 990))
        >>> alone == made
        True
    """

    epoch: BallsAndBins
    sampler = BallsAndBins.sampler

    def __post_init__(self) -> None:
        if not isinstance(self.epoch, BallsAndBins):
            raise ValueError(f"LaterBatch: epoch={self.epoch!r} must be the event of an epoch, such as BallsAndBins.")
        self.epoch.__post_init__()

    @property
    def neighboring_relation(self) -> NeighboringRelation:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The relation of its epoch."""
        return self.epoch.neighboring_relation

    @property
    def unit(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The unit of its epoch."""
        return self.epoch.unit


def in_bins(event: Event, num_bins: int) -> BallsAndBins:
    """Returns the event of an epoch of ``num_bins`` batches, each with the noise of a Poisson-sampled release.

    Raises:
        ValueError: the release is not one Gaussian, or protects an example that is replaced by another one.

    Example:
        >>> from torch_privacy.privacy import SubsampledGaussian
        >>> in_bins(SubsampledGaussian(noise_multiplier=1.0, sampling_probability=0.01), num_bins=100)
        BallsAndBins(noise_multiplier=1.0, num_bins=100)
    """
    return BallsAndBins(noise_of_one(event), num_bins, event.neighboring_relation, event.unit)
