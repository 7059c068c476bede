# SPDX-License-Identifier: Apache-2.0
"""Keeps the secret state that belongs to each checkpoint of a Trainer, outside of ``output_dir``."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..support.ranks import Ranks
from ..support.validate import Refused
from ..training import PrivateTraining
from ..training.secret_file import load_secret, save_secret

WHERE = "PrivateTrainer"
NEEDED = ("optimizer", "scheduler.pt", TRAINER_STATE_NAME)


class Secrets:
    """The files ``secret/checkpoint-K.json`` of a run folder, mode 0600, for checkpoints ``output_dir/checkpoint-K``.

    Args:
        run_folder: None keeps none; checkpoints can then be loaded as models, and no training can go on from them.
        output_dir: where the Trainer writes its checkpoints.
    """

    def __init__(self, run_folder: Path | str | None, output_dir: Path | str):
        self._folder = None if run_folder is None else Path(run_folder) / "secret"
        self._output_dir = Path(output_dir)

    def save(self, training: PrivateTraining, step: int) -> None:
        """Writes the state that belongs to a checkpoint that is complete, and removes those of deleted checkpoints."""
        if self._folder is None:
            return
        if Ranks.here().is_first:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        save_secret(training, self._path(step))
        if Ranks.here().is_first:
            for path in self._folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*.json"):
                if not (self._output_dir / path.stem).is_dir():
                    path.unlink(missing_ok=True)

    def load(self, training: PrivateTraining, checkpoint: Path, step: int) -> None:
        """Loads the state that belongs to a checkpoint, or refuses."""
        found = load_secret(training, self._path(step))
        if found != step:
            self.refuse(checkpoint, f"it was saved after step {step}, and the secret state after step {found}")

    def latest(self) -> Path:
        """Returns the latest checkpoint of ``output_dir`` that is complete and has its state here."""
        known = sorted(self._steps(), reverse=True)
        for step in known:
            checkpoint = self._output_dir / f"{PREFIX_CHECKPOINT_DIR}-{step}"
            if not self.lacking(checkpoint):
                return checkpoint
        return self.refuse(self._output_dir, "it has no complete checkpoint with a secret state")

    def lacking(self, checkpoint: Path) -> str:
        """Returns what a checkpoint lacks to continue exactly, in words."""
        if self._folder is None:
            return "no run folder was given, which keeps the keys of noise and batches"
        there = os.listdir(checkpoint) if checkpoint.is_dir() else []
        if missing := [name for name in NEEDED if not any(entry.startswith(name) for entry in there)]:
            return f"it has no {' and no '.join(missing)} (save_only_model=True writes none)"
        path = self._path(saved_step(checkpoint))
        return "" if path.is_file() else f"{str(path)!r} does not exist"

    def refuse(self, checkpoint: Path, why: str) -> Path:
        """Raises ``Refused``, and names what can be done."""
        known = ", ".join(f"{PREFIX_CHECKPOINT_DIR}-{step}" for step in sorted(self._steps())) or "none"
        raise Refused(
            f"{WHERE}: the training cannot go on from {str(checkpoint)!r}: {why}. Nothing was released. Pass the "
            f"privacy=dict(run_folder=...) of the run that saved it, and one of its checkpoints (here: {known}). To "
            "train a saved model further, load it and begin a new training; epsilon is then the sum of both."
        )

    def _steps(self) -> list[int]:
        if self._folder is None or not self._folder.is_dir():
            return []
        found = (_step_of(path) for path in self._folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*.json"))
        return [step for step in found if step >= 0]

    def _path(self, step: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{PREFIX_CHECKPOINT_DIR}-{step}.json"


def saved_step(checkpoint: Path) -> int:
    """Returns the number of steps made when a checkpoint was saved, as the Trainer wrote it."""
    return TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)).global_step


def _step_of(path: Path) -> int:
    """Returns the number in ``checkpoint-NUMBER``; -1 if there is none."""
    number = path.name.removesuffix(".json").removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    return int(number) if number.isdecimal() else -1
