# SPDX-License-Identifier: Apache-2.0
"""Provides the experiments of Yu et al. (2021), "Do not let privacy overbill utility", arXiv:2102.12677."""
