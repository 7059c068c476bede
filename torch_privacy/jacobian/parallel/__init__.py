# SPDX-License-Identifier: Apache-2.0
"""Holds what the ranks of a tensor-parallel model agree on."""
