# SPDX-License-Identifier: Apache-2.0
"""Provides events: one class for each kind of release that can be priced and recorded in a ledger."""
