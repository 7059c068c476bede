# SPDX-License-Identifier: Apache-2.0
"""Provides the experiments of Bu, Gopi et al. (2021) on DP-SGD with JL projections, arXiv:2102.03013."""
