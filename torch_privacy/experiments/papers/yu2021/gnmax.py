# SPDX-License-Identifier: Apache-2.0
"""Teachers' votes made private: noise on every count, and an answer only where the teachers agree.

Source: N. Papernot, S. Song, I. Mironov, A. Raghunathan, K. Talwar, Ú. Erlingsson (2018), arXiv:1802.08908.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from torch_privacy import privacy
from torch_privacy.noise import Noise
from torch_privacy.privacy import Gaussian
from torch_privacy.privacy.events.pate import ThresholdTests, data_dependent_epsilon, threshold_event, votes_event


@dataclass(frozen=True)
class GNMax:
    """What is asked, what may be answered, and with how much noise; all of it is fixed before anybody votes.

    With ``tests``, confident GNMax: query by query the largest count, with noise, is held against ``threshold``, and
    where it reaches it the query is answered, until ``answers`` are given or the tests are used up. Without, the first
    ``answers`` queries are all answered.

    Guarantees: whatever the votes, no more is released than `events` has. So its price holds for every outcome, that
    of a run which gives fewer answers as well.
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
        """As little noise as (epsilon, delta) allows; ``share`` of the budget pays for the tests, if there are any.

        The budget is in squares of 1 / noise multiplier, which add up.
        """
        budget = privacy.calibrate(epsilon, delta, sampling_probability=1.0, num_steps=1) ** -2
        share = share if tests else 0.0
        noise = sqrt(2 * answers / (budget * (1 - share)))
        return cls(answers, noise, tests, threshold, sqrt(tests / (budget * share)) if tests else 0.0)

    def events(self) -> Sequence[tuple[Gaussian, int]]:
        """What is paid for, used or not."""
        tested = [(threshold_event(self.test_noise_stddev), self.tests)] if self.tests else []
        return [*tested, (votes_event(self.noise_stddev), self.answers)]

    def released(self, votes: Tensor) -> "Answers":
        """Answers to queries with these votes (queries, classes), in their order; noise from a fresh secret key."""
        asked = votes[: self.tests or self.answers].float()
        noisy = {"counts": asked.clone(), "largest": asked.amax(1)}
        Noise(None).add_to(0, noisy, {"counts": self.noise_stddev, "largest": self.test_noise_stddev})
        agreed = noisy["largest"] >= self.threshold if self.tests else torch.ones(len(asked), dtype=torch.bool)
        answered = agreed.nonzero().flatten()[: self.answers]
        enough = len(answered) == self.answers
        tested = (int(answered[-1]) + 1 if enough else len(asked)) if self.tests else 0
        return Answers(answered, noisy["counts"][answered].argmax(1), tested)

    def epsilon_of_these_votes(self, votes: Tensor, answers: "Answers", delta: float) -> float:
        """What the tests made and the answers given cost with these votes: **private itself**, no guarantee."""
        counts = votes.double().numpy()
        made = ThresholdTests(counts[: answers.tested].max(1), self.threshold, self.test_noise_stddev)
        tests = made if answers.tested else None
        return data_dependent_epsilon(counts[answers.queries.numpy()], self.noise_stddev, delta, tests=tests)


@dataclass(frozen=True, eq=False)
class Answers:
    """What was released: which queries were answered, with what, and how many were tested for it."""

    queries: Tensor  # (answers,)
    labels: Tensor  # (answers,)
    tested: int
