# SPDX-License-Identifier: Apache-2.0
"""Events: one class for each kind of release that the ledger records."""
