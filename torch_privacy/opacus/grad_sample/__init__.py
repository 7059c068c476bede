# SPDX-License-Identifier: Apache-2.0
"""Has the names of Opacus' ``grad_sample`` that programs import: per-example gradients are not formed here."""
