# SPDX-License-Identifier: Apache-2.0
"""Provides the papers' networks, features and augmentations as plain modules and functions."""
