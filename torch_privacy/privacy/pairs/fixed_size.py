# SPDX-License-Identifier: Apache-2.0
"""Provides pairs that cover all that a step on a batch of fixed size can be, where one example is replaced.

Given the other examples, the pair is ``(1 - q) N(v) + q N(x)`` against ``(1 - q) N(v) + q N(y)``: x or y is in the
batch, or another example v in its place. The three lie in a ball of radius z/2, z the sensitivity over the noise.

1. *Triangles.* Where an affine map that lengthens no distance takes one triangle (v, x, y) to another, the second is no
   easier to tell apart: map the outcome, and add noise. So all triangles in the ball are dominated by those on a circle
   of radius z/2 without an obtuse angle: scale an acute one up; scale an obtuse one until its longest side is a
   diameter, and move the third corner away from that, onto the circle.
2. *Distances.* For ε >= 0, δ(ε) is at most that of a line with the same |v - x| and |x - y|, both on one side of x
   (``pairs.shifted`` has the proof, which holds in any dimension). For ε < 0 the same holds with x and y exchanged. So
   three distances bound the whole curve, which rises with each of them.
3. *Cells.* With angles β at x and γ at y, the distances over z are ``|v - x| = sin γ``, ``|v - y| = sin β`` and
   ``|x - y| = sin(β + γ)``. Each cell of angles is dominated by its largest distances.

No pair of the family dominates all others, and later steps may depend on earlier results: ``engines.adaptive`` composes
the family.
"""

import math
from functools import lru_cache

import numpy as np

from ..bracket import Array
from .discrete import DiscretePair
from .shifted import GaussianNoise, Mixture, log_ratio, masses, spread

CELLS = 1024  # of outcomes with a positive loss
REACH = 12.0
ANGLES = tuple(math.pi / 2 * k / 10 for k in range(11))  # ends of the cells; twice as many lower ε by some 2 %


@lru_cache(maxsize=16)
def family(shift: float, probability: float) -> tuple[DiscretePair, ...]:
    """Returns pairs, one of which dominates a step whatever the examples are; ``shift`` is z."""
    found: set[tuple[float, float, float]] = set()
    for first in range(len(ANGLES) - 1):
        for second in range(len(ANGLES) - 1):
            (beta, beta_end), (gamma, gamma_end) = (ANGLES[i : i + 2] for i in (first, second))
            if beta_end + gamma_end > math.pi / 2:
                far = math.sin(max(beta + gamma, math.pi / 2))
                found.add((shift * math.sin(gamma_end), shift * math.sin(beta_end), shift * far))
    kept = [one for one in found if not any(one != other and all(map(float.__le__, one, other)) for other in found)]
    return tuple(_pair(*distances, probability) for distances in sorted(kept))


def _pair(ahead: float, behind: float, far: float, probability: float) -> DiscretePair:
    """Returns the pair of the three distances |v - x|, |v - y| and |x - y|."""
    (p, q), (q_left, p_left) = (_positive(near, far, probability) for near in (ahead, behind))
    rest = max(1.0 - float(p.sum() + p_left.sum()), 0.0)
    joined = [np.concatenate([one, left, [rest]]).tolist() for one, left in ((p, p_left), (q, q_left))]
    return DiscretePair(tuple(joined[0]), tuple(joined[1]))


def _positive(near: float, far: float, probability: float) -> tuple[Array, Array]:
    """Returns the masses under P and Q of outcomes with a positive loss: v = 0, x at ``near``, y ``far`` below x."""
    noise, middle = GaussianNoise(), near - far / 2
    cuts = np.append(np.linspace(middle, max(middle, near) + REACH, CELLS + 1), np.inf)
    sides: list[Mixture] = [((1 - probability, 0.0), (probability, at)) for at in (near, near - far)]
    p, q = (masses(noise, side, cuts) for side in sides)
    ratio = log_ratio(noise, cuts[:-1], *sides)
    both = spread(p, q, np.maximum(ratio, 0.0), np.maximum(np.append(ratio[1:], np.inf), 0.0))
    return np.array(both.p), np.array(both.q)
