# SPDX-License-Identifier: Apache-2.0
"""Trains a ``LightningModule`` with Lightning's ``Trainer`` and the steps of a ``PrivateTraining``."""

from .fit import PrivateFit as PrivateFit
