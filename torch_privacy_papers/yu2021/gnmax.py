# SPDX-License-Identifier: Apache-2.0
"""Provides GNMax and confident GNMax, which release the winner of teachers' votes with noise on every count.

Source: N. Papernot, S. Song, I. Mironov, A. Raghunathan, K. Talwar, Ú. Erlingsson (2018), arXiv:1802.08908.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from torch_privacy import privacy
from torch_privacy.mechanisms.noise import Noise
from torch_privacy.privacy import Gaussian
from torch_privacy.privacy.events.pate import ThresholdTests, data_dependent_epsilon, threshold_event, votes_event


@dataclass(frozen=True)
class GNMax:
    """A mechanism that answers queries by vote; its settings are fixed before the votes are known.

    With ``tests``, this is confident GNMax: query by query it compares the largest count, with noise, with
    ``threshold``, and answers the query if the count reaches it, until ``answers`` answers are given or all tests are
    used. Without ``tests`` it answers the first ``answers`` queries.

    Guarantees: For any votes it releases no more than `events` lists, so that their price holds for every outcome,
    including a run with fewer answers.
    """

    answers: int
    noise_stddev: float  # of the noise on every count, in votes
    tests: int = 0
    threshold: float = 0.0
    test_noise_stddev: float = 0.0  # of the noise on the largest count, in votes

    @classmethod
    def within(
        cls, epsilon: float, delta: float, answers: int, *, tests: int = 0, threshold: float = 0.0, share: float = 0.5
    ) -> "GNMax":
        """Returns a mechanism with the least noise within (epsilon, delta); tests use ``share`` of the budget.

        The budget is the sum of the squares of 1 / noise multiplier.
        """
        budget = privacy.calibrate(epsilon, delta, sampling_probability=1.0, num_steps=1) ** -2
        share = share if tests else 0.0
        noise = sqrt(2 * answers / (budget * (1 - share)))
        return cls(answers, noise, tests, threshold, sqrt(tests / (budget * share)) if tests else 0.0)

    def events(self) -> Sequence[tuple[Gaussian, int]]:
        """Returns the releases to account for, whether or not all of them are used."""
        tested = [(threshold_event(self.test_noise_stddev), self.tests)] if self.tests else []
        return [*tested, (votes_event(self.noise_stddev), self.answers)]

    def released(self, votes: Tensor) -> "NoisyAnswers":
        """Answers queries with these votes (queries, classes) in order, with noise from a new secret key."""
        asked = votes[: self.tests or self.answers].float()
        noisy = {"counts": asked.clone(), "largest": asked.amax(1)}
        Noise(None).add_to(0, noisy, {"counts": self.noise_stddev, "largest": self.test_noise_stddev})
        agreed = noisy["largest"] >= self.threshold if self.tests else torch.ones(len(asked), dtype=torch.bool)
        answered = agreed.nonzero().flatten()[: self.answers]
        enough = len(answered) == self.answers
        tested = (int(answered[-1]) + 1 if enough else len(asked)) if self.tests else 0
        return NoisyAnswers(answered, noisy["counts"][answered].argmax(1), tested)

    def epsilon_of_these_votes(self, votes: Tensor, answers: "NoisyAnswers", delta: float) -> float:
        """Returns the data-dependent epsilon of the tests and answers: **private itself**, not a guarantee."""
        counts = votes.double().numpy()
        made = ThresholdTests(counts[: answers.tested].max(1), self.threshold, self.test_noise_stddev)
        tests = made if answers.tested else None
        return data_dependent_epsilon(counts[answers.queries.numpy()], self.noise_stddev, delta, tests=tests)


@dataclass(frozen=True, eq=False)
class NoisyAnswers:
    """The release: the answered queries, their labels, and the number of tested queries."""

    queries: Tensor  # (answers,)
    labels: Tensor  # (answers,)
    tested: int
