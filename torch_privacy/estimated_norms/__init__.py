# SPDX-License-Identifier: Apache-2.0
"""Norms estimated by random projections, for models that the tape refuses: cheap, and priced."""

from .choose import Sketched as Sketched
