# SPDX-License-Identifier: Apache-2.0
"""Runs a training again and again, with a fault at each of its writes and syncs in turn, and counts what was lost.

``PYTHONPATH=.:tests python tests/faults/victim.py WORKLOAD FOLDER [COUNT]`` prints one JSON object, with an entry for
each kind of fault; WORKLOAD is library, command or workers. Every run is a fork of this process, so that torch is
imported once. The calls of the operating system that change files are replaced by functions that count and, at the
right one, fail or kill the process.
"""

import builtins
import errno
import hashlib
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from trainings import cross_entropy, data, network

import torch_privacy as tp
from torch_privacy import cli, privacy
from torch_privacy.experiments import runner
from torch_privacy.privacy import ledger_file
from torch_privacy.runs.folder import RunFolder
from torch_privacy.training import release

CHANGES = ("write", "fsync", "ftruncate", "unlink", "remove", "replace", "rename", "mkdir", "rmdir", "link")
FAULTS = {  # kind of fault: the calls at which it can come
    "kill": {*CHANGES, "open"},
    "half": {"write"},
    "full": {"write"},
    "sync": {"fsync"},
}
SECOND, THIRD = 3, 4  # exit codes: one sentence of refusal; anything else
NUM_STEPS = 10
TRUE = {name: getattr(os, name) for name in (*CHANGES, "open")}


class Calls:
    """Counts the calls that change files, and does something at one of them.

    Args:
        number: of the call, counted from 0; -1 for none.
        fault: "kill" before the call; "half": kill after half of the bytes; "full": from there on nothing can be
            written; "sync": this sync fails.
    """

    def __init__(self, number: int, fault: str):
        self.number, self.fault = number, fault
        self.made: list[str] = []

    def install(self) -> None:
        """Replaces the operating system's calls, and files that are open for writing."""
        for name in CHANGES:
            setattr(os, name, self._counted(name))
        os.open = self._open
        builtins.open = io.open = self._open_file  # pyright: ignore[reportAttributeAccessIssue]

    def before(self, name: str, size: int = 0) -> int:
        """Counts a call; returns how many of its bytes may be written."""
        number = len(self.made)
        self.made.append(name)
        if number == self.number and self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if number == self.number and self.fault == "sync":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if number == self.number and self.fault in ("half", "full"):
            return size // 2
        if number > self.number >= 0 and self.fault == "full" and name in ("write", "mkdir", "open"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return size

    def after(self, number: int) -> None:
        if number == self.number and self.fault == "half":
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, file: int, content: Any) -> int:
        """Writes all bytes, half of them or none."""
        number, content = len(self.made), bytes(content)
        allowed = self.before("write", len(content))
        if number == self.number and self.fault == "full" and not allowed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = TRUE["write"](file, content[:allowed])
        self.after(number)
        return written

    def _counted(self, name: str) -> Callable[..., Any]:
        if name == "write":
            return self.write

        def call(*arguments: Any, **options: Any) -> Any:
            self.before(name)
            return TRUE[name](*arguments, **options)

        return call

    def _open(self, path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            self.before("open")
        return TRUE["open"](path, flags, *more, **options)

    def _open_file(self, file: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        if not set(mode) & set("wax+"):
            return TRUE_OPEN(file, mode, *more, **options)
        assert "b" in mode, f"{file}: opened with mode {mode!r}, which is not counted"
        return io.BufferedWriter(_CountedFile(self, file, mode.replace("b", "")))


class _CountedFile(io.FileIO):
    def __init__(self, calls: Calls, file: Any, mode: str):
        if not isinstance(file, int):
            calls.before("open")
        super().__init__(file, mode)
        self._calls = calls

    def write(self, content: Any) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._calls.write(self.fileno(), content)


TRUE_OPEN = builtins.open


@dataclass
class Outcome:
    """What a run has left: exit code, what it printed, how many calls changed files, and its results."""

    code: int
    said: str
    calls: list[str]


def in_fork(work: Callable[[], int], calls: Calls, said: Path) -> Outcome:
    """Runs the work in a forked process, with these calls."""
    counted = said.with_suffix(".calls")
    child = os.fork()
    if not child:
        code = THIRD
        try:
            file = TRUE["open"](said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(file, 1)
            os.dup2(file, 2)
            sys.stdout, sys.stderr = (TRUE_OPEN(k, "w", closefd=False, buffering=1) for k in (1, 2))
            calls.install()
            code = work()
            TRUE["write"](
                TRUE["open"](counted, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), json.dumps(calls.made).encode()
            )
        except BaseException as error:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises in its handler
            TRUE["write"](2, "".join(traceback.format_exception(error)).encode())
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    made = json.loads(counted.read_text()) if counted.exists() else []
    counted.unlink(missing_ok=True)
    text = said.read_text(errors="replace") if said.exists() else ""
    return Outcome(os.waitstatus_to_exitcode(status), text, made)


class Witness:
    """Notes the digest of every gradient that reaches an optimizer in a file, past all faults."""

    def __init__(self, path: Path):
        self.path = path
        self.file = TRUE["open"](path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def watch(self, training: tp.PrivateTraining) -> None:
        """Looks at each step of the training's optimizer."""
        training.optimizer.register_step_pre_hook(lambda *_: self._note(training))

    def _note(self, training: tp.PrivateTraining) -> None:
        used = b"".join(p.grad.numpy().tobytes() for p in training.model.parameters() if p.grad is not None)
        key = training._state.releases.noise.key + bytes([training.step_count])
        TRUE["write"](self.file, f"{hashlib.sha256(key).hexdigest()} {hashlib.sha256(used).hexdigest()}\n".encode())

    @property
    def releases(self) -> set[tuple[str, ...]]:
        """Returns the distinct pairs of noise and gradient."""
        return {tuple(line.split()) for line in self.path.read_text().splitlines()}


def fix_keys() -> None:
    """Makes the keys of new trainings the same in every run; those of a process that resumes are others."""
    keys = random.Random(11)
    release.secrets.token_bytes = keys.randbytes  # pyright: ignore[reportAttributeAccessIssue]


def library(folder: Path, witness: Witness) -> int:
    """Trains as in docs/run-folder.md, with a checkpoint after every third step; continues what it finds."""
    torch.manual_seed(1)
    run = RunFolder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        run.lock()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        training = tp.PrivateTraining(
            model, optimizer, data(), expected_batch_size=8, num_steps=NUM_STEPS, clipping=tp.Flat(0.5),
            noise_multiplier=1.0, run_folder=folder,
        )  # fmt: skip
        witness.watch(training)

        def save() -> None:
            tp.save_secret(training, run.checkpoint, model=model, optimizer=optimizer)

        if run.checkpoint.exists():
            tp.load_secret(training, run.checkpoint, model=model, optimizer=optimizer)
        else:
            assert not len(training.ledger), "no release comes before the first checkpoint"
            save()
        for x, y in training:
            if training.step(cross_entropy(model, x, y)) and training.step_count % 3 == 0:
                save()
        training.ledger.close()
        content = io.BytesIO()
        torch.save(model.state_dict(), content)
        run.write_model(content.getbuffer())  # pyright: ignore[reportArgumentType]
        if run.checkpoint.exists():
            run.delete_checkpoint()
        run.unlock()
    except (ValueError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return SECOND
    return 0


COMMAND = ["--epochs", "2", "--batch-size", "5000", "--hidden-units", "2", "--quiet"]


def command(folder: Path, witness: Witness) -> int:
    """Runs ``torch-privacy train``, or continues the run that it finds."""
    made = runner.new_training

    def watched(*arguments: Any, **more: Any) -> tp.PrivateTraining:
        training = made(*arguments, **more)
        witness.watch(training)
        return training

    runner.new_training = watched
    begun = (folder / "checkpoint.safetensors").exists()
    arguments = ["train", "--resume", str(folder)] if begun else ["train", "adult", *COMMAND, "--run", str(folder)]
    code = cli.run(arguments)
    return SECOND if code == 2 else code


WORKLOADS: dict[str, Callable[[Path, Witness], int]] = {"library": library, "command": command}


def result(folder: Path) -> dict[str, Any]:
    """Returns what a run has made, without times."""
    names = {path.name for path in folder.iterdir()}
    found: dict[str, Any] = {"files": sorted(names - {"lock"})}  # it is empty, and stays after a kill at its removal
    for name in ("ledger.jsonl", "model.safetensors"):
        if (folder / name).exists():
            found[name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    if (folder / "metrics.csv").exists():
        found["metrics.csv"] = [line.rpartition(",")[0] for line in (folder / "metrics.csv").read_text().splitlines()]
    if (folder / "results.json").exists():
        results = json.loads((folder / "results.json").read_text())
        timed = ("seconds", "files", "check")  # times, and digests of files that hold them
        found["results"] = {key: value for key, value in results.items() if key not in timed}
    return found


def ledger_length(folder: Path) -> int:
    """Returns how many releases the ledger has; 0 without a ledger."""
    path = folder / "ledger.jsonl"
    if not path.exists():
        return 0
    ledger = privacy.Ledger.load(path)
    ledger.close()
    return len(ledger)


def one_trial(workload: Callable[[Path, Witness], int], fault: str, number: int, folder: Path, whole: Any) -> list[str]:
    """Runs into the fault, resumes, and returns what was wrong."""
    run, said = folder / "run", folder / "said"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    witness = Witness(folder / "releases")
    wrong = []
    first = in_fork(lambda: (fix_keys(), workload(run, witness))[1], Calls(number, fault), said)
    if first.code == THIRD or "Traceback" in first.said:
        wrong.append(f"ended with a traceback: {first.said[-700:]}")
    elif first.code == SECOND and len(first.said.strip().splitlines()) != 1:
        wrong.append(f"said more than a sentence: {first.said[-700:]}")
    elif fault in ("kill", "half") and first.code != -signal.SIGKILL:
        wrong.append(f"was not killed: {first}")
    if ledger_length(run) < len(witness.releases):
        wrong.append(f"{ledger_length(run)} in the ledger of {len(witness.releases)} releases")
    if (run / "model.safetensors").exists() and not (run / "checkpoint.safetensors").exists():
        second = Outcome(0, "", [])  # complete
    else:
        if not (run / "checkpoint.safetensors").exists():
            if witness.releases:
                wrong.append("no checkpoint, but releases")
            shutil.rmtree(run, ignore_errors=True)  # as the message says: a new run
        second = in_fork(lambda: (fix_keys(), workload(run, witness))[1], Calls(-1, ""), said)
    if second.code:
        wrong.append(f"could not be resumed: {second.code} {second.said[-700:]}")
    elif result(run) != whole:
        found = result(run)
        differing = [(key, found.get(key), whole[key]) for key in whole if found.get(key) != whole[key]]
        wrong.append(f"another result: {differing}")
    noises = [noise for noise, _ in witness.releases]
    if len(noises) != len(set(noises)):
        wrong.append("two sums with one noise")
    if ledger_length(run) < len(witness.releases):
        wrong.append("the ledger has too few releases at the end")
    TRUE["write"](2, b"" if not wrong else f"{fault} at call {number}: {wrong}\n".encode())
    os.close(witness.file)
    return wrong


def places(calls: list[str], fault: str, count: int | None) -> list[int]:
    """Returns the numbers of the calls at which this fault can come; some, drawn at random, if there are many."""
    found = [number for number, name in enumerate(calls) if name in FAULTS[fault]]
    if count is None or len(found) <= count:
        return found
    return random.Random(5).sample(found, count)


class Slowly(torch.utils.data.Dataset):
    """The same examples, one by one."""

    def __init__(self) -> None:
        self.data = data()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def with_workers(folder: Path, witness: Witness, seed: int) -> int:
    """Trains with two workers, which are killed at a random time; iterates anew after the loader's error."""
    times, killers, failures = random.Random(seed), [], []
    model = network()
    training = tp.PrivateTraining(
        model, torch.optim.SGD(model.parameters(), lr=1.0), tp.Examples(Slowly(), num_workers=2),
        expected_batch_size=8, num_steps=12,
        clipping=tp.Flat(0.5), noise_multiplier=1.0, run_folder=folder,
    )  # fmt: skip
    witness.watch(training)
    kill_at, delay = 1 + times.randrange(6), 0.02 * times.random()
    for _ in range(5):
        try:
            try:
                for x, y in training:
                    if training.step_count >= kill_at and not killers:
                        children = [child.pid for child in multiprocessing.active_children()]
                        killers.append(threading.Timer(delay, lambda: [_kill(pid) for pid in children if pid]))  # noqa: B023
                        killers[0].start()
                    training.step(cross_entropy(model, x, y))
                    if killers and training.step_count > kill_at + 2:
                        killers[0].join()
            except RuntimeError as error:
                if "DataLoader worker" not in str(error) or "\n" in str(error).strip():
                    raise
                failures.append(str(error))
        except RuntimeError as error:  # that of the second worker, while the first one's is handled
            if "DataLoader worker" not in str(error):
                raise
    assert training.step_count == len(training.ledger) == 12, (training.step_count, len(training.ledger), failures)
    return 0


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def workers_killed(folder: Path, count: int) -> dict[str, Any]:
    """Returns the counts of trials in which workers are killed."""
    failures = {}
    for seed in range(count):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        witness = Witness(folder / "releases")
        outcome = in_fork(lambda: with_workers(folder / "run", witness, seed), Calls(-1, ""), folder / "said")  # noqa: B023
        wrong = [f"exit code {outcome.code}: {outcome.said[-700:]}"] if outcome.code else []
        if not 11 <= len(witness.releases) <= ledger_length(folder / "run"):
            wrong.append(f"{len(witness.releases)} releases, {ledger_length(folder / 'run')} in the ledger")
        if wrong:
            failures[seed] = wrong
    return {"tried": count, "right": count - len(failures), "failures": failures}


def main(name: str, folder: Path, count: int | None) -> dict[str, Any]:
    """Returns for each kind of fault the counts of trials and what was wrong in them."""
    torch.set_num_threads(1)
    if name == "workers":
        return {"kill": workers_killed(folder, count or 12)}
    if name == "library":
        torch.set_default_dtype(torch.float64)
    ledger_file.SECONDS_BETWEEN_SYNCS = -1.0  # a sync at every release, not at random ones
    workload = WORKLOADS[name]
    folder.mkdir(parents=True, exist_ok=True)
    with TRUE_OPEN(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        workload(folder / "warm", Witness(folder / "warm releases"))  # reads data, and imports what is imported late
    whole_folder = folder / "whole"
    shutil.rmtree(whole_folder, ignore_errors=True)
    whole_folder.mkdir(parents=True)
    witness = Witness(whole_folder / "releases")
    whole = in_fork(
        lambda: (fix_keys(), workload(whole_folder / "run", witness))[1], Calls(-1, ""), whole_folder / "said"
    )
    assert whole.code == 0, whole
    assert ledger_length(whole_folder / "run") == len(witness.releases)
    expected = result(whole_folder / "run")
    found = {}
    for fault in FAULTS:
        numbers = places(whole.calls, fault, count)
        trials = {n: one_trial(workload, fault, n, folder / "trial", expected) for n in numbers}
        failures = {n: wrong for n, wrong in trials.items() if wrong}
        found[fault] = {
            "tried": len(trials),
            "right": len(trials) - len(failures),
            "places": len(places(whole.calls, fault, None)),
            "failures": failures,
        }
    return found


if __name__ == "__main__":
    _, name, folder, *count = sys.argv
    print(json.dumps(main(name, Path(folder), int(count[0]) if count else None)))
