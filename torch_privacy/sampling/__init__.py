# SPDX-License-Identifier: Apache-2.0
"""Batches of a data set: which examples join a step, and their items, fetched and collated."""

from .samplers import PoissonSampler as PoissonSampler
