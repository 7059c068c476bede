# SPDX-License-Identifier: Apache-2.0
"""Runs that draw from the budget of their data: refused before a row is read, never counted twice, settled."""

import copy
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from json_schema import violations
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset
from trainings import train

import torch_privacy as tp
from torch_privacy import cli, privacy, tables
from torch_privacy.runs.report.words import budget_in_words
from torch_privacy.sklearn import PrivateScaler

N, DELTA = 200, 1e-4


class Recorded(Dataset):
    """Counts the items that are fetched."""

    def __init__(self, n=N, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.x, self.fetched = torch.randn(n, 4, generator=generator), 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.fetched += 1
        return self.x[index], index % 2


@pytest.fixture
def budget(tmp_path):
    return tp.Budget.open(tmp_path / "people.budget", epsilon=2, delta=DELTA)


@pytest.fixture
def data():
    return Recorded()


def begun(folder, budget, dataset, noise=40.0, **settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    given = {"expected_batch_size": 20, "num_steps": 4, "clipping": tp.Flat(1.0), "delta": DELTA} | settings
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    examples = dataset if isinstance(dataset, tp.Examples) else tp.Examples(dataset)
    examples = replace(examples, budget=budget)
    return tp.PrivateTraining(model, optimizer, examples, noise_multiplier=noise, run_folder=folder, **given)


def run(training, steps=None):
    made = 0
    for x, y in training:
        made += training.step(F.cross_entropy(training.model(x), y, reduction="none"))
        if made == steps:
            break
    return training


def test_training_that_does_not_fit_is_refused_before_it_reads_a_row(tmp_path, budget, data):
    with pytest.raises(tp.Refused, match=r"does not fit into .* Nothing was read or released"):
        begun(tmp_path / "run", budget, data, noise=0.3)
    assert data.fetched == 0
    assert not budget.state.runs
    assert not budget.state.data


def test_training_reserves_all_steps_and_settles_at_its_end(tmp_path, budget, data):
    training = begun(tmp_path / "run", budget, data)
    (drawn,) = budget.state.runs
    assert (drawn.status, drawn.reserved) == ("reserved", [(training.event, 4)])
    assert drawn.ledger == str(tmp_path / "run" / "ledger.jsonl")
    run(training)
    (drawn,) = budget.state.runs
    assert (drawn.status, drawn.settled, drawn.share) == ("settled", training.ledger.events, None)
    assert budget.spent().high == training.spent().epsilon.high
    statement = training.statement()
    assert not violations(privacy.statement_schema(), statement)
    assert statement["budget"] == {"epsilon": 2, "delta": DELTA}
    assert statement["data_budget"]["epsilon_drawn"] == budget.spent().high
    assert statement["data_budget"]["num_unsettled"] == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert budget_in_words(statement["data_budget"]) in page
    assert str(tmp_path) not in page


@pytest.mark.parametrize("ends", [True, False])
def test_a_run_that_is_not_private_is_named_in_the_budget(tmp_path, budget, data, capsys, ends):
    training = run(begun(tmp_path / "run", budget, data), steps=2)
    assert "num_not_private" not in budget.state.as_json()
    with torch.no_grad():
        training.model.weight.add_(1.0)
    with pytest.warns(UserWarning, match="NOT PRIVATE"):
        train(training, steps=None if ends else 3)
    if not ends:  # such as a process that is killed
        training.ledger.close()
        budget.settle(budget.state.runs[0].run)
    (drawn,) = budget.state.runs
    assert drawn.warning == training.statement()["warning"]
    assert budget.state.as_json()["num_not_private"] == 1
    later = run(begun(tmp_path / "later", budget, data))
    statement = later.statement()
    assert not violations(privacy.statement_schema(), statement)
    assert statement["private"]
    assert "1 of them said NOT PRIVATE" in budget_in_words(statement["data_budget"])
    for command in ("status", "list"):
        assert cli.run(["budget", command, str(budget.path)]) == 0
        assert "NOT PRIVATE" in capsys.readouterr().out


@pytest.mark.parametrize("test_seed", [None, 1])
def test_components_and_scales_under_a_fixed_key_are_named_in_the_budget(budget, test_seed):
    rows = np.random.default_rng(0).normal(size=(N, 3)).clip(-1, 1)
    of_scaler = tp.Budget.open(f"{budget.path}.of_scaler", epsilon=1000, delta=DELTA)
    tp.PrivatePCA(1, noise_multiplier=50.0, delta=DELTA, budget=budget, test_seed=test_seed).fit(rows)
    PrivateScaler(noise_multiplier=0.1, delta=DELTA, refits="separate", budget=of_scaler, test_seed=test_seed).fit(rows)
    assert [bool(drawn.warning) for drawn in [*budget.state.runs, *of_scaler.state.runs]] == [test_seed is not None] * 2


@pytest.mark.thorough
def test_resumed_training_does_not_reserve_again(tmp_path, budget, data):
    training = run(begun(tmp_path / "run", budget, data), steps=2)
    state, model, optimizer = (
        copy.deepcopy(part.state_dict()) for part in (training, training.model, training.optimizer)
    )
    training.ledger.close()
    assert budget.state.runs[0].status == "begun"
    again = begun(tmp_path / "run", budget, data)
    again.model.load_state_dict(model)
    again.optimizer.load_state_dict(optimizer)
    again.load_state_dict(state)
    run(again)
    (drawn,) = budget.state.runs
    assert drawn.settled == [(again.event, 4)]
    assert again.step_count == 4


def test_stop_gives_back_the_rest_if_it_is_declared_and_keeps_it_otherwise(tmp_path, budget, data):
    training = run(begun(tmp_path / "run", budget, data), steps=2)
    assert budget.state.runs[0].releases == [(training.event, 4)]
    training.declare_stop("the machine is needed")
    assert budget.state.runs[0].settled == [(training.event, 2)]
    assert budget.state.runs[0].reason == "the machine is needed"
    with pytest.raises(tp.Refused, match="is settled"):
        run(training)
    assert len(training.ledger) == 2


def test_training_releases_nothing_after_a_stop_declared_within_its_loop(tmp_path, budget, data):
    training = begun(tmp_path / "run", budget, data)

    def go_on():
        for x, y in training:
            if training.step(F.cross_entropy(training.model(x), y, reduction="none")):
                training.declare_stop("the machine is needed")

    with pytest.raises(tp.Refused, match="the stop was declared"):
        go_on()
    assert len(training.ledger) == 1


def test_training_that_its_budget_no_longer_has_is_refused_at_the_end_and_keeps_its_model(tmp_path, budget, data):
    training = begun(tmp_path / "run", budget, data)
    before = budget.path.read_bytes().splitlines(keepends=True)[0]

    def go_on():
        for x, y in training:
            budget.path.write_bytes(before)  # an older copy
            training.step(F.cross_entropy(training.model(x), y, reduction="none"))

    with pytest.raises(tp.Refused, match=r"has no run '\w+'"):
        go_on()
    with pytest.raises(tp.Refused, match=r"has no run '\w+'"):
        training.statement()
    assert (tmp_path / "run/model.safetensors").exists()


def test_lost_steps_are_paid_by_what_is_reserved(budget):
    event, other = privacy.Gaussian(20.0), privacy.Gaussian(21.0)
    reserved = budget.reserve([(event, 4), (other, 1)], "a run")
    assert [reserved.remaining(event, after=[(event, made)]) for made in range(6)] == [4, 3, 2, 1, 0, 0]
    assert reserved.remaining(event, most=3) == 3
    assert reserved.remaining(event, after=[(other, 2)]) == 0
    assert reserved.allows([(other, 1), (event, 4)])
    assert not reserved.allows([(event, 5)])


def test_training_without_run_folder_or_begun_without_the_budget_is_refused(tmp_path, budget, data):
    with pytest.raises(tp.Refused, match="so the training needs run_folder="):
        begun(None, budget, data)
    run(begun(tmp_path / "run", None, data), steps=1).ledger.close()
    with pytest.raises(tp.Refused, match="was begun without a budget of the data"):
        begun(tmp_path / "run", budget, data)
    assert not budget.state.runs


def test_training_begun_with_the_budget_does_not_go_on_without_it(tmp_path, budget, data):
    training = run(begun(tmp_path / "run", budget, data), steps=2)
    training.declare_stop("the machine is needed")
    training.ledger.close()
    with pytest.raises(tp.Refused, match=r"draws from a budget of the data, as \w+, and budget= is missing"):
        begun(tmp_path / "run", None, data)
    assert len(privacy.Ledger.read(tmp_path / "run/ledger.jsonl")) == 2


def test_other_data_are_refused_and_another_form_needs_binding(tmp_path, budget, data):
    begun(tmp_path / "1", budget, data)
    assert budget.key_path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(tp.Refused, match=r"the data are not those that .* is bound to: of 200 items"):
        begun(tmp_path / "2", budget, Recorded(seed=1))
    with pytest.raises(tp.Refused, match=r"is bound to 200 items, and the data have grown: they have 201"):
        begun(tmp_path / "3", budget, Recorded(N + 1))
    with pytest.raises(tp.Refused, match="the data are not those"):
        tp.bind_data(budget, Recorded(seed=1))
    other_form = TensorDataset(torch.zeros(N, 4), torch.zeros(N, dtype=torch.long))
    with pytest.raises(tp.Refused, match="the data are not those"):
        begun(tmp_path / "4", budget, other_form)
    begun(tmp_path / "5", tp.bind_data(budget, data), other_form)
    assert len(budget.state.runs) == 2
    budget.key_path.unlink()
    with pytest.raises(tp.Refused, match=r"its key .* is missing"):
        tp.bind_data(budget, data)


def test_data_that_cannot_be_bound_are_refused(budget):
    with pytest.raises(tp.Refused, match="is not below 1/n for these 10000 data"):
        tp.bind_data(budget, np.zeros((10_000, 1)))
    with pytest.raises(tp.Refused, match="they have no fingerprint"):
        tp.bind_data(budget, [object()])
    assert not budget.state.data


@pytest.mark.thorough
def test_components_draw_once_and_are_not_drawn_again_with_the_training(tmp_path, budget):
    rows = np.random.default_rng(0).normal(size=(N, 4))

    class Unread:
        """Has a size, and refuses to be read."""

        def __len__(self):
            return N

        def __array__(self, *_, **__):
            raise AssertionError("read")

    with pytest.raises(tp.Refused, match="Nothing was read or released"):
        tp.PrivatePCA(2, noise_multiplier=0.3, budget=budget).fit(Unread())
    bound = tp.bind_data(budget, rows)
    pca = tp.PrivatePCA(2, noise_multiplier=30.0, budget=bound).fit(rows)
    (drawn,) = budget.state.runs
    assert (drawn.what, drawn.settled) == ("principal components", [(pca.event_, 1)])
    features = TensorDataset(torch.tensor(rows, dtype=torch.get_default_dtype()), torch.zeros(N, dtype=torch.long))
    training = begun(tmp_path / "run", bound, features, prior_releases=[pca.release_])
    assert budget.state.runs[1].reserved == [(training.event, 4)]
    run(training)
    assert budget.state.runs[1].settled == [(training.event, 4)]
    other = privacy.Release(privacy.NoisyCovariance(30.0), "of a budget before")
    begun(tmp_path / "2", bound, features, prior_releases=[other])
    assert budget.state.runs[2].reserved == [(other.event, 1), (training.event, 4)]


@pytest.mark.thorough
def test_audit_draws_from_the_budget_of_the_examples_without_canaries(tmp_path, budget, data):
    tp.bind_data(budget, data)
    tp.audit(lambda dataset: run(begun(tmp_path / "run", budget, dataset)), data, tp.GradientCanaries(8))
    (drawn,) = budget.state.runs
    assert drawn.what == f"audit in {tmp_path / 'run'}"
    assert drawn.status == "settled"


def test_owners_have_a_budget_of_their_own_unit(tmp_path, budget, data):
    examples = tp.Examples(data, owners=np.arange(N) // 2, per_owner=2, owner_name="customer")
    with pytest.raises(tp.Refused, match=r"protects one customer, and .* is a budget for one example"):
        begun(tmp_path / "1", budget, examples)
    other = tp.Budget.open(tmp_path / "customers.budget", epsilon=2, delta=DELTA, unit="customer")
    begun(tmp_path / "2", other, examples)
    assert "num_examples" not in other.state.data  # it is private
    begun(tmp_path / "3", other, examples)


@pytest.mark.thorough
def test_learning_of_a_schema_draws_from_the_budget(budget):
    frame = pd.DataFrame(
        {"age": [str(20 + i % 50) for i in range(N)], "paid": [["yes", "no"][i % 2] for i in range(N)]}
    )
    frame.to_csv(file := budget.path.with_name("people.csv"), index=False)
    schema = tables.Schema.template(file, "paid")
    with pytest.raises(tp.Refused, match="Nothing was read or released"):
        tables.learn(frame, schema, epsilon=5.0, delta=DELTA, budget=budget)
    assert not budget.state.data
    try:
        learnt = tables.learn(frame, schema, epsilon=1.5, delta=DELTA, budget=budget).releases
    except tables.TableError as error:
        learnt = error.releases
    (drawn,) = budget.state.runs
    assert drawn.status == "settled"
    assert drawn.fingerprints == tuple(release.fingerprint for release in learnt)
    assert budget.spent().high <= 1.5
    assert budget.unknown(learnt) == []
