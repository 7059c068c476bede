# SPDX-License-Identifier: Apache-2.0
"""Adult income with NoisySGD: the first experiment of Bu, Dong, Long and Su (2020).

``torch-privacy train adult`` trains a perceptron with 16 ReLU units to tell who earns more than 50,000 dollars a year;
``torch-privacy reproduce gdp-adult`` makes the paper's Table 2. It reports 84.0 % test accuracy at mu = 2.03 with the
settings below, 84.5 % for a network without privacy, and 79.7 to 84.5 % for other methods.

Source: Z. Bu, J. Dong, Q. Long, W. Su, "Deep learning with Gaussian differential privacy", Harvard Data Science Review
2(3), 2020, arXiv:1911.11607. Ours samples by Poisson and reports a certified epsilon; their mu is the central limit
theorem's approximation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from torch_privacy import _validate as _check
from torch_privacy.data import Data, load_adult
from torch_privacy.data.synthetic import synthetic_adult
from torch_privacy.experiments.models.networks import adult_perceptron
from torch_privacy.experiments.task import Task, seeded
from torch_privacy.runs.rows import (
    ACCURACY_COLUMN,
    BASELINE,
    MU,
    PRIVACY_COLUMNS,
    SCORE,
    Column,
    Computation,
    Context,
    Numbers,
    Row,
    Training,
)

MOST_UNITS = 65536  # 8 million weights; beyond, memory ends before anything is learned
TEST_FRACTION = 0.1
COLUMNS = {
    SCORE: ACCURACY_COLUMN,
    BASELINE: Column("not private", digits=1, percent=True),
    **PRIVACY_COLUMNS,
}
NOTES = (
    "The split is another one for each seed. The other methods are those of scikit-learn, without privacy: the 3 "
    "nearest neighbors, Bernoulli naive Bayes, and a decision tree with at least 50 people in a leaf for C4.5.",
)


@dataclass(frozen=True)
class Settings:
    """The paper's settings; with 29,305 training examples 18 epochs are 2,061 steps."""

    noise_multiplier: float | None = 0.55  # noise_stddev / clip_norm; None with a target_epsilon, and only then
    target_epsilon: float | None = None
    delta: float = 1e-5
    expected_batch_size: int = 256
    learning_rate: float = 0.15
    clip_norm: float = 1.0
    epochs: float = 18
    hidden_units: int = 16
    test_fraction: float = TEST_FRACTION
    seed: int = 0  # public: the split, the initial weights, the baseline's shuffling; never the noise
    baseline: bool = True
    data: str | None = None  # folder; None is the copy shipped with the package


def build_task(settings: Settings) -> Task:
    """The random split of Adult, and the perceptron to be trained on it."""
    return _task(settings, load_adult(settings.data, test_fraction=settings.test_fraction, seed=settings.seed))


def build_stand_in(settings: Settings) -> Task:
    """The same with people who never were."""
    return _task(settings, synthetic_adult(seed=settings.seed))


def _task(settings: Settings, data: Data) -> Task:
    _check.whole("train", at_least=1, hidden_units=settings.hidden_units)
    _check.in_range("train", 0, MOST_UNITS, hidden_units=settings.hidden_units, hint="The paper's network has 16.")
    return Task(
        train=data.train,
        test=data.test,
        new_model=partial(seeded, partial(adult_perceptron, settings.hidden_units), settings.seed),
        new_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=settings.learning_rate),
        losses=partial(F.cross_entropy, reduction="none"),
        not_covered=data.not_covered,
        data_files=data.files,
        num_threads=1,
    )


def rows(quick: bool) -> Sequence[Row]:
    """The paper's Table 2."""
    paper = {SCORE: 0.840, BASELINE: 0.845, MU: 2.03}
    others = {"nearest neighbors": 0.797, "naive Bayes": 0.838, "decision tree": 0.845}
    return [
        Training("NoisySGD", {"epochs": 2} if quick else {}, paper),
        *(
            Computation(name, partial(other_method, name), {SCORE: score}, seeded=True)
            for name, score in others.items()
        ),
    ]


def other_method(name: str, context: Context) -> Numbers:
    """Accuracy of a method of scikit-learn, without privacy, on the same split; unknown where it is not installed."""
    try:
        from sklearn.naive_bayes import BernoulliNB
        from sklearn.neighbors import KNeighborsClassifier
        from sklearn.tree import DecisionTreeClassifier
    except ModuleNotFoundError:
        return {SCORE: None}
    methods = {
        "nearest neighbors": KNeighborsClassifier(n_neighbors=3, algorithm="brute"),
        "naive Bayes": BernoulliNB(),
        "decision tree": DecisionTreeClassifier(min_samples_leaf=50, random_state=context.seed),
    }
    data = load_adult(context.data, test_fraction=TEST_FRACTION, seed=context.seed)
    (features, labels), (held_out, truth) = data.train.tensors, data.test.tensors
    method = methods[name].fit(features.numpy(), labels.numpy())
    return {SCORE: float(method.score(held_out.numpy(), truth.numpy()))}
