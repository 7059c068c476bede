# SPDX-License-Identifier: Apache-2.0
"""Provides the networks of the papers as plain modules with sizes as arguments.

If a paper's code is in Keras, the initial weights are drawn as in Keras (``draw_as_keras``), since the start matters in
short private trainings. Outputs are logits (n, classes).

Sources: M. Abadi et al. (2016, arXiv:1607.00133); Z. Bu, J. Dong, Q. Long, W. Su (2020, arXiv:1911.11607) and their
published code; Z. Bu, S. Gopi et al. (2021, arXiv:2102.03013); N. Papernot et al. (2021, arXiv:2007.14191);
D. Yu et al. (2021, arXiv:2102.12677) and their published code.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def adult_perceptron(hidden: int = 16) -> nn.Module:
    """Returns a perceptron for 123 features and two classes: the Adult network of Bu, Dong et al.; 2,018 parameters."""
    return draw_as_keras(nn.Sequential(nn.Linear(123, hidden), nn.ReLU(), nn.Linear(hidden, 2)))


def mnist_cnn(width: int = 16, classes: int = 10, *, hidden: Sequence[int] = ()) -> nn.Module:
    """Returns two convolutions and two dense layers: MNIST in both papers of Bu et al.; 26,010 parameters.

    It is the network of TensorFlow Privacy's tutorial. ``hidden`` are the widths of dense layers before these two.
    Inputs (n, 1, 28, 28).
    """
    return draw_as_keras(nn.Sequential(*_mnist_convolutions(width), *_dense(32 * width, *hidden, 2 * width, classes)))


def gep_mnist_cnn(width: int = 16, classes: int = 10, *, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    """Returns two convolutions with max-pooling and one dense layer: MNIST in Yu et al.; 14,394 parameters.

    Neither paper nor code gives the widths; these are the convolutions of ``mnist_cnn``. Inputs (n, 1, 28, 28).
    """
    return nn.Sequential(*_mnist_convolutions(width, activation), *_dense(32 * width, classes))


def _mnist_convolutions(width: int, activation: Callable[[], nn.Module] = nn.ReLU) -> list[nn.Module]:
    """Returns layers from (n, 1, 28, 28) to (n, 2 * width, 4, 4)."""
    first = [nn.Conv2d(1, width, 8, 2, 3), activation(), nn.MaxPool2d(2, 1)]
    return [*first, nn.Conv2d(width, 2 * width, 4, 2), activation(), nn.MaxPool2d(2, 1)]


def cifar_cnn(width: int = 32, size: int = 32, classes: int = 10) -> nn.Module:
    """Returns seven convolutions and a dense layer with tanh: CIFAR-10 in Bu, Gopi et al.; 623,146 parameters.

    The authors cite Papernot et al. and print only depth and size. These widths give that size exactly: 32, 32, 64, 64,
    128, 128, 256 channels of 3x3, halved by average pooling after every two, and 4096 inputs of the last layer.
    Inputs (n, 3, size, size).
    """
    layers = [*_pair(3, width, nn.AvgPool2d), *_pair(width, 2 * width, nn.AvgPool2d)]
    layers += [*_pair(2 * width, 4 * width, nn.AvgPool2d), nn.Conv2d(4 * width, 8 * width, 3, padding=1), nn.Tanh()]
    return draw_as_keras(nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * width * (size // 8) ** 2, classes)))


def papernot_cnn(width: int = 32, classes: int = 10) -> nn.Module:
    """Returns six convolutions and two dense layers with tanh: CIFAR-10 in Papernot et al.; 550,570 parameters.

    Inputs (n, 3, 32, 32).
    """
    layers = [*_pair(3, width, nn.MaxPool2d), *_pair(width, 2 * width, nn.MaxPool2d)]
    layers += [*_pair(2 * width, 4 * width, nn.MaxPool2d), nn.Flatten()]
    return draw_as_keras(nn.Sequential(*layers, nn.Linear(64 * width, 128), nn.Tanh(), nn.Linear(128, classes)))


def _pair(before: int, after: int, pool: Callable[[int], nn.Module]) -> list[nn.Module]:
    """Returns two 3x3 convolutions with tanh, then pooling that halves height and width."""
    convolutions = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
    return [convolutions[0], nn.Tanh(), convolutions[1], nn.Tanh(), pool(2)]


def vgg13(width: int = 64, hidden: int = 4096, labels: int = 1000, classes: int = 10) -> nn.Module:
    """Returns VGG-13 with one more dense layer: CIFAR-10 in Bu, Gopi et al.; 32,394,562 parameters, as they print.

    This is the size of VGG-13 for 32x32 images with its 1000 outputs and a layer of ten on top. Inputs (n, 3, 32, 32).
    """
    layers: list[nn.Module] = []
    for before, after in pairwise([3, width, 2 * width, 4 * width, 8 * width, 8 * width]):
        for channels in (before, after):
            layers += [nn.Conv2d(channels, after, 3, padding=1), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    return draw_as_keras(nn.Sequential(*layers, *_dense(8 * width, hidden, hidden, labels, classes)))


def alexnet(width: int = 32, hidden: int = 4096, classes: int = 10) -> nn.Module:
    """Returns AlexNet for gray images: MNIST in Bu, Gopi et al.; 21,598,922 parameters, as they print.

    This size implies one input channel and a single pixel before the dense layers; the strides are ours.
    Inputs (n, 1, 28, 28).
    """
    large = [nn.Conv2d(1, 3 * width, 11, 4, 5), nn.ReLU(), nn.MaxPool2d(2)]
    large += [nn.Conv2d(3 * width, 8 * width, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    small: list[nn.Module] = []
    for before, after in pairwise([8 * width, 12 * width, 12 * width, 8 * width]):
        small += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
    return draw_as_keras(nn.Sequential(*large, *small, *_dense(8 * width, hidden, hidden, classes)))


def _dense(*widths: int) -> list[nn.Module]:
    """Returns dense layers with ReLU between them, on flattened inputs."""
    layers = [layer for before, after in pairwise(widths) for layer in (nn.Linear(before, after), nn.ReLU())]
    return [nn.Flatten(), *layers[:-1]]


class AveragedWords(nn.Module):
    """Averages word embeddings of width 16, then 16 ReLU units: IMDb in Bu, Dong et al.; 160,306 parameters.

    Inputs are word ids (n, t). The average includes padding (id 0), as in the paper's code, unless ``padded=False``.
    """

    def __init__(self, vocabulary: int = 10_000, width: int = 16, classes: int = 2, *, padded: bool = True):
        super().__init__()
        self.padded = padded
        self.embedding = nn.Embedding(vocabulary, width)
        self.dense = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))
        draw_as_keras(self)

    def forward(self, words: Tensor) -> Tensor:
        vectors = self.embedding(words)
        if self.padded:
            return self.dense(vectors.mean(1))
        real = (words != 0).to(vectors.dtype)[:, :, None]
        return self.dense((real * vectors).sum(1) / real.sum(1).clamp(min=1))


class BiLSTM(nn.Module):
    """Uses the last states of a bidirectional LSTM, then 64 ReLU units: IMDb in Bu, Gopi et al.; 598,274 parameters.

    As in Keras, every gate has one bias: the second one of ``nn.LSTM`` is zero and frozen. ``one_bias=False`` trains it
    as well, which adds 512 parameters. Inputs are word ids (n, t).
    """

    def __init__(self, vocabulary: int = 8185, width: int = 64, classes: int = 2, *, one_bias: bool = True):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.dense = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, classes))
        draw_as_keras(self)
        if one_bias:
            self.lstm.bias_hh_l0.requires_grad_(False)
            self.lstm.bias_hh_l0_reverse.requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        _, (last, _) = self.lstm(self.embedding(words))
        return self.dense(last.transpose(0, 1).flatten(1))


class StackedLSTM(nn.Module):
    """Two bidirectional LSTM layers of 64 and 32 units, then 64 ReLU units: the baseline of Bu, Dong et al. on IMDb.

    Their text says "the two-layer LSTM RNN model in the TensorFlow tutorials", which is this one; 10,000 words make
    751,554 parameters. As in Keras, every gate has one bias. Inputs are word ids (n, t), padded before the words.
    """

    def __init__(self, vocabulary: int = 10_000, width: int = 64, classes: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.first = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.second = nn.LSTM(2 * width, width // 2, batch_first=True, bidirectional=True)
        self.dense = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))
        draw_as_keras(self)
        for layer in (self.first, self.second):
            layer.bias_hh_l0.requires_grad_(False)
            layer.bias_hh_l0_reverse.requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.first(self.embedding(words))
        _, (last, _) = self.second(states)
        return self.dense(last.transpose(0, 1).flatten(1))


class Recommender(nn.Module):
    """Neural collaborative filtering, simplified: MovieLens in Bu, Dong et al.; 146,320 parameters for MovieLens 1M.

    A product of 5 numbers for the user and 5 for the movie, beside 10 more of each, into one dense layer with an output
    per rating. Inputs (n, 2), user and movie. The prediction is the mean rating under the softmax of the outputs.
    """

    def __init__(self, users: int = 6040, movies: int = 3706, ratings: int = 5):
        super().__init__()
        self.user_factors, self.movie_factors = nn.Embedding(users, 5), nn.Embedding(movies, 5)
        self.user, self.movie = nn.Embedding(users, 10), nn.Embedding(movies, 10)
        self.dense = nn.Linear(25, ratings)
        draw_as_keras(self)

    def forward(self, pairs: Tensor) -> Tensor:
        user, movie = pairs.unbind(1)
        product = self.user_factors(user) * self.movie_factors(movie)
        return self.dense(torch.cat([product, self.user(user), self.movie(movie)], 1))


def pca_perceptron(
    components: int = 60, hidden: int = 1000, classes: int = 10, *, before: Sequence[int] = ()
) -> nn.Sequential:
    """Returns a perceptron on principal components: MNIST in Abadi et al.; 70,000 parameters.

    As in their code: no biases; weights of variance 1 / inputs, truncated at two standard deviations. ``before`` are
    the widths of hidden layers before the last one. Inputs (n, components): projected images.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise([components, *before, hidden, classes]):
        layer, deviation = nn.Linear(inputs, outputs, bias=False), inputs**-0.5
        nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def abadi_cnn(width: int = 64, hidden: int = 384, classes: int = 10) -> nn.Module:
    """Returns two 5x5 convolutions and three dense layers: CIFAR-10 in Abadi et al.; 1,144,138 parameters.

    The convolutions are ``[0]`` and ``[3]``, which the paper pretrains on public data and freezes.
    Inputs (n, 3, 24, 24).
    """
    convolutions = [nn.Conv2d(3, width, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    convolutions += [nn.Conv2d(width, width, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    return draw_as_keras(nn.Sequential(*convolutions, *_dense(36 * width, hidden, hidden, classes)))


class ResNet20(nn.Module):
    """ResNet-20 for 32x32 images with group normalization: SVHN and CIFAR-10 in Yu et al.; 268,346 parameters.

    He et al. (2016), section 4.2: a stem, three stages of three blocks with 16, 32 and 64 channels, and a dense layer,
    which are the five groups of parameters of GEP. The defaults are those of the authors' code: four groups without
    scale and shift, and one more normalization in the shortcut where the channels double. With n blocks in a stage
    instead of three it is ResNet-(6n + 2).
    """

    def __init__(
        self,
        classes: int = 10,
        *,
        blocks: int = 3,
        groups: int = 4,
        affine: bool = False,
        normed_shortcut: bool = True,
    ):
        super().__init__()

        def norm(channels: int) -> nn.Module:
            return nn.GroupNorm(groups, channels, affine=affine)

        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), norm(16), nn.ReLU())
        stages = []
        for before, after in [(16, 16), (16, 32), (32, 64)]:
            shortcut = norm(before) if normed_shortcut and before != after else nn.Identity()
            others = (BasicBlock(after, after, norm) for _ in range(blocks - 1))
            stages.append(nn.Sequential(BasicBlock(before, after, norm, shortcut), *others))
        self.stages = nn.ModuleList(stages)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for stage in self.stages:
            h = stage(h)
        return self.head(h)


class BasicBlock(nn.Module):
    """Computes relu(body(x) + shortcut(x)); the shortcut skips every second pixel and adds channels of zeros."""

    def __init__(self, before: int, after: int, norm: Callable[[int], nn.Module], shortcut: nn.Module | None = None):
        super().__init__()
        self.stride, self.padding = after // before, after - before
        first, second = (nn.Conv2d(c, after, 3, s, 1, bias=False) for c, s in [(before, self.stride), (after, 1)])
        self.body = nn.Sequential(first, norm(after), nn.ReLU(), second, norm(after))
        self.shortcut = shortcut or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.shortcut(x[:, :, :: self.stride, :: self.stride])
        return F.relu(self.body(x) + F.pad(skipped, (0, 0, 0, 0, 0, self.padding)))


@torch.no_grad()
def draw_as_keras(model: nn.Module) -> nn.Module:
    """Draws initial weights as in Keras and returns the model: Glorot uniform, biases 0, those of forget gates 1.

    Embeddings are uniform in [-0.05, 0.05], recurrent weights orthogonal.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.uniform_(module.weight, -0.05, 0.05)
        elif isinstance(module, nn.LSTM):
            _draw_lstm_as_keras(module)
    return model


def _draw_lstm_as_keras(module: nn.LSTM) -> None:
    forget = slice(module.hidden_size, 2 * module.hidden_size)
    for name, parameter in module.named_parameters():
        if name.startswith("weight_ih"):
            nn.init.xavier_uniform_(parameter)
        elif name.startswith("weight_hh"):
            nn.init.orthogonal_(parameter)
        else:
            nn.init.zeros_(parameter)
            parameter[forget] = float(name.startswith("bias_ih"))
