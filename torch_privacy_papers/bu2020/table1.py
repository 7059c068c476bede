# SPDX-License-Identifier: Apache-2.0
"""Lists the six settings of Bu, Dong, Long and Su (2020), Table 1: MNIST, q = 256 / 60000, delta = 1e-5.

The cells are those of the published article, as the authors rounded them; 96.6 %, 97.0 %, mu = 0.57 and 1.13, and the
epsilons of the third row are also in its running text.
"""

from typing import NamedTuple

BATCH, NUM_EXAMPLES = 256, 60_000
PROBABILITY = BATCH / NUM_EXAMPLES
DELTA = 1e-5


class PrintedSetting(NamedTuple):
    """A line of the table: the settings of a training and its results."""

    learning_rate: float
    noise_multiplier: float
    clip_norm: float
    epochs: int
    accuracy: float
    mu: float
    clt: float  # the two epsilons at DELTA
    moments: float

    @property
    def num_steps(self) -> int:
        """Returns the epochs in steps."""
        return round(self.epochs / PROBABILITY)

    @property
    def name(self) -> str:
        """Returns the name of the line's row."""
        return f"sigma {self.noise_multiplier:g}, {self.epochs} epochs"


TABLE = (
    PrintedSetting(0.25, 1.3, 1.5, 15, 0.950, 0.23, 0.83, 1.19),
    PrintedSetting(0.15, 1.1, 1.0, 60, 0.966, 0.57, 2.32, 3.01),
    PrintedSetting(0.25, 0.7, 1.5, 45, 0.970, 1.13, 5.07, 7.10),
    PrintedSetting(0.25, 0.6, 1.5, 62, 0.976, 2.00, 9.98, 13.27),
    PrintedSetting(0.25, 0.55, 1.5, 68, 0.978, 2.76, 14.98, 18.72),
    PrintedSetting(0.25, 0.5, 1.5, 100, 0.980, 4.78, 31.12, 32.40),
)
