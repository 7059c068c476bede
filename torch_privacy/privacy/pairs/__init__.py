# SPDX-License-Identifier: Apache-2.0
"""Dominating pairs: the two distributions that an attacker must tell apart for one release."""
