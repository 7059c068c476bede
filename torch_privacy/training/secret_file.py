# SPDX-License-Identifier: Apache-2.0
"""Keeps the secret state of a training in a file that rank 0 alone writes, and only its owner can read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

from ..support.ranks import Ranks
from ..support.read_file import parse_json, read_bytes
from ..support.validate import Refused
from ..support.write_file import sync_directory, write_whole
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
        write_whole(path, lambda file: file.write(content), mode=0o600)
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


def _read(path: Path) -> dict:
    try:
        state = parse_json(read_bytes(path, LARGEST))
    except ValueError as error:
        raise Refused(f"load_secret: {path}: {error}. Begin a new training, or restore the file.") from None
    if not isinstance(state, dict):
        raise Refused(f"load_secret: {path}: it holds no state of a training. Name the file that save_secret wrote.")
    return state
