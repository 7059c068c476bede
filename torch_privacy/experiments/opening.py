# SPDX-License-Identifier: Apache-2.0
"""Opens the folder of a run, and makes its task; refuses what cannot begin or go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torch_privacy import privacy
from torch_privacy.experiments import load_trainable
from torch_privacy.experiments.study import Study
from torch_privacy.experiments.task import Settings, Task, check_names, check_numbers
from torch_privacy.runs.folder import RunFolder
from torch_privacy.support.ranks import Ranks

STATE = {"experiment", "settings", "released", "parts", "training", "log", "random_state"}  # in a checkpoint


def create(folder: RunFolder) -> None:
    """Creates the folder, unless the ledger of what the task released is there already."""
    if not folder.is_locked:
        folder.create()


def new_ledger(folder: RunFolder, run: str = "") -> privacy.Ledger:
    """Returns the ledger of a new run, for what its task releases before the training begins.

    ``run`` is its name in the budget of the data.
    """
    folder.create()
    return privacy.Ledger(folder.ledger, run=run)


@contextmanager
def leaving_its_price(folder: RunFolder) -> Iterator[None]:
    """Unlocks the folder of a run that cannot begin, and says where the ledger is of what was released until then."""
    try:
        yield
    except BaseException as error:
        if not folder.is_locked:
            raise
        folder.abandon()
        if isinstance(error, ValueError) and folder.ledger.exists():
            raise ValueError(
                f"{str(error).rstrip('.')}. {folder.ledger} has what was released; another try costs as much again, "
                "and the epsilons add up."
            ) from None
        raise


def lock(folder: RunFolder) -> None:
    """Locks the folder of an unfinished run."""
    folder.check_resumable()
    folder.lock()
    folder.check_resumable()  # again: the process that had the lock may have finished the run


def state_in(folder: RunFolder) -> dict[str, Any]:
    """Returns the state in the folder's checkpoint, if ``settings.json`` has the settings in it."""
    state = folder.read_checkpoint()
    if state.keys() != STATE:
        raise ValueError(f"{folder.checkpoint}: is no checkpoint of a run of this version. Start a new run.")
    folder.check_settings({"experiment": state["experiment"], **state["settings"]})
    return state


def task(ranks: Ranks, study: Study, settings: Settings, *released: Any, new_ledger: Any = None) -> Task:
    """Returns the task; what it releases all ranks release together, as one release, in a new ledger of rank 0."""
    with ranks.together("prepares the data"):
        found = study.task(settings, *released, new_ledger=new_ledger)
    _check_devices(ranks, found)
    return found


def _check_devices(ranks: Ranks, task: Task) -> None:
    """Refuses two ranks on one GPU."""
    own = None
    if ranks.size > 1 and task.device.startswith("cuda"):
        own = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    ranks_of: dict[str | None, list[int]] = {}
    for rank, gpu in enumerate(ranks.gather(own)):
        ranks_of.setdefault(gpu, []).append(rank)
    ranks_of.pop(None, None)
    if shared := next((found for found in ranks_of.values() if len(found) > 1), None):
        raise ValueError(
            f"train: ranks {', '.join(map(str, shared))} have the same GPU. Start one process for each GPU, as by "
            "torchrun --nproc-per-node 1 where there is one, or set CUDA_VISIBLE_DEVICES= to train on processors."
        )


def study_and_settings(experiment: str, chosen: dict[str, Any]) -> tuple[Study, Settings]:
    """Returns the study, and its settings with those chosen; raises a ``ValueError`` unless they are valid."""
    study = load_trainable(experiment)
    check_names(experiment, study.settings(), chosen)
    settings = study.settings(**chosen)
    check_numbers(settings)
    return study, settings
