# SPDX-License-Identifier: Apache-2.0
"""Finds which dimension of each recorded output holds the examples."""
