# SPDX-License-Identifier: Apache-2.0
"""The engine's epsilon, histories and checkpoints: all releases are counted, once, and targets hold."""

from __future__ import annotations

import copy
import runpy
import warnings
from pathlib import Path

import numpy as np
import opacus
import pytest
import torch
from migrating import DELTA, assert_same_weights, epsilon_of, examples, made_private, network, sgd, trained
from opacus.accountants import PRVAccountant
from torch import nn
from torch.utils.data import DataLoader

import torch_privacy as tp
from torch_privacy import Refused, privacy
from torch_privacy.opacus import PrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore:delta=")
ROOT = Path(__file__).parents[2]
Q = 1 / 6


def priced(*pairs: tuple[float, float, int], delta: float = DELTA) -> float:
    """Returns the certified epsilon of a history."""
    return privacy.compose([(privacy.SubsampledGaussian(s, q), n) for s, q, n in pairs]).epsilon(delta).high


def targeted(engine: PrivacyEngine, epochs: int, target: float = 3.0, data=None, **more):
    model = network()
    return engine.make_private_with_epsilon(
        module=model,
        optimizer=sgd(model),
        data_loader=DataLoader(examples() if data is None else data, batch_size=10),
        target_epsilon=target,
        target_delta=DELTA,
        epochs=epochs,
        max_grad_norm=1.0,
        **more,
    )


def test_the_epsilon_of_an_engine_is_that_of_the_steps_made() -> None:
    engine, model, optimizer, loader = made_private()
    assert epsilon_of(engine) == 0.0
    trained(model, optimizer, loader, epochs=2)
    assert epsilon_of(engine) == priced((1.0, Q, 12))
    assert len(engine.accountant) == 1
    assert engine.accountant.mechanism() == "prv"
    with pytest.raises(ValueError, match=r"delta=0.02 must lie in"):
        engine.get_epsilon(0.02)


@pytest.mark.filterwarnings("default:delta=")
def test_a_warning_names_the_line_that_makes_the_training() -> None:
    """It named a line of dataclasses, or of the ``__init__`` that they generate, "<string>:23"."""
    model, data = network(), examples()
    given = {"module": model, "optimizer": sgd(model), "data_loader": DataLoader(data, batch_size=10)}
    with pytest.warns(UserWarning, match="is close to 1/n") as caught:
        PrivacyEngine().make_private_with_epsilon(
            **given, target_epsilon=3.0, target_delta=0.5 / len(data), epochs=1, max_grad_norm=1.0
        )
    assert {warning.filename for warning in caught} == {__file__}


def test_a_fixed_seed_is_said_with_every_epsilon() -> None:
    engine, model, optimizer, loader = made_private()
    trained(model, optimizer, loader)
    with pytest.warns(UserWarning, match=r"PrivacyEngine.get_epsilon: NOT PRIVATE"):
        assert engine.get_epsilon(DELTA) == np.inf
    with pytest.warns(UserWarning, match=r"PrivacyEngine.get_epsilon: NOT PRIVATE"):
        epsilon, alpha = engine.accountant.get_privacy_spent(DELTA)
    assert epsilon == np.inf
    assert np.isnan(alpha)


def test_without_epochs_the_statement_covers_more_than_the_steps_made() -> None:
    engine, model, optimizer, loader = made_private(delta=DELTA)
    trained(model, optimizer, loader)
    spent = engine.training.spent()
    assert spent.planned.high > 10 * spent.epsilon.high
    assert engine.training.statement()["stop"] == {"independent_of_data": False, "reason": None}
    engine.training.declare_stop("three epochs were planned")
    assert engine.training.statement()["epsilon"]["high"] == epsilon_of(engine)


def test_with_epochs_the_plan_is_kept() -> None:
    engine, model, optimizer, loader = made_private(epochs=2, delta=DELTA)
    assert engine.training.spent().planned.high == priced((1.0, Q, 12))
    trained(model, optimizer, loader, epochs=2)
    with pytest.raises(Refused, match="all 12 steps are made that the privacy budget was planned for"):
        trained(model, optimizer, loader)
    assert engine.training.step_count == 12


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("epochs", [1, 3])
def test_a_target_epsilon_is_met_and_never_exceeded(epochs: int) -> None:
    engine = PrivacyEngine()
    model, optimizer, loader = targeted(engine, epochs)
    trained(model, optimizer, loader, epochs=epochs)
    assert 0.98 * 3.0 < engine.get_epsilon(DELTA) <= 3.0
    with pytest.raises(Refused, match="Give make_private more epochs"):
        trained(model, optimizer, loader)
    assert engine.get_epsilon(DELTA) <= 3.0
    exact = privacy.calibrate(3.0, DELTA, sampling_probability=Q, num_steps=6 * epochs)
    assert optimizer.noise_multiplier == pytest.approx(exact, rel=1e-6)


@pytest.mark.thorough
def test_a_second_training_counts_the_first_and_its_target_covers_both() -> None:
    engine, model, optimizer, loader = made_private(noise_multiplier=2.0, test_seed=None)
    trained(model, optimizer, loader)
    other, optimizer, loader = targeted(engine, 2, data=engine.dataset)
    trained(other, optimizer, loader, epochs=2)
    assert engine.accountant.history[0] == (2.0, Q, 6)
    assert 0.98 * 3.0 < engine.get_epsilon(DELTA) <= 3.0
    assert engine.training.spent().epsilon.high == pytest.approx(engine.get_epsilon(DELTA), rel=1e-9)


def test_trainings_that_take_turns_are_all_counted() -> None:
    engine, a, optimizer_a, loader_a = made_private(test_seed=None)
    _, b, optimizer_b, loader_b = made_private(noise_multiplier=2.0, engine=engine, data=engine.dataset, test_seed=None)
    for _ in range(2):
        trained(a, optimizer_a, loader_a)
        trained(b, optimizer_b, loader_b)
    assert engine.get_epsilon(DELTA) == pytest.approx(priced((1.0, Q, 12), (2.0, Q, 12)), rel=1e-9)


def test_a_returned_loader_may_be_made_private_again() -> None:  # as Opacus' mnist.py does with several runs
    engine, model, optimizer, loader = made_private()
    _, again, optimizer, loader = PrivacyEngine(), *PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0, test_seed=4
    )  # fmt: skip
    trained(again, optimizer, loader)
    assert len(loader) == 6
    with pytest.warns(UserWarning, match="this data set is not the one of the earlier make_private"):
        made_private(engine=engine)


def test_earlier_releases_and_steps_of_other_code_are_counted() -> None:
    prior = privacy.releases_from_opacus([(2.0, 0.5, 3)])
    engine, model, optimizer, loader = made_private(prior_releases=prior, test_seed=None)
    trained(model, optimizer, loader)
    engine.accountant.step(noise_multiplier=3.0, sample_rate=0.25)
    assert engine.accountant.history == [(2.0, 0.5, 3), (3.0, 0.25, 1), (1.0, Q, 6)]
    assert engine.get_epsilon(DELTA) == pytest.approx(priced((2.0, 0.5, 3), (1.0, Q, 6), (3.0, 0.25, 1)), rel=1e-9)
    engine, *_ = made_private(prior_releases=[privacy.Release(privacy.Gaussian(5.0), "a")])
    with pytest.raises(Refused, match="no place in a history of Opacus"):
        _ = engine.accountant.history


def test_weights_moved_by_other_code_are_said() -> None:
    engine, model, optimizer, loader = made_private(test_seed=None)
    trained(model, optimizer, loader)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with pytest.warns(UserWarning, match=r"NOT PRIVATE .the trained weights were changed"):
        assert engine.get_epsilon(DELTA) == np.inf


# Histories


@pytest.mark.thorough
def test_histories_cost_what_opacus_says_without_its_error() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        history = [
            (float(random.uniform(1.0, 3.0)), float(random.uniform(0.002, 0.05)), int(random.integers(10, 200)))
            for _ in range(random.integers(1, 3))
        ]
        accountant = PRVAccountant()
        accountant.history = history
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = accountant.get_epsilon(1e-5)
        releases = privacy.releases_from_opacus(accountant)
        ours = privacy.compose([(release.event, 1) for release in releases]).epsilon(1e-5)
        assert ours.high <= theirs <= ours.high + 0.0205, history  # eps_error=0.01 on either side
        assert sum(n for *_, n in history) == len(releases)


def test_histories_are_found_in_what_holds_them() -> None:
    history = [(1.1, 0.01, 3), (1.2, 0.01, 1)]
    accountant = PRVAccountant()
    accountant.history = history
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = opacus.PrivacyEngine()
    engine.accountant = accountant
    holders = [history, accountant, accountant.state_dict(), engine]
    holders.append({"privacy_accountant_state_dict": accountant.state_dict(), "module_state_dict": {}})
    for holder in holders:
        releases = privacy.releases_from_opacus(holder)
        assert [r.event for r in releases] == [privacy.SubsampledGaussian(1.1, 0.01)] * 3 + [
            privacy.SubsampledGaussian(1.2, 0.01)
        ]
        assert len({r.fingerprint for r in releases}) == 4
    assert privacy.releases_from_opacus([]) == []


@pytest.mark.parametrize(
    ("history", "message"),
    [
        (None, "NoneType is no history of Opacus"),
        ([(1.0, 0.1)], "is no history"),
        ([(0.0, 0.1, 5)], "no noise and are not private"),
        ([(1.0, 1.5, 5)], "sampling_probability=1.5"),
        ([(-1.0, 0.5, 5)], "noise_multiplier=-1.0"),
        ([(1.0, 0.5, 2.5)], "num_steps=2.5"),
    ],
)
def test_what_is_no_history_is_refused(history, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        privacy.releases_from_opacus(history)


def test_the_reference_values_of_the_page() -> None:
    page = (ROOT / "docs/from-opacus.md").read_text()
    measured = runpy.run_path(str(ROOT / "benchmarks/opacus_epsilon.py"))
    for setting, printed in measured["REFERENCE"].items():
        computed = measured["row"](*setting)
        assert all(f"{value:.4f}" in page for value in printed.values()), setting
        assert {name: round(value, 4) for name, value in computed.items()} == printed
        assert computed["gdp"] < computed["ours"] < computed["prv"] < computed["rdp"]


# Checkpoints


def saved(engine: PrivacyEngine, model: nn.Module, optimizer, path) -> None:
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer, checkpoint_dict={"epoch": 1})


def test_a_checkpoint_goes_on_with_its_history_and_without_keys(tmp_path) -> None:
    engine, model, optimizer, loader = made_private(test_seed=None)
    trained(model, optimizer, loader)
    saved(engine, model, optimizer, tmp_path / "c.pt")
    assert b"noise_key" not in (tmp_path / "c.pt").read_bytes()

    again, model_2, optimizer_2, loader_2 = made_private(test_seed=None)
    left = again.load_checkpoint(path=tmp_path / "c.pt", module=model_2, optimizer=optimizer_2)
    assert left["epoch"] == 1
    assert_same_weights(model, model_2)
    momentum = optimizer_2.state_dict()["state"][0]["momentum_buffer"]
    assert torch.equal(momentum, optimizer.state_dict()["state"][0]["momentum_buffer"])
    trained(model_2, optimizer_2, loader_2)
    assert again.accountant.history == [(1.0, Q, 12)]
    assert again.training.statement()["private"]
    assert again.training.spent(DELTA).epsilon.high == pytest.approx(again.get_epsilon(DELTA), rel=1e-9)


def test_an_earlier_checkpoint_of_the_same_engine_takes_nothing_back(tmp_path) -> None:
    engine, model, optimizer, loader = made_private(test_seed=None)
    trained(model, optimizer, loader)
    best = [p.detach().clone() for p in model.parameters()]
    saved(engine, model, optimizer, tmp_path / "best.pt")
    trained(model, optimizer, loader)
    engine.load_checkpoint(path=tmp_path / "best.pt", module=model, optimizer=optimizer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), best, strict=True))
    assert engine.accountant.history == [(1.0, Q, 12)]
    trained(model, optimizer, loader)
    assert engine.accountant.history == [(1.0, Q, 18)]
    assert engine.training.statement()["private"]


def test_a_target_holds_over_a_checkpoint(tmp_path) -> None:
    engine = PrivacyEngine()
    model, optimizer, loader = targeted(engine, epochs=3)
    trained(model, optimizer, loader)
    saved(engine, model, optimizer, tmp_path / "c.pt")
    again = PrivacyEngine()
    model, optimizer, loader = targeted(again, epochs=3)
    again.load_checkpoint(path=tmp_path / "c.pt", module=model, optimizer=optimizer)
    trained(model, optimizer, loader, epochs=2)
    assert [steps for *_, steps in again.accountant.history] == [18]
    assert 0.98 * 3.0 < again.get_epsilon(DELTA) <= 3.0
    with pytest.raises(Refused, match="Give make_private more epochs"):
        trained(model, optimizer, loader)
    saved(again, model, optimizer, tmp_path / "end.pt")
    third = PrivacyEngine()
    model, optimizer, loader = targeted(third, epochs=3)
    with pytest.raises(Refused, match=r"all 18 steps planned for target_epsilon=3.0 are made"):
        third.load_checkpoint(path=tmp_path / "end.pt", module=model, optimizer=optimizer)


def test_the_budget_of_the_data_stays_over_a_checkpoint(tmp_path) -> None:
    budget = tp.Budget.open(tmp_path / "people.budget", epsilon=6, delta=DELTA)
    engine = PrivacyEngine()
    model, optimizer, loader = targeted(engine, epochs=3, budget=budget, run_folder=tmp_path / "first")
    trained(model, optimizer, loader)
    saved(engine, model, optimizer, tmp_path / "c.pt")
    again = PrivacyEngine()
    model, optimizer, loader = targeted(again, epochs=3, budget=budget, run_folder=tmp_path / "second")
    again.load_checkpoint(path=tmp_path / "c.pt", module=model, optimizer=optimizer)
    trained(model, optimizer, loader, epochs=2)
    assert again.training.settings.budget == budget
    assert [sum(count for _, count in run.releases) for run in budget.state.runs] == [18, 18]


def test_a_checkpoint_of_opacus_loads_and_counts(tmp_path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, model = opacus.PrivacyEngine(), network()
        wrapped, optimizer, loader = engine.make_private(
            module=model,
            optimizer=sgd(model),
            data_loader=DataLoader(examples(), 10),
            noise_multiplier=1.5,
            max_grad_norm=1.0,
        )
        trained(wrapped, optimizer, loader)
        engine.save_checkpoint(path=tmp_path / "opacus.pt", module=wrapped, optimizer=optimizer)
    ours, model_2, optimizer_2, loader_2 = made_private(test_seed=None)
    ours.load_checkpoint(path=tmp_path / "opacus.pt", module=model_2, optimizer=optimizer_2)
    assert_same_weights(model, model_2)
    trained(model_2, optimizer_2, loader_2)
    assert ours.accountant.history == [(1.5, Q, 6), (1.0, Q, 6)]
    assert ours.get_epsilon(DELTA) == pytest.approx(priced((1.5, Q, 6), (1.0, Q, 6)), rel=1e-9)
    saved(ours, model_2, optimizer_2, tmp_path / "ours.pt")  # and Opacus reads ours
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = opacus.PrivacyEngine()
        reader.load_checkpoint(path=tmp_path / "ours.pt", module=network(), optimizer=sgd(network()))
        assert reader.accountant.history == ours.accountant.history


def test_releases_of_other_code_are_counted_beside_those_of_a_checkpoint(tmp_path) -> None:
    """Their names were numbers, which those in the checkpoint have, too."""
    first, second = PrivacyEngine(), PrivacyEngine()
    for _ in range(3):
        first.accountant.step(noise_multiplier=1.0, sample_rate=1.0)
        second.accountant.step(noise_multiplier=2.0, sample_rate=1.0)
    for engine, noise in ((first, 5.0), (second, 6.0)):
        engine.accountant.load_state_dict({"history": [(noise, 0.5, 4)], "mechanism": "prv"})
    model = network()
    first.save_checkpoint(path=tmp_path / "c.pt", module=model)
    for _ in range(2):  # the second time changes nothing
        second.load_checkpoint(path=tmp_path / "c.pt", module=model)
        history = [(2.0, 1.0, 3), (6.0, 0.5, 4), (1.0, 1.0, 3), (5.0, 0.5, 4)]
        assert second.accountant.history == history
    assert second.get_epsilon(DELTA) == pytest.approx(priced(*history), rel=1e-9)


def test_a_checkpoint_keeps_releases_that_opacus_does_not_know(tmp_path) -> None:
    prior = [privacy.Release(privacy.Gaussian(5.0), "components")]
    engine, model, optimizer, loader = made_private(prior_releases=prior, test_seed=None)
    trained(model, optimizer, loader)
    saved(engine, model, optimizer, tmp_path / "c.pt")
    again, model, optimizer, loader = made_private(test_seed=None)
    again.load_checkpoint(path=tmp_path / "c.pt", module=model, optimizer=optimizer)
    assert again.get_epsilon(DELTA) == engine.get_epsilon(DELTA)
    with pytest.raises(ValueError, match="history"):  # Opacus would count less
        PRVAccountant().load_state_dict(engine.accountant.state_dict())


def test_prior_releases_are_counted_once_and_those_with_one_fingerprint_all() -> None:
    prior = [privacy.Release(privacy.Gaussian(noise), "classes") for noise in (20.0, 30.0, 30.0)]
    engine, *_ = made_private(prior_releases=prior)
    made_private(engine=engine, data=engine.dataset, prior_releases=prior)
    assert engine.accountant.events() == [(privacy.Gaussian(noise), 1) for noise in (20.0, 30.0, 30.0)]


def test_releases_without_a_fingerprint_are_all_counted() -> None:
    engine, *_ = made_private(prior_releases=[privacy.Release(privacy.Gaussian(20.0), "")])
    made_private(engine=engine, data=engine.dataset, prior_releases=[privacy.Release(privacy.Gaussian(20.0), "")])
    assert engine.accountant.events() == [(privacy.Gaussian(20.0), 1)] * 2


def test_a_checkpoint_of_a_run_that_is_not_private_says_so_where_it_is_loaded(tmp_path) -> None:
    engine, model, optimizer, loader = made_private(test_seed=4)
    trained(model, optimizer, loader)
    saved(engine, model, optimizer, tmp_path / "c.pt")
    again, model, optimizer, loader = made_private(test_seed=None)
    again.load_checkpoint(path=tmp_path / "c.pt", module=model, optimizer=optimizer)
    with pytest.warns(UserWarning, match="NOT PRIVATE"):
        assert again.get_epsilon(DELTA) == float("inf")


def test_checkpoints_that_do_not_fit_are_refused(tmp_path) -> None:
    engine, model, optimizer, loader = made_private(test_seed=None)
    trained(model, optimizer, loader)
    saved(engine, model, optimizer, tmp_path / "c.pt")
    with pytest.raises(Refused, match=r"it has no 'weight', 'bias'; it has besides '0.weight'"):
        engine.load_checkpoint(path=tmp_path / "c.pt", module=nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="the file has an optimizer_state_dict, and optimizer was not given"):
        engine.load_checkpoint(path=tmp_path / "c.pt", module=model)
    torch.save({"module_state_dict": model.state_dict()}, tmp_path / "weights.pt")
    with pytest.raises(Refused, match="no privacy_accountant_state_dict"):
        engine.load_checkpoint(path=tmp_path / "weights.pt", module=model)
    torch.save({"weights": 1}, tmp_path / "other.pt")
    with pytest.raises(Refused, match="no module_state_dict"):
        engine.load_checkpoint(path=tmp_path / "other.pt", module=model)
    with pytest.raises(Refused, match="has no history"):
        engine.accountant.load_state_dict({})
    with pytest.raises(ValueError, match="call make_private first"):
        _ = PrivacyEngine().training
    assert tp.opacus  # pyright: ignore[reportAttributeAccessIssue]


def test_the_model_is_its_own_inner_module(tmp_path):
    _, model, *_ = made_private()
    assert model._module is model
    assert list(model.state_dict()) == list(network().state_dict())
    assert [*model.children()] == [model[0], model[1], model[2]]
    copied = copy.deepcopy(model)
    assert copied._module is copied


@pytest.mark.filterwarnings("ignore:Optimal order")
def test_accountants_alone_are_certified():
    """Opacus' own are the references: its PRV accountant has error bounds of its own."""
    from opacus.accountants.utils import get_noise_multiplier as of_opacus

    from torch_privacy.opacus.accountants import RDPAccountant, create_accountant
    from torch_privacy.opacus.accountants.utils import get_noise_multiplier

    for accountant in (RDPAccountant(), create_accountant("prv")):
        for _ in range(10):
            accountant.step(noise_multiplier=1.0, sample_rate=0.1)
        assert accountant.get_epsilon(delta=1e-5) == priced((1.0, 0.1, 10), delta=1e-5)
    target = {"target_epsilon": 2.0, "target_delta": 1e-5, "sample_rate": 0.01}
    ours = get_noise_multiplier(**target, epochs=5, accountant="rdp", epsilon_tolerance=0.1)
    assert ours == get_noise_multiplier(**target, steps=500)
    assert privacy.compose([(privacy.SubsampledGaussian(ours, 0.01), 500)]).epsilon(1e-5).high <= 2.0
    assert ours == pytest.approx(of_opacus(**target, steps=500, accountant="prv", epsilon_tolerance=1e-3), rel=0.02)
    with pytest.raises(ValueError, match="exactly one"):
        get_noise_multiplier(**target)
    with pytest.raises(ImportError, match="leave it out"):
        from torch_privacy.opacus import GradSampleModule  # noqa: F401
