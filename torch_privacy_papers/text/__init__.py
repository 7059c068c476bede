# SPDX-License-Identifier: Apache-2.0
"""Provides the experiments that fine-tune a public text encoder on private texts."""
