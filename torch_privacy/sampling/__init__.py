# SPDX-License-Identifier: Apache-2.0
"""Poisson batches of a data set: which examples join a step, and their items, fetched and collated."""

from .poisson import Poisson as Poisson
