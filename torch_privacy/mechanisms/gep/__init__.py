# SPDX-License-Identifier: Apache-2.0
"""Gradient embedding perturbation: separate noise for a public subspace and for the residual outside of it."""

from .settings import BGEP as BGEP
from .settings import GEP as GEP
from .settings import AnchorSubspace as AnchorSubspace
