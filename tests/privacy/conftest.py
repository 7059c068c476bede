# SPDX-License-Identifier: Apache-2.0
"""Settings shared by the privacy tests."""

import os

from hypothesis import HealthCheck, settings

# A composition takes tens of milliseconds, so few examples; no deadline, because a shared machine may be busy. The same
# draws in every run, so that a failure can be seen again; HYPOTHESIS_PROFILE=explore draws anew.
COMMON = {"max_examples": 12, "deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("privacy", derandomize=True, **COMMON)
settings.register_profile("explore", **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "privacy"))
