# SPDX-License-Identifier: Apache-2.0
"""Provides the experiments of Bu, Dong, Long and Su (2020) on Gaussian differential privacy, arXiv:1911.11607."""
