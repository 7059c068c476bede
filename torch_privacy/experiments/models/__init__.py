# SPDX-License-Identifier: Apache-2.0
"""Networks of the papers, their features and augmentations, as plain modules and functions."""
