# SPDX-License-Identifier: Apache-2.0
"""Provides the experiments of ``torch-privacy train`` and ``reproduce`` by name, without importing torch.

The papers are a package beside this one. This file and ``cli/reproduce.py`` are the only ones that import it.
"""

from importlib import import_module

from torch_privacy.experiments.study import Study
from torch_privacy.support import validate as _check
from torch_privacy_papers.catalog import CATALOG

EXPERIMENTS = {experiment.name: experiment for experiment in CATALOG}
SHORT = {"adult": "gdp-adult"}  # short name -> name
OWN_TABLE = "table"  # the experiment of a file of the user's own
TRAININGS = (*SHORT, *(name for name, experiment in EXPERIMENTS.items() if experiment.trains))


def load_study(name: str) -> Study:
    """Returns the study of an experiment, imported on first use; raises a ``ValueError`` for an unknown name."""
    _check.one_of("reproduce", EXPERIMENTS, experiment=name)
    module, _, study = EXPERIMENTS[name].study.partition(":")
    return getattr(import_module(f"torch_privacy_papers.{module}"), study)


def load_trainable(name: str, where: str = "train") -> Study:
    """Returns the study of an experiment that ``train`` can train; raises a ``ValueError`` for any other name."""
    if name == OWN_TABLE:
        return import_module("torch_privacy.experiments.own_table").STUDY
    _check.one_of(where, TRAININGS, experiment=name)
    return load_study(SHORT.get(name, name))
