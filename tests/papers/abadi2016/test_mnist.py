# SPDX-License-Identifier: Apache-2.0
"""abadi-mnist: the paper's settings, and one ledger for components and training; on images made up here."""

import io
from dataclasses import replace

import pytest
import torch
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.data.dataset import Data
from torch_privacy.runs.rows import BASELINE, BASELINE_GAP, Context
from torch_privacy_papers.abadi2016 import mnist, unprotected
from torch_privacy_papers.abadi2016.mnist import (
    DEFAULTS,
    LEVELS,
    build_task,
    new_model,
    new_scheduler,
    rows,
)

SMALL = {"num_components": 8, "hidden_units": 16, "expected_batch_size": 20, "delta": 1e-4}


@pytest.fixture(autouse=True)
def made_up_images(monkeypatch):
    torch.set_default_dtype(torch.float32)
    part = TensorDataset(torch.rand(200, 1, 28, 28), torch.randint(10, (200,)))
    data = Data("MNIST", part, part, tuple(range(10)), "none", {"a": "b"})
    monkeypatch.setattr(mnist, "load_mnist", lambda folder: data)


def training_of(task, settings) -> tp.PrivateTraining:
    model = task.new_model()
    optimizer = task.new_optimizer(model)
    noise = {"noise_multiplier": settings.noise_multiplier, "delta": settings.delta}
    return tp.PrivateTraining(
        model, optimizer, task.train, expected_batch_size=20, num_steps=3, **noise, **task.private(model)
    )


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_epochs_are_those_that_the_papers_accountant_allows(level):
    """Integer orders up to 32, both layers counted as samples of their own, as the authors' code does."""

    def claimed(epochs: float) -> float:
        steps = privacy.SubsampledGaussian(float(level.noise), 0.01), 2 * round(100 * epochs)
        components = privacy.NoisyCovariance(float(level.pca_noise)), 1
        return privacy.moments_of([components, steps], 1e-5, orders=range(1, 33))

    assert claimed(level.epochs) <= level.epsilon < claimed(level.epochs + 0.1)


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_certified_epochs_reach_the_epsilon_and_do_not_exceed_it(level):
    step = privacy.SubsampledGaussian(level.noise / 2**0.5, 0.01)
    before = [(privacy.NoisyCovariance(float(level.pca_noise)), 1)]
    steps = privacy.Budget(level.epsilon, 1e-5).remaining(step, after=before)
    assert level.certified_epochs <= steps / 100 < level.certified_epochs + 0.1


def test_noise_of_each_layer_is_that_of_the_paper():
    """Standard deviation 4 sigma, as rows give it."""
    for row, level in zip(rows(quick=True), LEVELS, strict=True):
        settings = replace(DEFAULTS, **row.settings)
        rule = build_task(settings).private(torch.nn.Module())["clipping"].bind(["2.weight", "4.weight"])
        sensitivity = rule.sensitivity(privacy.NeighboringRelation.ADD_OR_REMOVE_ONE)
        assert settings.noise_multiplier * sensitivity == pytest.approx(4 * level.noise)


def test_learning_rate_falls_over_ten_epochs():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = new_scheduler(100, optimizer, 2000)
    rates = []
    for _ in range(1500):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert [rates[0], rates[500], rates[1000], rates[1499]] == pytest.approx([0.1, 0.076, 0.052, 0.052])


def test_weights_are_normal_and_cut_at_two_deviations():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model = new_model(torch.eye(60, 784), 1000, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["2.weight", "4.weight"]
    weights = model[2].weight.detach() * 60**0.5
    assert 1.99 < weights.abs().max() <= 2
    assert float(weights.std()) == pytest.approx(0.88, abs=0.01)  # of a normal law cut at two deviations


def test_components_and_training_share_one_epsilon():
    settings = replace(DEFAULTS, **SMALL)
    task = build_task(settings)
    training = training_of(task, settings)
    for x, y in training:
        training.step(task.losses(training.model(x), y))
    step = privacy.SubsampledGaussian(4 / 2**0.5, 0.1, privacy.NeighboringRelation.REPLACE_SPECIAL)
    releases = [(privacy.NoisyCovariance(7.0), 1), (step, 3)]
    assert training.ledger.events == releases


def test_resumed_run_keeps_the_components_that_were_released():
    settings = replace(DEFAULTS, **SMALL)
    task = build_task(settings)
    saved = io.BytesIO()
    torch.save(dict(task.released), saved)
    saved.seek(0)
    again = build_task(settings, torch.load(saved, weights_only=True))
    assert torch.equal(again.new_model()[1].weight, task.new_model()[1].weight)
    state = training_of(task, settings).state_dict()
    training_of(again, settings).load_state_dict(state)
    with pytest.raises(tp.Refused, match="prior_releases"):
        training_of(build_task(settings), settings).load_state_dict(state)


@pytest.mark.parametrize("name", ["num_components", "hidden_units"])
def test_sizes_are_checked(name):
    with pytest.raises(ValueError, match=f"{name}=0 must be an integer of at least 1"):
        build_task(replace(DEFAULTS, **{**SMALL, name: 0}))


def test_noise_falls_in_ten_parts_that_spend_the_target():
    settings = replace(DEFAULTS, **SMALL, epochs=10.0, target_epsilon=2.0, noise_multiplier=None, final_noise=0.5)
    task = build_task(settings)
    model = task.new_model()
    training = tp.PrivateTraining(
        model, task.new_optimizer(model), task.train, expected_batch_size=20, num_steps=100,
        target_epsilon=2.0, delta=settings.delta, **task.private(model),
    )  # fmt: skip
    noises = [training.settings.noise_at(step) for step in range(100)]
    assert noises == pytest.approx([noises[0] * (1 - 0.5 * (step // 10) / 9) for step in range(100)])
    steps = [(privacy.SubsampledGaussian(noise, 0.1), 1) for noise in noises]
    spent = privacy.compose([(privacy.NoisyCovariance(7.0), 1), *steps]).epsilon(settings.delta).high
    assert 1.9 < spent <= 2.0 * (1 + 1e-6)


def test_noiseless_components_are_the_leading_directions_and_nothing_else_is_noisy(monkeypatch):
    images = torch.rand(60, 5) * torch.tensor([5.0, 4.0, 3.0, 0.1, 0.1])
    found = unprotected.exact_components(images, 3).double()
    unit = torch.nn.functional.normalize(images.double(), dim=1)
    exact = torch.linalg.svd(unit, full_matrices=False).Vh[:3]
    torch.testing.assert_close((found @ exact.T).abs(), torch.eye(3).double(), atol=1e-5, rtol=0)
    monkeypatch.setattr(unprotected, "EPOCHS", (1, 2, 3))
    small = {name: SMALL[name] for name in ("num_components", "hidden_units", "expected_batch_size")}
    monkeypatch.setattr(mnist, "DEFAULTS", replace(DEFAULTS, **small))
    numbers = mnist.behind_exact_components(Context(False, 0, None))
    assert set(numbers) == {BASELINE, BASELINE_GAP, "gap after 1", "gap after 2"}
    assert all(-1 <= number <= 1 for number in numbers.values())
    assert numbers == mnist.behind_exact_components(Context(False, 0, None))


def test_components_of_a_sample_are_priced_as_such():
    settings = replace(DEFAULTS, **SMALL, pca_sampling_probability=0.25)
    (prior,) = build_task(settings).private(torch.nn.Module())["prior_releases"]
    assert prior.event == privacy.NoisyCovariance(7.0, 0.25)
