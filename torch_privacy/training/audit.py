# SPDX-License-Identifier: Apache-2.0
"""Audits a training: puts canaries into one run by fair coins, scores them, and tests the ledger's own claim."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from ..mechanisms.gep.settings import BGEP, GEP
from ..privacy.audit import Audit, audit_scores, check_test, plan_of
from ..sampling.canaries import GradientCanaries, WithCanaries
from ..sampling.examples import Examples
from ..support.validate import Refused, one_of
from .canaries import CanaryScores, Observed
from .loop import PrivateTraining
from .sampling import Truncated

USUAL_DELTA = 1e-5
MANY = 0.1  # share of the examples above which canaries change what is learned
DISTURBING = (
    "There is more than one canary for ten examples: they change what is learned, which makes the attack weaker, but "
    "not the test wrong."
)
Score = Callable[[Observed], Any]


def audit(
    train: Callable[[Dataset], Any],
    dataset: Dataset,
    canaries: Dataset | Sequence[Any] | GradientCanaries,
    *,
    score: str | Score = "gradient",
    significance: float = 0.05,
    delta: float | None = None,
    num_guesses: tuple[int, int] | None = None,
    test_seed: int | None = None,
) -> Audit:
    """Audits a training in one run: is the epsilon of its ledger believable?

    A fair coin decides for each canary whether it is in the data. The user's own training runs once, an attack guesses
    the coins, and the claim is tested: the certified trade-off curve of the run's ledger. The audit needs no trust in
    how gradients, clipping, noise and sampling are computed; it shows only what one attack finds in one run.

    Args:
        train: takes the data set with canaries, makes one `PrivateTraining` of it, runs its loop to the end, and
            returns the training or ``(model, training)``. Fetching and collating belong into the data set or into
            ``collate_fn``: the data set must reach `PrivateTraining` as it is, or in `Examples`.
        dataset: the user's own, map-style.
        canaries: more examples, such as mislabelled ones, which a model must memorize to fit; or `GradientCanaries`.
            1,000 to 5,000 are usual: with few, no attack can show a large epsilon.
        score: "gradient", for an attacker who sees every release (white box): products of the releases with the
            canaries' own gradients. "loss", for one who sees the final model (black box): by how much training lowered
            a canary's loss. Or a function of `Observed` that returns (m,) scores, higher for "in".
        significance: probability of a false alarm.
        delta: δ at which epsilon is shown; by default the training's, or 1e-5.
        num_guesses: how many canaries are guessed "in" and "out"; see `audit_scores`.
        test_seed: fixes the coins, for tests only.

    Returns:
        The `Audit`.

    Guarantees:
        - The coins come from the operating system and are in no statement, ledger or file.
        - Sampling probability and divisor do not depend on the coins. A canary that is out is left out of its batches,
          as if it were not in the data.
        - The ledger and the statement of the run say that it is an audit.
        - With `GradientCanaries` and ``score="gradient"``, sums of scores are tested, too: no canary's score depends on
          the coins of others. Not with `Truncated` batches, GEP and B-GEP, where it may.
        - The attacker knows all other examples and when they were sampled, which does not change the claim: examples
          are sampled independently.

    Raises:
        Refused: the training used another data set or stopped early; scores that the mechanism cannot give.
        ValueError: a number is out of range.

    Example:
        >>> import torch
        >>> import torch_privacy as tp
        >>> data = torch.utils.data.TensorDataset(torch.randn(1000, 50), torch.randint(2, (1000,)))
        >>> def train(dataset):
        ...     model = torch.nn.Linear(50, 40)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     training = tp.PrivateTraining(model, optimizer, dataset, expected_batch_size=100, num_steps=3,
        ...                                   clipping=tp.Flat(clip_norm=1.0), noise_multiplier=1.0)
        ...     for x, y in training:
        ...         training.step(torch.nn.functional.cross_entropy(model(x), y, reduction="none"))
        ...     return training
        >>> audit = tp.audit(train, data, tp.GradientCanaries(200), significance=1e-4)
        >>> 0 <= audit.epsilon_low(1e-5) < audit.profile.epsilon(1e-5).high
        True

    Source: Steinke, Nasr & Jagielski (2023), arXiv 2305.08846; Mahloujifar, Melis & Chaudhuri (2024), arXiv 2410.22235.
    """
    if isinstance(score, str):
        one_of("tp.audit", ("gradient", "loss"), score=score)
    if isinstance(dataset, Examples):
        raise Refused(
            "tp.audit: dataset is Examples(...). Pass the data set itself, and wrap what train(dataset) gets: "
            "PrivateTraining(model, optimizer, tp.Examples(dataset, ...))."
        )
    if isinstance(canaries, GradientCanaries) and score == "loss":
        raise Refused('tp.audit: GradientCanaries have no loss. Take score="gradient", or records as canaries.')
    check_test("tp.audit", significance, USUAL_DELTA if delta is None else delta)
    if num_guesses is not None:
        plan_of("tp.audit", num_guesses, len(canaries))  # type: ignore[arg-type]
    seed = secrets.randbits(256) if test_seed is None else test_seed
    coins = np.random.Generator(np.random.PCG64DXSM(seed)).random(len(canaries)) < 0.5  # type: ignore[arg-type]
    data = WithCanaries(dataset, canaries, coins)
    scores = data.scores = CanaryScores(
        data,
        by_losses=data.are_records and score != "gradient",
        by_releases=score != "loss",
        keeps_steps=callable(score),
    )
    returned = train(data)
    training = _checked(returned, data)
    found = _scores(score, scores.conclude(), len(coins))
    delta = training.settings.delta or USUAL_DELTA if delta is None else delta
    notes = [DISTURBING] if len(coins) > MANY * data.num_examples and data.are_records else []
    return audit_scores(
        found[coins],
        found[~coins],
        training.profile(),
        significance=significance,
        delta=delta,
        num_guesses=num_guesses,
        disjoint=score == "gradient" and _are_disjoint(training, data),
        notes=notes,
    )


def _are_disjoint(training: PrivateTraining, data: WithCanaries) -> bool:
    """True if the score of no canary depends on the coins of others, should the ledger's claim hold.

    `Truncated` batches leave canaries out because of others; the directions of GEP are shared.
    """
    settings = training.settings
    apart = not isinstance(settings.sampling, Truncated) and not isinstance(settings.unscheduled, GEP | BGEP)
    return apart and not data.are_records


def _checked(returned: Any, data: WithCanaries) -> PrivateTraining:
    """Returns the training; refuses one of other data, and one that did not reach its end."""
    training = returned[1] if isinstance(returned, tuple) and len(returned) == 2 else returned
    if not isinstance(training, PrivateTraining):
        raise Refused(
            f"tp.audit: train(dataset) returned {type(training).__name__}: must return the PrivateTraining, alone "
            "or as (model, training)."
        )
    if data.training is not training:
        raise Refused(
            "tp.audit: the training that train(dataset) returned was made on another data set. Pass dataset as it is "
            "to PrivateTraining, or in Examples; transforms belong into the data set that tp.audit gets, or into "
            "collate_fn."
        )
    if not data.scores.is_complete:
        raise Refused(
            "tp.audit: the loop ended before the last step, so the scores are not complete. Run "
            "`for batch in training` to its end."
        )
    return training


def _scores(score: str | Score, observed: Observed, count: int) -> np.ndarray:
    if score == "loss":
        before, after = observed.losses_before, observed.losses_after
        found: Any = None if before is None or after is None else before - after
    elif score == "gradient":
        found = observed.log_ratio
    else:
        assert callable(score)
        found = score(observed)
    scores = np.asarray(found.detach().cpu() if isinstance(found, Tensor) else found, float)
    if scores.shape != (count,):
        raise ValueError(f"tp.audit: score returned shape {scores.shape}: must be ({count},), one for each canary.")
    return np.nan_to_num(scores, nan=-np.inf)
