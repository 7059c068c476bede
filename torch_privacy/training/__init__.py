# SPDX-License-Identifier: Apache-2.0
"""Provides ``PrivateTraining``, the only place that joins recording, clipping, noise, sampling and ledger."""

from .averaging import MovingAverage as MovingAverage
from .loop import PrivateTraining as PrivateTraining
from .settings import TrainingSettings as TrainingSettings
from .statement import Spent as Spent
