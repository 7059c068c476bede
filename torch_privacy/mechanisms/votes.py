# SPDX-License-Identifier: Apache-2.0
"""Provides ``GNMax``, which releases the winner of teachers' votes with noise on every count: PATE.

Source: N. Papernot, S. Song, I. Mironov, A. Raghunathan, K. Talwar, Ú. Erlingsson (2018), arXiv:1802.08908.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import privacy
from ..privacy.events.pate import ThresholdTests, data_dependent_epsilon, threshold_event, votes_event
from ..support.validate import (
    PLACE_IN_MEMORY,
    Refused,
    non_negative,
    plain_numbers,
    positive,
    strictly_between,
    whole,
)
from .noise import Noise

MOST_VOTES = 2**24  # float32 counts up to here


def teachers_of(examples: Iterable[Any], num_teachers: int, *, seed: int = 0) -> Tensor:
    """Returns the number of each example's teacher, (n,) from 0 to ``num_teachers - 1``.

    It is a function of the example's own content and of the seed, which is public. A number counts as the same in every
    type that holds it, and a text in arrays of every width. So one example more or less changes the data of one
    teacher. If examples were dealt out in their order, one more would move all that follow. Equal examples have the
    same teacher.

    Args:
        examples: tensors, arrays, images, texts, numbers, or tuples, lists or dicts of these; of other types those with
            a ``repr`` that shows their content.
        num_teachers: how many.
        seed: public.

    Raises:
        Refused: a table or text where its rows or lines are meant, or an example with a ``repr`` that shows where it
            lies in memory: its teacher would depend on the other examples.

    Example:
        >>> teachers_of([[1, 2], [3, 4], [1, 2]], 10).tolist()
        [4, 6, 4]
    """
    whole("teachers_of", at_least=1, num_teachers=num_teachers)
    whole("teachers_of", seed=seed)
    if isinstance(examples, (str, bytes, Mapping)) or hasattr(examples, "itertuples"):
        raise Refused(
            f"teachers_of: examples of type {type(examples).__name__} would be taken apart into characters or names of "
            "columns. Pass one element for each example, of a data frame table.itertuples(index=False)."
        )
    key = seed.to_bytes(8, "big")
    digests = (hashlib.blake2b(_content(example), key=key, digest_size=8).digest() for example in examples)
    return torch.tensor([int.from_bytes(digest, "big") % num_teachers for digest in digests], dtype=torch.int64)


def _content(example: Any) -> bytes:
    plain = _plain(example)
    return plain if isinstance(plain, bytes) else repr(plain).encode("utf-8", "surrogatepass")


def _number(value: float) -> float:
    """Returns a number as a float, if that is the same: one fraction makes floats of the whole numbers beside it."""
    try:
        return float(value) if float(value) == value else value
    except OverflowError:
        return value


def _plain(value: Any) -> Any:
    """Returns the content as bytes, or as a list or object with a ``repr`` that shows it.

    It must not depend on other examples: an array has one type for all, as wide as the longest text needs.
    """
    if isinstance(value, Tensor) and value.layout is torch.strided:  # through bytes, as numpy has no bfloat16
        value = value.detach().cpu() if value.is_complex() else value.detach().cpu().double()
        return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "biuf":
            return value.astype(np.float64).tobytes()
        # Texts are as wide as the longest.
        return value.tobytes() if value.dtype.kind in "cmM" else _plain(value.tolist())
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (int, float)):
        return _number(value)
    if isinstance(value, Mapping):
        return [(key, _plain(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, (set, frozenset)):  # has no order of its own
        return sorted(repr(_plain(part)) for part in value)
    if hasattr(value, "__array_interface__"):  # an image
        return _plain(np.asarray(value))
    if not isinstance(value, str) and PLACE_IN_MEMORY.search(repr(value)):
        raise Refused(
            f"teachers_of: {value!r} shows its place in memory, not its content, so that its teacher would depend on "
            "the other examples. Pass the content: tensors, arrays, texts, numbers, or tuples of these."
        )
    return value


@plain_numbers
@dataclass(frozen=True)
class GNMax:
    """A mechanism that answers queries by the noisy votes of teachers; its settings are fixed before the votes.

    Each teacher has learned from examples of its own (`teachers_of`). It votes for one class of each query, and the
    class with the largest count, noise included, is the answer. With ``tests`` this is confident GNMax: query by query
    it compares the largest count, with noise of its own, with ``threshold``, and answers the query if the count reaches
    it, until ``answers`` answers are given or all tests are used. Without ``tests`` it answers the first ``answers``
    queries.

    Args:
        answers: largest number of answers.
        noise_stddev: standard deviation of the noise on every count, in votes.
        tests: largest number of tests; 0 for none.
        threshold: of the tests, in votes.
        test_noise_stddev: standard deviation of the noise on the largest count, in votes.

    Guarantees:
        - For any votes `released` gives no more than `events` lists, so that their price holds for every outcome,
          including a run with fewer answers. Every call of it is a release of its own.
        - One example changes one teacher, hence one vote of each query: two counts by 1, the largest by at most 1.

    Example:
        >>> mechanism = GNMax.within(epsilon=2.0, delta=1e-5, answers=100)
        >>> votes = torch.tensor([[200.0, 30.0, 20.0]]).repeat(100, 1)
        >>> mechanism.released(votes).labels.shape
        torch.Size([100])
        >>> print(privacy.compose(mechanism.events()))
        epsilon in [1.999, 2.000] at delta = 1e-05 (add/remove one example, full batch sampling)
    """

    answers: int
    noise_stddev: float
    tests: int = 0
    threshold: float = 0.0
    test_noise_stddev: float = 0.0

    def __post_init__(self) -> None:
        whole("GNMax", at_least=1, answers=self.answers)
        whole("GNMax", tests=self.tests)
        positive("GNMax", noise_stddev=self.noise_stddev)
        non_negative("GNMax", threshold=self.threshold, test_noise_stddev=self.test_noise_stddev)
        if self.tests:
            positive("GNMax", test_noise_stddev=self.test_noise_stddev)

    @classmethod
    def within(
        cls, epsilon: float, delta: float, answers: int, *, tests: int = 0, threshold: float = 0.0, share: float = 0.5
    ) -> GNMax:
        """Returns a mechanism with the least noise within (epsilon, delta); tests use ``share`` of the budget.

        The budget is the sum of the squares of 1 / noise multiplier.
        """
        if tests:
            strictly_between("GNMax.within", 0, 1, share=share)
        budget = privacy.calibrate(epsilon, delta, sampling_probability=1.0, num_steps=1) ** -2
        share = share if tests else 0.0
        noise = sqrt(2 * answers / (budget * (1 - share)))
        return cls(answers, noise, tests, threshold, sqrt(tests / (budget * share)) if tests else 0.0)

    def events(self) -> Sequence[tuple[privacy.Gaussian, int]]:
        """Returns the releases to account for, whether or not all of them are used."""
        tested = [(threshold_event(self.test_noise_stddev), self.tests)] if self.tests else []
        return [*tested, (votes_event(self.noise_stddev), self.answers)]

    def released(self, votes: Tensor) -> NoisyAnswers:
        """Answers queries with these votes (queries, classes) in order, with noise from a new secret key.

        Raises:
            Refused: the votes are no counts; nothing was released.
        """
        counts = torch.as_tensor(votes)
        if counts.ndim != 2 or counts.shape[1] < 2 or not _are_counts(counts):
            raise Refused(
                f"GNMax.released: votes of shape {tuple(counts.shape)} must be whole numbers of votes, from 0 to "
                f"{MOST_VOTES}, of shape (queries, classes) with two or more classes."
            )
        asked = counts[: self.tests or self.answers].float()
        noisy = {"counts": asked.clone(), "largest": asked.amax(1)}
        Noise(None).add_to(0, noisy, {"counts": self.noise_stddev, "largest": self.test_noise_stddev})
        agreed = noisy["largest"] >= self.threshold if self.tests else torch.ones(len(asked), dtype=torch.bool)
        answered = agreed.nonzero().flatten()[: self.answers]
        enough = len(answered) == self.answers
        tested = (int(answered[-1]) + 1 if enough else len(asked)) if self.tests else 0
        return NoisyAnswers(answered, noisy["counts"][answered].argmax(1), tested)

    def epsilon_of_these_votes(self, votes: Tensor, answers: NoisyAnswers, delta: float) -> float:
        """Returns the data-dependent epsilon of the tests and answers: **private itself**, not a guarantee."""
        counts = torch.as_tensor(votes).double().numpy()
        made = ThresholdTests(counts[: answers.tested].max(1), self.threshold, self.test_noise_stddev)
        tests = made if answers.tested else None
        return data_dependent_epsilon(counts[answers.queries.numpy()], self.noise_stddev, delta, tests=tests)


def _are_counts(votes: Tensor) -> bool:
    return bool(((votes >= 0) & (votes <= MOST_VOTES) & (votes == votes.round())).all())


@dataclass(frozen=True, eq=False)
class NoisyAnswers:
    """The release: the answered queries, (answers,), their labels, (answers,), and the number of tested queries."""

    queries: Tensor
    labels: Tensor
    tested: int
