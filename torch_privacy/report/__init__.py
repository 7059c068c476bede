# SPDX-License-Identifier: Apache-2.0
"""Renders run folders as self-contained HTML pages, and draws figures of privacy curves."""
