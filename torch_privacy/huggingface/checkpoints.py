# SPDX-License-Identifier: Apache-2.0
"""Keeps the secret state that belongs to each checkpoint of a Trainer, outside of ``output_dir``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..support.ranks import Ranks
from ..support.validate import Refused
from ..training import PrivateTraining
from ..training.secret_file import SecretFolder, load_secret, release_before

WHERE = "PrivateTrainer"
NO_FOLDER = "no run folder was given, which keeps the keys of noise and batches"
RELEASE = "release"
NEEDED = ("optimizer", "scheduler.pt", TRAINER_STATE_NAME)


class Secrets:
    """Owns the secret files ``checkpoint-K.safetensors`` of a run folder, for checkpoints ``output_dir/checkpoint-K``.

    Args:
        run_folder: None keeps none; checkpoints can then be loaded as models, and no training can go on from them.
        output_dir: where the Trainer writes its checkpoints.
    """

    def __init__(self, run_folder: Path | str | None, output_dir: Path | str):
        self._keys = None if run_folder is None else SecretFolder(run_folder, PREFIX_CHECKPOINT_DIR, "start")
        self._output_dir = Path(output_dir)

    @property
    def start(self) -> Path | None:
        """Returns the folder of the checkpoint from before the first release; None without a run folder."""
        return None if self._keys is None else self._keys.start

    def make(self) -> None:
        """Makes the folder of the keys, if they are kept."""
        if self._keys is not None:
            self._keys.make()

    def save(self, training: PrivateTraining, step: int) -> None:
        """Writes the state that belongs to a checkpoint that is complete, and removes those of deleted checkpoints."""
        if self._keys is None:
            return
        self._keys.save(training, step)
        if Ranks.here().is_first:
            for known in self._keys.steps():
                if not self._checkpoint(known).is_dir():
                    self._keys.delete(known)

    def end(self, is_over: bool) -> None:
        """Deletes all keys of a run that is over, when its files are written; else warns that they are kept."""
        if self._keys is not None:
            self._keys.end() if is_over else self._keys.warn_kept(WHERE)

    def load(self, training: PrivateTraining, checkpoint: Path, step: int) -> None:
        """Loads the state that belongs to a checkpoint, or refuses."""
        assert self._keys is not None
        found = load_secret(training, self._keys.at(step))
        if found != step:
            self.refuse(checkpoint, f"it was saved after step {step}, and the secret state after step {found}")
        if training.step_count != step:
            self.refuse(
                checkpoint,
                f"the ledger has {training.step_count - step} later steps, which repeat on as many processes as before "
                "alone: sums over other parts of a batch are rounded otherwise. Go on with as many as before",
            )
        states: Any = _saved(checkpoint).stateful_callbacks
        if states.get(WHERE, {}).get(RELEASE, "") != release_before(training):
            self.refuse(checkpoint, "another run saved it, the releases of which this ledger does not have")

    def latest(self) -> Path:
        """Returns the latest checkpoint of ``output_dir`` that is complete and has its state here."""
        for step in reversed(self._steps()):
            if not self.lacking(self._checkpoint(step)):
                return self._checkpoint(step)
        if self._keys is None:
            return self.refuse(self._output_dir, NO_FOLDER)
        return self.refuse(
            self._output_dir,
            f"it has no complete checkpoint with its keys in {str(self._keys.path)!r} (keys are deleted when a "
            "run is over)",
        )

    def lacking(self, checkpoint: Path) -> str:
        """Returns what a checkpoint lacks to continue exactly, in words."""
        if self._keys is None:
            return NO_FOLDER
        there = os.listdir(checkpoint) if checkpoint.is_dir() else []
        if missing := [name for name in NEEDED if not any(entry.startswith(name) for entry in there)]:
            return f"it has no {' and no '.join(missing)} (save_only_model=True writes none)"
        path = self._keys.at(saved_step(checkpoint))
        return "" if path.is_file() else f"{str(path)!r} does not exist (keys are deleted when a run is over)"

    def refuse(self, checkpoint: Path, why: str) -> Path:
        """Raises ``Refused``, and names what can be done."""
        known = ", ".join(f"{PREFIX_CHECKPOINT_DIR}-{step}" for step in self._steps()) or "none"
        raise Refused(
            f"{WHERE}: the training cannot go on from {str(checkpoint)!r}: {why}. Nothing was released. Pass the "
            f"privacy=dict(run_folder=...) of the run that saved it, and one of its checkpoints (here: {known}). To "
            "train a saved model further, load it and begin a new training; epsilon is then the sum of both."
        )

    def _steps(self) -> list[int]:
        return [] if self._keys is None else self._keys.steps()

    def _checkpoint(self, step: int) -> Path:
        if not step and self._keys is not None:
            return self._keys.start
        return self._output_dir / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def saved_step(checkpoint: Path) -> int:
    """Returns the number of steps made when a checkpoint was saved, as the Trainer wrote it."""
    return _saved(checkpoint).global_step


def note_release(state: TrainerState, training: PrivateTraining) -> None:
    """Notes in a Trainer's state, before it is saved, which release its checkpoint follows."""
    states: Any = state.stateful_callbacks
    states[WHERE] = {RELEASE: release_before(training)}


def _saved(checkpoint: Path) -> TrainerState:
    return TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
