# SPDX-License-Identifier: Apache-2.0
"""Provides run folders: the files of a training, its metrics, tables of results, pages and plots."""
