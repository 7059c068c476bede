# SPDX-License-Identifier: Apache-2.0
"""The experiments, in a folder for each paper: one file for each table or figure."""
