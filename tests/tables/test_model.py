# SPDX-License-Identifier: Apache-2.0
"""The perceptron, its losses, the defaults, and a private training on a table from file to score."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

import torch_privacy as tp
from torch_privacy.tables import Column, Encoder, Schema, defaults, learn, losses, new_model, read_table, split

NUMBERS = (Column("a", "number", (0, 1)), Column("b", "number", (0, 1)))
CATEGORIES = (Column("c", "category", categories=("x", "y")), Column("d", "category", categories=("z",)))
CLASSES = Column("t", "category", categories=("u", "v", "w"))


@pytest.mark.parametrize("features", [NUMBERS, CATEGORIES, NUMBERS + CATEGORIES], ids=["numbers", "categories", "both"])
@pytest.mark.parametrize("hidden_units", [(), (5,), (6, 4)])
@pytest.mark.parametrize("target", [CLASSES, Column("t", "number", (0, 1))], ids=["classes", "number"])
def test_rows_of_the_model_are_independent_and_exact(features, hidden_units, target):
    task = "classification" if target is CLASSES else "regression"
    schema = Schema((*features, target), "t", task)
    frame = pd.DataFrame({column.name: ["0.5", "", "x", "0.1", "z"] for column in schema.columns})
    frame["t"] = ["u", "v", "", "w", "1"] if task == "classification" else ["0", "1", "", "0.5", "0.2"]
    encoded = Encoder(schema).encode(frame)
    model = new_model(schema, hidden_units).double()
    torch.nn.init.normal_(next(reversed(list(model.parameters()))))
    inputs = encoded.inputs.double()
    outputs = model(inputs)
    assert outputs.shape == ((5, 3) if task == "classification" else (5,))
    torch.testing.assert_close(outputs, model((encoded.numbers.double(), encoded.categories)))
    with tp.record(model) as tape:
        found = losses(model(inputs), encoded.targets)
    norms = tape.jacobian(found, verify=True).squared_norms()
    assert found[2] == 0
    for i in range(5):
        grads = torch.autograd.grad(
            losses(model(inputs[i : i + 1]), encoded.targets[i : i + 1]).sum(), list(model.parameters())
        )
        expected = sum(grad.square().sum() for grad in grads)
        assert norms[i] == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)


def test_losses_are_those_of_torch_and_zero_without_a_target():
    logits, classes = torch.randn(4, 3), torch.tensor([0, -100, 2, 1])
    found = losses(logits, classes)
    torch.testing.assert_close(found[[0, 2, 3]], -logits.log_softmax(1)[[0, 2, 3], [0, 2, 1]])
    outputs = torch.tensor([1.0, 2.0], requires_grad=True)
    found = losses(outputs, torch.tensor([0.0, math.nan]))
    assert found.tolist() == [0.5, 0.0]
    assert torch.autograd.grad(found.sum(), outputs)[0].tolist() == [1.0, 0.0]
    assert found[1] == losses(logits, classes)[1] == 0


@pytest.mark.parametrize("n", [2, 3, 100, 40_000, 10**7])
@pytest.mark.parametrize("epsilon", [0.1, 2.0, 50.0])
def test_defaults_fit_any_table(n, epsilon):
    found = defaults(n, epsilon)
    assert 1 <= found.expected_batch_size <= n / 2
    assert found.epochs == pytest.approx(found.num_steps * found.expected_batch_size / n)
    assert 0 < found.delta <= 0.1 / n
    assert 0 < found.learning_share < 1
    assert defaults(n, epsilon, 1e-9).delta == 1e-9


@pytest.mark.parametrize(("n", "epsilon", "delta"), [(1, 1.0, None), (10, 0.0, None), (10, 1.0, 2.0)])
def test_wrong_numbers_are_refused(n, epsilon, delta):
    with pytest.raises(ValueError, match="defaults: "):
        defaults(n, epsilon, delta)


def test_weights_of_the_perceptron_decay_and_nothing_else_does():
    """The bias of a rare class is large, and right; a rare category has few gradients to hold its weights up."""
    choice = defaults(4000, 3.0, classes=2)
    columns = Column("x", "number", (0, 1)), Column("c", "category", categories=("a", "b"))
    model = new_model(Schema((*columns, Column("y", "category", categories=("p", "q"))), "y", "classification"))
    for p in model.parameters():
        p.data.uniform_(0.5, 1.0)
        p.grad = torch.zeros_like(p)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    choice.new_optimizer(model).step()
    factors = {name: (p / before[name]).unique().tolist() for name, p in model.named_parameters()}
    decayed = pytest.approx(1 - choice.learning_rate * choice.weight_decay, rel=1e-6)
    expected = {name: [decayed] if name in ("mlp.0.weight", "mlp.2.weight") else [1.0] for name in factors}
    assert {name: found[:1] for name, found in factors.items()} == expected
    assert not defaults(4000, 3.0).weight_decay  # of a number
    assert not defaults(4000, 3.0, classes=10).weight_decay
    assert defaults(400, 1.0, classes=2).weight_decay < choice.weight_decay  # little is learnt


@pytest.mark.thorough
def test_a_training_from_file_to_score(tmp_path):
    rng = np.random.default_rng(0)
    n = 3000
    age, city = rng.uniform(20, 60, n), rng.integers(0, 3, n)
    frame = pd.DataFrame({"age": age.round(1), "city": np.array(["Rome", "Oslo", "Bern"])[city]})
    frame.loc[rng.random(n) < 0.2, "age"] = np.nan
    frame["y"] = np.where(age + 10 * city > 45, "yes", "no")
    frame.loc[:50, "y"] = ""
    frame.to_csv(tmp_path / "t.csv", index=False)
    table, schema = read_table(tmp_path / "t.csv"), Schema.template(tmp_path / "t.csv", "y")
    train, test = split(n)
    choice = defaults(len(train), 4.0)
    share = choice.learning_share
    learnt = learn(table.iloc[train], schema, epsilon=4.0 * share, delta=choice.delta * share)
    encoder = Encoder(learnt.schema)
    data, held_out = encoder.encode(table.iloc[train]), encoder.encode(table.iloc[test])
    changed = table.copy()
    changed.iloc[test] = "?"
    again = encoder.encode(changed.iloc[train])
    assert torch.equal(again.inputs, data.inputs)
    assert torch.equal(again.targets, data.targets)
    torch.manual_seed(0)
    model = new_model(learnt.schema, (16,)).float()
    training = tp.PrivateTraining(
        model,
        choice.new_optimizer(model),
        data.dataset(),
        expected_batch_size=choice.expected_batch_size,
        num_steps=60,
        clipping=tp.Flat(choice.clip_norm),
        noise_multiplier=1.5,
        delta=choice.delta,
        prior_releases=learnt.releases,
    )
    for inputs, targets in training:
        training.step(losses(model(inputs), targets))
    found = encoder.predictions(model(held_out.inputs))
    known = held_out.has_target.numpy()
    truth = table["y"].iloc[test].to_numpy()
    assert (found["prediction"].to_numpy() == truth)[known].mean() > 0.7


@pytest.mark.thorough
@pytest.mark.parametrize("bounds", [(2.3,), (-0.7, 0.7)], ids=["a rare class", "three classes"])
def test_probabilities_of_the_defaults_are_better_than_the_base_rate(bounds):
    """With automatic clipping, which lifts the gradients of rows that are right already, they were far worse."""
    rng, n = np.random.default_rng(0), 3000
    x = rng.normal(size=(n, 3))
    y = np.digitize(x[:, 0] + rng.normal(size=n), bounds).astype(str)
    names = ("x0", "x1", "x2")
    columns = [*(Column(name, "number", (-3, 3)) for name in names), Column("y", "category", categories=tuple(set(y)))]
    schema = Schema(tuple(columns), "y", "classification")
    data = Encoder(schema).encode(pd.DataFrame({**dict(zip(names, x.T, strict=True)), "y": y}))
    train, test = slice(2000), slice(2000, None)
    choice = defaults(2000, 2.0)
    torch.manual_seed(0)
    model = new_model(schema, choice.hidden_units).float()
    optimizer = choice.new_optimizer(model)
    average = tp.MovingAverage(model, optimizer, choice.average)
    training = tp.PrivateTraining(
        model,
        optimizer,
        tp.Examples(
            torch.utils.data.TensorDataset(data.inputs[train], data.targets[train]),
            assume_independent="rows are encoded one by one",
        ),
        expected_batch_size=choice.expected_batch_size,
        num_steps=100,
        clipping=tp.Flat(choice.clip_norm),
        target_epsilon=2.0,
        delta=choice.delta,
    )
    for inputs, targets in training:
        training.step(losses(model(inputs), targets))
    log_loss = float(losses(average.model(data.inputs[test]), data.targets[test]).mean())
    shares = data.targets[test].bincount() / len(data.targets[test])
    assert log_loss < -float((shares * shares.log()).sum())
