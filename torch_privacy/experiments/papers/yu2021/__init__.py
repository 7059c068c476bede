# SPDX-License-Identifier: Apache-2.0
"""Experiments of Yu et al. (2021), "Do not let privacy overbill utility", arXiv:2102.12677."""
