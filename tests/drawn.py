# SPDX-License-Identifier: Apache-2.0
"""Configures hypothesis: the same examples in every run, or, by ``make fuzz``, new ones and many more."""

from hypothesis import HealthCheck, settings

EXAMPLES = 12  # by default: a composition takes tens of milliseconds
LONGER = 25  # factor for ``make fuzz``

# No deadline and no health check of the time that drawing takes, because a shared machine may be busy.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fixed", derandomize=True, max_examples=EXAMPLES, **COMMON)
settings.register_profile("fuzz", max_examples=LONGER * EXAMPLES, print_blob=True, **COMMON)


def draws(count: int) -> settings:
    """Returns settings with ``count`` examples for one test, and ``LONGER`` times as many under ``make fuzz``."""
    return settings(max_examples=count * settings.default.max_examples // EXAMPLES)
