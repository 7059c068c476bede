# SPDX-License-Identifier: Apache-2.0
"""Predicts film ratings with NoisyAdam: Bu, Dong, Long and Su (2020), Table 4.

``torch-privacy reproduce gdp-movielens`` trains simplified neural collaborative filtering: one dense layer on the
product of five factors and ten more factors for user and film. The paper reports a root mean squared error of 0.915 at
mu = 1.94 on MovieLens 1M, 0.893 without privacy, and 0.873 to 1.117 for methods of the Surprise library.

MovieLens 1M is used if it is found, else latest-small: a tenth of the ratings, by a tenth of the users, in half stars.
Its numbers stand beside the paper's, but belong to another task.

Source: Z. Bu, J. Dong, Q. Long, W. Su, "Deep learning with Gaussian differential privacy", Harvard Data Science Review
2(3), 2020, arXiv:1911.11607.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from torch_privacy.data import Data, load_movielens
from torch_privacy.experiments import task
from torch_privacy.experiments.study import Study
from torch_privacy.experiments.task import RMSE, Score, Task, seeded
from torch_privacy.runs.rows import (
    BASELINE,
    CLT,
    MOMENTS,
    MU,
    PRIVACY_COLUMNS,
    SCORE,
    Computation,
    Context,
    Numbers,
    Row,
    TableColumn,
    TrainingRow,
)
from torch_privacy_papers.models.networks import Recommender

TEST_FRACTION = 0.2
PAPER = {SCORE: 0.915, BASELINE: 0.893, MU: 1.94, CLT: 10.61, MOMENTS: 15.39}
TINY = 1e-300  # a denominator of films without ratings
HELD_OUT = 0.1  # of the training ratings, to stop the baseline early
SAMPLING_PROBABILITY = 1 / 80
COLUMNS = {SCORE: TableColumn("RMSE"), BASELINE: TableColumn("not private"), **PRIVACY_COLUMNS}
NOTES = (
    "The paper's numbers are for MovieLens 1M. If it is not in the data folder, ours are for latest-small, which has "
    "a tenth of the ratings.",
    "The other methods use scikit-learn, without privacy: the mean, ridge regression on user and film, the same with "
    "10 factors of its residuals by a truncated singular value decomposition, and the mean over the 40 users with "
    "the most similar ratings. Nonnegative factors are ours, with the defaults of the Surprise library, which the "
    "paper used (15 factors, 50 epochs, regularization 0.06), as scikit-learn's take a missing rating for a 0.",
    "Not private: the same network, stopped early. It trains on 90 % of the training ratings, and the epoch with the "
    "smallest RMSE on the other 10 % is taken; without that it overfits, to an RMSE of 0.94 after 20 epochs.",
)


@dataclass(frozen=True, kw_only=True)
class Settings(task.Settings):
    """The settings of a training on film ratings."""

    test_fraction: float = TEST_FRACTION


DEFAULTS = Settings(  # the paper's
    noise_multiplier=0.6,
    delta=1e-6,
    expected_batch_size=1008,  # q = 1/80 for latest-small; see settings_of_data
    learning_rate=0.01,
    clip_norm=5.0,
    epochs=20,
    baseline=True,
)


def settings_of_data(folder: str | None) -> dict[str, int]:
    """Returns the expected batch size for q = 1/80 of the ratings found: 1,008, or 10,002 for MovieLens 1M."""
    data = load_movielens(folder, test_fraction=TEST_FRACTION, seed=0)
    return {"expected_batch_size": round(len(data.train) * SAMPLING_PROBABILITY)}


def build_task(settings: Settings) -> Task:
    """Returns a random split of the ratings and a recommender network."""
    data = load_movielens(settings.data, test_fraction=settings.test_fraction, seed=settings.seed)
    stars = torch.tensor(data.classes, dtype=torch.float32)
    return task.classification(
        data,
        partial(seeded, partial(Recommender, *data.num_ids, data.num_classes), settings.seed),
        settings,
        new_optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=settings.learning_rate),
        baseline_held_out=HELD_OUT,
        score=Score(RMSE.measure, partial(squared_stars, stars), RMSE.of_mean),
    )


def squared_stars(stars: Tensor, outputs: Tensor, labels: Tensor) -> Tensor:
    """Returns the squared differences (n,) of the mean rating under softmax outputs (n, ratings) from the label's."""
    return (outputs.softmax(1) @ stars - stars[labels]).square()


def rows(quick: bool) -> Sequence[Row]:
    """Returns the rows of the paper's Table 4, with the other methods that libraries provide."""
    others = {
        "global average": {SCORE: 1.117},
        "user and film": {},
        "user, film and factors": {SCORE: 0.873},
        "nonnegative factors": {SCORE: 0.916},
        "nearest users": {SCORE: 0.923},
    }
    return [
        TrainingRow(
            "NoisyAdam",
            {"epochs": 3} if quick else {},
            {SCORE: 0.915, BASELINE: 0.893, MU: 1.94, CLT: 10.61, MOMENTS: 15.39},
        ),
        *(
            Computation(name, partial(other_method, name), paper, seeded=True, needs="scikit-learn")
            for name, paper in others.items()
        ),
    ]


def other_method(name: str, context: Context) -> Numbers:
    """Returns a scikit-learn method's RMSE on the same split, without privacy; None without scikit-learn."""
    methods = {
        "global average": _mean,
        "user and film": _biases,
        "user, film and factors": _factors,
        "nonnegative factors": partial(_nonnegative, seed=context.seed),
        "nearest users": _nearest,
    }
    data = load_movielens(context.data, test_fraction=TEST_FRACTION, seed=context.seed)
    try:
        predicted = methods[name](data)
    except ModuleNotFoundError:
        return {SCORE: None}
    truth = np.array(data.classes)[data.test.tensors[1].numpy()]
    return {SCORE: float(np.sqrt(np.mean((predicted - truth) ** 2)))}


def _mean(data: Data) -> np.ndarray:
    """Predicts the mean training rating."""
    stars = np.array(data.classes)
    return np.full(len(data.test), stars[data.train.tensors[1].numpy()].mean())


def _biases(data: Data) -> np.ndarray:
    """Predicts by a bias for each user and film, fitted by ridge regression."""
    return _fitted_biases(data)(data.test.tensors[0].numpy())


def _factors(data: Data, num_factors: int = 10) -> np.ndarray:
    """Adds a low-rank fit of the residuals to the biases; missing ratings count as residuals of 0."""
    from scipy.sparse import csr_array
    from sklearn.decomposition import TruncatedSVD

    pairs, labels = (tensor.numpy() for tensor in data.train.tensors)
    predict = _fitted_biases(data)
    residuals = csr_array((np.array(data.classes)[labels] - predict(pairs), tuple(pairs.T)), shape=data.num_ids)
    decomposition = TruncatedSVD(num_factors, random_state=0)
    low_rank = decomposition.inverse_transform(decomposition.fit_transform(residuals))
    users, films = data.test.tensors[0].numpy().T
    return _biases(data) + low_rank[users, films]


def _fitted_biases(data: Data) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function from pairs (user, film) to the sum of their biases, fitted on the training ratings."""
    from scipy.sparse import csr_array
    from sklearn.linear_model import Ridge

    def one_hot(pairs: np.ndarray) -> csr_array:
        n, columns = len(pairs), pairs + np.array([0, data.num_ids[0]])
        return csr_array((np.ones(2 * n), columns.ravel(), np.arange(0, 2 * n + 1, 2)), shape=(n, sum(data.num_ids)))

    pairs, labels = (tensor.numpy() for tensor in data.train.tensors)
    model = Ridge(alpha=5.0).fit(one_hot(pairs), np.array(data.classes)[labels])
    return lambda pairs: model.predict(one_hot(pairs))


def _nonnegative(
    data: Data, num_factors: int = 15, epochs: int = 50, regularization: float = 0.06, *, seed: int
) -> np.ndarray:
    """Predicts by the product of nonnegative factors of user and film, fitted to the training ratings alone.

    Every factor p is multiplied by Σ r q / Σ (r̂ q + λ p), with sums over the ratings r of its user or film and their
    fits r̂, so it stays nonnegative; users' and films' factors take turns. Source: Luo, Zhou, Xia & Zhu (2014).
    """
    from scipy.sparse import csr_array

    pairs, labels = (tensor.numpy() for tensor in data.train.tensors)
    stars, random = np.array(data.classes)[labels], np.random.default_rng(seed)
    p, q = (random.uniform(0, 1, (size, num_factors)) for size in data.num_ids)
    of_user, of_film = pairs.T

    def table(values: np.ndarray) -> csr_array:
        return csr_array((values, (of_user, of_film)), shape=data.num_ids)

    def fitted() -> csr_array:
        return table(np.einsum("nk,nk->n", p[of_user], q[of_film]))

    ratings = table(stars)
    by_user, by_film = (np.bincount(ids, minlength=n)[:, None] for ids, n in zip(pairs.T, data.num_ids, strict=True))
    for _ in range(epochs):
        p = p * (ratings @ q) / np.maximum(fitted() @ q + regularization * by_user * p, TINY)
        q = q * (ratings.T @ p) / np.maximum(fitted().T @ p + regularization * by_film * q, TINY)
    users, films = data.test.tensors[0].numpy().T
    known = (by_user[users] > 0).ravel() & (by_film[films] > 0).ravel()
    predicted = np.where(known, np.einsum("nk,nk->n", p[users], q[films]), stars.mean())
    return predicted.clip(min(data.classes), max(data.classes))


def _nearest(data: Data) -> np.ndarray:
    """Predicts a film's mean rating by the 40 most similar users among those who rated it."""
    from sklearn.metrics.pairwise import cosine_similarity

    pairs, labels = (tensor.numpy() for tensor in data.train.tensors)
    table = np.zeros(data.num_ids)
    table[pairs[:, 0], pairs[:, 1]] = np.array(data.classes)[labels]
    similarity, rated = cosine_similarity(table), table > 0
    mean, predicted = table[rated].mean(), []
    for user, film in data.test.tensors[0].numpy():
        raters = np.flatnonzero(rated[:, film])
        nearest = raters[np.argsort(-similarity[user, raters])[:40]]
        weights = similarity[user, nearest]
        predicted.append(weights @ table[nearest, film] / weights.sum() if weights.sum() > 0 else mean)
    return np.array(predicted)


STUDY = Study(COLUMNS, rows, NOTES, DEFAULTS, build_task, settings_of_data=settings_of_data)
