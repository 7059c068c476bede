# SPDX-License-Identifier: Apache-2.0
"""Clipping by randomly estimated norms, for models that the tape refuses; the accountant prices the estimates."""

from .norms import estimate_norms as estimate_norms
from .settings import Sketched as Sketched
