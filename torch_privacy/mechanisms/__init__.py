# SPDX-License-Identifier: Apache-2.0
"""What one training step releases: clipped sums, estimated norms, gradient embeddings."""
