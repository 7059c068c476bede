# SPDX-License-Identifier: Apache-2.0
"""Trains the network of Abadi et al. (2016) without privacy behind noiseless components: accuracy and gap over epochs.

The paper: 98.3 % after about 100 epochs, and a gap between training and test accuracy that grows with the epochs.
"""

import torch
from torch import Tensor

from torch_privacy.experiments import baseline
from torch_privacy.experiments.fitting import test_score
from torch_privacy.experiments.task import Settings, Task, num_units, number_of_steps
from torch_privacy.runs.metrics import Log
from torch_privacy.runs.rows import BASELINE, BASELINE_GAP, Numbers, TableColumn
from torch_privacy.support.ranks import Ranks

NAME = "not private, exact components"
EPOCHS = 1, 10, 30, 100
COLUMNS = {f"gap after {epoch}": TableColumn(f"gap after {epoch}", digits=1, percent=True) for epoch in EPOCHS[:-1]}
NOTE = (
    "Not private, exact components: nothing is protected, neither components nor network. Its gap is that after 100 "
    "epochs; those after 1, 10 and 30 are beside it."
)


def exact_components(rows: Tensor, count: int) -> Tensor:
    """Returns the leading eigenvectors (count, d) of the second moment of the rows (n, d), each of length one."""
    unit = torch.nn.functional.normalize(rows.double(), dim=1)
    return torch.linalg.eigh(unit.T @ unit).eigenvectors[:, -count:].flip(1).T.to(rows.dtype)


def course(task: Task, settings: Settings) -> Numbers:
    """Returns the score after the last epoch, and how far the training score was above it after some epochs."""
    log = Log(number_of_steps(settings, num_units(task)), settings.epochs, "non-private")
    found: dict[float, float] = {}
    for step, model in baseline.steps(task, settings, Ranks.here(), log):
        if model is None:
            continue
        log.end_epoch(step, test_score=test_score(task, model))
        row = log.rows[-1]
        assert row.train_score is not None
        assert row.test_score is not None
        found[row.epoch] = row.train_score - row.test_score
    gaps = {f"gap after {epoch}": found.get(epoch) for epoch in EPOCHS[:-1]}
    return {BASELINE: log.rows[-1].test_score, BASELINE_GAP: found[log.rows[-1].epoch], **gaps}
