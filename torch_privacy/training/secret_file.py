# SPDX-License-Identifier: Apache-2.0
"""Keeps the secret state of a training in a file that rank 0 alone writes, and only its owner can read."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Literal

from ..support.ranks import Ranks
from ..support.read_file import parse_json, read_bytes
from ..support.validate import Refused
from ..support.warning import warn
from ..support.write_file import PARTIAL, sync_directory, write_whole
from .loop import PrivateTraining

LARGEST = 2**32  # bytes; a release has about thirty


def save_secret(training: PrivateTraining, path: Path | str) -> None:
    """Writes ``training.state_dict()``, which holds the keys, into a file that its owner alone can read.

    With several ranks, every rank calls it, and rank 0 writes. Save model and optimizer *before*, into a folder that
    is named by ``training.step_count``: this file then says which of these checkpoints is complete.

    Args:
        training: the training, between two steps.
        path: the file. Keep it out of folders that are shared, uploaded or backed up, and delete it when the run is
            over: with it anyone can compute the noise of every step, past and future.

    Guarantees:
        - The file has mode 0600, and a crash or power failure leaves the old file or the new one.
        - It is on the disk when any rank returns, and so is the ledger of the run folder.

    Raises:
        OSError: it cannot be written; on the other ranks ``Refused``.
    """
    ranks, path = Ranks.here(), Path(path)

    def write() -> int:
        training.ledger.sync()
        content = json.dumps(training.state_dict(), allow_nan=False).encode()
        write_whole(path, lambda file: file.write(content))
        sync_directory(path.parent)
        return 0

    ranks.first_does("saves its secret state", write)


def load_secret(
    training: PrivateTraining, path: Path | str, replay: Literal["exact", "skip"] | None = None
) -> int | None:
    """Reads what `save_secret` wrote, and calls ``training.load_state_dict`` with it.

    With several ranks, every rank calls it, rank 0 reads, and the others get what they need in memory alone. Their
    number may be another one than when the file was written.

    Args:
        training: a new training with the same settings and the same ``run_folder``.
        path: the file.
        replay: what to do with steps that were released after the file was written; see ``load_state_dict``.

    Returns:
        ``step_count`` when the file was written, which names the checkpoint of model and optimizer that belongs to it;
        None if there is no such file. ``training.step_count`` may be larger, as steps are skipped.

    Raises:
        Refused: the file is damaged, or belongs to another training.
    """
    ranks, path = Ranks.here(), Path(path)
    state = {}
    with ranks.together("reads its secret state"):
        exists = ranks.is_first and os.path.lexists(path)
        if exists:
            state = _read(path)
    if not ranks.from_first(exists):
        return None
    training.load_state_dict(state, replay)
    return ranks.from_first(state.get("step_count"))


class SecretFolder:
    """Owns the keys of a training that others checkpoint: the folder ``secret`` of its run folder, mode 0700.

    It has one file ``NAME-STEP.json`` of `save_secret` for each checkpoint, a checkpoint from before the first release
    until there is another one, and is deleted when the run is over: then nobody can compute the noise again, and no
    keys are written any more.

    Args:
        run_folder: the run's folder.
        name: how the checkpoints are called.
        start: name of the first checkpoint, a file or a folder.
    """

    def __init__(self, run_folder: Path | str, name: str, start: str):
        self.path, self._name = Path(run_folder) / "secret", name
        self.start = self.path / start
        self._is_over = False

    def at(self, step: int) -> Path:
        """Returns the file that belongs to the checkpoint after this many steps."""
        return self.path / f"{self._name}-{step}.json"

    def steps(self) -> list[int]:
        """Returns the steps with a file, in order."""
        numbers = (path.stem.removeprefix(f"{self._name}-") for path in self.path.glob(f"{self._name}-*.json"))
        return sorted(int(number) for number in numbers if number.isdecimal())

    def make(self) -> None:
        """Makes the folder; every rank calls it."""
        ranks = Ranks.here()
        with ranks.together("makes the folder of its secret state"):
            if ranks.is_first and self.path.is_symlink():
                raise Refused(f"{self.path}: is a symbolic link, and keys stay in the run folder. Remove it.")
            if ranks.is_first:
                self.path.mkdir(parents=True, exist_ok=True)
                self.path.chmod(0o700)

    def save(self, training: PrivateTraining, step: int) -> None:
        """Writes the file of a checkpoint; every rank calls it. A run that is over has no keys any more."""
        if self._is_over:
            return
        self.make()
        save_secret(training, self.at(step))
        if step and Ranks.here().is_first:
            self._delete_start()

    def delete(self, step: int) -> None:
        """Deletes the file of a checkpoint that is no more."""
        self.at(step).unlink(missing_ok=True)

    def end(self) -> None:
        """Deletes all keys, with what a crash left of them: the run is over, and its files are written."""
        self._is_over = True
        if not Ranks.here().is_first or self.path.is_symlink() or not self.path.is_dir():
            return
        self._delete_start()
        for step in self.steps():
            self.delete(step)
        for left in self.path.glob(f"{self._name}-*{PARTIAL}"):
            left.unlink()
        with suppress(OSError):  # something of the user's is in it
            self.path.rmdir()
        sync_directory(self.path.parent)

    def warn_kept(self, where: str) -> None:
        """Warns that the keys of a training that was stopped before its last step are kept."""
        if self.steps() and Ranks.here().is_first:
            warn(
                f"{where}: the training stopped before its last step, and {str(self.path)!r} keeps the keys of noise "
                "and batches, to go on. Whoever reads them can subtract the noise: delete that folder if the training "
                "is over."
            )

    def _delete_start(self) -> None:
        self.delete(0)
        if self.start.is_dir() and not self.start.is_symlink():
            shutil.rmtree(self.start)
        else:
            self.start.unlink(missing_ok=True)


def _read(path: Path) -> dict:
    try:
        state = parse_json(read_bytes(path, LARGEST))
    except ValueError as error:
        raise Refused(f"load_secret: {path}: {error}. Begin a new training, or restore the file.") from None
    if not isinstance(state, dict):
        raise Refused(f"load_secret: {path}: it holds no state of a training. Name the file that save_secret wrote.")
    return state
