# SPDX-License-Identifier: Apache-2.0
"""Large networks with norms by random projections: Bu, Gopi, Kulkarni, Lee, Shen and Tantipongpipat (2021).

``torch-privacy reproduce jl-large`` times a step, and measures its memory and largest batch, for AlexNet on digits
(21.6 M parameters), VGG-13 on small photographs (32.4 M) and the network of ``jl-mnist`` with more dense layers
(17.1 M); a quick look takes narrow networks of the same layers. Nothing is trained: the paper says of VGG-13 that
almost no method came to 20 % accuracy, and of the others nothing.

Source: arXiv:2102.03013, Table 4 (digits with more dense layers); its first version (submitted to ICLR 2021, "Fast
differentially private-SGD via JL projections"), Tables 4 (AlexNet) and 5 (VGG-13).
"""

from dataclasses import dataclass
from functools import partial

from torch.optim import SGD

from torch_privacy.data import load_cifar10, load_mnist
from torch_privacy.experiments.models.networks import alexnet, mnist_cnn, vgg13
from torch_privacy.experiments.papers.bu2021 import common as jl
from torch_privacy.experiments.papers.bu2021 import tables as jl_mnist
from torch_privacy.experiments.papers.bu2021.common import LARGEST, MEMORY, SECONDS
from torch_privacy.runs.rows import Row

MIB_PER_PERCENT = 0.01 * 16 * 1024  # of the paper's GPU
MORE_LAYERS = 4096, 3642  # the paper prints the number of parameters alone; these come to 0.1 per mille of it


@dataclass(frozen=True)
class AlexNetSettings(jl_mnist.Settings):
    """The paper's batch; the rest is that of jl-mnist."""

    expected_batch_size: int = 64


@dataclass(frozen=True)
class VGGSettings(jl.Settings):
    """The paper's settings."""

    noise_multiplier: float | None = 0.9
    learning_rate: float = 0.001
    clip_norm: float = 3.0


ALEXNET = jl.Experiment(
    AlexNetSettings,
    load_mnist,
    alexnet,
    SGD,
    methods={
        "non-private": {SECONDS: 11, MEMORY: 12 * MIB_PER_PERCENT},
        "vanilla": {SECONDS: 332, MEMORY: 38 * MIB_PER_PERCENT},
        "outer product": {SECONDS: 85, MEMORY: 75 * MIB_PER_PERCENT},
        "JL(1)": {SECONDS: 43, MEMORY: 15 * MIB_PER_PERCENT},
        "JL(10)": {SECONDS: 182, MEMORY: 15 * MIB_PER_PERCENT},
    },
    quick_model=partial(alexnet, 8, 512),
    projections=(1, 10),
    prefix="AlexNet, ",
)
VGG = jl.Experiment(
    VGGSettings,
    load_cifar10,
    vgg13,
    SGD,
    methods={
        "non-private": {SECONDS: 12},
        "vanilla": {SECONDS: 1625},
        "JL(1)": {SECONDS: 20},
        "JL(10)": {SECONDS: 106},
    },
    quick_model=partial(vgg13, 16, 512, 250),
    projections=(1, 10),
    prefix="VGG-13, ",
)
DENSER = jl.Experiment(
    jl_mnist.Settings,
    load_mnist,
    partial(mnist_cnn, hidden=MORE_LAYERS),
    SGD,
    methods={
        "non-private": {LARGEST: 52_000},
        "vanilla": {LARGEST: 100},
        "JL(10)": {LARGEST: 28_000},
        "JL(30)": {LARGEST: 25_000},
    },
    quick_model=partial(mnist_cnn, hidden=(1024, 512)),
    projections=(10, 30),
    prefix="17.1 M, ",
)
COLUMNS = {name: jl.COLUMNS[name] for name in (SECONDS, jl.RATIO, MEMORY, LARGEST)}
NOTES = (
    *jl.NOTES[:-1],
    "The paper's memory is a share of its GPU's 16 GB, parameters included; ours is what a step takes beyond these.",
    "Where outer product has no numbers, the rows of a batch, which it holds all at once, are more than half of this "
    "machine's memory. The paper says the same of VGG-13.",
)


def rows(quick: bool) -> list[Row]:
    """Those of AlexNet, of VGG-13, and of the network with more dense layers."""
    return [row for experiment in (ALEXNET, VGG, DENSER) for row in experiment.rows(quick)]
