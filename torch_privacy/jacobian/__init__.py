# SPDX-License-Identifier: Apache-2.0
"""Per-example gradients of one batch: recorded, separated by example, and summed with a factor for each example."""

from .public_record import record as record
from .rows.operator import Jacobian as Jacobian
