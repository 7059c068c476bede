# SPDX-License-Identifier: Apache-2.0
"""Measures time and memory of large networks with norms by random projections: Bu, Gopi et al. (2021).

``torch-privacy reproduce jl-large`` times a step, and measures its memory, for AlexNet on digits (21.6 M parameters),
VGG-13 on small photographs (32.4 M) and the network of ``jl-mnist`` with more dense layers (17.1 M), for which it
searches the largest batch as well; a quick look takes narrow networks of the same layers. All steps are of 64 examples,
as the paper's AlexNet has; the paper's other two have 256, with which two cores take hours. VGG-13 is trained for one
epoch with exact norms: by the paper almost no method reached 20 % accuracy. It reports no accuracy of the others.

Source: arXiv:2102.03013, Table 4 (digits with more dense layers); its first version (submitted to ICLR 2021, "Fast
differentially private-SGD via JL projections"), Tables 4 (AlexNet) and 5 (VGG-13).
"""

from dataclasses import replace
from functools import partial

from torch.optim import SGD

from torch_privacy.data import load_cifar10, load_mnist
from torch_privacy.experiments.study import Study
from torch_privacy.runs.rows import EXACT, SCORE, Row, TrainingRow
from torch_privacy_papers.bu2021 import common
from torch_privacy_papers.bu2021.common import LARGEST, MEMORY, RATIO, SECONDS, AccuracyComparison
from torch_privacy_papers.bu2021.tables import CIFAR10_DEFAULTS, MNIST_DEFAULTS
from torch_privacy_papers.models.networks import alexnet, mnist_cnn, vgg13

BATCH_SIZE = 64
MIB_PER_PERCENT = 0.01 * 16 * 1024  # of the paper's GPU
MORE_LAYERS = 4096, 3642  # the paper prints only the number of parameters, which these meet to 0.1 per mille


ALEXNET = AccuracyComparison(
    replace(MNIST_DEFAULTS, expected_batch_size=BATCH_SIZE),
    load_mnist,
    alexnet,
    SGD,
    methods={
        "non-private": {SECONDS: 11, MEMORY: 12 * MIB_PER_PERCENT},
        "vanilla": {SECONDS: 332, MEMORY: 38 * MIB_PER_PERCENT},
        "outer product": {SECONDS: 85, MEMORY: 75 * MIB_PER_PERCENT},
        "JL(1)": {SECONDS: 43, MEMORY: 15 * MIB_PER_PERCENT},
        "JL(10)": {SECONDS: 182, MEMORY: 15 * MIB_PER_PERCENT},
        "JL(1), double vjp": {SECONDS: 26, MEMORY: 22 * MIB_PER_PERCENT},
        "JL(10), double vjp": {SECONDS: 105, MEMORY: 22 * MIB_PER_PERCENT},
    },
    quick_model=partial(alexnet, 8, 512),
    projections=(1, 10),
    prefix="AlexNet, ",
    with_largest=False,
)
VGG = AccuracyComparison(
    replace(CIFAR10_DEFAULTS, expected_batch_size=BATCH_SIZE, learning_rate=0.001, clip_norm=3.0, epochs=1),
    load_cifar10,
    vgg13,
    SGD,
    methods={
        "non-private": {SECONDS: 12},
        "vanilla": {SECONDS: 1625},
        "JL(1)": {SECONDS: 20},
        "JL(10)": {SECONDS: 106},
        "JL(1), double vjp": {SECONDS: 212, RATIO: 212 / 13},
        "JL(10), double vjp": {SECONDS: 1946, RATIO: 1946 / 13},
    },
    quick_model=partial(vgg13, 16, 512, 250),
    projections=(1, 10),
    prefix="VGG-13, ",
    with_largest=False,
)
DENSER = AccuracyComparison(
    replace(MNIST_DEFAULTS, expected_batch_size=BATCH_SIZE),
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
VGG_TRAINED = replace(VGG.defaults, expected_batch_size=CIFAR10_DEFAULTS.expected_batch_size)
COLUMNS = {name: common.COLUMNS[name] for name in (SECONDS, RATIO, MEMORY, LARGEST, SCORE, EXACT)}
NOTES = (
    *common.NOTES[:-1],
    "Steps of 64 examples. The paper's are of 256 for VGG-13 and for the network of 17.1 M parameters: in ours, what a "
    "step does once for all examples, the noise and the update, weighs more.",
    "The paper's memory is a share of its GPU's 16 GB, parameters included; ours is what a step takes beyond these.",
    "Outer product holds all rows of a batch at once; with 256 examples those of VGG-13 would take 31 GiB. The paper "
    "reports that its memory did not suffice.",
    "Largest batches are searched where the paper has them, for 17.1 M parameters; 0 says that 64 examples do not "
    "fit. JL(30) is taken to need as much memory as JL(10).",
    "The paper's double vjp is in PyTorch, where the non-private epoch of VGG-13 takes 13 s.",
)


def rows(quick: bool) -> list[Row]:
    """Returns the rows of AlexNet, VGG-13, and the network with more dense layers; a quick look trains nothing."""
    measured = [row for comparison in (ALEXNET, VGG, DENSER) for row in comparison.rows(quick)]
    return measured if quick else [*measured, TrainingRow("VGG-13, trained, exact", {})]


STUDY = Study(COLUMNS, rows, NOTES, VGG_TRAINED, VGG.build_task)
