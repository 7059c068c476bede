# SPDX-License-Identifier: Apache-2.0
"""Norms, products and sums of the rows of the Jacobian."""
