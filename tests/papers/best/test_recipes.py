# SPDX-License-Identifier: Apache-2.0
"""The recipes of today, on images made up here: what the network sees, and that every network trains privately."""

import gzip
import struct
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from torch_privacy.cli import run as command
from torch_privacy.data import DataError, PublicImages
from torch_privacy.data.dataset import Data
from torch_privacy.experiments.fitting import losses_and_scores, new_average, new_training
from torch_privacy.runs.folder import RunFolder
from torch_privacy_papers.best import cifar10 as best_cifar10
from torch_privacy_papers.best import common as best
from torch_privacy_papers.best import mnist as best_mnist
from torch_privacy_papers.models.scattering import scattering
from torch_privacy_papers.models.wide_resnet import WideResNet
from torch_privacy_papers.reproduction import Reproduction

SMALL = {"expected_batch_size": 4, "epochs": 0.2, "microbatch_size": 4, "delta": 1e-3}


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    best.with_inputs.cache_clear()


def made_up(channels, size):
    part = TensorDataset(torch.rand(40, channels, size, size), torch.randint(10, (40,)))
    data = Data("made up", part, part, tuple(range(10)), "none", {"a": "b"})
    return lambda folder: data


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("module", "shape", "recipe"),
    [
        *((best_mnist, (1, 28), recipe) for recipe in best_mnist.RECIPES.recipes),
        *((best_cifar10, (3, 32), recipe) for recipe in best_cifar10.RECIPES.recipes),
    ],
)
def test_every_recipe_trains_privately(module, shape, recipe):
    recipes = {**module.RECIPES.recipes}
    if recipe.startswith("WRN"):
        recipes[recipe] = replace(recipes[recipe], new_model=partial(WideResNet, 10, 1))  # seconds instead of minutes
    if recipes[recipe].public:
        public = PublicImages("photographs", torch.rand(60, *shape[:1], *shape[1:] * 2), "", {})
        recipes[recipe] = replace(recipes[recipe], public=lambda folder: public)
    study = replace(module.RECIPES, load=made_up(*shape), recipes=recipes).study(recipe)
    settings = study.settings(**{**study.rows(False)[0].settings, **SMALL, "views": 2})
    task = study.task(settings)
    training = new_training(settings, task, None)
    average = new_average(task, training.model, training.optimizer)
    for batch in training:
        losses, scores = losses_and_scores(task, training.model, batch, task.views)
        assert losses.shape == (len(losses), 2)
        assert scores.shape == (2 * len(losses),)
        training.step(losses)
    assert training.step_count == training.settings.num_steps == 2
    assert average is not None
    assert training.spent().epsilon.high <= 1
    assert "the choice of the settings" in task.not_covered


def test_features_are_normalized_scattering_coefficients():
    load = made_up(1, 28)
    data = best.with_inputs(load, best.scattered, None, 7)
    assert [len(data.train), len(data.test)] == [7, 7]
    coefficients = scattering(load(None).train.tensors[0][:7]).view(7, best.GROUPS, -1)
    deviation = (coefficients.var(2, keepdim=True, correction=0) + 1e-5).sqrt()
    expected = (coefficients - coefficients.mean(2, keepdim=True)) / deviation
    torch.testing.assert_close(data.train.tensors[0].view(7, best.GROUPS, -1), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(best.with_inputs(load, None, None, None).train.tensors[0], load(None).train.tensors[0])


def test_made_up_images_have_the_spectrum_of_photographs():
    images = best.made_up_images(200, 32)
    assert torch.equal(images, best.made_up_images(200, 32))
    window = torch.hann_window(32)
    power = torch.fft.fft2((images - images.mean((2, 3), keepdim=True)) * window * window[:, None]).abs().square()
    power = power.mean((0, 1))
    assert float(power[0, 4] / power[0, 8]) == pytest.approx(4, rel=0.15)  # 1 / frequency²
    assert float(power[4, 0] / power[0, 4]) == pytest.approx(1, rel=0.15)


def test_whitening_decorrelates_what_it_was_made_for(monkeypatch):
    monkeypatch.setattr(best, "PART", 150)
    best._of_noise.cache_clear()
    images = best.made_up_images(150, 28)
    before, after = (
        torch.cov(features(images).transpose(0, 1).flatten(1)) for features in (best.scattered, best.whitened)
    )
    shares = [cov.diagonal().sum() ** 2 / cov.square().sum() for cov in (before, after)]  # at most 81: all equal
    assert shares[0] < 35 < 65 < shares[1] <= 81
    best._of_noise.cache_clear()


@pytest.mark.thorough
def test_whitened_features_are_mixed_channels_of_the_same_length():
    images = torch.rand(3, 2, 28, 28)  # two colors
    seen = best.scattered(images).view(3, 2, 81, 49)
    matrix = best._of_noise()
    torch.testing.assert_close(matrix, matrix.T)
    expected = torch.stack([torch.stack([matrix @ color for color in image]) for image in seen]).flatten(1)
    expected *= (2 * 81 * 49) ** 0.5 / expected.norm(dim=1, keepdim=True)
    torch.testing.assert_close(best.whitened(images).flatten(1), expected, atol=1e-4, rtol=1e-4)


def test_features_are_decorrelated_by_public_images(monkeypatch):
    monkeypatch.setattr(best, "PART", 4)
    images, public = torch.rand(6, 3, 16, 16), torch.rand(9, 3, 16, 16) ** 2
    known, seen = (scattering(part).double().permute(0, 2, 3, 1).flatten(0, 2) for part in (public, images))
    mean, covariance = known.mean(0), torch.cov(known.T, correction=0)
    ridge = 0.05 * covariance.trace() / len(covariance) * torch.eye(len(covariance), dtype=torch.float64)
    # The square root by Newton and Schulz, to which no eigenvectors are known.
    scale = (covariance + ridge).norm()
    root, inverse = (covariance + ridge) / scale, torch.eye(len(covariance), dtype=torch.float64)
    for _ in range(60):
        step = (3 * torch.eye(len(covariance), dtype=torch.float64) - inverse @ root) / 2
        root, inverse = root @ step, step @ inverse
    torch.testing.assert_close(root @ root * scale, covariance + ridge)
    mixed = ((seen - mean) @ (inverse / scale.sqrt())).view(6, 4, 4, -1).permute(0, 3, 1, 2)
    expected = mixed / mixed.flatten(1).norm(dim=1).view(-1, 1, 1, 1) * mixed[0].numel() ** 0.5
    given = []
    found = best.whitened_by(images.float(), public, lambda x: given.append(x) or scattering, shrinkage=0.05)
    torch.testing.assert_close(found.double(), expected, atol=2e-3, rtol=1e-3)
    assert given == [public]


def test_public_images_are_read_from_the_same_folder_and_named(monkeypatch):
    load = made_up(1, 28)
    public = PublicImages("photographs", torch.rand(5, 1, 28, 28), "", {"public": "1"})
    folders = []
    data = best.with_inputs(
        load,
        lambda images, public: images + public.mean(),
        "folder",
        7,
        lambda folder: folders.append(folder) or public,
    )
    expected = load(None).train.tensors[0][:7] + public.images.mean()
    torch.testing.assert_close(data.train.tensors[0], expected)
    assert folders == ["folder"]
    assert data.files == {**load(None).files, "public": "1"}


@pytest.fixture
def fashion(tmp_path):
    """A folder of four idx files in MNIST's format: class 0 is dark, class 1 is bright."""
    folder, rng = tmp_path / "fashion", np.random.default_rng(0)
    folder.mkdir()
    for part, n in (("train", 120), ("t10k", 40)):
        y = np.arange(n, dtype=np.uint8) % 2
        x = (rng.integers(0, 100, (n, 28, 28)) + 150 * y[:, None, None]).astype(np.uint8)
        head = struct.pack(">I3I", 0x803, *x.shape), struct.pack(">II", 0x801, n)
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(head[0] + x.tobytes()))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(head[1] + y.tobytes())
    return folder


def test_predictions_are_averaged_over_shifts_outside_of_training_only():
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(25, 3))
    model, x = best_mnist.Shifted(network, 1), torch.rand(4, 1, 5, 5)
    assert torch.equal(model.train()(x), network(x))
    expected = torch.zeros(4, 3)
    for down in (-1, 0, 1):
        for right in (-1, 0, 1):
            shifted = torch.zeros_like(x)
            for i in range(5):
                for j in range(5):
                    if 0 <= i - down < 5 and 0 <= j - right < 5:
                        shifted[:, :, i, j] = x[:, :, i - down, j - right]
            expected += network(shifted).softmax(1) / 9
    torch.testing.assert_close(model.eval()(x).exp(), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["best-mnist", "best-mnist-cnn"])
def test_images_of_ones_own_are_trained_on_under_their_own_name(name, fashion, tmp_path, monkeypatch):
    monkeypatch.setattr("torch_privacy.experiments.fitting.number_of_steps", lambda settings, n: 3)
    run = Reproduction.start(tmp_path / "r", name, data=str(fashion), quick=True)
    (job,) = run.unfinished()
    training = run.training(job)
    share = best_mnist.RECIPES.recipes[training.settings.recipe].settings.get("expected_batch_size", 4096) / 60_000
    assert training.settings.expected_batch_size == max(1, round(120 * share))
    for _ in training.steps():
        pass
    training.finish()
    results = run.finish()
    assert results["own_data"] == "fashion"
    assert [row["paper"] for row in results["rows"]] == [{}]
    assert results["rows"][0]["runs"][0]["numbers"]["score"] is not None


@pytest.mark.thorough
def test_own_images_can_be_trained_on_alone(fashion, tmp_path, capsys):
    options = ["--data", str(fashion), "--batch-size", "20", "--epochs", "0.3", "--run", str(tmp_path / "t")]
    assert command(["train", "best-mnist", *options, "--quiet"]) == 0
    settings = RunFolder(tmp_path / "t").read_settings()
    assert (settings["recipe"], settings["data"]) == ("scattering, linear", "fashion")


def test_published_images_are_mnist_and_others_are_named_after_their_folder(fashion, monkeypatch):
    assert best_mnist.own_data(str(fashion)) == "fashion"
    assert best_mnist.load_images(str(fashion)).licence == "unknown"
    inner = fashion / "mnist"
    inner.mkdir()
    for path in fashion.glob("*ubyte*"):
        path.rename(inner / path.name)
    assert best_mnist.own_data(str(fashion)) == "fashion"
    monkeypatch.setattr("torch_privacy.data.mnist.is_published", lambda file, checksum: True)
    assert best_mnist.own_data(str(fashion)) is None


def test_images_of_another_size_are_refused(fashion):
    for part, n in (("train", 120), ("t10k", 40)):
        content = struct.pack(">I3I", 0x803, n, 32, 32) + bytes(n * 32 * 32)
        (fashion / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match="images are of 32x32 pixels and must be of 28x28"):
        best_mnist.load_images(str(fashion))


def test_held_out_examples_are_the_last_of_the_training_data():
    recipes = replace(best_mnist.RECIPES, load=made_up(1, 28))
    study = recipes.study("convolutions")
    whole = recipes.build_task(study.settings(**SMALL))
    part = recipes.build_task(study.settings(**SMALL, held_out=10))
    (x, y), (kept, labels), (scored, truth) = (data.tensors for data in (whole.train, part.train, part.test))
    assert torch.equal(torch.cat([kept, scored]), x)
    assert torch.equal(torch.cat([labels, truth]), y)
    assert (len(kept), len(scored)) == (30, 10)
    with pytest.raises(ValueError, match="held_out=40 must lie in"):
        recipes.build_task(study.settings(**SMALL, held_out=40))


@pytest.mark.parametrize("study", [best_mnist.CONVOLUTIONS, best_cifar10.FIXED, best_cifar10.WIDE])
def test_rows_and_defaults_have_the_settings_of_their_recipe(study):
    module = best_mnist if study is best_mnist.CONVOLUTIONS else best_cifar10
    for row in study.rows(False):
        settings = study.settings(**row.settings)
        recipe = module.RECIPES.recipes[settings.recipe]
        expected = {**recipe.settings, **(recipe.at or {}).get(settings.target_epsilon, {})}
        assert {name: getattr(settings, name) for name in expected} == expected
        assert row.name.startswith(settings.recipe)
    first = study.settings()
    wanted = module.RECIPES.recipes[first.recipe].settings
    assert {name: getattr(first, name) for name in wanted} == wanted
