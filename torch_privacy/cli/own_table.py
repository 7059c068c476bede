# SPDX-License-Identifier: Apache-2.0
"""Provides what ``train`` needs for a table of the user's own: its settings, and how a file differs from a name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch_privacy.experiments import TRAININGS
from torch_privacy.experiments.table_settings import OF_TABLE
from torch_privacy.support.validate import unknown_name

SUFFIXES = (".csv", ".tsv", ".txt", ".parquet", ".pq", ".gz", ".zip", ".bz2", ".xz", ".zst", ".xlsx", ".xls", ".json")


def is_table(name: str) -> bool:
    """True for what can only be a file: no experiment's name, and it exists or looks like a path.

    Example:
        >>> is_table("people.csv"), is_table("data/people"), is_table("adult"), is_table("adlut")
        (True, True, False, False)
    """
    if name in TRAININGS:
        return False
    path = Path(name)
    separators = tuple(filter(None, (os.sep, os.altsep)))
    return path.suffix.lower() in SUFFIXES or any(mark in name for mark in separators) or path.exists()


def check_is_experiment(name: str, chosen: dict[str, Any]) -> None:
    """Raises a ``ValueError`` for options of a table that are given with an experiment, and for a name of neither."""
    own = [setting for setting in chosen if setting in OF_TABLE]
    if name not in TRAININGS:
        raise ValueError(
            f"train: experiment={name!r} {unknown_name(name, TRAININGS)} Or name a table's file: there is no such file."
        )
    if own:
        option = f"--{own[0].replace('_', '-')}"
        raise ValueError(f"train: {option} is for a table of your own, and {name!r} is an experiment, not a file.")


def settings_of_table(file: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """Returns all settings of a training on a table, with defaults for its size where none were chosen."""
    if "data" in chosen:
        raise ValueError(f"train: --data is the folder of an experiment's data, and {file} is a table; leave it out.")
    if "method" in chosen:
        raise ValueError(f"train: --method is for the experiment text-imdb, and {file} is a table; leave it out.")
    path = Path(file)
    if not path.exists():
        raise ValueError(f"train: {file}: no such file. Name a CSV or Parquet file.")
    from torch_privacy.experiments.own_table import complete

    return complete(path, chosen)
