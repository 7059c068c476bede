# SPDX-License-Identifier: Apache-2.0
"""The experiments on gradient embedding perturbation: what each method releases, and what its anchors may know."""

from dataclasses import replace

import pytest
import torch
from parts import own_batches
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.data.dataset import Data
from torch_privacy.experiments import opening, runner
from torch_privacy.experiments.fitting import new_training
from torch_privacy_papers.yu2021 import ablations as gep_ablations
from torch_privacy_papers.yu2021 import benefit as gep_benefit
from torch_privacy_papers.yu2021 import cifar10 as gep_cifar10
from torch_privacy_papers.yu2021 import common as gep
from torch_privacy_papers.yu2021 import figures as gep_figures
from torch_privacy_papers.yu2021 import linear as gep_linear
from torch_privacy_papers.yu2021 import mnist as gep_mnist
from torch_privacy_papers.yu2021 import network as gep_network

SMALL = {"expected_batch_size": 20, "delta": 1e-4, "num_anchors": 30, "epochs": 0.3}
EVENTS = {"GP": privacy.SubsampledGaussian, "B-GEP": privacy.SubsampledGaussian, "GEP": privacy.SubsampledBlocks}


@pytest.fixture(autouse=True)
def float32():
    torch.set_default_dtype(torch.float32)


def digits(count=200):
    images = torch.rand(count, 1, 28, 28)
    images[:, 0, 0, 0] = torch.arange(count) / count  # no two alike
    part = TensorDataset(images, torch.randint(10, (count,)))
    return Data("MNIST", part, part, tuple(range(10)), "none", {"a": "b"})


def made_up(has_labels=False):
    images = torch.rand(40, 1, 28, 28)
    examples = TensorDataset(images, torch.arange(40) % 10) if has_labels else images
    found = digits(), gep.Public(examples, {"c": "d"}, has_labels)
    return replace(gep_mnist.COMPARISON, load=lambda settings: found[0], load_public=lambda settings: found[1])


@pytest.mark.parametrize("method", EVENTS)
def test_every_method_is_one_event_within_its_epsilon(method):
    experiment = made_up()
    for epsilon in gep.EPSILONS:
        (row,) = (row for row in experiment.rows(quick=True) if row.name == f"{method}, epsilon {epsilon:g}")
        settings = replace(gep_mnist.DEFAULTS, **{**row.settings, **SMALL, "baseline": False})
        training = new_training(settings, experiment.build_task(settings), None)
        assert type(training.event) is EVENTS[method]
        spent = privacy.compose([(training.event, training.settings.num_steps)]).epsilon(settings.delta)
        assert 0.99 * epsilon < spent.high <= epsilon


def test_equal_split_is_the_papers_event():
    settings = replace(gep_mnist.DEFAULTS, **SMALL, embedding_share=0.5)
    assert isinstance(new_training(settings, made_up().build_task(settings), None).event, privacy.SubsampledGEP)


@pytest.mark.thorough
def test_noise_that_is_given_takes_the_place_of_the_target(monkeypatch, tmp_path):
    monkeypatch.setattr(opening, "load_trainable", lambda name: made_up().study())
    run = runner.Run.start(tmp_path / "r", "made-up", **SMALL, noise_multiplier=3.0)
    assert run.settings.target_epsilon is None
    assert run.training.settings.noise_multiplier == 3.0
    run.close()


@pytest.mark.parametrize("has_labels", [False, True])
def test_anchors_have_the_labels_of_the_data_only_if_these_are_meant(has_labels):
    settings = replace(gep_mnist.DEFAULTS, **SMALL)
    training = new_training(settings, made_up(has_labels).build_task(settings), None)
    assert isinstance(training.settings.clipping, tp.GEP)
    taken = training.settings.clipping.subspace.labels((None, torch.arange(5)), torch.zeros(5, 10), torch.Generator())
    assert torch.equal(taken, torch.arange(5)) == has_labels


def test_learning_rate_falls_to_zero_and_training_goes_through():
    settings = replace(gep_mnist.DEFAULTS, **SMALL)
    task = made_up().build_task(settings)
    training = new_training(settings, task, None)
    rates = []
    for x, y in own_batches(training, lambda model, x, y: task.losses(model(x), y)):
        rates.append(training.optimizer.param_groups[0]["lr"])
        training.step(task.losses(training.model(x), y))
    assert rates == pytest.approx([settings.learning_rate * (1 - step / 3) for step in range(3)])


def test_rate_is_a_tenth_from_half_time_on_and_weights_decay():
    settings = replace(gep_cifar10.DEFAULTS, learning_rate=0.5, weight_decay=0.1, momentum=0.0)
    task = made_up().build_task(replace(settings, num_basis=0))
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = task.new_optimizer(model)
    assert task.new_scheduler is not None
    scheduler, rates = task.new_scheduler(optimizer, 5), []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.5, 0.5, 0.5, 0.05, 0.05])
    assert model.weight.item() == pytest.approx(0.95**3 * 0.995**2)
    constant = made_up().build_task(replace(settings, num_basis=0, optimizer="Adam", decay="none"))
    assert isinstance(constant.new_optimizer(model), torch.optim.Adam)
    assert constant.new_scheduler is None


def test_photographs_are_trained_with_the_papers_settings():
    settings = vars(gep_cifar10.DEFAULTS)
    expected = {"momentum": 0.9, "weight_decay": 1e-4, "embedding_share": 0.5, "clip_norm": 10.0, "learning_rate": 0.1}
    assert {name: settings[name] for name in expected} == expected
    assert any("CIFAR-100" in note for note in gep_cifar10.CIFAR10.notes)


def test_rows_as_printed_have_the_papers_settings_and_follow_the_others():
    *_, gp, alone, both, many = gep_mnist.COMPARISON.rows(False)
    printed = {"epochs": 50, "clip_norm": 10.0, "learning_rate": 0.1, "weight_decay": 1e-4, "target_epsilon": 2.0}
    expected = (gp, 0, 2.0, 0.947), (alone, 500, 0.0, 0.931), (both, 500, 2.0, 0.963)
    for row, k, bound, accuracy in expected:
        assert row.name.endswith("as printed")
        assert {name: row.settings[name] for name in printed} == printed
        assert (row.settings["num_basis"], row.settings["residual_clip_norm"], row.paper["score"]) == (
            k,
            bound,
            accuracy,
        )
    assert many.name == "B-GEP, epsilon 2, k = 500, m = 2000"
    settings = replace(gep_mnist.DEFAULTS, **{**both.settings, **SMALL, "num_basis": 20, "epochs": 0.3})
    training = new_training(settings, made_up().build_task(settings), None)
    assert training.settings.clipping.keeps_residual_noise
    assert isinstance(training.event, privacy.SubsampledGEP)
    *_, alone, both, gp, fast_alone, fast = gep_cifar10.ON_CIFAR10.rows(False)
    assert [row.name for row in (alone, both)] == ["B-GEP, epsilon 2, k = m = 500", "GEP, epsilon 2, k = m = 500"]
    assert [row.name for row in (gp, fast)] == ["GP, epsilon 2, 8 epochs", "GEP, epsilon 2, 8 epochs"]
    assert {**alone.settings, "epochs": 8} == fast_alone.settings
    assert {**both.settings, "epochs": 8} == fast.settings


def test_settings_are_tuned_on_training_examples_that_are_held_out():
    settings = replace(gep_mnist.DEFAULTS, **SMALL, held_out=50, num_train=100)
    task, data = made_up().build_task(settings), digits(200)
    assert torch.equal(task.train.tensors[0][:, 0, 0, 0], data.train.tensors[0][:100, 0, 0, 0])  # type: ignore[attr-defined]
    assert torch.equal(task.test.tensors[0][:, 0, 0, 0], data.train.tensors[0][150:, 0, 0, 0])  # type: ignore[attr-defined]
    whole = made_up().build_task(replace(settings, num_train=None)).train.tensors[0]  # type: ignore[attr-defined]
    assert torch.equal(whole[:, 0, 0, 0], data.train.tensors[0][:150, 0, 0, 0])
    with pytest.raises(ValueError, match="num_train=151"):
        made_up().build_task(replace(settings, num_train=151))


@pytest.mark.parametrize("module", [gep_mnist, gep_benefit, gep_network])
def test_every_method_is_tuned_with_as_many_settings(module):
    rows = [row for row in module.TUNING.rows(False) if row.name.startswith(("GP", "B-GEP", "GEP"))]
    counts = {method: sum(row.name.startswith(f"{method},") for row in rows) for method in EVENTS}
    assert len(set(counts.values())) == 1
    assert all(row.settings["held_out"] == gep.HELD_OUT for row in rows)


def test_differences_from_plain_clipping_have_their_standard_errors():
    def results(**scores):
        names = {"plain": "GP, epsilon 2", "gep": "GEP, epsilon 2", "alone": "GEP, k = 50"}
        return {
            "rows": [
                {"row": names[key], "runs": [{"numbers": {"score": score}} for score in several]}
                for key, several in scores.items()
            ]
        }

    several = list(gep.findings(results(plain=[0.50, 0.52, 0.54], gep=[0.51, 0.55, 0.56], alone=[0.5] * 3)))
    assert several == ["GEP, epsilon 2: +2.0 points from GP, standard error 0.6 (paired over 3 seeds)."]
    once, verdict = gep.findings(results(plain=[0.5], gep=[0.1]))
    assert once == "GEP, epsilon 2: -40.0 points from GP, standard error 0.6 (one seed: that of the test images alone)."
    assert verdict == "GEP does not beat GP here: no gain exceeds 2 standard errors."
    assert not list(gep.findings(results(plain=[0.5], gep=[None])))


def test_width_sets_the_size_of_the_network_and_of_its_groups(monkeypatch):
    part = TensorDataset(torch.rand(60, 3, 32, 32), torch.arange(60) % 10)
    data = Data("CIFAR-10", part, part, (), "", {})
    settings = replace(gep_benefit.DEFAULTS, num_train=40, num_basis=0, width=2)
    public = gep.Public(torch.rand(4, 3, 32, 32), {})
    comparison = replace(gep_benefit.COMPARISON, load=lambda settings: data, load_public=lambda settings: public)
    monkeypatch.setattr(gep_benefit, "COMPARISON", comparison)
    model = gep_benefit.build_task(settings).new_model()
    assert model(torch.rand(3, 3, 32, 32)).shape == (3, 10)
    named = dict(model.named_parameters())
    assert {name.split(".")[0] for name in named} == set(comparison.groups)
    assert sum(p.numel() for p in named.values()) == 56 + 76 + 296 + 1290


def test_features_are_learned_from_the_public_half_alone(monkeypatch):
    images, labels = torch.rand(60, 3, 32, 32), torch.arange(60) % 10
    seen = []

    def trained_on(public, public_labels, epochs):
        seen.append((public, public_labels, epochs))
        return torch.nn.Flatten()

    data = Data("CIFAR-10", TensorDataset(images, labels), TensorDataset(images[:5], labels[:5]), (), "", {})
    monkeypatch.setattr(gep_network, "load_cifar10", lambda folder: data)
    monkeypatch.setattr(gep_network, "trained_on", trained_on)
    monkeypatch.setattr(gep_network, "NUM_AUXILIARY", 7)
    found, public = gep_network.load_features("made up", 20, 3)
    ((learned, learned_labels, epochs),) = seen
    assert torch.equal(learned, images[40:])
    assert torch.equal(learned_labels, labels[40:])
    assert epochs == 3
    assert len(found.train.tensors[0]) == 40
    torch.testing.assert_close(found.train.tensors[0], torch.nn.functional.normalize(images[:40].flatten(1)))
    torch.testing.assert_close(public.examples, torch.nn.functional.normalize(images[40:47].flatten(1)))


def test_network_of_the_features_learns_and_is_a_function_of_the_public_images():
    labels = torch.arange(64) % 2
    images = torch.rand(64, 3, 8, 8) * 0.1 + labels[:, None, None, None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gep_network, "NUM_FEATURES", 256)
        networks = [gep_network.trained_on(images, labels, 3) for _ in range(2)]
    outputs = [gep_network.features(network, images) for network in networks]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
    torch.testing.assert_close(outputs[0].norm(dim=1), torch.ones(64))
    before = gep_network.features(gep_network.seeded(gep_network.new_network, 0).eval(), images)
    assert not torch.equal(outputs[0], before)


def test_anchors_beyond_two_thousand_are_other_photographs(monkeypatch):
    monkeypatch.setattr(gep_ablations, "HELD_OUT", 3)
    others = Data(
        "CIFAR-10", TensorDataset(torch.rand(5, 3, 32, 32), torch.zeros(5)), TensorDataset(), (), "", {"b": "2"}
    )
    monkeypatch.setattr(gep_ablations, "load_cifar10", lambda folder: others)
    photographs = gep.Public(torch.rand(4, 1, 28, 28), {"a": "1"})
    monkeypatch.setattr(gep_mnist, "load_public", lambda settings: photographs)
    found = gep_ablations.load_public(replace(gep_ablations.DEFAULTS, auxiliary="more photographs"))
    assert torch.equal(found.examples[:4], photographs.examples)
    assert found.examples[4:].shape == (3, 1, 28, 28)
    assert found.files == {"a": "1", "b": "2"}


def test_anchors_are_not_in_the_test_set(monkeypatch):
    data = digits(2500)
    monkeypatch.setattr(gep_ablations, "load_mnist", lambda folder: data)
    settings = replace(gep_ablations.DEFAULTS, auxiliary="digits")
    images, _ = gep_ablations.load_public(settings).examples.tensors  # type: ignore[union-attr]
    tested = gep_ablations.load(settings).test
    assert len(images) + len(tested) == 2500
    assert not torch.isin(images[:, 0, 0, 0], tested.tensors[0][:, 0, 0, 0]).any()
    with pytest.raises(ValueError, match="auxiliary='cats'"):
        gep_ablations.load_public(replace(settings, auxiliary="cats"))


@pytest.mark.thorough
def test_house_numbers_train_as_small_photographs_do(monkeypatch):
    """SVHN is not at hand: its place is taken by images made up here."""
    asked, part = [], TensorDataset(torch.rand(300, 3, 32, 32), torch.randint(10, (300,)))
    data = Data("SVHN", part, part, tuple(range(10)), "none", {"a": "b"})
    public = gep.Public(torch.rand(70, 3, 32, 32), {"c": "d"})
    monkeypatch.setattr(gep_cifar10, "_svhn", lambda folder, extra: asked.append(extra) or data)
    experiment = replace(gep_cifar10.ON_SVHN, load_public=lambda settings: public)
    for quick in (True, False):
        (row,) = (row for row in experiment.rows(quick) if row.name == "GEP, epsilon 8")
        assert row.paper["score"] == 0.951
        settings = replace(
            gep_cifar10.SVHN_DEFAULTS, **{**row.settings, "epochs": 0.1, "expected_batch_size": 10, "num_anchors": 60}
        )
        task = experiment.build_task(replace(settings, num_basis=20, num_test_examples=7))
        training = new_training(replace(settings, num_basis=20), task, None)
        assert (training.settings.delta, len(task.test), asked[-1]) == (1e-6, 7, not quick)
    for x, y in own_batches(training, lambda model, x, y: task.losses(model(x), y)):
        assert training.step(task.losses(training.model(x), y))
    assert training.step_count == 3


def test_features_are_of_one_image_alone_and_as_many_as_in_the_paper():
    public, images = torch.rand(20, 3, 32, 32), torch.rand(4, 3, 32, 32)
    features = gep_linear.new_features(public)
    found = features(images)
    assert found.shape == (4, 4096)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(4))
    torch.testing.assert_close(features(images[2:3])[0], found[2])
    assert sum(p.numel() for p in gep_linear.new_model().parameters()) == 40_960


def test_watched_network_is_deeper_with_more_blocks():
    def size(depth):
        return sum(p.numel() for p in gep_figures.new_model(gep_figures.DEPTHS[depth], 0).parameters())

    assert size(20) == 268_346 - 6 * 65  # four classes instead of ten
    assert 6 < size(110) / size(20) < 6.5
