# SPDX-License-Identifier: Apache-2.0
"""Provides the experiments of Abadi et al. (2016), "Deep learning with differential privacy", arXiv:1607.00133."""
