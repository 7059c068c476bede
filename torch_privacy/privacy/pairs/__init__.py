# SPDX-License-Identifier: Apache-2.0
"""Provides dominating pairs: the two distributions that an attacker must distinguish for one release."""
