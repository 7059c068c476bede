# SPDX-License-Identifier: Apache-2.0
"""Reads the Adult data once for all tests of this folder."""

from adult_once import adult_once as adult_once
