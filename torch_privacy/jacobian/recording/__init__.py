# SPDX-License-Identifier: Apache-2.0
"""Records which ops of a forward meet trained parameters."""
