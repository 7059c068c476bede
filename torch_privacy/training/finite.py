# SPDX-License-Identifier: Apache-2.0
"""Detects batches without a finite gradient, after which a step would release noise alone."""

from ..support.validate import Refused
from ..support.warning import warn

FEWEST = 4  # examples without a finite gradient that cannot be chance
FIRST_STEPS = 8
CAUSES = (
    "Look for NaN or infinity in the data, log(0) or a division by 0 in the loss, and overflow in half precision. An "
    "example with such a gradient is left out of every sum."
)


class FiniteRows:
    """Counts the examples with a gradient that is not finite.

    What it says depends on the data, and no epsilon covers it: it is for whoever runs the training.
    """

    def __init__(self) -> None:
        self._lost, self._drawn = 0, 0  # examples so far
        self._in_vain = 0  # examples of the latest batches without a finite gradient
        self._has_warned = False

    def check(self, step: int, num_lost: int, num_drawn: int) -> None:
        """Takes the counts of a batch before its release; warns once if half of the examples or more are lost.

        Small batches count together: half of the batch, or of all batches so far, and at least 4 examples.

        Raises:
            Refused: in one of the first steps, 4 or more examples in a row of batches have no finite gradient.
        """
        in_vain = self._in_vain + num_drawn if num_lost >= num_drawn else 0
        if step < FIRST_STEPS and in_vain >= FEWEST:
            raise Refused(
                f"PrivateTraining: none of the examples drawn last, up to step {step}, has a finite gradient. The step "
                f"would spend epsilon on noise alone, and nothing was released for it. {CAUSES}"
            )
        self._in_vain = in_vain
        self._lost, self._drawn = self._lost + num_lost, self._drawn + num_drawn
        counts = (num_lost, num_drawn), (self._lost, self._drawn)
        if self._lost and not self._has_warned and any(lost >= FEWEST and 2 * lost >= drawn for lost, drawn in counts):
            self._has_warned = True
            warn(
                f"PrivateTraining: half of the examples of step {step}, or more, have a gradient that is not finite, "
                f"so that the step is mostly noise. {CAUSES} training.num_non_finite counts them."
            )
