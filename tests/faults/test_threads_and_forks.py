# SPDX-License-Identifier: Apache-2.0
"""Threads, forked processes and killed workers: right, or refused by name, and every release is in the ledger."""

import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from trainings import cross_entropy, parameters_of, train, training_of

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.runs.folder import RunFolder
from torch_privacy.sklearn import PrivateClassifier
from torch_privacy.sklearn.fitting import new_network
from torch_privacy.support import random_state as replay

ROOT = Path(__file__).parents[2]
ALL = "TORCH_PRIVACY_ALL_FAULTS" in os.environ  # set by ``make faults``


@pytest.fixture(autouse=True)
def frequent_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(*functions):
    """Runs each function in a thread of its own; returns the exceptions."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def with_dropout():
    torch.manual_seed(1)
    return training_of(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.4), nn.Linear(8, 2)), num_steps=20)


@pytest.mark.thorough
def test_trainings_in_threads_are_those_of_one_thread_bit_for_bit(tally):
    """The random state belongs to all threads: dropout draws from the right key all the same."""
    expected, trials = with_dropout(), 20 if ALL else 3
    train(expected)
    right = 0
    for _ in range(trials):
        trainings = [with_dropout() for _ in range(3)]
        before = torch.get_rng_state()
        errors = in_threads(*(lambda t=t: train(t) for t in trainings))
        right += not errors and all(torch.equal(parameters_of(t), parameters_of(expected)) for t in trainings)
        right -= not torch.equal(torch.get_rng_state(), before)
    tally("two trainings in threads", trials, right)
    assert right == trials


def test_steps_made_in_other_threads_are_those_of_one_thread():
    expected, training = with_dropout(), with_dropout()
    train(expected)
    for x, y in training:
        losses = cross_entropy(training.model, x, y)
        assert not in_threads(lambda losses=losses: training.step(losses))
    assert torch.equal(parameters_of(training), parameters_of(expected))
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_batch_that_another_thread_keeps_is_named(monkeypatch):
    monkeypatch.setattr(replay, "LONGEST_WAIT", 0.0)
    kept, other = training_of(), training_of()
    loop = iter(kept)
    next(loop)
    (error,) = in_threads(lambda: train(other))
    assert isinstance(error, tp.Refused)
    assert "a batch of another training has waited for its step for 0 seconds, in thread 'MainThread'" in str(error)
    assert len(other.ledger) == 0
    loop.close()
    assert not in_threads(lambda: train(other))
    assert other.step_count == 6


def check(training):
    tp.check(training.model, lambda model, x: model(x).square().sum(1), torch.ones(4, 3))


@pytest.mark.parametrize("act", [check, lambda _: new_network(PrivateClassifier(), 3, 2)])
def test_what_replaces_the_random_state_waits_for_a_batch(act, monkeypatch):
    monkeypatch.setattr(replay, "LONGEST_WAIT", 0.0)
    kept, other = training_of(), training_of()
    loop = iter(kept)
    x, y = next(loop)
    before = torch.get_rng_state()
    (error,) = in_threads(lambda: act(other))
    assert "a batch of another training has waited for its step" in str(error)
    assert torch.equal(torch.get_rng_state(), before)
    kept.step(cross_entropy(kept.model, x, y))
    loop.close()
    assert not in_threads(lambda: act(other))


def test_a_thread_that_ended_with_a_batch_stops_nobody():
    kept, other, loops = training_of(), training_of(), []
    before = torch.get_rng_state()
    loops.append(iter(kept))
    assert not in_threads(lambda: next(loops[0]))
    steps = iter(other)
    next(steps)
    loops[0].close()  # as the garbage collector does; it leaves the numbers of the other training alone
    assert not other._runs.pending.numbers.was_seeded
    steps.close()
    assert torch.equal(torch.get_rng_state(), before)
    train(other)
    assert other.step_count == 6


@pytest.mark.thorough
def test_one_training_stepped_from_two_threads_adds_no_batch_twice(tally):
    expected, trials, right = training_of(num_steps=6), 30 if ALL else 5, 0
    train(expected)
    refused = 0
    for _ in range(trials):
        training = training_of(num_steps=6)
        for x, y in training:
            losses, start = cross_entropy(training.model, x, y), threading.Barrier(2)

            def step(training=training, losses=losses, start=start):
                start.wait()
                training.step(losses)

            errors = in_threads(step, step)
            assert all(isinstance(error, tp.Refused) for error in errors), errors
            refused += len(errors)
        right += torch.equal(parameters_of(training), parameters_of(expected)) and len(training.ledger) == 6
    tally("one training in two threads", trials, right)
    assert right == trials
    assert refused


@pytest.mark.filterwarnings("ignore:PrivateTraining. all 40 steps are made")  # where both loops went on to the end
def test_two_loops_in_two_threads_are_refused_or_right():
    expected = training_of(num_steps=40)
    train(expected)
    training = training_of(num_steps=40)
    errors = in_threads(lambda: train(training), lambda: train(training))
    assert all(isinstance(error, tp.Refused) for error in errors), errors
    train(training)
    assert torch.equal(parameters_of(training), parameters_of(expected))
    assert len(training.ledger) == 40


def forked(function):
    """Runs the function in a forked process; returns what it says, or its exception's message."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other tests may have left threads
        child = os.fork()
    if not child:
        try:
            said = str(function())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode()[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        said = file.read().decode()
    os.waitpid(child, 0)
    return said


@pytest.mark.thorough
def test_a_fork_releases_nothing(tmp_path, tally):
    """It has the parent's keys: neither a step nor a line in the ledger's file, in memory or not, at any moment."""
    expected, said = training_of(), []
    train(expected)
    for folder in (None, tmp_path):
        training = training_of(run_folder=folder)
        for number, (x, y) in enumerate(training):
            losses = cross_entropy(training.model, x, y)
            if number % 3 == 0:  # each fork runs a training
                said.append(forked(lambda: training.step(losses) and "released"))  # noqa: B023
                said.append(forked(lambda: train(training)))  # noqa: B023
            if number % 3 == 0 and folder is not None:
                ledger = training.ledger
                release = training.event, len(ledger), "a"
                said.append(forked(lambda: ledger.record(*release)))  # noqa: B023
                said.append(forked(lambda: privacy.Ledger.load(tmp_path / "ledger.jsonl")))
            training.step(losses)
        assert torch.equal(parameters_of(training), parameters_of(expected))
        assert len(training.ledger) == 6
    training.ledger.close()
    assert privacy.Ledger.load(tmp_path / "ledger.jsonl").state_dict() == expected.ledger.state_dict()
    refusals = (
        "Refused: PrivateTraining: this process was forked from the one that began",
        "because this process was forked from the one that writes it",
        "another process writes",
        "False",  # a rehearsal or a microbatch, compared only
    )
    right = sum(any(text in answer for text in refusals) for answer in said)
    tally("forked processes", len(said), right)
    assert right == len(said), [answer for answer in said if not any(text in answer for text in refusals)]


LOCKS = """
import os, sys, time
from pathlib import Path
from torch_privacy import privacy
from torch_privacy.runs.folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.create()
ledger = privacy.Ledger(folder.ledger)
if os.fork():
    os._exit(0)
print("forked", flush=True)
time.sleep(60)
"""


@pytest.mark.thorough
def test_the_locks_end_with_the_process_that_made_them(tmp_path):
    """A worker of a process that was killed may live on for seconds."""
    child = subprocess.Popen([sys.executable, "-c", LOCKS, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT)
    assert child.stdout is not None
    assert child.stdout.readline() == b"forked\n"
    assert child.wait() == 0
    folder = RunFolder(tmp_path)
    folder.lock()
    privacy.Ledger.load(folder.ledger).close()
    folder.unlock()
    child.stdout.close()  # the fork ends by itself
