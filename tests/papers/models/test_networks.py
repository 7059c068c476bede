# SPDX-License-Identifier: Apache-2.0
"""The networks of the papers: their sizes, and that they train privately."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_privacy as tp
from torch_privacy_papers.models import networks

PRINTED = {  # by the papers
    "mnist_cnn": 26_010,
    "cifar_cnn": 623_146,
    "BiLSTM": 598_274,
    "vgg13": 32_394_562,
    "alexnet": 21_598_922,
}
COUNTED = {  # by hand, layer by layer
    "adult_perceptron": (123 + 1) * 16 + (16 + 1) * 2,
    "papernot_cnn": sum(9 * c * e + e for c, e in [(3, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128)])
    + (128 * 4 * 4 + 1) * 128
    + (128 + 1) * 10,
    "AveragedWords": 10_000 * 16 + (16 + 1) * 16 + (16 + 1) * 2,
    "StackedLSTM": 10_000 * 64
    + 2 * 4 * 64 * (64 + 64 + 1)
    + 2 * 4 * 32 * (2 * 64 + 32 + 1)
    + (64 + 1) * 64
    + (64 + 1) * 2,
    "Recommender": (6040 + 3706) * (5 + 10) + (5 + 10 + 10 + 1) * 5,
    "pca_perceptron": 60 * 1000 + 1000 * 10,
    "abadi_cnn": (25 * 3 + 1) * 64 + (25 * 64 + 1) * 64 + (6 * 6 * 64 + 1) * 384 + (384 + 1) * 384 + (384 + 1) * 10,
    "gep_mnist_cnn": (8 * 8 + 1) * 16 + (4 * 4 * 16 + 1) * 32 + (4 * 4 * 32 + 1) * 10,
    "ResNet20": 9 * (3 * 16 + 6 * 16 * 16 + 16 * 32 + 5 * 32 * 32 + 32 * 64 + 5 * 64 * 64) + (64 + 1) * 10,
}
INPUTS = {
    "adult_perceptron": lambda n: (torch.rand(n, 123) < 0.1).double(),
    "mnist_cnn": lambda n: torch.rand(n, 1, 28, 28),
    "cifar_cnn": lambda n: torch.rand(n, 3, 32, 32),
    "papernot_cnn": lambda n: torch.rand(n, 3, 32, 32),
    "AveragedWords": lambda n: torch.randint(10_000, (n, 256)),
    "BiLSTM": lambda n: torch.randint(8185, (n, 12)),
    "StackedLSTM": lambda n: torch.randint(10_000, (n, 9)),
    "Recommender": lambda n: torch.stack([torch.randint(6040, (n,)), torch.randint(3706, (n,))], 1),
    "pca_perceptron": lambda n: torch.randn(n, 60),
    "abadi_cnn": lambda n: torch.rand(n, 3, 24, 24),
    "gep_mnist_cnn": lambda n: torch.rand(n, 1, 28, 28),
    "ResNet20": lambda n: torch.rand(n, 3, 32, 32),
    "vgg13": lambda n: torch.rand(n, 3, 32, 32),
    "alexnet": lambda n: torch.rand(n, 1, 28, 28),
}


NARROW = {
    "vgg13": {"width": 4, "hidden": 8, "labels": 6},
    "alexnet": {"width": 2, "hidden": 8},
}  # where all is too much


def made(name: str) -> nn.Module:
    return getattr(networks, name)(**NARROW.get(name, {}))


def losses(model: nn.Module, batch: tuple) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize("name", INPUTS)
def test_network_has_the_parameters_of_its_paper(name):
    with torch.device("meta"):
        model = getattr(networks, name)()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == (PRINTED | COUNTED)[name]
    assert f"{trained:,}" in getattr(networks, name).__doc__


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("name", INPUTS)
def test_network_passes_every_check(name):
    checkup = tp.check(made(name), losses, (INPUTS[name](3), torch.tensor([0, 1, 0])))
    assert checkup.ok, checkup


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("name", INPUTS)
def test_network_trains_privately(name):
    data = torch.utils.data.TensorDataset(INPUTS[name](4), torch.tensor([0, 1, 0, 1]))
    model = made(name)
    before = [p.detach().clone() for p in model.parameters()]
    training = tp.PrivateTraining(
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        data,
        expected_batch_size=3,
        num_steps=2,
        clipping=tp.Flat(1.0),
        noise_multiplier=1.0,
        delta=1e-5,
    )
    for batch in training:
        training.step(losses(model, batch))
    assert training.step_count == 2
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new) != new.requires_grad


def test_convolutions_of_abadi_can_be_frozen():
    model = networks.abadi_cnn()
    assert isinstance(model, nn.Sequential)
    for i in (0, 3):
        assert isinstance(model[i], nn.Conv2d)
        model[i].requires_grad_(False)
    assert tp.check(model, losses, (INPUTS["abadi_cnn"](3), torch.tensor([0, 1, 0]))).ok


def test_resnet20_follows_the_code_of_its_authors():
    """Their block, written out: normalized, every second pixel, as many channels of zeros behind."""
    model = networks.ResNet20()
    block, x = model.stages[1][0], torch.randn(2, 16, 8, 8)
    conv1, norm1, _, conv2, norm2 = block.body
    shortcut = F.group_norm(x[:, :, ::2, ::2], 4)
    expected = norm2(conv2(F.relu(norm1(conv1(x))))) + torch.cat([shortcut, torch.zeros_like(shortcut)], 1)
    torch.testing.assert_close(block(x), F.relu(expected))


def test_first_weights_are_those_of_keras():
    torch.manual_seed(0)
    model = networks.BiLSTM(vocabulary=1000)
    assert 0.049 < model.embedding.weight.abs().max() <= 0.05
    limit = (6 / (64 + 4 * 64)) ** 0.5  # of Glorot's law for 64 inputs and 4 * 64 outputs
    assert 0.98 * limit < model.lstm.weight_ih_l0.abs().max() <= limit
    square = model.lstm.weight_hh_l0.T @ model.lstm.weight_hh_l0
    torch.testing.assert_close(square, torch.eye(64))
    biases = model.lstm.bias_ih_l0 + model.lstm.bias_hh_l0
    assert biases.tolist() == [0.0] * 64 + [1.0] * 64 + [0.0] * 128


def test_words_are_averaged_without_their_padding_when_told_so():
    model = networks.AveragedWords(20, padded=False)
    words, padding = torch.tensor([[4, 7, 7], [5, 6, 9]]), torch.zeros(2, 4, dtype=torch.int64)
    without = model(words)
    torch.testing.assert_close(model(torch.cat([padding, words], 1)), without)
    assert torch.isfinite(model(padding)).all()
    model.padded = True
    torch.testing.assert_close(model(words), without)
    assert not torch.allclose(model(torch.cat([padding, words], 1)), without)
