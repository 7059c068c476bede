# SPDX-License-Identifier: Apache-2.0
"""Computes norms, products and sums of the rows of the Jacobian."""
