# SPDX-License-Identifier: Apache-2.0
"""Gradient embedding perturbation: noise in a public subspace, and apart from it for the rest."""

from .settings import BGEP as BGEP
from .settings import GEP as GEP
from .settings import AnchorSubspace as AnchorSubspace
