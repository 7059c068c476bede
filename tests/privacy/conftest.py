# SPDX-License-Identifier: Apache-2.0
"""Settings shared by the privacy tests."""

from hypothesis import HealthCheck, settings

# A composition takes tens of milliseconds, so few examples; no deadline, because a shared machine may be busy.
settings.register_profile("privacy", max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("privacy")
