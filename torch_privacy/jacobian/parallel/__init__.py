# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a tensor-parallel model agree on."""
