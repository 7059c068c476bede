# SPDX-License-Identifier: Apache-2.0
"""Tests a trade-off function by sums of the scores of independent canaries."""

import math
import secrets
from typing import NamedTuple

import numpy as np
import scipy

from .audit_bounds import NORMAL, USUAL_RATE, clopper_pearson
from .bracket import Array
from .compose import Profile
from .tradeoff import TradeOff, bayes_accuracy, tensor

PIECES_OF_PRODUCT = 96  # of the trade-off function of a block
FEWEST_BLOCKS = 8
LARGEST_SCORE = 1e300


class Sums(NamedTuple):
    """The outcome of blocks of canaries with scores independent of each other: which half has the larger sum?

    A block has ``block`` canaries that were in and as many that were out, put together at random; it is right if the
    sum of the scores of those that were in is larger. Sums of many scores are nearly normal, whatever a score is.
    """

    num_blocks: int
    block: int
    num_right: int

    def reject(self, curve: TradeOff, significance: float) -> bool:
        """True if a claim with this trade-off function has a p-value of at most ``significance``."""
        return self.p_value(curve) <= significance

    def p_value(self, curve: TradeOff) -> float:
        """Returns the probability of as many right blocks, at most, under a claim with this trade-off function f.

        Proof: coins are fair and blocks are drawn at random, so given the two halves A and B of a block, A in and B out
        is as likely as the reverse. These two hypotheses are products of 2g pairs of distributions, g the size of a
        half, and each pair is f-DP in both directions: together they are no easier to tell apart than ``f^(⊗ 2g)``. A
        guess at one of two equally likely hypotheses is right with a probability of at most ``(1 + TV)/2``, TV = δ(0)
        of that product. Blocks are independent, so the number of right ones is at most binomial.

        Args:
            curve: symmetric f; a lower bound on the true one makes the test more cautious.
        """
        return float(scipy.stats.binom.sf(self.num_right - 1, self.num_blocks, _accuracy(curve, self.block)))


def _squared(curve: TradeOff) -> TradeOff:
    return tensor(curve, curve, pieces=PIECES_OF_PRODUCT).low


def _accuracy(curve: TradeOff, block: int) -> float:
    """Returns an upper bound on the probability that a block is right; its size is a power of two."""
    product = _squared(curve)
    for _ in range(block.bit_length() - 1):
        product = _squared(product)
    return bayes_accuracy(product, 0.5)


def plan_block(profile: Profile, num_canaries: int) -> int:
    """Returns the size of half a block, a power of two, that serves the ideal attack on the claim best."""
    product, block, best = _squared(profile.tradeoffs["symmetrized"].low), 1, (0.0, 1)
    while (blocks := num_canaries // (2 * block)) >= FEWEST_BLOCKS:
        right = min(round(blocks * bayes_accuracy(product, 0.5)), blocks)
        missed = clopper_pearson(blocks - right, blocks, USUAL_RATE)
        best = max(best, (-NORMAL.inv_cdf(missed) / math.sqrt(block) if missed < 1 else 0.0, block))
        product, block = _squared(product), 2 * block
    return best[1]


def ideal_sums(profile: Profile, num_canaries: int, block: int) -> Sums:
    """Returns the counts that no attack exceeds on average, if the claim holds."""
    blocks = num_canaries // (2 * block)
    return Sums(blocks, block, round(blocks * _accuracy(profile.tradeoffs["symmetrized"].low, block)))


def sums(inside: Array, outside: Array, block: int) -> Sums:
    """Returns in how many blocks, drawn at random, the scores inside have the larger sum; ties are decided by coins."""
    rng, count = np.random.default_rng(secrets.randbits(128)), min(len(inside), len(outside)) // block
    halves = [_sums_of_blocks(rng.permutation(side)[: count * block], block) for side in (inside, outside)]
    larger = np.where(halves[0] == halves[1], rng.random(count) < 0.5, halves[0] > halves[1])
    return Sums(count, block, int(larger.sum()))


def _sums_of_blocks(scores: Array, block: int) -> Array:
    """Returns the sum of each block of scores; infinite ones count as numbers that no finite ones outweigh."""
    return np.clip(scores, -LARGEST_SCORE, LARGEST_SCORE).reshape(-1, block).sum(1)
