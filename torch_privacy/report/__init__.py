# SPDX-License-Identifier: Apache-2.0
"""Run folders turned into pages: tables, plots, one self-contained HTML file."""
