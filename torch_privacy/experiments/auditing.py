# SPDX-License-Identifier: Apache-2.0
"""Audits the training of an experiment, or of a finished run, on its own data and model."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import torch
from torch.utils.data import Dataset, TensorDataset

import torch_privacy as tp
from torch_privacy.experiments import OWN_TABLE, TRAININGS, load_trainable
from torch_privacy.experiments.fitting import losses_and_scores, new_training
from torch_privacy.experiments.opening import study_and_settings
from torch_privacy.experiments.task import check_settings, num_units
from torch_privacy.runs.folder import RunFolder
from torch_privacy.support.read_file import read_bytes
from torch_privacy.training.machine import number_of_threads

LARGEST = 2**31  # bytes of canaries
UNREADABLE = (  # what libraries raise for files of arrays that are damaged, or that name huge shapes
    OSError, ValueError, TypeError, EOFError, MemoryError, zipfile.BadZipFile, safetensors.SafetensorError,
)  # fmt: skip
FILE_ENDINGS = (".npz", ".safetensors")


def audit_experiment(
    experiment: str,
    settings: dict[str, Any],
    canaries: tp.GradientCanaries | Dataset,
    *,
    folder: Path | None = None,
    **options: Any,
) -> tp.Audit:
    """Trains once with canaries, as the experiment does with these settings, and returns the audit.

    Args:
        experiment: one of ``TRAININGS``.
        settings: replace the experiment's own.
        canaries: as for `tp.audit`.
        folder: for the ledger of the audited training.
        options: further arguments of `tp.audit`.
    """
    study, chosen = study_and_settings(experiment, settings)
    task = study.task(chosen)
    check_settings(chosen, num_units(task))

    def train(dataset: Dataset) -> tp.PrivateTraining:
        torch.manual_seed(chosen.seed)
        files = None if folder is None else RunFolder(folder)
        training = new_training(chosen, replace(task, train=dataset), files)
        with number_of_threads(task.num_threads):
            for batch in training:
                losses, _ = losses_and_scores(task, training.model, batch, task.views)
                training.step(losses)
        training.ledger.close()
        return training

    return tp.audit(train, task.train, canaries, **options)


def subject_of(name: str) -> tuple[str, dict[str, Any]]:
    """Returns experiment and settings that a name stands for: an experiment, or the folder of a run.

    Raises:
        ValueError: if it is neither.
    """
    if name in TRAININGS:
        return name, {}
    folder = RunFolder(Path(name))
    if not folder.settings.exists():
        known = ", ".join(TRAININGS)
        raise ValueError(f"audit: {name!r} is no experiment ({known}), no folder of a run, and no function.")
    content = folder.with_paths(dict(folder.read_settings()))
    if folder.privacy.exists():  # canaries change n: the same target would need other noise
        content |= {"noise_multiplier": folder.read_statement()["noise_multiplier"], "target_epsilon": None}
    experiment = content.pop("experiment", None)
    if experiment not in (OWN_TABLE, *TRAININGS):
        instead = ""
        if "generator" in content:
            instead = " A generator of rows is audited by torch-privacy synthesize FILE --audit CANARIES."
        raise ValueError(
            f"{folder.settings}: names no experiment that this version can train: {experiment!r}.{instead}"
        )
    fields = load_trainable(experiment).settings().__dataclass_fields__
    known = {key: value for key, value in content.items() if key in fields}
    if experiment == OWN_TABLE:
        known["schema"] = str(folder.schema)  # the one that the run kept: nothing is learnt again
    return experiment, known


def read_canaries(text: str) -> tp.GradientCanaries | TensorDataset:
    """Returns the canaries that a number or a file stands for.

    A number asks for `GradientCanaries`. A file ends in .npz or .safetensors and holds one array for each part of an
    example, in the order of its names, such as ``0`` (inputs) and ``1`` (labels), with one entry for each canary.

    Raises:
        ValueError: if the file cannot be read, or its arrays differ in length.
    """
    if text.isdecimal():
        return tp.GradientCanaries(int(text))
    path = Path(text)
    if path.suffix not in FILE_ENDINGS:
        endings = " or ".join(FILE_ENDINGS)
        raise ValueError(f"audit: --canaries {text}: must be a number, or a file with a name ending in {endings}.")
    try:
        arrays = _read_npz(path) if path.suffix == ".npz" else safetensors.numpy.load(read_bytes(path, LARGEST))
        parts = [torch.from_numpy(arrays[name]) for name in sorted(arrays)]
    except FileNotFoundError:
        raise
    except UNREADABLE as error:
        raise ValueError(f"{path}: cannot be read ({error}). Give a file with arrays of numbers.") from None
    lengths = [len(part) if part.ndim else 0 for part in parts]
    if not parts or len({*lengths}) > 1 or not lengths[0]:
        raise ValueError(f"{path}: must hold arrays with one entry for each canary; their lengths are {lengths}.")
    return TensorDataset(*parts)


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a file; refuses one that unpacks to more than `LARGEST` bytes."""
    content = BytesIO(read_bytes(path, LARGEST))
    with zipfile.ZipFile(content) as members:
        size = sum(member.file_size for member in members.infolist())
    if size > LARGEST:
        raise ValueError(f"it unpacks to {size} bytes: at most {LARGEST} are read")
    with np.load(content, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}
