# SPDX-License-Identifier: Apache-2.0
"""Trains on MNIST with gradient embedding perturbation: Yu, Zhang, Chen and Liu (2021), Table 1.

``torch-privacy reproduce gep-mnist`` trains two convolutions with max-pooling and one dense layer (14,394 parameters).
The anchors are photographs of CIFAR-100, gray and 28 x 28, with random labels. The paper reports 96.3, 97.9 and 98.4 %
test accuracy with GEP at epsilon 2, 5 and 8.

Some settings differ from the paper's, so that two cores can run it: tanh in place of ReLU, 5 to 20 epochs in place of
50 to 200, and 100 directions of 400 anchors in place of 250 to 1000 of 2000; clip norms 1 for the embedding and 0.8 for
the residual; a learning rate of 1 (2 for B-GEP) that decays linearly to zero; and the split of the budget with the
least noise. Batches of 1000 and momentum 0.9 are the paper's. Rates and the residuals' bound are the best of eight for
each method at epsilon 2, by accuracy on the last 10,000 training images: ``torch-privacy reproduce gep-mnist-tuning``
prints all. Rows at epsilon 5 and 8 have the same. No epsilon covers this choice.

Source: D. Yu, H. Zhang, W. Chen, T.-Y. Liu, "Do not let privacy overbill utility: gradient embedding perturbation for
private learning", ICLR 2021, arXiv:2102.12677.
"""

from dataclasses import replace

import torch
from torch import nn

from torch_privacy.data import Data, load_mnist, load_public_images
from torch_privacy_papers.models.networks import gep_mnist_cnn
from torch_privacy_papers.yu2021 import common
from torch_privacy_papers.yu2021.common import MethodComparison, Public, Settings

DEFAULTS = replace(
    common.DEFAULTS, learning_rate=2.0, residual_clip_norm=0.4, num_basis=100, num_anchors=400
)  # tuned for few steps on two cores, by `TUNING`


def load(settings: Settings) -> Data:
    """Returns MNIST."""
    return load_mnist(settings.data)


def load_public(settings: Settings) -> Public:
    """Returns public photographs, gray and of the digits' size."""
    found = load_public_images(settings.data, size=28, gray=True)
    return Public(found.images, found.files)


def new_model() -> nn.Module:
    """Returns the network in channels-last format, in which pooling takes a third of the time on a CPU."""
    return gep_mnist_cnn(activation=nn.Tanh).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


MANY = {"num_basis": 500, "num_anchors": 2000}
PRINTED = {  # the paper's settings at epsilon 2; for k it tried 250 to 1000
    **{"epochs": 50, "learning_rate": 0.1, "decay": "tenth from half time", "weight_decay": 1e-4},
    **{"clip_norm": 10.0, "residual_clip_norm": 2.0, "embedding_share": 0.5, "keeps_residual_noise": True},
    **MANY,
}
CLIP_NORMS = [{"learning_rate": 1.0 / bound, "clip_norm": bound} for bound in (0.25, 0.5, 2.0)]  # other than 1
COMPARISON = MethodComparison(
    DEFAULTS,
    load,
    load_public,
    new_model,
    groups=("0", "3", "7"),
    methods={
        "GP": {"num_basis": 0, "learning_rate": 1.0},
        "B-GEP": {"residual_clip_norm": 0.0},
        "GEP": {"learning_rate": 1.0, "residual_clip_norm": 0.8},
    },
    levels={2.0: {"epochs": 5}, 5.0: {"epochs": 12}, 8.0: {"epochs": 20}},
    paper={
        ("GP", 2.0): 0.947, ("GP", 5.0): 0.968, ("GP", 8.0): 0.972,
        ("B-GEP", 2.0): 0.931, ("B-GEP", 5.0): 0.945, ("B-GEP", 8.0): 0.959,
        ("GEP", 2.0): 0.963, ("GEP", 5.0): 0.979, ("GEP", 8.0): 0.984,
    },
    baseline=0.991,
    quick={"epochs": 0.5},
    tried={
        "GP": [*({"learning_rate": rate} for rate in (0.25, 0.5, 1.0, 2.0, 4.0)), *CLIP_NORMS],
        "B-GEP": [*({"learning_rate": rate} for rate in (0.25, 0.5, 1.0, 2.0, 4.0)), *CLIP_NORMS],
        "GEP": [
            *({"learning_rate": rate, "residual_clip_norm": 0.4} for rate in (0.5, 1.0, 2.0, 4.0)),
            {"learning_rate": 1.0, "residual_clip_norm": 0.2},
            *({"learning_rate": 2.0, "residual_clip_norm": bound} for bound in (0.8, 1.2)),
            {"learning_rate": 1.0, "residual_clip_norm": 0.8},
        ],
    },
    variants={
        "as printed": {
            "GP": {**PRINTED, "num_basis": 0},
            "B-GEP": {**PRINTED, "residual_clip_norm": 0.0},
            "GEP": PRINTED,
        },
        "k = 500, m = 2000": {"B-GEP": MANY},
    },
)  # fmt: skip
NOTES = (
    "Rates and the residuals' bound are the best of eight for each method, to 0.1 points, at epsilon 2 on held-out "
    "training images (gep-mnist-tuning). Rows at epsilon 5 and 8 have the same. No epsilon covers this choice.",
    "Where this deviates from the paper: tanh for ReLU; 5, 12 and 20 epochs for 50, 100 and 200; k = 100 of m = 400 "
    "photographs of CIFAR-100 for k = 250 to 1000 of 2000 of ImageNet; clip norms 1 and 0.8 for 10 and 2; a learning "
    "rate that decays linearly from 1 (B-GEP: 2) to zero for one of 0.1 with a single decay; no weight decay; and the "
    "split of the budget with the least noise.",
    "As printed: 50 epochs, clip norms 10 and 2, rate 0.1 and a tenth of it from half time on, weight decay 1e-4, k = "
    "500 of m = 2000, equal noise multipliers, and the residual's noise as a whole. What differs still: tanh, the "
    "photographs, and noise that is calibrated by exact accounting.",
)
STUDY, TUNING = COMPARISON.study(*NOTES), COMPARISON.tuning(2.0)
