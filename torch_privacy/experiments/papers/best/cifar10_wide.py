# SPDX-License-Identifier: Apache-2.0
"""Small photographs by a wide residual network, as De et al. train it: the recipe of `best_cifar10` for a GPU."""

from functools import partial

from torch_privacy.experiments.papers.best import cifar10 as best_cifar10
from torch_privacy.experiments.papers.best.cifar10 import EXPERIMENT

Settings, COLUMNS = best_cifar10.Settings, best_cifar10.COLUMNS
NOTES = (*best_cifar10.NOTES, "The paper's number beside WRN-16-4 is that of the larger WRN-40-4.")
build_task, rows = EXPERIMENT.build_task, partial(EXPERIMENT.rows, of=["WRN-16-4"])
