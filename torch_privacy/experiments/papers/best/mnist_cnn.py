# SPDX-License-Identifier: Apache-2.0
"""Digits by convolutions as well as private training recognizes them today: the other recipe of `best_mnist`."""

from functools import partial

from torch_privacy.experiments.papers.best import mnist as best_mnist
from torch_privacy.experiments.papers.best.mnist import EXPERIMENT

Settings, COLUMNS, NOTES = best_mnist.Settings, best_mnist.COLUMNS, best_mnist.NOTES
build_task, rows = EXPERIMENT.build_task, partial(EXPERIMENT.rows, of=["convolutions"])
