# SPDX-License-Identifier: Apache-2.0
"""Keeps the secret state of a training in a file that rank 0 alone writes, and only its owner can read."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import nn

from ..runs import checkpoint
from ..support.ranks import Ranks
from ..support.validate import Refused, quoted
from ..support.warning import warn
from ..support.write_file import PARTIAL, sync_directory
from .loop import PrivateTraining

ENDING = ".safetensors"
UNFIT = (RuntimeError, LookupError, ValueError, TypeError, AttributeError)  # what parts raise for a wrong state


class Stateful(Protocol):
    """Something with a state, such as a model, an optimizer, a scheduler or a `MovingAverage`."""

    def state_dict(self) -> Any:
        """Returns the state, of tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Restores it."""
        ...


def save_secret(training: PrivateTraining, path: Path | str, **parts: Stateful) -> None:
    """Writes ``training.state_dict()``, which holds the keys, into a file that its owner alone can read.

    The states of other parts can go into the same file: ``save_secret(training, path, model=model,
    optimizer=optimizer)``. If they are saved elsewhere, such as those of a sharded model, save them *before*, into a
    folder that is named by ``training.step_count``: this file then says which of these checkpoints is complete. With
    several ranks, every rank calls it, and rank 0 writes.

    Args:
        training: the training, between two steps.
        path: the file. Keep it out of folders that are shared, uploaded or backed up, and delete it when the run is
            over: with it anyone can compute the noise of every step, past and future.
        parts: by name, whatever has ``state_dict`` and ``load_state_dict``; equal on all ranks. Functions, as in the
            state of some schedulers, are refused.

    Guarantees:
        - The file has mode 0600, and a crash or power failure leaves the old file or the new one.
        - It is on the disk when any rank returns, and so is the ledger of the run folder.
        - It is in the safetensors format, with JSON, and holds no pickle: reading it runs no code.

    Raises:
        Refused: a part has a state that cannot be saved; the message says where.
        OSError: it cannot be written; on the other ranks ``Refused``.
    """
    ranks, path = Ranks.here(), Path(path)

    def write() -> None:
        training.ledger.sync()
        states = {name: part.state_dict() for name, part in parts.items()}
        checkpoint.save(path, {"training": training.state_dict(), "parts": states})
        sync_directory(path.parent)

    ranks.first_does("saves its secret state", write)


def load_secret(
    training: PrivateTraining, path: Path | str, replay: Literal["exact", "skip"] | None = None, **parts: Stateful
) -> int | None:
    """Reads what `save_secret` wrote, and calls ``load_state_dict`` of the training and of all parts with it.

    With several ranks, every rank calls it, rank 0 reads, and the others get what they need in memory alone. Their
    number may be another one than when the file was written.

    Args:
        training: a new training with the same settings and the same ``run_folder``.
        path: the file.
        replay: what to do with steps that were released after the file was written; see ``load_state_dict``.
        parts: those that were saved, under the same names.

    Returns:
        ``step_count`` when the file was written, which names the checkpoint of model and optimizer that belongs to it;
        None if there is no such file. ``training.step_count`` may be larger, as steps are skipped.

    Raises:
        Refused: the file is damaged, or belongs to another training or other parts; nothing was loaded. Only if an
            optimizer or a scheduler refuses its state, parts before it are loaded already.
    """
    ranks, path = Ranks.here(), Path(path)
    state: dict[str, Any] = {"training": {}, "parts": {}}
    with ranks.together("reads its secret state"):
        exists = ranks.is_first and os.path.lexists(path)
        if exists:
            state = _read(path)
    if not ranks.from_first(exists):
        return None
    states = ranks.from_first(state["parts"])
    with ranks.together("compares the parts of its state"):
        check_parts(path, states, parts)
    training.load_state_dict(state["training"], replay)
    load_parts(path, states, parts)
    return ranks.from_first(state["training"].get("step_count"))


def release_before(training: PrivateTraining) -> str:
    """Returns the fingerprint of the latest release, by which a checkpoint that is saved now is known; "" without one.

    A checkpoint of another run, in the same place, has another one: its weights come from releases of another ledger.
    """
    step = training.step_count
    return training.ledger.made[training._state.releases.number(step - 1)].fingerprint if step else ""


def check_parts(path: Path, states: dict[str, Any], parts: dict[str, Any]) -> None:
    """Refuses states of other parts, and of a model with other tensors, before anything is loaded."""
    if states.keys() != parts.keys():
        raise Refused(
            f"{path}: holds the states of {quoted(sorted(states)) or 'no parts'}, and those of "
            f"{quoted(sorted(parts)) or 'none'} are to be loaded. Name the same parts."
        )
    for name, part in parts.items():
        if not isinstance(part, nn.Module):
            continue
        ours, found = _shapes(part.state_dict()), _shapes(states[name])
        if differing := [key for key in {**ours, **found} if ours.get(key, ...) != found.get(key, ...)]:
            raise Refused(
                f"{path}: its {name} differs from this one in {quoted(differing, at_most=5)}. Make it as it was when "
                "the file was written."
            )


def load_parts(path: Path, states: dict[str, Any], parts: dict[str, Any]) -> None:
    """Restores the states of all parts."""
    for name, part in parts.items():
        try:
            part.load_state_dict(states[name])
        except UNFIT as error:
            reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
            raise Refused(
                f"{path}: its {name} does not fit this one ({reason}). Make it as it was when the file was written."
            ) from None


def _shapes(state: Any) -> dict[str, Any]:
    """Returns the shapes of a model's tensors by name, and the types of what is no tensor."""
    entries = state.items() if isinstance(state, dict) else ()
    return {str(name): getattr(value, "shape", type(value)) for name, value in entries}


class SecretFolder:
    """Owns the keys of a training that others checkpoint: the folder ``secret`` of its run folder, mode 0700.

    It has one file ``NAME-STEP.safetensors`` of `save_secret` for each checkpoint, a checkpoint from before the first
    release until two others were begun, and is deleted when the run is over: then no one can compute the noise again,
    and no keys are written any more.

    Args:
        run_folder: the run's folder.
        name: how the checkpoints are called.
        start: name of the first checkpoint, a file or a folder.

    Raises:
        Refused: the run was begun by an earlier version, and this one does not read its files.
    """

    def __init__(self, run_folder: Path | str, name: str, start: str):
        self.path, self._name = Path(run_folder) / "secret", name
        if former := sorted(self.path.glob(f"{name}-*.json")):
            raise Refused(f"{former[0]}: {checkpoint.EARLIER}")
        self.start = self.path / start
        self._is_over = False

    def at(self, step: int) -> Path:
        """Returns the file that belongs to the checkpoint after this many steps."""
        return self.path / f"{self._name}-{step}{ENDING}"

    def steps(self) -> list[int]:
        """Returns the steps with a file, in order."""
        numbers = (path.stem.removeprefix(f"{self._name}-") for path in self.path.glob(f"{self._name}-*{ENDING}"))
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
        earlier = any(0 < known < step for known in self.steps())  # a checkpoint that is complete: this one may not be
        save_secret(training, self.at(step))
        if earlier and Ranks.here().is_first:
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
    state = checkpoint.load(path)
    if state.keys() != {"training", "parts"} or not all(isinstance(part, dict) for part in state.values()):
        raise Refused(f"{path}: holds no state of a training. Name the file that save_secret wrote.")
    return state
