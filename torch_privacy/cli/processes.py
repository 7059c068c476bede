# SPDX-License-Identifier: Apache-2.0
"""Provides what a command needs where torchrun started several processes of it: rank 0 leads, the others follow.

Rank 0 runs the command as one process would. For each training it opens a process group, and says to the others by
the launcher's key-value store which run to start or resume; they join it and are silent. At its end it sends them its
exit code. So a mistake is said once, and nothing has to be parsed twice.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from torch_privacy.cli.signals import DeferredSignals

if TYPE_CHECKING:
    from torch_privacy.experiments.runner import Run

TOGETHER = {"train", "reproduce"}  # commands that all processes share; of the others, rank 0 runs most alone
ALONE = {"audit", "search"}  # that take long, and work in one process
LAST_WORDS = 10.0  # seconds for which a rank that failed lets rank 0 say why
GRACE = 20.0  # seconds from a signal to the end of a rank that has nothing to do; torchrun kills it after 30


def num_launched() -> int:
    """Returns the number of processes that a launcher such as torchrun started; 1 without a launcher."""
    size = os.environ.get("WORLD_SIZE", "")
    return max(1, int(size)) if "RANK" in os.environ and size.isdecimal() else 1


def is_first() -> bool:
    """True for the process that runs the command: rank 0, or the only one."""
    return num_launched() == 1 or os.environ["RANK"] == "0"


def to_resume(command: str, folder: Path | None) -> bool:
    """True if the launcher started the processes again and the folder has an unfinished run.

    Raises:
        ValueError: They were started again and the run has no given name, so that it cannot be found.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return False
    if folder is None:
        raise ValueError(
            f"{command}: torchrun has started the processes again, and the run that they began has no given name. "
            "Continue it with --resume; name runs with --run where --max-restarts is above 0."
        )
    return (folder / "settings.json").exists()


def again() -> str:
    """Returns the beginning of a command that goes on with as many processes."""
    size = num_launched()
    if size == 1:
        return "torch-privacy"
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    nodes = f"--nnodes {size // int(here)} " if here.isdecimal() and 0 < int(here) < size else ""
    # Without the dashes, torchrun takes --run for an option of its own.
    return f"torchrun {nodes}--nproc-per-node {here or size} --no-python -- torch-privacy"


def lost_rank(error: RuntimeError) -> bool:
    """True if the error says that another rank ended or does not answer."""
    ranks = sys.modules.get("torch_privacy.support.ranks")  # it is loaded if the error comes from there
    return ranks is not None and isinstance(error, ranks.RankLost)


class Processes:
    """The launched processes, and the key-value store through which rank 0 directs the others.

    The store waits for rank 0 as long as it takes; a process group would give up.
    """

    def __init__(self) -> None:
        self._words = self._groups = 0
        self._size = num_launched()
        self._outlived = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by the launcher's own process

    @cached_property
    def _store(self) -> Any:
        """The store; only a command that needs it connects to it."""
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        with _setting_up():
            store, *_ = next(iter(rendezvous("env://")))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the launcher keeps messages of earlier attempts
        return PrefixStore(f"torch_privacy, attempt {attempt}", store)

    @contextmanager
    def open_run(self, folder: Path, experiment: str | None, chosen: dict[str, Any]) -> Iterator[Run]:
        """Starts a run, or resumes one if ``experiment`` is None, in all launched processes; closes it at the end."""
        from torch_privacy.experiments.runner import begin

        if self._size == 1:
            with closing(begin(folder, experiment, chosen)) as run:
                yield run
            return
        self._say([str(folder), experiment, chosen])
        with self._group(), closing(begin(folder, experiment, chosen)) as run:
            yield run

    def end(self, code: int) -> None:
        """Notifies the other processes that rank 0 has ended the command."""
        with suppress(RuntimeError):  # the store has ended with its process, and so will the others
            self._say(code)
            self._wait_until_heard()

    def follow(self) -> int:
        """Does the other ranks' part: joins every training of rank 0, and returns the exit code of rank 0.

        Raises what went wrong here, unless rank 0 ends the command soon afterwards and has said it.
        """
        with DeferredSignals() as signals, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rank 0 shows them
            try:
                while not isinstance(word := self._next_word(signals), int):
                    self._join(_beginning(word), signals)
            except Exception as error:
                code = self._last_word(LAST_WORDS)
                if code is None or not isinstance(error, (ValueError, OSError, RuntimeError)):
                    raise
                return code
            return word

    def _join(self, beginning: tuple[Path, str | None, dict[str, Any]], signals: DeferredSignals) -> None:
        from torch_privacy.cli.progress import run_to_end
        from torch_privacy.experiments.runner import begin

        with self._group(), closing(begin(*beginning)) as run:
            if run_to_end(run, signals, silent=True):
                run.finish()

    def _say(self, word: Any) -> None:
        """Sends the others a word, in JSON: how a training begins, or the exit code."""
        text = json.dumps(word)
        assert json.loads(text) == word, "settings are plain values"
        with _setting_up():
            self._store.set(f"word {self._words}", text)
        self._words += 1

    def _wait_until_heard(self) -> None:
        """Waits some seconds for the others to read the exit code, if the store ends with this process."""
        until = monotonic() + LAST_WORDS
        while not self._outlived and self._store.add("heard", 0) < self._size - 1 and monotonic() < until:
            sleep(0.05)

    def _next_word(self, signals: DeferredSignals) -> Any:
        """Returns the next word of rank 0; gives up some seconds after a signal, as rank 0 may be gone."""
        until = None
        while (word := self._word()) is None:
            if signals.received:
                until = until or monotonic() + GRACE
                if monotonic() > until:
                    return 128 + signals.received
            sleep(0.05)
        return word

    def _last_word(self, seconds: float) -> int | None:
        """Returns the exit code of rank 0, or None if rank 0 does not end within this time."""
        until = monotonic() + seconds
        while monotonic() < until:
            try:
                word = self._word()
            except RuntimeError:  # the store has ended with its process
                return None
            if isinstance(word, int):
                return word
            if word is None:
                sleep(0.05)
        return None

    def _word(self) -> Any:
        key = f"word {self._words}"
        with _setting_up():
            if not self._store.check([key]):
                return None
            text = self._store.get(key)
        self._words += 1
        try:
            word = json.loads(text)
        except (ValueError, RecursionError):
            return []  # no word of ours
        if isinstance(word, int):
            self._store.add("heard", 1)
        return [] if word is None else word

    @contextmanager
    def _group(self) -> Iterator[None]:
        """Opens a process group of all ranks: gloo, and NCCL for the tensors on GPUs, one for each local rank."""
        import torch
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import PrefixStore

        backend = "gloo"
        if torch.cuda.is_available():
            backend = "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        self._groups += 1
        store = PrefixStore(f"group {self._groups}", self._store)
        with _setting_up():
            dist.init_process_group(backend, store=store, rank=int(os.environ["RANK"]), world_size=self._size)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _beginning(word: Any) -> tuple[Path, str | None, dict[str, Any]]:
    """Returns how a training begins, of a word that says so: anybody who reaches the store can write into it."""
    match word:
        case [str(folder), str() | None as experiment, dict(chosen)]:
            return Path(folder), experiment, chosen
    raise ValueError("train: rank 0 said what no rank says. Keep the launcher's port from others.")


def _setting_up() -> AbstractContextManager[None]:
    """Raises `RankLost`, one sentence, where the launcher's store or another rank does not answer."""
    from torch_privacy.support.ranks import communicating

    return communicating("set-up")
