# SPDX-License-Identifier: Apache-2.0
"""The experiments that ``torch-privacy train`` and ``reproduce`` know, by name. Listing them imports no torch."""

from importlib import import_module
from typing import Any, cast

from torch_privacy import _validate as _check
from torch_privacy.experiments.catalog import CATALOG, Experiment
from torch_privacy.experiments.task import Trainable
from torch_privacy.runs.rows import Reproducible

EXPERIMENTS = {experiment.name: experiment for experiment in CATALOG}
SHORT = {"adult": "gdp-adult"}  # names that came first
TRAININGS = (*SHORT, *(name for name, experiment in EXPERIMENTS.items() if experiment.trains))


def load_trainable(name: str) -> Trainable:
    """The module of an experiment that trains, imported on first use; an unknown name raises a ``ValueError``."""
    _check.one_of("train", TRAININGS, experiment=name)
    return cast(Trainable, _module(SHORT.get(name, name)))


def load_reproducible(name: str) -> tuple[Experiment, Reproducible]:
    """An experiment and its module, imported on first use; an unknown name raises a ``ValueError``."""
    _check.one_of("reproduce", EXPERIMENTS, experiment=name)
    return EXPERIMENTS[name], cast(Reproducible, _module(name))


def _module(name: str) -> Any:
    return import_module(f"torch_privacy.experiments.{EXPERIMENTS[name].module}")
