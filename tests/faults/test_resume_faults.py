# SPDX-License-Identifier: Apache-2.0
"""A run that cannot be repeated bit for bit goes on, and its ledger counts every release ever made."""

import copy
import warnings
from collections import defaultdict

import pytest
import torch
from trainings import cross_entropy, data, network, parameters_of, private_training, train

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.experiments import runner
from torch_privacy.training import release

GOES_ON = r"did not repeat bit for bit what was released before the training was resumed"


class Witness:
    """Sees every release that reaches an optimizer, with its noise."""

    def __init__(self):
        self.used = defaultdict(set)  # noise key and step -> gradients of the optimizer

    def watch(self, training):
        training.optimizer.register_step_pre_hook(lambda *_: self._use(training))
        return training

    def _use(self, training):
        gradient = b"".join(p.grad.numpy().tobytes() for p in training.model.parameters())
        self.used[training._state.releases.noise.key, training.step_count].add(gradient)


@pytest.fixture
def witness():
    return Witness()


@pytest.fixture
def new_process(monkeypatch):
    """Returns a function that makes the library forget what this process has released."""
    return lambda: monkeypatch.setattr(release, "_RELEASED", {})


def secret_training(**settings):
    """Returns a training with keys from the operating system, as a user would have."""
    model = network()
    settings = {"noise_multiplier": 1.0} | settings
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return private_training(
        model, optimizer, data(), **{"expected_batch_size": 8, "num_steps": 6, "clipping": tp.Flat(0.5)} | settings
    )


def saved(training):
    return copy.deepcopy((training.state_dict(), training.model.state_dict()))


def resumed(state, **settings):
    training = secret_training(**settings)
    training.load_state_dict(copy.deepcopy(state[0]))
    training.model.load_state_dict(state[1])
    return training


def by_threads(model, x, y):
    """Returns losses that differ in the last bits with the number of threads, as large sums do."""
    return cross_entropy(model, x * (1 + 1e-6 * torch.get_num_threads()), y)


def elsewhere(model, x, y):
    """Returns the losses as another processor computes them."""
    return cross_entropy(model, x * (1 + 1e-6), y)


def assert_counted(training, witness):
    """The ledger has a release for every gradient that any process ever used, and a key's noise has one sum."""
    assert len(training.ledger) >= len(witness.used)
    assert {len(gradients) for gradients in witness.used.values()} == {1}
    assert training.num_lost == len(training.ledger) - training.step_count


@pytest.mark.thorough
def test_steps_are_repeated_with_the_recorded_number_of_threads(tmp_path, new_process):
    torch.set_num_threads(2)
    whole = secret_training(run_folder=tmp_path)
    train(whole, steps=2, losses=by_threads)
    state = saved(whole)
    train(whole, steps=5, losses=by_threads)
    five, ledger = parameters_of(whole), whole.ledger.state_dict()
    new_process()
    torch.set_num_threads(1)
    again = resumed(state, run_folder=tmp_path)
    train(again, steps=5, losses=by_threads)
    assert torch.equal(parameters_of(again), five)
    assert again.ledger.state_dict() == ledger
    assert torch.get_num_threads() == 1
    train(again, losses=by_threads)
    assert torch.get_num_threads() == 1
    assert (again.num_lost, len(again.ledger)) == (0, 6)


@pytest.mark.thorough
def test_a_number_of_threads_that_the_state_does_not_know_is_named(tmp_path, new_process):
    torch.set_num_threads(2)
    whole = secret_training(run_folder=tmp_path)
    train(whole, steps=2, losses=by_threads)
    state = saved(whole)
    state[0]["machine"] |= {"threads": 3, "torch": "1.0"}
    train(whole, steps=5, losses=by_threads)
    new_process()
    again = resumed(state, run_folder=tmp_path)
    message = r"step 2 .*threads was 3 and is 2, torch was 1\.0 and is .*counts the 3 steps that are made again"
    with pytest.warns(UserWarning, match=message):
        train(again, losses=by_threads)


@pytest.mark.thorough
def test_a_state_names_the_generator_of_the_noise(tmp_path, new_process):
    """What is repeated with another generator differs, and the warning says why."""
    whole = secret_training(run_folder=tmp_path)
    train(whole, steps=2)
    state = saved(whole)
    assert state[0]["machine"]["generator"] == "AES-256-CTR, ziggurat"
    train(whole, steps=5)
    new_process()
    state[0]["machine"]["generator"] = "AES-256-CTR, Box-Muller"
    again = resumed(state, run_folder=tmp_path)
    again._state.releases.noise._processor = again._state.releases.noise._device  # any other generator
    message = r"step 2 .*generator was AES-256-CTR, Box-Muller and is AES-256-CTR, ziggurat.* new keys"
    with pytest.warns(UserWarning, match=message):
        train(again)
    assert again.num_lost == 3


@pytest.mark.thorough
@pytest.mark.parametrize("microbatch_size", [None, 3])
@pytest.mark.parametrize("same_until", [2, 3, 4])
def test_a_run_that_cannot_be_repeated_goes_on_with_new_keys(
    tmp_path, witness, new_process, same_until, microbatch_size
):
    settings = {"run_folder": tmp_path, "performance": tp.Performance(microbatch_size=microbatch_size), "delta": 1e-3}
    first = witness.watch(secret_training(**settings))
    train(first, steps=2)
    state = saved(first)
    train(first, steps=5)
    new_process()
    again = witness.watch(resumed(state, **settings))
    assert (again.step_count, len(again.ledger)) == (2, 5)

    def losses(model, x, y):
        return (cross_entropy if again.step_count < same_until else elsewhere)(model, x, y)

    with pytest.warns(
        UserWarning, match=f"step {same_until} {GOES_ON}.*the {5 - same_until} steps that are made again"
    ):
        train(again, losses=losses)
    lost = 5 - same_until
    assert (again.step_count, again.num_lost, len(again.ledger)) == (6, lost, 6 + lost)
    assert_counted(again, witness)
    spent = privacy.compose([(again.event, 6 + lost)]).epsilon(1e-3)
    assert again.spent().epsilon == spent
    assert again.statement()["releases"][0]["count"] == 6 + lost
    assert again.state_dict()["noise_key"] != first.state_dict()["noise_key"]
    assert again.state_dict()["sampler_key"] != first.state_dict()["sampler_key"]
    assert len(witness.used) == 6 + lost


@pytest.mark.thorough
@pytest.mark.parametrize("limit", ["target", "budget"])
def test_a_limit_on_epsilon_holds_with_the_lost_steps(tmp_path, new_process, limit):
    delta, epsilon = 1e-3, privacy.compose([(privacy.SubsampledGaussian(1.0, 0.2), 6)]).epsilon_high(1e-3) * 1.001
    settings = {"run_folder": tmp_path, "delta": delta}
    if limit == "target":
        settings |= {"target_epsilon": epsilon, "noise_multiplier": None}
    else:
        settings |= {"examples": {"budget": privacy.Budget(epsilon, delta)}}
    first = secret_training(**settings)
    train(first, steps=2)
    state = saved(first)
    train(first, steps=4)
    new_process()
    again = resumed(state, **settings)
    with pytest.warns(UserWarning, match="4 of 6 steps are made, so that epsilon stays within its limit"):
        train(again, losses=elsewhere)
    assert (again.step_count, len(again.ledger)) == (4, 6)
    assert again.spent().epsilon.high <= epsilon
    assert again.spent().planned == again.spent().epsilon
    assert "after" not in str(again.spent())
    with pytest.warns(UserWarning, match="this loop gets no batch"):
        train(again, losses=elsewhere)  # nothing is left
    assert len(again.ledger) == 6
    new_process()
    last = resumed(saved(again), **settings)
    train(last)
    assert (last.step_count, len(last.ledger)) == (4, 6)


@pytest.mark.thorough
def test_crash_after_crash_on_changing_machines(tmp_path, witness, new_process):
    """The state is that of step 2 every time: the new keys of each process are lost with it."""
    first = witness.watch(secret_training(run_folder=tmp_path, num_steps=20))
    train(first, steps=2)
    state = saved(first)
    train(first, steps=5)
    for losses, until in [(elsewhere, 4), (cross_entropy, 7), (elsewhere, 9)]:
        new_process()
        again = witness.watch(resumed(state, run_folder=tmp_path, num_steps=20))
        with pytest.warns(UserWarning, match=GOES_ON):
            train(again, steps=until, losses=losses)
        assert_counted(again, witness)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = saved(again)
        train(again, steps=12)
        lost, expected, length = again.num_lost, parameters_of(again), len(again.ledger)
        new_process()
        last = resumed(state, run_folder=tmp_path, num_steps=20)
        train(last, steps=12, losses=cross_entropy)
    assert torch.equal(parameters_of(last), expected)
    assert (last.num_lost, len(last.ledger)) == (lost, length)


@pytest.mark.thorough
def test_an_empty_batch_that_cannot_be_repeated(tmp_path, new_process):
    settings = {"run_folder": tmp_path, "expected_batch_size": 0.01}
    first = secret_training(**settings)
    train(first, steps=6)
    state = copy.deepcopy((first.state_dict() | {"step_count": 0}, first.model.state_dict()))
    with (tmp_path / "ledger.jsonl").open("rb") as file:
        lines = file.readlines()
    assert len(lines) == 8
    new_process()
    state[0]["ledger"] = privacy.Ledger().state_dict()
    state[0]["noise_key"] = "00" * 32
    again = resumed(state, **settings)
    with pytest.warns(UserWarning, match=GOES_ON):
        train(again)
    assert (again.step_count, len(again.ledger)) == (6, 12)


@pytest.mark.thorough
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("moment", ["before", "within", "after"])
def test_an_exception_in_the_update_and_a_later_crash_lose_no_run(tmp_path, witness, new_process, error, moment):
    class Failing(torch.optim.SGD):
        number = 0

        def step(self, closure=None):
            self.number += 1
            if self.number != 4:
                return super().step(closure)
            if moment == "within":
                with torch.no_grad():
                    p = self.param_groups[0]["params"][0]
                    p -= p.grad
            elif moment == "after":
                super().step()
            raise error

    def made(optimizer):
        model = network()
        optimizer = optimizer(model.parameters(), lr=1.0)
        return witness.watch(
            tp.PrivateTraining(
                model, optimizer, data(), expected_batch_size=8, num_steps=9, clipping=tp.Flat(0.5),
                noise_multiplier=1.0, delta=1e-3, run_folder=tmp_path,
            )
        )  # fmt: skip

    first = made(Failing)
    train(first, steps=2)
    state = saved(first)
    with pytest.raises(error):
        train(first)
    assert first.step_count == len(first.ledger) == 4
    train(first, steps=6)  # the user goes on, without the update
    assert "NOT PRIVATE" not in str(first.spent())
    new_process()  # a crash
    again = made(torch.optim.SGD)
    again.load_state_dict(state[0])
    again.model.load_state_dict(state[1])
    if moment == "after":  # the same weights as without the exception: the steps repeat
        train(again)
        assert again.num_lost == 0
    else:
        with pytest.warns(UserWarning, match=f"step 4 {GOES_ON}"):
            train(again)
        assert again.num_lost == 2
    assert again.step_count == 9
    assert_counted(again, witness)


@pytest.mark.thorough
@pytest.mark.parametrize("epsilon", [None, 0.5])
def test_a_run_of_the_command_goes_on_elsewhere(tmp_path, monkeypatch, new_process, epsilon):
    """A line on stderr says so; progress, metrics and results count the lost steps."""
    torch.set_default_dtype(torch.float32)
    noise = {"noise_multiplier": 0.55} if epsilon is None else {"target_epsilon": epsilon}
    chosen = {"epochs": 0.2, "baseline": False} | noise
    run = runner.Run.start(tmp_path / "run", "adult", **chosen)
    for progress in run.steps():
        if progress.step == 5:
            break
    planned = progress.num_steps
    run.close()  # without a checkpoint, as by kill -9
    new_process()
    losses_and_scores = runner.losses_and_scores

    def elsewhere(task, model, batch, views=1):
        return losses_and_scores(task, model, [batch[0] * (1 + 1e-6), batch[1]], views)

    monkeypatch.setattr(runner, "losses_and_scores", elsewhere)
    run = runner.Run.resume(tmp_path / "run")
    with pytest.warns(UserWarning, match=f"step 0 {GOES_ON}"):
        steps = list(run.steps())
    assert run.training.num_lost == 5
    assert steps[-1].num_lost == 5
    made = steps[-1].step
    assert made == (planned if epsilon is None else made)
    assert made < planned or epsilon is None
    results = run.finish()
    spent = privacy.compose([(run.training.event, made + 5)]).epsilon(run.settings.delta)
    assert results["privacy"]["epsilon"] == {"low": spent.low, "high": spent.high}
    assert epsilon is None or spent.high <= epsilon
    rows = run.folder.read_metrics()
    assert [row.step for row in rows] == [made]
    assert rows[0].epsilon_high == spent.high
    assert run.epsilon_high(made + 5) == spent.high


def test_a_difference_in_any_number_is_noticed(tmp_path, new_process):
    """Also in those far apart, and if last bits rise and fall in turn."""
    model = torch.nn.Linear(3000, 2)
    sums = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    training = secret_training()
    found = release.Releases(training.settings, training._setup.plan, privacy.Ledger(), release.new_keys(None, 0))
    before = found._fingerprint(0, sums)
    assert before == found._fingerprint(0, {name: total.clone() for name, total in sums.items()})
    flat = sums["weight"].view(-1)
    for places in ([1], [5999], [3, 4], [7, 1031], [7, 8, 1031, 1033]):
        changed = flat.clone()
        for sign, place in enumerate(places):
            changed.view(torch.int64)[place] += (-1) ** sign
        assert found._fingerprint(0, sums | {"weight": changed.view(2, 3000)}) != before, places
