# SPDX-License-Identifier: Apache-2.0
"""The version of the package."""

__version__ = "0.2.0"
