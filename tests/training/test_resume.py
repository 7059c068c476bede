# SPDX-License-Identifier: Apache-2.0
"""Tests that a training that was stopped, killed or copied resumes as if never stopped, and reuses no noise."""

import copy
import os
import pickle
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from cases import Calls, losses_of
from parts import own_batches
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from trainings import (
    RULES,
    N,
    by_each_rule,
    cross_entropy,
    data,
    network,
    network_parameters,
    parameters_of,
    train,
    training_of,
)

import torch_privacy as tp
from torch_privacy.runs.folder import RunFolder
from torch_privacy.training import release


@pytest.mark.thorough(but=2)
@by_each_rule
@pytest.mark.parametrize("stop", [1, 4])
def test_resumed_run_of_any_rule_is_the_uninterrupted_one_bit_for_bit(rule, stop):
    whole, first, second = (training_of(clipping=RULES[rule][0]) for _ in range(3))
    batches = train(whole)
    seen = train(first, steps=stop)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    second.model.load_state_dict(first.model.state_dict())
    assert second.clipping == first.clipping
    assert seen + train(second) == batches
    assert torch.equal(parameters_of(second), parameters_of(whole))
    assert second.clipping == whole.clipping
    assert second.ledger.state_dict() == whole.ledger.state_dict()


@pytest.mark.thorough(but=2)
@by_each_rule
def test_steps_beyond_the_saved_state_are_released_again_under_any_rule(rule):
    training = training_of(clipping=RULES[rule][0])
    train(training, steps=2)
    state, weights = training.state_dict(), copy.deepcopy(training.model.state_dict())
    train(training)
    last, clipping = parameters_of(training), training.clipping
    training.load_state_dict(state)
    training.model.load_state_dict(weights)
    train(training)
    assert torch.equal(parameters_of(training), last)
    assert training.clipping == clipping
    assert len(training.ledger) == 6


def test_resumed_run_is_bit_for_bit_with_a_transformed_input():
    """The first batches of each run are checked more closely; that must not change the result."""

    def made():
        torch.manual_seed(1)
        model = Calls(
            lambda m, x: m.g(torch.tanh(m.f(x.sin().exp().cos().exp().sin()))), f=nn.Linear(16, 16), g=nn.Linear(16, 2)
        )
        return training_of(model, dataset, expected_batch_size=20)

    dataset = TensorDataset(torch.randn(N, 9, 16), torch.zeros(N))
    whole, first = made(), made()
    train(whole, losses=lambda model, x, y: losses_of(model, x))
    train(first, losses=lambda model, x, y: losses_of(model, x), steps=4)
    second = made()
    second.load_state_dict(first.state_dict())
    second.model.load_state_dict(first.model.state_dict())
    train(second, losses=lambda model, x, y: losses_of(model, x))
    assert torch.equal(parameters_of(second), parameters_of(whole))


def test_state_of_another_rule_is_refused():
    state = training_of(clipping=tp.PerLayer(0.5)).state_dict()
    with pytest.raises(tp.Refused, match=r"clipping=\"Groups\(clip_norms=\{'0': 0\.3, '2': 0\.3\}\)\" \(the state has"):
        training_of(clipping=tp.EachLayer(0.3)).load_state_dict(state)


class Doubled(Dataset):
    """Makes items in code."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return N

    def __getitem__(self, i):
        return 2 * self.x[i]


@pytest.mark.parametrize("made", [TensorDataset, Doubled], ids=["tensors", "items"])
def test_state_of_other_data_of_the_same_size_is_refused(made):
    x = torch.randn(N, 3)
    state = pickle.loads(pickle.dumps(training_of(dataset=made(x)).state_dict()))
    training_of(dataset=made(x.clone())).load_state_dict(state)
    other = training_of(dataset=made(x.flip(0)))
    with pytest.raises(tp.Refused, match="on other data of the same size"):
        other.load_state_dict(state)
    assert other.state_dict()["data"] != state["data"]
    other.load_state_dict({key: value for key, value in state.items() if key != "data"})  # of an older version


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_resumed_run_is_the_uninterrupted_one(stop):
    whole = training_of()
    batches = train(whole)
    first = training_of()
    seen = train(first, steps=stop)
    state = pickle.loads(pickle.dumps((first.state_dict(), first.model.state_dict(), first.optimizer.state_dict())))
    second = tp.PrivateTraining(
        *(lambda m: (m, torch.optim.SGD(m.parameters(), lr=1.0)))(network()),
        data(),
        expected_batch_size=8,
        num_steps=6,
        clipping=tp.Flat(0.5),
        noise_multiplier=1.0,
    )
    second.load_state_dict(state[0])
    second.model.load_state_dict(state[1])
    second.optimizer.load_state_dict(state[2])
    assert seen + train(second) == batches
    assert torch.equal(parameters_of(second), parameters_of(whole))
    assert second.ledger.state_dict() == whole.ledger.state_dict()


@pytest.mark.parametrize("replay", ["exact", "skip"])
def test_a_declared_stop_is_not_that_of_later_steps(tmp_path, replay):
    """The ledger may have more steps than the state, and outcomes may have decided to stop after these."""
    first = training_of(run_folder=RunFolder(tmp_path), delta=1e-3)
    train(first, steps=2)
    first.declare_stop("the hour was up")
    state = first.state_dict()
    train(first, steps=4)
    planned = first.spent().planned
    first.ledger.close()
    second = training_of(run_folder=RunFolder(tmp_path), delta=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # skipped updates are lost
        second.load_state_dict(state, replay)
    statement = second.statement()
    assert not statement["stop"]["independent_of_data"]
    assert statement["epsilon"]["high"] == planned.high


def with_dropout():
    torch.manual_seed(1)
    return training_of(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.4), nn.Linear(8, 2)))


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_resumed_run_with_dropout_is_the_uninterrupted_one_bit_for_bit(stop):
    """Dropout masks are a function of the secret key and the step, not of the user's random state."""
    whole, first, second = with_dropout(), with_dropout(), with_dropout()
    batches, seen = train(whole), train(first, steps=stop)
    torch.manual_seed(99)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    second.model.load_state_dict(first.model.state_dict())
    assert seen + train(second) == batches
    assert torch.equal(parameters_of(second), parameters_of(whole))
    assert second.ledger.state_dict() == whole.ledger.state_dict()


def test_steps_beyond_the_saved_state_are_released_again_with_dropout():
    training = with_dropout()
    train(training, steps=2)
    state, weights = training.state_dict(), copy.deepcopy(training.model.state_dict())
    train(training)
    last = parameters_of(training)
    training.load_state_dict({**state, "ledger": training.state_dict()["ledger"]})
    training.model.load_state_dict(weights)
    torch.manual_seed(99)
    train(training)
    assert torch.equal(parameters_of(training), last)
    assert len(training.ledger) == 6


def test_breaking_off_within_a_step_begins_it_anew():
    training = training_of(performance=tp.Performance(microbatch_size=3))
    for x, y in own_batches(training, cross_entropy):
        training.step(cross_entropy(training.model, x, y))
        break
    assert training.step_count == 0
    train(training)
    whole = training_of(performance=tp.Performance(microbatch_size=3))
    train(whole)
    assert torch.equal(parameters_of(training), parameters_of(whole))


def test_going_back_to_a_state_and_training_otherwise_is_refused():
    """Rolling back with another learning rate would release other gradients with noise that was used before."""
    training = training_of()
    train(training, steps=2)
    state, weights = training.state_dict(), copy.deepcopy(training.model.state_dict())
    train(training)
    training.load_state_dict(state)
    training.model.load_state_dict(weights)
    train(training, steps=4)  # a replay
    training.load_state_dict(state)
    training.model.load_state_dict(weights)
    training.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(tp.Refused, match=r"step 3 was .* would share one step's noise.* tp\.load_secret"):
        train(training)
    assert len(training.ledger) == 6


def test_interrupted_update_spends_its_noise():
    training = training_of()
    broken = [True]

    def interrupt(*_):
        if broken.pop():
            raise KeyboardInterrupt

    training.optimizer.register_step_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(training)
    assert training.step_count == len(training.ledger) == 1
    broken[:] = [False] * 9
    train(training)
    assert training.step_count == len(training.ledger) == 6


def test_state_of_other_settings_is_refused():
    state = training_of().state_dict()
    with pytest.raises(tp.Refused, match=r"noise_multiplier=0\.9 \(the state has 1\.0\)"):
        training_of(noise_multiplier=0.9).load_state_dict(state)
    with pytest.raises(tp.Refused, match=r"memory_budget=2\.0 \(the state has 1\.2\)"):
        training_of(performance=tp.Performance(memory_budget=2.0)).load_state_dict(state)


def test_a_state_that_lacks_an_entry_is_refused():
    state = training_of().state_dict()
    for name in state.keys() - {"data", "losses"}:  # of the data alone, and of a run folder
        with pytest.raises(tp.Refused, match=r"load_state_dict: .*Load a state that state_dict returned"):
            training_of().load_state_dict({key: value for key, value in state.items() if key != name})


@pytest.mark.parametrize("change", ["freezes", "unfreezes", "freezes by layer"])
@pytest.mark.parametrize("stop", [2, 4])  # right after the change, and later
def test_a_run_that_switches_what_it_trains_is_resumed_in_its_folder(change, stop, tmp_path):
    """The model is made as at the start, and switched as the loop did, before the loop goes on."""
    clipping = tp.EachLayer(0.5) if change == "freezes by layer" else tp.Flat(0.5)

    def made(name):
        model = network()
        model[0].requires_grad_(change != "unfreezes")
        return training_of(model, clipping=clipping, run_folder=tmp_path / name)

    def switched(training, steps=None):
        if training.step_count < 2:
            train(training, steps=2)
        training.model[0].requires_grad_(change == "unfreezes")
        if steps != 2:
            train(training, steps=steps)

    whole, first = made("whole"), made("run")
    switched(whole)
    switched(first, stop)
    state, weights, ledger = first.state_dict(), first.model.state_dict(), tmp_path / "run" / "ledger.jsonl"
    first.ledger.close()
    second = made("run")
    second.load_state_dict(pickle.loads(pickle.dumps(state)))
    second.model.load_state_dict(weights)
    switched(second)
    assert torch.equal(parameters_of(second), parameters_of(whole))
    assert ledger.read_text().count("\n") == (tmp_path / "whole" / "ledger.jsonl").read_text().count("\n")


@pytest.mark.parametrize("stop", [2, 4])
def test_a_run_that_freezes_a_layer_goes_on_in_a_training_that_never_trained_it(stop):
    """Without a folder, which has the settings that the run began with."""
    first = training_of()
    train(first, steps=2)
    first.model[0].requires_grad_(False)
    if stop > 2:
        train(first, steps=stop)
    model = network()
    model.load_state_dict(first.model.state_dict())
    model[0].requires_grad_(False)
    second = training_of(model)
    second.load_state_dict(first.state_dict())
    train(second)
    train(first)
    assert torch.equal(parameters_of(second), parameters_of(first))


def test_run_folder_of_another_run_is_refused(tmp_path):
    train(training_of(run_folder=tmp_path), steps=2)
    model = network()
    again = tp.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        data(),
        expected_batch_size=8,
        num_steps=6,
        clipping=tp.Flat(0.5),
        noise_multiplier=1.0,
        run_folder=tmp_path,
    )
    with pytest.raises(tp.Refused, match=r"step 0 was SubsampledGaussian"):
        train(again)
    assert torch.equal(parameters_of(again), network_parameters())


KILLED = """
import os, sys, torch
sys.path[:0] = {paths!r}
from pathlib import Path
from trainings import parameters_of, train, training_of
torch.set_default_dtype(torch.float64)
folder, kill_at, resume = Path(sys.argv[1]), int(sys.argv[2]), len(sys.argv) > 3
training = training_of(run_folder=folder, num_steps=12)
if resume:
    state = torch.load(folder / "state.pt")
    training.load_state_dict(state["training"]); training.model.load_state_dict(state["model"])
for x, y in training:
    if not training.step(torch.nn.functional.cross_entropy(training.model(x), y, reduction="none")): continue
    with open(folder / "batches", "a") as file: print(training.step_count, sorted(x[:, 0].tolist()), file=file)
    if training.step_count == 4 and not resume:
        training.ledger.sync()
        torch.save(dict(training=training.state_dict(), model=training.model.state_dict()), folder / "state.pt")
    if training.step_count == kill_at and not resume: os.kill(os.getpid(), 9)
torch.save(parameters_of(training), folder / "final.pt")
"""


@pytest.mark.thorough
def test_killed_run_resumes_with_the_same_ledger_and_batches(tmp_path):
    kill_at = int(torch.randint(5, 12, (), generator=torch.Generator().manual_seed(torch.Generator().seed())))
    folders = [tmp_path / "whole", tmp_path / "killed"]
    code = KILLED.format(paths=[str(Path(__file__).parents[2]), str(Path(__file__).parents[1])])

    def run(folder, *arguments):
        folder.mkdir(exist_ok=True)
        return subprocess.run([sys.executable, "-c", code, str(folder), *arguments], check=False).returncode

    assert run(folders[0], "0") == 0
    assert run(folders[1], str(kill_at)) == -signal.SIGKILL
    assert (folders[1] / "ledger.jsonl").read_text().count('"step"') == kill_at
    assert run(folders[1], "0", "resume") == 0
    whole, killed = folders
    assert (whole / "ledger.jsonl").read_text() == (killed / "ledger.jsonl").read_text()
    later = {line for line in (killed / "batches").read_text().splitlines()}
    assert later == set((whole / "batches").read_text().splitlines())
    assert torch.equal(torch.load(whole / "final.pt"), torch.load(killed / "final.pt"))


def secret_training(model=None, **settings):
    """Returns a training with keys from the operating system, as a user would have."""
    model = model or network()
    settings = {"expected_batch_size": 8, "num_steps": 6, "clipping": tp.Flat(0.5), "noise_multiplier": 1.0} | settings
    return tp.PrivateTraining(model, torch.optim.SGD(model.parameters(), lr=1.0), data(), **settings)


def opposite(model, x, y):
    return -cross_entropy(model, x, y)


def test_one_noise_for_two_releases_of_one_process_is_refused():
    """A state that is loaded twice may be trained again in the same way only."""
    training = secret_training()
    train(training, steps=2)
    state, weights = copy.deepcopy(training.state_dict()), copy.deepcopy(training.model.state_dict())
    train(training, steps=4)
    again, other = secret_training(), secret_training()
    for copied in (again, other):
        copied.load_state_dict(copy.deepcopy(state))
        copied.model.load_state_dict(weights)
    train(again, steps=4)
    assert torch.equal(parameters_of(again), parameters_of(training))
    before = parameters_of(other).clone()
    with pytest.raises(tp.Refused, match="step 2 was released before with the same noise and other sums"):
        train(other, losses=opposite)
    assert torch.equal(parameters_of(other), before)
    assert len(other.ledger) == 2


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("replay", ["exact", "skip"])
def test_steps_after_a_state_that_no_ledger_on_disk_may_have_are_named(step, replay, tmp_path, monkeypatch):
    """Made again otherwise, in another process, they would have the same noise; "skip" takes other noise."""
    training = secret_training()
    if step:
        train(training, steps=step)
    state = training.state_dict()
    monkeypatch.setattr(release, "_RELEASED", {})  # as in another process
    for settings, known in (({}, False), ({"run_folder": tmp_path}, step == 0), ({"run_folder": tmp_path}, True)):
        again = secret_training(**settings)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            again.load_state_dict(copy.deepcopy(state), replay)
        assert any("no ledger on disk" in str(w.message) for w in warned) == (replay == "exact" and not known)
        assert any(f"state of step {step}," in line for line in again.statement()["not_covered"]) == (not known)
        assert (again.state_dict()["noise_key"] != state["noise_key"]) == (replay == "skip" and not known)
        again.ledger.close()


@pytest.mark.parametrize("replay", ["exact", "skip"])
def test_a_state_of_a_test_seed_is_not_private_in_any_training(tmp_path, replay):
    fixed = training_of(run_folder=tmp_path)
    train(fixed, steps=2)
    fixed.ledger.close()
    for settings in ({}, {"run_folder": tmp_path}):
        training = secret_training(**settings)
        training.load_state_dict(fixed.state_dict(), replay)
        assert training.statement()["warning"] == fixed.statement()["warning"]


def test_a_training_goes_on_in_its_own_process_only(monkeypatch):
    training, process = secret_training(), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)  # as after a fork
    with pytest.raises(tp.Refused, match="was forked from the one that began the training"):
        train(training)
    assert len(training.ledger) == 0
    training.load_state_dict(training.state_dict())
    train(training)
