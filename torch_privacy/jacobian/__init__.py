# SPDX-License-Identifier: Apache-2.0
"""Per-example gradients of one batch: recorded, told apart, measured, and summed with a factor for each example."""

from .operator import Jacobian as Jacobian
from .tape import record as record
from .vmapped import vmapped_jacobian as vmapped_jacobian
