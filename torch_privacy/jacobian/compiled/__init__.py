# SPDX-License-Identifier: Apache-2.0
"""Provides the compiled path of a settled training: a plan from the tape, replayed by graphs of ``torch.compile``."""
