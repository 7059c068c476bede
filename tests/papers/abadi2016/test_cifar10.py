# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import torch
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy.data import PublicImages
from torch_privacy.data.dataset import Data
from torch_privacy.experiments.fitting import losses_and_scores, new_training
from torch_privacy_papers.abadi2016 import cifar10


@pytest.fixture(autouse=True)
def float32():
    torch.set_default_dtype(torch.float32)


def made_up(channels, size):
    part = TensorDataset(torch.rand(40, channels, size, size), torch.randint(10, (40,)))
    data = Data("made up", part, part, tuple(range(10)), "none", {"a": "b"})
    return lambda folder: data


def test_pretrained_convolutions_stay_and_the_last_layer_trains(monkeypatch):
    public = PublicImages("photographs", torch.rand(64, 3, 32, 32), "", {})
    monkeypatch.setattr(cifar10, "load_labeled_public_images", lambda folder: None)  # no file of labels
    monkeypatch.setattr(cifar10, "load_public_images", lambda folder: public)
    monkeypatch.setattr(cifar10, "load_cifar10", made_up(3, 32))
    cifar10.pretrained.cache_clear()
    settings = replace(cifar10.DEFAULTS, expected_batch_size=4, epochs=0.1, pretraining_epochs=2, delta=1e-3)
    task = cifar10.build_task(settings)
    training = new_training(settings, task, None)
    model, learnt = training.model, cifar10.pretrained(None, 2)
    assert isinstance(training.clipping, tp.Groups)
    assert training.clipping.clip_norms == {"8": 3.0, "10": 3.0, "12": 6.0}
    assert torch.equal(model.state_dict()["8.weight"], learnt["8.weight"])
    for batch in training:
        training.step(losses_and_scores(task, model, batch)[0])
    assert torch.equal(model.state_dict()["1.weight"], learnt["1.weight"])
    assert not torch.equal(model.state_dict()["8.weight"], learnt["8.weight"])
    images = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(model(images), model(images[:, :, 4:28, 4:28]))
    cifar10.pretrained.cache_clear()


def test_of_the_hidden_layers_the_upper_one_may_train_alone_with_the_same_noise_for_each_bound(monkeypatch):
    public = PublicImages("photographs", torch.rand(64, 3, 32, 32), "", {})
    monkeypatch.setattr(cifar10, "load_labeled_public_images", lambda folder: None)
    monkeypatch.setattr(cifar10, "load_public_images", lambda folder: public)
    monkeypatch.setattr(cifar10, "load_cifar10", made_up(3, 32))
    cifar10.pretrained.cache_clear()
    row = next(row for row in cifar10.rows(False) if row.name == "epsilon 2, upper layers")
    small = {"expected_batch_size": 4, "epochs": 0.1, "pretraining_epochs": 2, "delta": 1e-3}
    settings = replace(cifar10.DEFAULTS, **{**row.settings, **small})
    training = new_training(settings, cifar10.build_task(settings), None)
    cifar10.pretrained.cache_clear()
    assert isinstance(training.clipping, tp.Groups)
    assert training.clipping.clip_norms == {"10": 3.0, "12": 6.0}
    trained = {name for name, parameter in training.model.named_parameters() if parameter.requires_grad}
    assert trained == {"10.weight", "10.bias", "12.weight", "12.bias"}
    for multiplier, layers in ((settings.noise_multiplier, 2), (cifar10.DEFAULTS.noise_multiplier, 3)):
        assert multiplier == pytest.approx(6 / layers**0.5)  # one release of all layers
    with pytest.raises(ValueError, match="hidden_layers=3"):
        cifar10.build_task(replace(settings, hidden_layers=3))


@pytest.mark.thorough
def test_labels_of_public_images_are_learned_where_there_are_any(monkeypatch):
    """The classes differ in color alone, so a network that learned rotations could not tell them apart."""
    colors, labels = torch.eye(3)[torch.arange(120) % 3], torch.arange(120) % 3
    images = (colors[:, :, None, None] + 0.3 * torch.rand(120, 3, 32, 32)).clamp(0, 1)
    labeled = PublicImages("photographs", images, "", {}, labels)
    monkeypatch.setattr(cifar10, "load_labeled_public_images", lambda folder: labeled)
    monkeypatch.setattr(cifar10, "load_public_images", lambda folder: pytest.fail("labels are there"))
    cifar10.pretrained.cache_clear()
    model = cifar10._network(100)
    model.load_state_dict(cifar10.pretrained(None, 20))
    cifar10.pretrained.cache_clear()
    assert (model(images).argmax(1) == labels).float().mean() > 0.9
