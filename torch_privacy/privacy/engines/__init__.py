# SPDX-License-Identifier: Apache-2.0
"""How the releases of a run compose: one curve for all of them, certified from both sides."""
