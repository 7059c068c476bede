# SPDX-License-Identifier: Apache-2.0
"""Experiments of Bu, Dong, Long and Su (2020), "Deep learning with Gaussian differential privacy", arXiv:1911.11607."""
