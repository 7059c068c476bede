# SPDX-License-Identifier: Apache-2.0
"""Holds what Opacus has at ``opacus.utils``."""
