# SPDX-License-Identifier: Apache-2.0
"""Provides the experiments: a folder for each paper, a file for each table or figure."""
