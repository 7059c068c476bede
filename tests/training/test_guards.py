# SPDX-License-Identifier: Apache-2.0
"""Tests that misuse of private training is refused with one sentence that names culprit and cure; nothing is lost."""

import copy
import gc
import math
import pickle
import re
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from scipy.sparse import csr_array
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset
from trainings import private_training

import torch_privacy as tp
from torch_privacy.mechanisms.clipping import ClippingRule
from torch_privacy.training.releaser import FiniteRows

N = 60


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def data() -> TensorDataset:
    return TensorDataset(torch.randn(N, 6), torch.randint(2, (N,)))


def training_of(model=None, optimizer=None, dataset=None, **settings) -> tp.PrivateTraining:
    model = model or network()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    usual = {"expected_batch_size": 10, "num_steps": 6, "clipping": tp.Flat(1.0), "noise_multiplier": 1.0}
    return private_training(
        model, optimizer, data() if dataset is None else dataset, **(usual | {"delta": 1e-3} | settings)
    )


def losses_of(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def loop(training, losses=losses_of, steps=math.inf):
    for batch in training:
        training.step(losses(training.model, *batch))
        if training.step_count >= steps:
            break
    return training


def weights(model) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same_weights(model, before) -> bool:
    return all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def refused(message: str):
    return pytest.raises(tp.Refused, match=re.escape(message))


# Settings


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("views", 4),
        ("expected_batch_size", 5),
        ("num_examples", 1000),
        ("num_steps", 2),
        ("noise_multiplier", 9.0),
        ("delta", 0.5),
        ("sampling_probability", 0.01),
        ("performance", tp.Performance(microbatch_size=3)),
        ("event", None),
        ("ledger", None),
        ("model", None),
        ("optimizer", None),
        ("test_seed", None),
        ("not_for_release", False),
    ],
)
def test_settings_cannot_be_set_after_the_start(name, value):
    training = training_of()
    owner = training.settings if hasattr(training.settings, name) else training
    before = getattr(owner, name)
    with pytest.raises(AttributeError, match=f"{name} cannot be set"):
        setattr(training, name, value)
    if owner is not training:
        with pytest.raises(AttributeError):
            setattr(owner, name, value)
    assert getattr(owner, name) == before
    loop(training)
    assert training.step_count == 6


def test_a_delta_that_the_constructor_refuses_is_refused_by_spent_too():
    with pytest.raises(ValueError, match=r"delta=0\.5"):
        training_of(delta=0.5)
    training = training_of()
    for delta in (0.5, 1 / N, 0.0):
        with pytest.raises(ValueError, match="delta="):
            training.spent(delta)
    assert training.spent(1e-4).delta == 1e-4


@pytest.mark.parametrize(("delta", "warned"), [(0.99 / N, True), (0.11 / N, True), (0.1 / N, False), (1e-6, False)])
def test_a_delta_above_a_tenth_of_one_over_n_warns(delta, warned):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training = training_of(delta=delta)
        at_start = len(caught)
        training.spent(delta)
    warned_of = [str(w.message) for w in caught if "close to 1/n" in str(w.message)]
    assert bool(at_start) == warned
    assert len(warned_of) == 2 * warned


# Steps of other optimizers, and other changes of the weights


def ordinary(training, losses):
    losses.mean().backward()
    training.optimizer.step()


def another_optimizer(training, losses):
    losses.mean().backward()
    torch.optim.Adam(training.model.parameters()).step()


def a_closure(training, losses):
    training.optimizer.step(lambda: losses.mean())


def after_ours(training, losses):
    training.step(losses)
    for p in training.model.parameters():
        p.grad = torch.ones_like(p)
    training.optimizer.step()


@pytest.mark.parametrize("body", [ordinary, another_optimizer, a_closure, after_ours])
def test_optimizer_step_in_the_loop_is_refused_before_it_moves_a_weight(body):
    training = training_of()
    before = weights(training.model)
    with refused("optimizer.step() was called inside of the loop"):
        for x, y in training:
            body(training, losses_of(training.model, x, y))
    assert same_weights(training.model, before)
    assert training.step_count == 0
    assert len(training.ledger) == 0


@pytest.mark.filterwarnings("ignore:PrivateTraining. SGD made a step for 'other'")
def test_an_optimizer_of_other_parameters_may_step_in_the_loop():
    training, other = training_of(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for x, y in training:
        training.step(losses_of(training.model, x, y))
        other(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert training.step_count == 6


def clamp(model):
    for p in model.parameters():
        p.clamp_(-0.05, 0.05)


def replace_by_shrunk(model):
    for p in model.parameters():
        p.data = p.sign() * (p.abs() - 0.01).clamp(min=0)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("change", [clamp, replace_by_shrunk])
def test_weights_may_be_changed_after_every_update(change):
    start, same = network(), data()
    training = training_of(copy.deepcopy(start), dataset=same, test_seed=1, after_update=change)
    plain = training_of(start, dataset=same, test_seed=1)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the same by hand is noticed
        for of_training, of_plain in zip(training.steps(), plain.steps(), strict=True):
            for x, y in of_training:
                training.step(with_gradient(training.model, x, y))
            for x, y in of_plain:
                plain.step(with_gradient(plain.model, x, y))
            change(plain.model)
            assert same_weights(training.model, weights(plain.model))
    assert not training._progress().moved_otherwise
    assert change.__qualname__ in training.statement()["after_update"]
    assert plain._progress().moved_otherwise


def with_gradient(model, x, y):
    with torch.enable_grad():
        return losses_of(model, x, y)


def test_empty_batches_are_followed_by_the_change_too():
    calls = []
    training = training_of(after_update=lambda model: calls.append(1), expected_batch_size=0.5)
    loop(training)
    assert len(calls) == training.step_count == 6


def test_what_is_drawn_after_an_update_repeats_and_leaves_the_users_random_numbers():
    def jitter(model):
        model[0].weight.mul_(1 + 0.1 * torch.randn(()))

    same, found = data(), []
    for options in ({"after_update": jitter}, {"after_update": jitter}, {}):
        torch.manual_seed(3)
        training = training_of(network(), dataset=same, test_seed=1, **options)
        loop(training)
        found.append((weights(training.model), torch.randn(())))
    (one, after_one), (two, after_two), (three, after_three) = found
    assert all(map(torch.equal, one, two))
    assert not torch.equal(one[0], three[0])
    assert after_one == after_two == after_three


def test_a_state_of_another_change_after_the_update_is_refused():
    same = data()
    state = training_of(after_update=clamp, dataset=same).state_dict()
    with refused("after_update=None"):
        training_of(dataset=same).load_state_dict(state)
    training_of(after_update=clamp, dataset=same).load_state_dict(state)


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
@pytest.mark.filterwarnings("ignore:.*made a step for")
def test_a_loop_that_is_dropped_during_another_step_leaves_that_step_alone(register):
    model = nn.Linear(2, 1)
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    loops = [iter(training_of())]
    next(loops[0])
    handles = [register(lambda *_: (loops.clear(), gc.collect()) and None), register(lambda *_: None)]
    try:
        model(torch.ones(1, 2)).sum().backward()
        before = model.bias.item()
        other.step()
    finally:
        for handle in handles:
            handle.remove()
    assert not loops
    assert model.bias.item() == before - 1


def test_the_optimizer_may_step_again_after_the_loop():
    """The statement reports that the weights moved; it cannot know if that was fine-tuning on public data."""
    training = loop(training_of())
    assert "NOT PRIVATE" not in str(training.spent())
    losses_of(training.model, torch.randn(4, 6), torch.ones(4).long()).mean().backward()
    training.optimizer.step()
    assert "NOT PRIVATE" in str(training.spent())


def by_data(p):
    p.data.add_(1)


def under_no_grad(p):
    with torch.no_grad():
        p -= 0.1


def swapped(p):
    p.data = p.data + 1


@pytest.mark.parametrize("move", [by_data, under_no_grad, swapped])
@pytest.mark.parametrize("when", ["in the loop", "after a break", "after the end"])
def test_weights_that_moved_otherwise_are_not_private(move, when):
    training = training_of()
    noticed = (
        pytest.warns(UserWarning, match=r"first seen after step \d.*after_update=")
        if when == "in the loop"
        else nullcontext()
    )
    with noticed:
        for x, y in training:
            if training.step(losses_of(training.model, x, y)) and when == "in the loop" and training.step_count == 2:
                move(training.model[2].weight)
            if when == "after a break" and training.step_count == 2:
                break
    if when != "in the loop":
        move(training.model[2].weight)
    assert "NOT PRIVATE" in str(training.spent())
    statement = training.statement()
    assert statement["private"] is False
    assert "changed other than" in statement["warning"]
    assert training.state_dict()["moved_otherwise"]


def filled(state, x):
    state["momentum_buffer"] = torch.ones_like(state["momentum_buffer"]) * x.sum()


def added(state, x):
    state["momentum_buffer"].add_(x.sum())


def of_its_own(state, x):
    state["means"] = x.mean(0)


def cleared(state, x):
    state.clear()


def zeroed(state, x):
    state["momentum_buffer"].zero_()


@pytest.mark.filterwarnings("ignore:.*the trained weights were changed")
@pytest.mark.parametrize(
    ("write", "is_private"), [(filled, False), (added, False), (of_its_own, False), (cleared, True), (zeroed, True)]
)
def test_an_optimizer_that_other_code_fills_is_not_private(write, is_private):
    model = network()
    training = training_of(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9))
    for x, y in training:
        if training.step(losses_of(model, x, y)) and training.step_count == 2:
            write(training.optimizer.state[model[2].weight], x)
    assert training.state_dict()["moved_otherwise"].endswith("of 2.weight'") is not is_private


@pytest.mark.filterwarnings("ignore:.*the trained weights were changed")
def test_an_optimizer_that_other_code_fills_before_the_first_step_is_not_private():
    model = network()
    training = training_of(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9))
    for x, y in training:
        training.optimizer.state[model[2].weight]["momentum_buffer"] = torch.full_like(model[2].weight, 3.0)
        training.step(losses_of(model, x, y))
    assert training.state_dict()["moved_otherwise"] == "first seen after step 0, in 'momentum_buffer of 2.weight'"


@pytest.mark.filterwarnings("ignore:.*the trained weights were changed")
def test_an_optimizer_that_other_code_fills_between_two_loops_is_not_private():
    model = network()
    training = training_of(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9))
    loop(training, steps=2)
    training.optimizer.state[model[2].weight]["momentum_buffer"].add_(1)
    loop(training)
    assert training.statement()["private"] is False
    assert training.state_dict()["moved_otherwise"] == "first seen after step 2, in 'momentum_buffer of 2.weight'"


@pytest.mark.filterwarnings("ignore:.*the trained weights were changed")
def test_the_ledger_says_that_weights_moved_before_a_release_that_depends_on_it(tmp_path):
    """So the file is right if the process is killed at any time."""
    training, found = training_of(run_folder=tmp_path), []
    read = lambda *_: found.append("changed other than" in (tmp_path / "ledger.jsonl").read_text())  # noqa: E731
    training.optimizer.register_step_pre_hook(read)
    for x, y in training:
        if training.step(losses_of(training.model, x, y)) and training.step_count == 2:
            by_data(training.model[2].weight)
    assert found == [False, False, True, True, True, True]


@pytest.mark.filterwarnings("ignore:.*the trained weights were changed")
def test_weights_that_moved_while_they_were_frozen_are_not_private():
    training = training_of()
    layer = training.model[2]
    for x, y in training:
        if training.step(losses_of(training.model, x, y)):
            layer.requires_grad_(training.step_count not in (2, 3))
            if training.step_count == 3:
                under_no_grad(layer.weight)
    assert "in '2.weight'" in training.statement()["warning"]


@pytest.mark.parametrize("move", [by_data, under_no_grad])
@pytest.mark.parametrize("first", [True, False])
def test_updates_by_hand_are_refused_and_taken_back(move, first):
    """The first rehearsal shows updates before and after ``training.step``."""
    training = training_of()
    before = weights(training.model)
    with refused("the forward changed '2.weight', or the loop did"):
        for x, y in training:
            losses = losses_of(training.model, x, y)
            if first:
                move(training.model[2].weight)
            training.step(losses)
            if not first:
                move(training.model[2].weight)
    assert same_weights(training.model, before)
    assert len(training.ledger) == 0
    assert training.statement()["private"]


def test_a_resumed_run_remembers_that_weights_moved_otherwise():
    same = data()
    training = loop(training_of(dataset=same), steps=2)
    by_data(training.model[2].weight)
    state = training.state_dict()
    again = training_of(training.model, dataset=same)
    again.load_state_dict(state)
    assert "NOT PRIVATE" in str(again.spent())


def test_weights_that_were_changed_and_restored_are_private():
    """This allows an evaluation with averaged weights."""
    training = training_of()
    for x, y in training:
        if training.step(losses_of(training.model, x, y)):
            kept = copy.deepcopy(training.model.state_dict())
            with torch.no_grad():
                for p in training.model.parameters():
                    p.zero_()
            training.model.load_state_dict(kept)
    assert training.statement()["private"]


class Skipping(torch.optim.SGD):
    """Makes only every second step."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        return super().step(closure) if self.calls % 2 == 0 else None


def test_an_optimizer_that_skips_its_step_is_refused():
    model = network()
    training = training_of(model, Skipping(model.parameters(), lr=0.1))
    with refused("Skipping.step() changed no weight"):
        loop(training)
    assert len(training.ledger) == training.step_count == 1  # the step is spent, and the ledger records it


def test_a_learning_rate_of_zero_is_not_a_skipped_step():
    model = network()
    training = loop(training_of(model, torch.optim.SGD(model.parameters(), lr=0.0)))
    assert training.step_count == 6


def test_a_scheduler_that_needs_a_loss_is_refused_at_construction():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with refused("scheduler=ReduceLROnPlateau needs metrics"):
        training_of(model, optimizer, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


@pytest.mark.parametrize(
    ("optimizer", "setting", "value"),
    [
        (torch.optim.SGD, "lr", lambda x: 0.1 + float(x.detach().mean())),
        (torch.optim.SGD, "weight_decay", lambda x: float(x.detach().square().mean())),
        (torch.optim.SGD, "momentum", lambda x: 0.5 + 0.1 * float(x.detach().mean().sigmoid())),
        (torch.optim.Adam, "betas", lambda x: (0.9, 0.9 + 0.05 * float(x.detach().mean().sigmoid()))),
    ],
)
def test_an_optimizer_setting_that_follows_the_batch_is_refused(optimizer, setting, value):
    model = network()
    training = training_of(model, optimizer=optimizer(model.parameters(), lr=0.1))
    before = [p.clone() for p in model.parameters()]
    with refused(f"{setting} of the optimizer changed before the step was made"):
        for x, y in training:
            training.optimizer.param_groups[0][setting] = value(x)
            training.step(F.cross_entropy(model(x), y, reduction="none"))
    assert training.step_count == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


class Remembers(nn.Module):
    """Adds what the loop left in a buffer, or in an attribute."""

    def __init__(self, attribute: bool):
        super().__init__()
        self.f = nn.Linear(6, 3)
        if attribute:
            self.last = [torch.zeros(6)]
        else:
            self.register_buffer("last", torch.zeros(6))

    def forward(self, x):
        return self.f(x + self.last[0] if isinstance(self.last, list) else x + self.last)


def remember(training: tp.PrivateTraining) -> None:
    """Leaves a mean of each batch in the model, after its step."""
    model: Any = training.model
    for x, y in training:
        training.step(F.cross_entropy(model(x), y, reduction="none"))
        if isinstance(model.last, list):
            model.last[0] = x.mean(0)
        else:
            model.last = x.mean(0)


@pytest.mark.parametrize("attribute", [False, True])
def test_data_that_the_loop_leaves_in_the_model_after_step_are_refused(attribute):
    model = Remembers(attribute)
    training = training_of(model)
    with pytest.raises(tp.Refused, match=r"the loop changed 'last.*' after training\.step"):
        remember(training)
    assert training.step_count == 0


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_scheduler_that_is_advanced_on_rehearsals_is_refused():
    training = training_of()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9)
    with refused("lr of the optimizer changed before the step was made"):
        for x, y in training:
            training.step(losses_of(training.model, x, y))
            scheduler.step()


def test_a_scheduler_that_is_advanced_where_step_returns_true_works():
    training = training_of()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.5)
    for x, y in training:
        if training.step(losses_of(training.model, x, y)):
            scheduler.step()
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**6)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("late", [False, True])
def test_hooks_on_parameters_are_refused(register, late):
    model = network()
    seen = []
    if not late:
        getattr(model[2].weight, register)(seen.append)
        with refused("parameter '2.weight' has a hook for its gradient"):
            training_of(model)
        return
    training = training_of(model)
    loop(training, steps=2)
    getattr(model[2].weight, register)(seen.append)
    with refused("parameter '2.weight' has a hook for its gradient"):
        loop(training)
    assert not seen
    assert training.step_count == 2


# Copies, and two trainings at once


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_training_cannot_be_copied_or_pickled(copied):
    with refused("PrivateTraining cannot be copied or pickled"):
        copied(training_of())


def test_two_trainings_in_a_zip_are_refused():
    one, two = training_of(), training_of()
    with refused("a batch of another training waits for its step"):
        for (x, y), (u, v) in zip(one, two, strict=False):
            one.step(losses_of(one.model, x, y))
            two.step(losses_of(two.model, u, v))
    loop(one)  # nothing is lost
    loop(two)
    assert one.step_count == two.step_count == 6


def test_a_loop_that_an_error_left_is_named_until_what_keeps_it_is_deleted():
    """A function's progress bar is kept by what watches the variables of the loop, and that by the training."""
    trainings, other = [training_of()], training_of()

    def fit(training, num_made=0):
        bar = iter(training)
        for _ in bar:
            raise ZeroDivisionError(num_made)

    with pytest.raises(ZeroDivisionError):
        fit(trainings[0])
    with refused("If that loop was left by an error, delete what keeps it"):
        loop(other)
    trainings.clear()
    loop(other)
    assert other.step_count == 6


def test_a_loop_that_only_a_cycle_of_references_keeps_is_not_waited_for():
    """As one that an error left; Python 3.14 collects cycles late."""
    gc.disable()
    try:
        left = training_of()
        kept: list = [left, iter(left)]
        next(kept[1])
        kept.append(kept)
        del left, kept
        assert loop(training_of()).step_count == 6
    finally:
        gc.enable()


def test_two_trainings_one_after_the_other_work():
    one, two = loop(training_of(), steps=3), loop(training_of(), steps=3)
    assert loop(one).step_count == loop(two).step_count == 6


def test_several_processes_are_refused(monkeypatch):
    training = training_of()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    with refused("torch.distributed runs with 2 processes"):
        training_of()
    with refused("torch.distributed runs with 2 processes"):
        loop(training)


def test_one_process_of_torch_distributed_works(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 1)
    assert loop(training_of()).step_count == 6


# Losses that were scaled, or used up


def test_losses_of_a_gradient_scaler_are_refused():
    training, scaler = training_of(network().float(), dataset=floats()), torch.amp.GradScaler("cpu")
    with refused("as GradScaler does"):
        loop(training, lambda model, x, y: scaler.scale(losses_of(model, x, y)))


def floats() -> TensorDataset:
    return TensorDataset(torch.randn(N, 6, dtype=torch.float32), torch.randint(2, (N,)))


@pytest.mark.parametrize("factor", [10.0, 8.0, 0.125, torch.tensor(10.0)])
def test_losses_that_are_multiplied_by_a_number_train(factor):
    """The number may be close to the batch's size."""
    training = loop(training_of(), lambda model, x, y: factor * losses_of(model, x, y))
    assert training.step_count == 6


def test_a_backward_before_the_step_is_refused():
    training = training_of()
    with refused("the graph of the losses was used up"):
        for x, y in training:
            losses = losses_of(training.model, x, y)
            losses.mean().backward()
            training.step(losses)
    assert len(training.ledger) == 0


# The planned epsilon, and stops


def test_an_early_stop_carries_the_planned_epsilon_unless_it_is_declared():
    whole = training_of(num_steps=50)
    training = loop(training_of(num_steps=50), steps=5)
    spent = training.spent()
    assert spent.epsilon.high < spent.planned.high
    assert "after 5 of 50 steps" in str(spent)
    assert "the one to report if a stop depends" in str(spent)
    statement = training.statement()
    assert statement["epsilon"] == spent.planned._asdict()
    assert statement["epsilon_of_steps_made"] == spent.epsilon._asdict()
    assert not statement["stop"]["independent_of_data"]
    loop(whole)
    assert whole.spent().epsilon == pytest.approx(spent.planned)
    assert whole.spent().planned == whole.spent().epsilon

    with pytest.raises(ValueError, match="reason"):
        training.declare_stop(" ")
    training.declare_stop("the power went out")
    statement = training.statement()
    assert statement["epsilon"] == spent.epsilon._asdict()
    assert statement["stop"] == {"independent_of_data": True, "reason": "the power went out"}
    loop(training, steps=6)  # training goes on after all
    assert training.statement()["stop"] == {"independent_of_data": False, "reason": None}


def test_with_a_budget_the_planned_steps_are_those_that_it_allows():
    training = training_of(num_steps=500, examples={"budget": tp.privacy.Budget(4.0, 1e-3)})
    assert training.spent().planned.high <= 4.0
    loop(training)
    assert training.step_count < 500
    assert training.statement()["epsilon"]["high"] <= 4.0


# Unusual models, data sets and inputs


@pytest.mark.parametrize("kind", ["model", "optimizer", "both"])
def test_models_and_optimizers_wrapped_by_opacus_are_refused_by_name(kind):
    """Opacus's classes are recognized by their module, so that Opacus need not be installed."""
    wrapper = type("GradSampleModule", (nn.Module,), {"__module__": "opacus.grad_sample.grad_sample_module"})
    sgd = type("DPOptimizer", (torch.optim.SGD,), {"__module__": "opacus.optimizers.optimizer"})
    model = network()
    optimizer = (sgd if kind != "model" else torch.optim.SGD)(model.parameters(), lr=0.1)
    if kind != "optimizer":
        wrapped = wrapper()
        wrapped.inner = model
        model = wrapped
    with refused("comes from Opacus. Pass model and optimizer as they were before make_private"):
        training_of(model, optimizer)


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (pd.DataFrame({"a": [1.0, 2.0]}), "dataset is a pandas DataFrame; its items are columns"),
        (pa.table({"a": [1.0, 2.0]}), "dataset is a pyarrow Table; its items are columns"),
        (csr_array(np.eye(2)), "csr_array cannot be sampled"),  # it has no length
    ],
    ids=["pandas", "pyarrow", "sparse"],
)
def test_a_table_is_refused(dataset, text):
    with refused(text):
        training_of(dataset=dataset)


def test_numpy_data_sets_train():
    """Items are collated as by DataLoader, which turns arrays into tensors."""
    items = [(np.random.randn(6), int(k % 2)) for k in range(N)]
    assert loop(training_of(dataset=items)).step_count == 6
    rows = np.random.randn(N, 6)
    training = training_of(nn.Linear(6, 1), dataset=rows)
    for x in training:
        training.step(training.model(x).squeeze(1).square())
    assert training.step_count == 6


def test_batches_that_stay_numpy_train():
    def collate(items):
        return np.stack([x for x, _ in items]), np.array([y for _, y in items])

    items = [(np.random.randn(6), int(k % 2)) for k in range(N)]
    training = training_of(dataset=items, examples={"collate_fn": collate})
    for x, y in training:
        training.step(losses_of(training.model, torch.from_numpy(x), torch.from_numpy(y)))
    assert training.step_count == 6


class FromNumpy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x):
        return self.layer(torch.from_numpy(np.tanh(x.numpy() if isinstance(x, Tensor) else x)))


def test_a_forward_that_uses_numpy_trains():
    assert loop(training_of(FromNumpy())).step_count == 6


def test_nested_inputs_are_refused_with_one_sentence():
    def losses(model, x, y):
        return F.cross_entropy(model(torch.nested.nested_tensor(list(x))).to_padded_tensor(0), y, reduction="none")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(tp.Refused, match="nested"):
            loop(training_of(), losses)


def test_a_broadcast_of_outputs_against_targets_is_named():
    def broadcast(model, x, y):
        return F.mse_loss(model(x), y.to(x.dtype), reduction="none")

    training = training_of(nn.Linear(6, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with refused("A broadcast of (n, 1) against (n,)"):
            loop(training, broadcast)
        with pytest.raises(tp.Refused, match=r"depend on each other.*broadcast of"):
            loop(training, lambda *batch: broadcast(*batch).mean(1))


def test_several_losses_of_each_example_are_refused_with_the_right_advice():
    training = training_of(nn.Linear(6, 3))
    with pytest.raises(tp.Refused, match="sum their losses and divide by the example's own count"):
        loop(training, lambda model, x, y: model(x).square())


# Rules


class NoDataclass(ClippingRule):
    def factors(self, norms, group="all"):
        return (1 / norms).clamp(max=1)

    def sensitivity(self, relation):
        return 1.0


@dataclass(frozen=True)
class Ones(ClippingRule):
    clip_norm: float = 0.01

    def factors(self, norms, group="all"):
        return torch.ones_like(norms)

    def sensitivity(self, relation):
        return self.clip_norm


@dataclass(frozen=True)
class LaterOnes(Ones):
    """Stops clipping as soon as a row of the batch is longer than any in the first batches."""

    def factors(self, norms, group="all"):
        late = float(norms.max()) > 1e3
        return torch.ones_like(norms) if late else (self.clip_norm / norms).clamp(max=1)


@dataclass(frozen=True)
class WithoutGroup(Ones):
    def factors(self, norms):
        return torch.ones_like(norms)


def test_a_rule_that_is_no_dataclass_or_knows_no_group_is_refused_when_it_is_given():
    with pytest.raises(ValueError, match=r"Make NoDataclass a dataclass"):
        training_of(clipping=NoDataclass())
    with pytest.raises(ValueError, match=r'WithoutGroup.factors .* define factors\(self, norms, group="all"\)'):
        training_of(clipping=WithoutGroup())


@pytest.mark.parametrize("part", ["embedding_clipping", "residual_clipping"])
def test_rules_of_embedding_perturbation_are_checked_too(part):
    subspace = tp.AnchorSubspace(torch.randn(30, 6), 8)
    with pytest.raises(ValueError, match=f"{part}=.*Make NoDataclass a dataclass"):
        tp.GEP(subspace, **{part: NoDataclass()})
    training = training_of(clipping=tp.GEP(subspace, **{part: Ones()}))
    with pytest.raises(tp.Refused, match="Ones"):
        loop(training)
    assert len(training.ledger) == 0


def test_a_rule_that_does_not_clip_is_refused_before_anything_is_released():
    training = training_of(clipping=Ones())
    before = weights(training.model)
    with pytest.raises(tp.Refused, match="Ones"):
        loop(training)
    assert same_weights(training.model, before)
    assert len(training.ledger) == 0


def test_the_bound_of_a_rule_is_checked_on_every_step():
    training = training_of(clipping=LaterOnes(), num_steps=40)
    loop(training, steps=21)  # step 21 is not rehearsed
    with pytest.raises(tp.Refused, match="LaterOnes"):
        loop(training, lambda *batch: 1e5 * losses_of(*batch))
    assert len(training.ledger) == 21


def test_unfreezing_under_groups_that_share_one_bound_is_refused():
    model = network()
    model[0].requires_grad_(False)
    training = loop(training_of(model, clipping=tp.PerLayer(1.0)), steps=2)
    model[0].requires_grad_(True)
    with pytest.raises(tp.Refused, match=r"'0\.weight'"):
        loop(training)
    assert len(training.ledger) == 2


# torch.compile and padding


def compiled_model(model):
    return torch.compile(model, backend="aot_eager"), losses_of


def compiled_module(model):
    model[0] = torch.compile(model[0], backend="aot_eager")
    return model, losses_of


def compiled_in_place(model):
    model.compile(backend="aot_eager")
    return model, losses_of


def compiled_forward(model):
    model[0].forward = torch.compile(model[0].forward, backend="aot_eager")
    return model, losses_of


def compiled_loss(model):
    loss = torch.compile(lambda output, y: F.cross_entropy(output, y, reduction="none"), backend="aot_eager")
    return model, lambda model, x, y: loss(model(x), y)


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize(
    "compiled", [compiled_model, compiled_module, compiled_in_place, compiled_forward, compiled_loss]
)
def test_compiled_parts_train_as_they_do_uncompiled(compiled):
    torch._dynamo.reset()
    results = []
    for prepare in (lambda model: (model, losses_of), compiled):
        torch.manual_seed(3)
        model, losses = prepare(network())
        training = loop(training_of(model, test_seed=4), losses)
        results.append(weights(model))
        assert training.step_count == 6
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain)


class Texts(nn.Module):
    """Sums the words of a text; the table may be the head, too, or be looked up without padding as well."""

    def __init__(self, use):
        super().__init__()
        self.table, self.use = nn.Embedding(7, 4, padding_idx=0), use
        self.head = None if use == "head" else nn.Linear(4, 7)

    def forward(self, x):
        h = self.table(x).sum(1)
        if self.use == "another look-up":
            h = h + F.embedding(x, self.table.weight).sum(1)
        return F.linear(h, self.table.weight) if self.head is None else self.head(h)


@pytest.mark.parametrize("use", ["alone", "head", "another look-up"])
def test_the_row_of_padding_gets_no_noise_unless_it_is_trained(use):
    """In torch it stays 0, so that padding has no effect; tied to the head it has a gradient like other rows."""
    examples = TensorDataset(torch.randint(1, 7, (N, 5)), torch.randint(1, 7, (N,)))
    training = loop(training_of(Texts(use), dataset=examples))
    table = training.model.table.weight.detach()
    assert bool((table[0] == 0).all()) == (use == "alone")
    assert (table[1:] != 0).all()


class Quoting(Texts):
    """Reads the whole table for texts with the last word in them."""

    def forward(self, x):
        h, quotes = self.table(x).sum(1), (x == 6).any(1, keepdim=True)
        if quotes.any():
            h = torch.where(quotes, h + torch.softmax(h @ self.table.weight.T, 1) @ self.table.weight, h)
        return self.head(h)


@pytest.mark.parametrize("resumes", [False, True], ids=["new", "resumed"])
def test_a_row_of_padding_that_one_example_would_train_is_refused(resumes):
    """Its row of padding stayed 0 until the step with this example, and had noise from then on."""
    x = torch.randint(1, 6, (N, 5))
    x[7, 2] = 6
    examples = TensorDataset(x, torch.randint(1, 7, (N,)))
    training = training_of(Quoting("another use"), dataset=examples, num_steps=30)
    if resumes:  # after batches of which all examples had that word
        other = loop(training_of(Texts("head"), dataset=examples, num_steps=1))
        assert other.state_dict()["padded"] == {"table.weight": True}
        training.load_state_dict(training.state_dict() | {"padded": {"table.weight": True}})
    with pytest.raises(tp.Refused, match=r"the row of padding_idx of 'table.weight' gets a gradient in some batches"):
        loop(training)
    assert (training.step_count == 0) == resumes
    assert training.step_count == len(training.ledger)
    assert (training.model.table.weight[0] == 0).all()


# Half of the examples or more are not finite --------------------------------------------------------------------------


def data_with_nan(lost: int) -> TensorDataset:
    x = torch.randn(N, 6)
    x[:lost] = math.nan
    return TensorDataset(x, torch.randint(2, (N,)))


@pytest.mark.parametrize("size", [1, 2, 10])
def test_batches_without_a_finite_gradient_are_refused_before_a_release(size):
    model = network()
    training = training_of(model, dataset=data_with_nan(N), expected_batch_size=size, num_steps=40)
    before = weights(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(tp.Refused, match="none of the examples drawn last, up to step"):
            loop(training)
    assert training.step_count == len(training.ledger) < 8
    if size == 10:
        assert training.step_count == 0
        assert same_weights(model, before)


@pytest.mark.parametrize(
    "settings", [{}, {"performance": tp.Performance(microbatch_size=4)}, {"clipping": tp.PerLayer(1.0)}]
)
def test_half_of_a_batch_that_is_not_finite_is_warned_about_once(settings):
    training = training_of(dataset=data_with_nan(40), test_seed=1, **settings)
    with pytest.warns(UserWarning, match="have a gradient that is not finite") as warned:
        loop(training)
    assert len(warned) == 1
    assert training.step_count == 6


def test_a_few_examples_that_are_not_finite_are_left_out_without_a_warning():
    training = loop(training_of(dataset=data_with_nan(6), test_seed=1))
    assert training.num_non_finite > 0


def test_batches_that_lose_all_examples_later_are_not_refused():
    rows = FiniteRows()
    rows.check(7, 0, 10)
    with pytest.warns(UserWarning, match="half of the examples"):
        rows.check(8, 10, 10)
    rows.check(9, 10, 10)


# The second pass ------------------------------------------------------------------------------------------------------


def test_a_second_pass_over_a_finished_training_warns():
    training = loop(training_of())
    with pytest.warns(UserWarning, match=r"all 6 steps are made.*training.steps\(\)"):
        assert list(training) == []


def test_losses_with_one_column_are_told_to_squeeze():
    with pytest.raises(tp.Refused, match=r"Pass losses.squeeze\(1\); plain squeeze\(\)"):
        loop(training_of(), lambda model, x, y: losses_of(model, x, y)[:, None])


@pytest.mark.parametrize("settings", [{"noise_multiplier": 0}, {"noise_multiplier": None, "target_epsilon": 1e9}])
def test_too_little_noise_says_how_to_debug(settings):
    with pytest.raises(ValueError, match="To debug almost without noise, pass noise_multiplier=1e-6 with test_seed=0"):
        training_of(**settings)
    training = loop(training_of(noise_multiplier=1e-6, test_seed=0))
    assert "NOT PRIVATE" in str(training.spent())
