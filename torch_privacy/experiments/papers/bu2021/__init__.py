# SPDX-License-Identifier: Apache-2.0
"""Experiments of Bu, Gopi et al. (2021), "Fast and memory efficient DP-SGD via JL projections", arXiv:2102.03013."""
