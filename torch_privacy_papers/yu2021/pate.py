# SPDX-License-Identifier: Apache-2.0
"""Trains with noisy votes of teachers (PATE), the baseline of GEP in Yu et al. (2021), Table 1.

``torch-privacy reproduce pate-mnist`` gives each of 250 teachers about 240 digits of its own. An image's teacher
depends on the image alone, so that adding or removing an image affects one teacher only. The teachers vote on some of
9,000 test images that count as public, and a student learns from the noisy answers and all 9,000 images. It is scored
on the remaining 1,000, as in the papers on PATE. Answers come from GNMax, or from confident GNMax, which first tests
whether the teachers agree. ``pate-cifar10`` does the same with photographs, 200 for each teacher, and GNMax alone.

The certified epsilon holds for all votes and may be reported. The data-dependent epsilon that the papers report is a
function of the private data and must not be published; it is shown for comparison only.

Source: N. Papernot, S. Song, I. Mironov, A. Raghunathan, K. Talwar, Ú. Erlingsson (2018), arXiv:1802.08908. Their
teachers are networks and their student is a generative one; ours use scattering coefficients: kernel ridge regression
for the teachers, label propagation to similar images for the student.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_privacy import privacy
from torch_privacy.data import load_cifar10, load_mnist
from torch_privacy.experiments.study import Study
from torch_privacy.mechanisms.votes import GNMax, teachers_of
from torch_privacy.runs.rows import (
    ACCURACY_COLUMN,
    EXACT,
    PRIVACY_COLUMNS,
    SCORE,
    Computation,
    Context,
    Numbers,
    TableColumn,
)
from torch_privacy_papers.best.common import scattered, with_inputs
from torch_privacy_papers.yu2021.kernels import Ridge, neighborhood, principal, spread, width

DELTA = 1e-5
NUM_SCORED = 1000  # of the test images; the others are public
TESTS_PER_ANSWER = 2  # at most, for confident GNMax
COMPONENTS = 300  # principal components of the public images' features
TESTED, ANSWERED, NOISE = "tests", "queries", "noise_stddev"
RIGHT, DEPENDENT = "labels_right", "epsilon_data_dependent"
COLUMNS = {
    SCORE: ACCURACY_COLUMN,
    RIGHT: TableColumn("labels right", digits=1, percent=True),
    TESTED: TableColumn("tests", digits=0),
    ANSWERED: TableColumn("labels", digits=0),
    NOISE: TableColumn("noise, votes", digits=1),
    EXACT: PRIVACY_COLUMNS[EXACT],
    DEPENDENT: TableColumn("eps of these votes", digits=2),
}
NOTES = (
    "Labels right: the fraction of correct noisy answers of the teachers. Scored on 1,000 test images.",
    "Eps of these votes is data-dependent, as in the papers: it is private itself and must not be published. The "
    "certified one holds for all votes.",
    "Kernel and graph were chosen with the public images' labels.",
)


@dataclass(frozen=True, eq=False)
class PateSize:
    """The size of the experiment; ``num_examples`` is None for all images."""

    source: str  # a key of `SOURCES`
    teachers: int
    threshold: float  # of confident GNMax, in votes
    answers: Mapping[int, int]  # epsilon -> number of labels to ask for
    num_examples: int | None = None

    @property
    def questions(self) -> int:
        """Returns the largest number of public images that the teachers label."""
        return TESTS_PER_ANSWER * max(self.answers.values())

    def mechanism(self, epsilon: int, confident: bool) -> GNMax:
        """Returns the mechanism that answers at one epsilon."""
        answers = self.answers[epsilon]
        tests = TESTS_PER_ANSWER * answers if confident else 0
        return GNMax.within(epsilon, DELTA, answers, tests=tests, threshold=self.threshold)


DIGITS, PHOTOGRAPHS = "MNIST", "CIFAR-10"
SOURCES = {DIGITS: lambda folder: load_mnist(folder), PHOTOGRAPHS: lambda folder: load_cifar10(folder)}
FULL, QUICK = (
    PateSize(DIGITS, 250, 200.0, {2: 200, 5: 600, 8: 1000}),
    PateSize(DIGITS, 25, 15.0, {8: 40}, num_examples=5000),
)
PAPER = {DIGITS: {2: 0.985, 5: 0.985, 8: 0.986}, PHOTOGRAPHS: {2: 0.342, 5: 0.419, 8: 0.436}}


def rows(source: str, mechanisms: Sequence[bool], quick: bool) -> Sequence[Computation]:
    """Returns a student for GNMax (False) or confident GNMax (True) at each of the paper's epsilons."""
    size = replace(QUICK if quick else FULL, source=source)
    return [
        Computation(
            f"epsilon {epsilon:g}{', confident' * confident}",
            partial(student_numbers, size, epsilon, confident),
            {SCORE: PAPER[source][epsilon]},
            True,
        )
        for epsilon in size.answers
        for confident in mechanisms
    ]


def student_numbers(size: PateSize, epsilon: int, confident: bool, context: Context) -> Numbers:
    """Returns the numbers of the answers at one epsilon and of the student that learns from them."""
    images, votes = images_seen(size, context.data), votes_of_teachers(size, context.seed, context.data)
    mechanism = size.mechanism(epsilon, confident)
    released = mechanism.released(votes)
    known = questions(size, context.seed, len(images.public))[released.queries]
    labels = released.labels
    student = Ridge.fitted(images.public, spread(images.graph, known, labels), images.width)
    return {
        SCORE: float((student.predicted(images.scored) == images.scored_digits).float().mean()),
        RIGHT: float((labels == images.public_digits[known]).float().mean()),
        TESTED: released.tested if confident else None,
        ANSWERED: len(labels),
        NOISE: mechanism.noise_stddev,
        EXACT: privacy.compose(mechanism.events()).epsilon(DELTA),
        DEPENDENT: mechanism.epsilon_of_these_votes(votes, released, DELTA),
    }


@dataclass(frozen=True, eq=False)
class Images:
    """Features and digits of the private, public and scored images, and a graph of the public ones."""

    private: Tensor
    digits: Tensor
    public: Tensor
    public_digits: Tensor  # used only to count correct answers
    scored: Tensor
    scored_digits: Tensor
    width: float  # of the kernel
    graph: Any  # of public images and their neighbors


@lru_cache(maxsize=1)  # shared by all rows
def images_seen(size: PateSize, folder: str | None) -> Images:
    """Returns scattering coefficients, projected onto the principal components of the public images alone."""
    data = with_inputs(SOURCES[size.source], scattered, folder, size.num_examples)
    (private, digits), (others, other_digits) = data.train.tensors, data.test.tensors
    mean, directions = principal(others[:-NUM_SCORED].flatten(1), COMPONENTS)
    private, others = (
        torch.cat([(part.flatten(1) - mean) @ directions for part in x.split(1000)]) for x in (private, others)
    )
    public, scored = others[:-NUM_SCORED], others[-NUM_SCORED:]
    split = other_digits[:-NUM_SCORED], scored, other_digits[-NUM_SCORED:]
    return Images(private, digits, public, *split, width(public), neighborhood(public))


def questions(size: PateSize, seed: int, num_public: int) -> Tensor:
    """Returns the public images to be labeled, in this order; fewer questions are a prefix of more."""
    chosen = np.random.default_rng(seed).permutation(num_public)[: size.questions]
    return torch.from_numpy(chosen)


@lru_cache(maxsize=16)  # number of seeds; all rows ask the same teachers
def votes_of_teachers(size: PateSize, seed: int, folder: str | None) -> Tensor:
    """Returns the numbers of teachers that vote for each class, (questions, 10); secret."""
    images = images_seen(size, folder)
    teacher_of = teachers_of(
        SOURCES[size.source](folder).train.tensors[0][: len(images.private)], size.teachers, seed=seed
    )
    asked = images.public[questions(size, seed, len(images.public))]
    votes = torch.zeros(len(asked), 10)
    for number in range(size.teachers):
        own = (teacher_of == number).nonzero().flatten()
        if len(own):  # a teacher without images has no vote
            teacher = Ridge.fitted(images.private[own], images.digits[own], images.width)
            votes[torch.arange(len(asked)), teacher.predicted(asked)] += 1
    return votes


MNIST = Study(COLUMNS, partial(rows, DIGITS, (False, True)), NOTES, delta=DELTA)
CIFAR10 = Study(COLUMNS, partial(rows, PHOTOGRAPHS, (False,)), NOTES, delta=DELTA)
