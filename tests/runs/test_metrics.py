# SPDX-License-Identifier: Apache-2.0
from torch_privacy.runs.metrics import Log, Metrics


def test_log_has_diverged_when_a_loss_is_not_finite():
    for loss, diverged in [(0.3, False), (float("nan"), True), (float("inf"), True)]:
        rows = [Metrics("private", 1.0, 5, loss, 0.8, 0.8), Metrics("private", 2.0, 10, 0.3, 0.8, 0.8)]
        assert Log(10, 2, rows=rows).has_diverged() == diverged
