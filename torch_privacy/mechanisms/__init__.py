# SPDX-License-Identifier: Apache-2.0
"""Holds what one training step releases: clipped sums, estimated norms, gradient embeddings, and their noise."""
