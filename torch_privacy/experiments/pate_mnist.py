# SPDX-License-Identifier: Apache-2.0
"""Digits learnt from the noisy votes of teachers (PATE): the baseline that Yu et al. (2021) compare GEP to, Table 1.

``torch-privacy reproduce pate-mnist`` trains 250 teachers, each on 240 digits of its own, lets them vote with Gaussian
noise (GNMax) on some of 9,000 test images that count as public, and trains a student on these labels and on all 9,000
images. It is scored on the 1,000 that are left, as in the papers on PATE.

The certified epsilon holds whatever the votes: it is what may be reported. The data-dependent one, which the papers
report, is itself a function of the private data and must not be published; it stands there to compare.

Source: N. Papernot, S. Song, I. Mironov, A. Raghunathan, K. Talwar, Ú. Erlingsson (2018), arXiv:1802.08908; the
student learns as in K. Sohn et al. (2020), arXiv:2001.07685 (FixMatch), where theirs was a generative network.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import sqrt

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_privacy import privacy
from torch_privacy.data import load_mnist
from torch_privacy.experiments._protocol import seeded
from torch_privacy.experiments.augmentation import cropped, turned
from torch_privacy.experiments.rows import (
    ACCURACY_COLUMN,
    EXACT,
    PRIVACY_COLUMNS,
    SCORE,
    Column,
    Computation,
    Context,
    Numbers,
)
from torch_privacy.noise import Noise
from torch_privacy.privacy.pate import data_dependent_epsilon, votes_event

DELTA = 1e-5
NUM_PUBLIC = 9000  # of the test images; the rest is to score on
CONFIDENT = 0.95  # from here on a student believes itself
QUERIES, NOISE, RIGHT, DEPENDENT = "queries", "noise_stddev", "labels_right", "epsilon_data_dependent"
COLUMNS = {
    SCORE: ACCURACY_COLUMN,
    RIGHT: Column("labels right", digits=1, percent=True),
    QUERIES: Column("labels", digits=0),
    NOISE: Column("noise, votes", digits=1),
    EXACT: PRIVACY_COLUMNS[EXACT],
    DEPENDENT: Column("eps of these votes", digits=2),
}
NOTES = (
    "Labels right: the share of the teachers' noisy answers that are true. Scored on 1,000 test images.",
    "Eps of these votes is data-dependent, the kind that the papers report: it is private itself, and no guarantee to "
    "be published. The certified one holds whatever the votes.",
)


@dataclass(frozen=True, eq=False)
class Size:
    """How large everything is."""

    teachers: int
    teacher_steps: int
    student_steps: int
    queries: Mapping[int, int]  # epsilon -> how many labels are asked for


FULL = Size(250, 160, 1000, {2: 300, 5: 1000, 8: 1500})
QUICK = Size(25, 60, 60, {8: 40})
PAPER = {2: 0.985, 5: 0.985, 8: 0.986}


def rows(quick: bool) -> Sequence[Computation]:
    """One student at each of the paper's epsilons."""
    size = QUICK if quick else FULL
    return [
        Computation(f"epsilon {epsilon:g}", partial(student_numbers, size, epsilon), {SCORE: PAPER[epsilon]}, True)
        for epsilon in size.queries
    ]


def student_numbers(size: Size, epsilon: int, context: Context) -> Numbers:
    """Answers at one epsilon, and the student that learns from them."""
    images, digits = load_mnist(context.data).test.tensors
    asked = questions(size, context.seed)[: size.queries[epsilon]]
    votes = votes_of_teachers(size, context.seed, context.data)[: len(asked)]
    noise = sqrt(2) * privacy.calibrate(epsilon, DELTA, sampling_probability=1.0, num_steps=len(asked))
    noisy = {"votes": votes.clone()}
    Noise(None).add_to(0, noisy, noise)
    labels = noisy["votes"].argmax(1)
    student = trained_student(images[:NUM_PUBLIC], asked, labels, size.student_steps, context.seed)
    return {
        SCORE: accuracy(student, images[NUM_PUBLIC:], digits[NUM_PUBLIC:]),
        RIGHT: float((labels == digits[asked]).float().mean()),
        QUERIES: len(asked),
        NOISE: noise,
        EXACT: privacy.compose([(votes_event(noise), len(asked))]).epsilon(DELTA),
        DEPENDENT: data_dependent_epsilon(votes.numpy(), noise, DELTA),
    }


def network(classes: int = 10) -> nn.Module:
    """Two convolutions and a dense layer."""
    layers = [nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.3), nn.Linear(32 * 49, classes))


def questions(size: Size, seed: int) -> Tensor:
    """The public images whose labels are asked for at the largest number of them; fewer are the first of these."""
    chosen = np.random.default_rng(seed).permutation(NUM_PUBLIC)[: max(size.queries.values())]
    return torch.from_numpy(chosen)


@lru_cache(maxsize=2)  # all rows ask the same teachers
def votes_of_teachers(size: Size, seed: int, folder: str | None) -> Tensor:
    """(questions, 10): how many teachers vote for each digit; secret. The seed says whose example is whose."""
    data = load_mnist(folder)
    (images, digits), (public, _) = data.train.tensors, data.test.tensors
    order, asked = torch.from_numpy(np.random.default_rng(seed).permutation(len(images))), questions(size, seed)
    votes = torch.zeros(len(asked), 10)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for number in range(size.teachers):
            own = order[number :: size.teachers]
            teacher = trained_teacher(images[own], digits[own], size.teacher_steps, number)
            votes[torch.arange(len(asked)), predicted(teacher, public[asked])] += 1
    return votes


def trained_teacher(images: Tensor, digits: Tensor, num_steps: int, seed: int) -> nn.Module:
    """One teacher, without privacy of its own."""
    model = seeded(network, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(num_steps):
        batch = torch.randint(len(images), (40,))
        _step(optimizer, F.cross_entropy(model(_changed(images[batch])), digits[batch]))
    return model


def trained_student(images: Tensor, asked: Tensor, labels: Tensor, num_steps: int, seed: int) -> nn.Module:
    """A network that fits the labels, and its own confident answers to the other images when these are changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, known = seeded(network, seed), images[asked]
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for step in range(num_steps):
            batch, others = torch.randint(len(known), (64,)), images[torch.randint(len(images), (192,))]
            loss = F.cross_entropy(model(_changed(known[batch])), labels[batch])
            with torch.no_grad():
                surest, guess = model(others).softmax(1).max(1)
            own = F.cross_entropy(model(_changed(others)), guess, reduction="none")
            share = min(1.0, 4 * step / num_steps)  # at first it knows too little
            _step(optimizer, loss + share * (own * (surest > CONFIDENT)).mean())
    return model


def _changed(images: Tensor) -> Tensor:
    """Shifted, turned and scaled at random."""
    return turned(cropped(images, 28, padding=2), degrees=12, scale=0.12)


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def predicted(model: nn.Module, images: Tensor) -> Tensor:
    """The digits (n,) that a model sees."""
    model.eval()
    with torch.no_grad():
        return torch.cat([model(part).argmax(1) for part in images.split(1000)])


def accuracy(model: nn.Module, images: Tensor, digits: Tensor) -> float:
    """Share of the images that a model is right about."""
    return float((predicted(model, images) == digits).float().mean())
