# SPDX-License-Identifier: Apache-2.0
"""Tests the privacy statement, the data sets that training takes, and the budget at which it stops."""

import copy
import gc
import json
import pickle
import re
import weakref
from dataclasses import replace
from html import escape

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, default_collate
from trainings import N, cross_entropy, data, network, parameters_of, private_training, train, training_of

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.privacy import ledger_file
from torch_privacy.sampling.batches import Batches
from torch_privacy.training.statement import NOT_PRIVATE


def test_statement_and_spent_say_what_was_released():
    training = training_of(delta=1e-3)
    train(training)
    statement = training.statement()
    assert statement["releases"] == [{"event": tp.privacy.event_to_dict(training.event), "count": 6}]
    assert statement["private"] is False
    assert statement["neighboring_relation"] == "replace_special"
    spent = training.spent()
    assert spent.epsilon == tp.privacy.compose([(training.event, 6)]).epsilon(1e-3)
    assert str(spent).startswith("NOT PRIVATE")
    assert not any(training.state_dict()[key] in str(statement) for key in ("noise_key", "sampler_key"))


@pytest.mark.parametrize("is_moved", [False, True])
def test_what_is_not_private_stays_so_as_a_prior_release(tmp_path, monkeypatch, is_moved):
    monkeypatch.setattr(ledger_file, "SECONDS_BETWEEN_SYNCS", -1.0)  # so that the ledger asks first, in every step

    def made(**settings):
        settings = {
            "expected_batch_size": 8,
            "num_steps": 3,
            "clipping": tp.Flat(0.5),
            "noise_multiplier": 1.0,
        } | settings
        model = network()
        return private_training(model, torch.optim.SGD(model.parameters(), lr=0.1), data(), delta=1e-3, **settings)

    training = made(run_folder=tmp_path)
    train(training, 2)
    if is_moved:
        with torch.no_grad():
            training.model[0].weight.add_(1.0)
        with pytest.warns(UserWarning, match="NOT PRIVATE"):
            train(training)
    ledger = training.ledger
    ledger.close()
    on_disk, in_state = privacy.Ledger.read(ledger.path), privacy.Ledger()
    in_state.load_state_dict(json.loads(json.dumps(on_disk.state_dict())))
    priors = [ledger, pickle.loads(pickle.dumps(ledger)), on_disk, in_state, made(prior_releases=ledger).ledger]
    for prior in priors:
        assert str(made(prior_releases=prior).spent()).startswith("NOT PRIVATE") == is_moved


def test_a_ledger_on_disk_says_why_it_is_not_private_and_keeps_quiet_after_the_end(tmp_path):
    def on_disk(folder):
        return privacy.Ledger.read(folder / "ledger.jsonl").warning

    def made(folder, dataset=None, **settings):
        model = network()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = {
            "expected_batch_size": 8,
            "num_steps": 2,
            "clipping": tp.Flat(0.5),
            "noise_multiplier": 1.0,
        } | settings
        dataset = data() if dataset is None else dataset
        return tp.PrivateTraining(model, sgd, dataset, delta=1e-3, run_folder=tmp_path / folder, **settings)

    def audited(dataset):
        training = made("audited", dataset)
        train(training)
        return training.model, training

    made("fixed", test_seed=1)
    assert on_disk(tmp_path / "fixed").startswith("NOT PRIVATE (test_seed")  # before the first release

    tp.audit(audited, data(), canaries=tp.GradientCanaries(8))
    assert on_disk(tmp_path / "audited") == ""  # its model is not for release, its releases cost what they cost

    def moved(dataset):
        training = made("moved", dataset)
        train(training, 1)
        with torch.no_grad():
            training.model[0].weight.add_(1.0)
        train(training)
        return training.model, training

    with pytest.warns(UserWarning, match="changed other than"):
        tp.audit(moved, data(), canaries=tp.GradientCanaries(8))
    assert "changed other than" in on_disk(tmp_path / "moved")

    again = made("again")
    train(again, 1)
    parts = again.model, again.optimizer, again
    states = [copy.deepcopy(part.state_dict()) for part in parts]
    train(again)
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    assert again.ledger.warning == on_disk(tmp_path / "again") == ""  # weights that are loaded are not moved

    ended = made("ended")
    train(ended)
    files = {path: path.read_bytes() for path in (tmp_path / "ended").iterdir()}
    with torch.no_grad():
        ended.model[0].weight.add_(1.0)  # such as public fine-tuning: no release depends on it
    ended.ledger.close()
    assert on_disk(tmp_path / "ended") == ""
    assert files == {path: path.read_bytes() for path in (tmp_path / "ended").iterdir()}  # the digests still fit


def test_a_ledger_does_not_keep_its_training():
    def made():
        training = training_of(delta=1e-3)
        train(training)
        return training.ledger, weakref.ref(training)

    ledger, training = made()
    gc.collect()
    assert training() is None
    assert {release.warning for release in ledger.releases} == {NOT_PRIVATE}  # it has a test_seed


def test_spent_and_statement_have_the_attacker_the_unit_and_what_is_public():
    training = training_of(delta=1e-3)
    train(training, 3)
    spent, statement, planned = training.spent(), training.statement(), tp.privacy.compose([(training.event, 6)])
    assert spent.mu == planned.mu()  # of all planned steps: the stop may depend on what was released
    assert spent.regret == planned.regret()
    assert spent.relation == "zero out one example"
    assert (spent.unit, list(spent.treated_as_public)) == (statement["unit"], statement["treated_as_public"])
    assert list(spent.not_covered) == statement["not_covered"]
    assert statement["attacker"]["mu"]["high"] == spent.mu.high
    for rate in statement["attacker"]["true_positive_rates"]:
        assert (rate["low"], rate["high"]) == spent.true_positive_rate(rate["false_positive_rate"])
    assert statement["releases_priced"] == [{"event": tp.privacy.event_to_dict(training.event), "count": 6}]
    shown = spent.in_full()
    for text in (str(spent), "zero out one example", *spent.treated_as_public, *spent.not_covered):
        assert text in shown
    training.declare_stop("a time limit")
    assert training.spent().mu == training.profile().mu()
    assert "releases_priced" not in training.statement()


def test_a_notebook_shows_a_training_and_what_it_has_spent_as_tables():
    settings = {"expected_batch_size": 8, "num_steps": 6, "clipping": tp.Flat(0.5), "noise_multiplier": 1.0}
    model = network()
    training = private_training(model, torch.optim.SGD(model.parameters(), lr=0.1), data(), delta=1e-3, **settings)
    train(training, 3)
    shown, spent = training._repr_html_(), training.spent()
    assert f'<td style="text-align:left">{escape(str(spent))}</td>' in shown
    assert "3 of 6" in shown
    assert f"noise multiplier: {training.settings.noise_multiplier:.6g}" in repr(training)
    table = spent._repr_html_()
    for text in (str(spent), spent.unit, *spent.not_covered):
        assert escape(text) in table
    assert "all planned steps" in table
    assert "<script>" not in replace(spent, text="<script>")._repr_html_()
    assert "NOT PRIVATE" in training_of(delta=1e-3)._repr_html_()


def noise_made(noise_multiplier):
    """Returns the statement of a step without any gradient, and the standard deviation of its noise."""
    training = training_of(num_steps=1, noise_multiplier=noise_multiplier)
    before = parameters_of(training)
    for x, _ in training:
        training.step(0 * training.model(x).sum(1))
    drawn = {"z": torch.zeros_like(before)}
    training._state.releases.noise.add_to(0, drawn, 1.0)
    divisor = training.settings.expected_batch_size / training.optimizer.param_groups[0]["lr"]
    moved = (before - parameters_of(training)).double() * divisor
    return training.statement(), float((moved @ drawn["z"].double()) / (drawn["z"].double() @ drawn["z"].double()))


def test_the_noise_covers_rounding_and_the_statement_says_by_what_factor():
    for noise_multiplier in (1.0, 3e5):
        statement, stddev = noise_made(noise_multiplier)
        factor = statement["noise_factor"]
        assert stddev == pytest.approx(noise_multiplier * statement["sensitivity"] * factor["made"], rel=1e-6)
        assert factor["clipping"] * factor["grid"] * factor["law"] <= factor["made"] * (1 + 1e-15)
        num_trained = len(parameters_of(training_of()))
        assert factor["grid"] >= 1 + noise_multiplier * 2**-32 * num_trained**0.5  # the unit, in every number
    assert statement["noise_factor"]["made"] > 1.0005


def test_private_run_says_so():
    model = network()
    training = tp.PrivateTraining(
        model,
        torch.optim.Adam(model.parameters()),
        data(),
        expected_batch_size=8,
        num_steps=3,
        clipping=tp.Flat(1.0),
        target_epsilon=2.0,
        delta=1e-3,
    )
    train(training)
    assert training.statement()["private"] is True
    assert 1.99 < training.spent().epsilon.high <= 2.0
    assert "zero out one example" in str(training.spent())
    assert "Poisson" in str(training.spent())


def test_two_runs_without_a_seed_differ_even_if_the_user_seeds_torch():
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        model = network()
        training = tp.PrivateTraining(
            model, torch.optim.SGD(model.parameters(), lr=1.0), data(), expected_batch_size=8, num_steps=1,
            clipping=tp.Flat(1.0), noise_multiplier=1.0,
        )  # fmt: skip
        train(training)
        results.append(parameters_of(training))
    assert not torch.equal(*results)


class Dictionaries(torch.utils.data.Dataset):
    def __len__(self):
        return N

    def __getitem__(self, i):
        x, y = data()[i]
        return {"x": x, "target": (y, i)}


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("num_workers", [0, pytest.param(2)])
def test_any_collatable_structure_and_workers(num_workers):
    training = training_of(
        dataset=Dictionaries(), examples={"num_workers": num_workers}, performance=tp.Performance(microbatch_size=5)
    )
    for batch in training:
        assert len(batch["x"]) <= 5
        training.step(F.cross_entropy(training.model(batch["x"]), batch["target"][0], reduction="none"))
    plain = training_of(performance=tp.Performance(microbatch_size=5))
    train(plain)
    assert torch.equal(parameters_of(training), parameters_of(plain))


def test_collate_fn_is_used():
    training = training_of(examples={"collate_fn": lambda items: default_collate([(x * 0, y) for x, y in items])})
    assert all(step == [0.0] * len(step) for step in train(training))


@pytest.mark.parametrize(
    "dataset",
    [
        data(),
        Subset(data(), [5, 3, 9, 9, 0]),
        Subset(Subset(data(), [5, 3, 9]), [2, 0]),
        Dictionaries(),
        [1.0, 2.0, 3.0],
    ],
    ids=["tensors", "subset", "subset of a subset", "dictionaries", "list"],
)
def test_batches_are_those_of_a_data_loader(dataset):
    import numpy as np

    numbers = [np.array([1, 0]), np.array([1])]
    ours = list(Batches(dataset, None, 0).plain(numbers))
    theirs = list(DataLoader(dataset, batch_sampler=[n.tolist() for n in numbers]))
    torch.testing.assert_close(ours, theirs)


def test_training_stops_by_itself_before_a_budget_is_exceeded():
    budget = tp.privacy.Budget(epsilon=3.0, delta=1e-3)
    training = training_of(num_steps=10_000, noise_multiplier=2.0, examples={"budget": budget})
    train(training)
    (event, made), *others = training.ledger.events
    assert not others
    assert 0 < made == training.step_count < 10_000
    assert training.spent(1e-3).epsilon.high <= 3.0 < tp.privacy.compose([(event, made + 1)]).epsilon(1e-3).high
    with pytest.warns(UserWarning, match="this loop gets no batch"):
        assert list(training) == []
    assert training.statement()["budget"] == {"epsilon": 3.0, "delta": 1e-3}


def test_budget_that_allows_no_step_is_refused():
    with pytest.raises(tp.Refused, match="does not allow one step"):
        training_of(noise_multiplier=0.3, examples={"budget": tp.privacy.Budget(epsilon=0.1, delta=1e-6)})


class Normalizing(nn.Module):
    """Subtracts a mean that somebody computed from data; its table and its temporary tensor are of no release, too."""

    def __init__(self):
        super().__init__()
        self.inner = network()
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("temporary", torch.ones(4), persistent=False)
        self.table = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        return self.inner((x - self.mean) * self.table)


def test_what_the_file_has_beside_releases_is_named():
    (said,) = (text for text in training_of(Normalizing()).statement()["not_covered"] if "model's file" in text)
    assert said.endswith(": buffers 'mean'; parameters that were not trained 'table'")
    assert not [text for text in training_of().statement()["not_covered"] if "model's file" in text]


def test_a_refusal_says_how_far_a_loss_moved_and_no_loss():
    seen = []

    def coupled(*batch):
        losses = cross_entropy(*batch)
        losses = losses * (1 + losses.detach().mean())
        seen.extend(losses.tolist())
        return losses

    with pytest.raises(tp.Refused, match=r"changed by [0-9.e+]+ % when") as refused:
        train(training_of(num_steps=50), losses=coupled)
    assert len(seen) > 2
    numbers = [float(text) for text in re.findall(r"[0-9]+\.[0-9]{3,}", str(refused.value).split("Every loss")[0])]
    assert not [number for number in numbers for loss in seen if abs(number - loss) < 1e-3 * abs(loss)]
