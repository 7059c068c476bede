# SPDX-License-Identifier: Apache-2.0
"""Classifies film reviews with NoisyAdam: Bu, Dong, Long and Su (2020), Table 3.

``torch-privacy reproduce gdp-imdb`` trains an embedding of 10,000 words, averaged over 256 of them, and 16 ReLU units.
The paper reports 83.8 % test accuracy at mu = 2.07, and 84.7 % without privacy. As there, the vocabulary is taken from
the training reviews: epsilon does not cover the choice of the frequent words.

With exact norms our accuracy is three points lower. The authors' code computes norms that are too small (see
`sparse_norms`); with these, training is not private, and most of the difference disappears. All of it disappears,
privately and with exact norms, if the average leaves out padding: its embedding makes the gradients of short texts
large.

Source: Z. Bu, J. Dong, Q. Long, W. Su, "Deep learning with Gaussian differential privacy", Harvard Data Science Review
2(3), 2020, arXiv:1911.11607.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import TensorDataset

from torch_privacy.data import TrainingWords, load_imdb
from torch_privacy.experiments import task
from torch_privacy.experiments.fitting import test_score
from torch_privacy.experiments.study import Study
from torch_privacy.experiments.task import Task, number_of_steps, seeded
from torch_privacy.runs.rows import (
    BASELINE,
    MU,
    SCORE,
    USUAL_COLUMNS,
    Computation,
    Context,
    Numbers,
    Row,
    TrainingRow,
)
from torch_privacy.support import validate as _check
from torch_privacy_papers.bu2020 import sparse_norms
from torch_privacy_papers.models.networks import AveragedWords
from torch_privacy_papers.models.optimizers import UncorrectedAdam

VOCABULARY = (
    "The vocabulary is taken from the training reviews without noise, as in the paper: epsilon does not cover it."
)
NOTES = (
    "Without bias correction: Adam as the paper prints it. The other rows have torch's, which corrects the bias of "
    "both moments, as Keras does.",
    VOCABULARY,
    "The authors' norms square the gradient of a word that occurs k times in a text, padding included, position by "
    "position. They are too small, so clipping does not bound the released sum: that row has no guarantee.",
    "The paper says that NoisyAdam converges much faster than NoisySGD here, and that AdaGrad has the same guarantee. "
    "Its text prints no numbers. AdaGrad has Adam's rate; all optimizers make the same 9 epochs.",
)


@dataclass(frozen=True, kw_only=True)
class Settings(task.Settings):
    """The settings of a training on film reviews."""

    words: int = 10_000
    length: int = 256
    padded: bool = True  # whether the average includes padding, as in the paper's code
    optimizer: str = "Adam"  # or another key of `OPTIMIZERS`


UNCORRECTED = "Adam without bias correction"
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    UNCORRECTED: UncorrectedAdam,
    "AdaGrad": torch.optim.Adagrad,
    "SGD": torch.optim.SGD,
}
SGD_RATES = 0.2, 2.0, 20.0


DEFAULTS = Settings(  # the paper's; with 25,000 training reviews 9 epochs are 439 steps
    noise_multiplier=0.56,
    expected_batch_size=512,
    learning_rate=0.02,
    clip_norm=1.0,
    epochs=9,
    baseline=True,
)


def build_task(settings: Settings) -> Task:
    """Returns IMDb's own split and a network on averaged words."""
    _check.one_of("train", OPTIMIZERS, optimizer=settings.optimizer)
    new_optimizer = OPTIMIZERS[settings.optimizer]
    return task.classification(
        load_imdb(settings.data, vocabulary=TrainingWords(settings.words), length=settings.length),
        partial(seeded, partial(AveragedWords, settings.words, padded=settings.padded), settings.seed),
        settings,
        new_optimizer=lambda model: new_optimizer(model.parameters(), lr=settings.learning_rate),
    )


def rows(quick: bool) -> Sequence[Row]:
    """Returns the private line of Table 3, with exact and with the authors' norms; a quick look makes two epochs."""
    epochs = {"epochs": 2} if quick else {}
    authors = Computation("the authors' norms", partial(with_sparse_norms, epochs), {SCORE: 0.838}, seeded=True)
    return [
        TrainingRow("NoisyAdam", epochs, {SCORE: 0.838, BASELINE: 0.847, MU: 2.07}),
        authors,
        TrainingRow("NoisyAdam, without padding", {**epochs, "padded": False}),
        TrainingRow("NoisyAdam, without bias correction", {**epochs, **_by(UNCORRECTED)}, {SCORE: 0.838}),
        TrainingRow("NoisyAdaGrad", {**epochs, **_by("AdaGrad")}),
        *(
            TrainingRow(f"NoisySGD, rate {rate:g}", {**epochs, **_by("SGD"), "learning_rate": rate})
            for rate in SGD_RATES
        ),
    ]


def _by(optimizer: str) -> dict[str, Any]:
    return {"optimizer": optimizer, "baseline": False}


def with_sparse_norms(chosen: Mapping[str, Any], context: Context) -> Numbers:
    """Returns the test accuracy of training with the authors' norms; not private."""
    settings = replace(DEFAULTS, **chosen, seed=context.seed, data=context.data)
    problem = build_task(settings)
    words, labels = cast(TensorDataset, problem.train).tensors
    model = cast(AveragedWords, problem.new_model())
    sparse_norms.train(model, words, labels, settings, number_of_steps(settings, len(words)))
    return {SCORE: test_score(problem, model)}


STUDY = Study(USUAL_COLUMNS, rows, NOTES, DEFAULTS, build_task)
