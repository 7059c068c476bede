# SPDX-License-Identifier: Apache-2.0
"""Composes the releases of a run into one curve with certified bounds on both sides."""
