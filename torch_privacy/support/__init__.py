# SPDX-License-Identifier: Apache-2.0
"""Support for all other folders: validation and refusals, random state, torch modes, the state of a model."""
