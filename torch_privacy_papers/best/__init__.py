# SPDX-License-Identifier: Apache-2.0
"""Provides the experiments with the best known private training of today: Tramèr and Boneh (2021), De et al. (2022)."""
