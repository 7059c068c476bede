# SPDX-License-Identifier: Apache-2.0
"""Provides the experiments of the papers: a folder for each paper, a file for each table or figure.

They use torch_privacy as anybody could. ``catalog.py`` lists them, ``torch-privacy reproduce`` runs them.
"""
