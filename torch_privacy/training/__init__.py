# SPDX-License-Identifier: Apache-2.0
"""Private training: the only place that joins recording, clipping, noise, sampling and ledger."""

from .loop import PrivateTraining as PrivateTraining
from .statement import Spent as Spent
