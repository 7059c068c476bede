# SPDX-License-Identifier: Apache-2.0
"""The experiments that ``torch-privacy train`` knows, by name. Listing them imports nothing."""

from importlib import import_module
from typing import cast

from torch_privacy import _check
from torch_privacy.experiments._protocol import Experiment

EXPERIMENTS = {"adult": "torch_privacy.experiments.adult"}


def load_experiment(name: str) -> Experiment:
    """The experiment's module, imported on first use; an unknown name raises a ``ValueError``."""
    _check.one_of("train", EXPERIMENTS, experiment=name)
    return cast(Experiment, import_module(EXPERIMENTS[name]))
