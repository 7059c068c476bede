# SPDX-License-Identifier: Apache-2.0
"""Clipping by randomly estimated norms, for models that the tape refuses; the accountant prices the estimates."""

from .settings import Sketched as Sketched
