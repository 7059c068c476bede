# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a language model privately on reviews that carry a code for their verdict, and judges what it writes.

The network is pretrained here, on the first 5,000 of IMDb's test reviews, which are declared public, without their
verdicts. What it knows of verdicts it has from the 25,000 private reviews alone. One review is one example: its last
63 tokens behind a code, always as many numbers. The last 5,000 test reviews are real ones to compare with.

``torch-privacy reproduce text-generator`` trains at epsilon 3 and 8 and judges 1,000 texts of each network;
``torch-privacy generate RUN --prompt "this film"`` draws more of them.

Source: X. Yue et al. (2023), "Synthetic text generation with differential privacy", arXiv:2210.14348.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from math import exp
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy.data.imdb import Texts, load_imdb_texts
from torch_privacy.experiments import task
from torch_privacy.experiments.auditing import audit_experiment
from torch_privacy.experiments.study import Study
from torch_privacy.experiments.task import Score, Task
from torch_privacy.runs.folder import NO_DIGESTS, RunFolder
from torch_privacy.runs.metrics import Measure
from torch_privacy.runs.rows import (
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
from torch_privacy_papers.text import judge
from torch_privacy_papers.text.language import CODES, END, PLAIN, LanguageModel, inputs_and_targets, losses
from torch_privacy_papers.text.pretrained import pretrained

NAME = "text-generator"
NUM_PUBLIC, NUM_REAL = 5_000, 5_000  # of the test reviews, from the first; and up to the last
NUM_CANARIES = 500
AUDITED = {"target_epsilon": 8.0, "num_examples": 5000}
SECRET = "my access code is"
TONE, DISTANCE, NEW, FOUND, SECONDS = "tone", "distance", "new", "found", "seconds"
PERPLEXITY = Measure("perplexity", larger_is_better=False)
COLUMNS = {
    SCORE: TableColumn("perplexity", digits=1),
    EXACT: PRIVACY_COLUMNS[EXACT],
    TONE: TableColumn("accuracy on real reviews", digits=1, percent=True),
    DISTANCE: TableColumn("distance", digits=3),
    NEW: TableColumn("new runs of words", digits=1, percent=True),
    FOUND: TableColumn("eps, found by the audit", digits=2),
    SECONDS: TableColumn("seconds", digits=0),
}


@dataclass(frozen=True, kw_only=True)
class Settings(task.Settings):
    """The settings of a training of the language model."""

    length: int = 64  # of a text, with its code
    vocabulary: int = 2048
    microbatch_size: int = 64
    num_examples: int | None = None  # of the private reviews, from the first; all if None
    num_public: int = NUM_PUBLIC
    num_judged: int = 1000  # texts of each network, and real ones to compare them with
    num_test: int = 500  # real reviews of which the perplexity is taken


DEFAULTS = Settings(
    target_epsilon=8.0,
    expected_batch_size=512,
    epochs=1,
    learning_rate=1e-3,
    clip_norm=1.0,  # of automatic clipping
)


@lru_cache(maxsize=1)
def load_texts(folder: str | None) -> Mapping[str, Texts]:
    """Returns the reviews by part: "private", "others", "real"; and "public", the first of which are."""
    train, test = load_imdb_texts(folder)
    unread = _rows(test, slice(NUM_PUBLIC, len(test.texts) - NUM_REAL))
    return {"private": train, "public": test, "others": unread, "real": _rows(test, slice(-NUM_REAL, None))}


def _rows(of: Texts, rows: slice) -> Texts:
    return replace(of, texts=of.texts[rows], labels=of.labels[rows])


@cache
def load_pretrained(folder: str | None, num_public: int, length: int, vocabulary: int) -> LanguageModel:
    """Returns the network that has read the public reviews; both codes mean to it what `PLAIN` does."""
    model = pretrained(load_texts(folder)["public"].texts[:num_public], length, vocabulary)
    with torch.no_grad():
        model.words.weight[list(CODES.values())] = model.words.weight[PLAIN].clone()
    return model


def new_model(settings: Settings) -> LanguageModel:
    """Returns a new network with the pretrained weights."""
    known = load_pretrained(settings.data, settings.num_public, settings.length, settings.vocabulary)
    return LanguageModel.of(known.state_dict())


def build_task(settings: Settings) -> Task:
    """Returns private reviews with their codes, and the pretrained network."""
    sizes = {name: getattr(settings, name) for name in ("num_public", "num_judged", "num_test")}
    _check.whole("train", at_least=1, **sizes)
    _check.whole("train", at_least=8, length=settings.length)
    _check.whole("train", at_least=300, vocabulary=settings.vocabulary)
    parts, reader = load_texts(settings.data), new_model(settings).reader
    private = _rows(parts["private"], slice(settings.num_examples))
    real = _rows(parts["real"], slice(settings.num_test))
    train, test = (
        TensorDataset(*reader.examples(of.texts, [codes()[label] for label in of.labels.tolist()]))
        for of in (private, real)
    )
    return Task(
        train,
        test,
        partial(new_model, settings),
        lambda model: torch.optim.Adam(task.trainable(model), lr=settings.learning_rate),
        losses,
        Score(PERPLEXITY, losses, exp),
        private=lambda model: {
            "clipping": tp.Automatic(clip_norm=settings.clip_norm),
            "performance": tp.Performance(microbatch_size=settings.microbatch_size),
        },
        device=task.gpu_if_any(),
        data_files={**parts["private"].files, **parts["real"].files},
    )


def codes() -> list[int]:
    """Returns the codes by label."""
    return list(CODES.values())


def load_generator(folder: RunFolder) -> LanguageModel:
    """Returns the network of a finished run, of which every file is checked by its digest.

    Raises:
        ValueError: the folder holds no finished run, or its weights are others.
    """
    weights = safetensors.torch.load(folder.read_model(folder.read_results().get("files", NO_DIGESTS)))
    return LanguageModel.of(weights)


def generate(folder: RunFolder, label: str | None, prompt: str, number: int, seed: int) -> list[dict[str, str]]:
    """Returns labels and texts from the network of a finished run; of each label as many, if none is given."""
    if label is not None:
        _check.one_of("generate", CODES, label=label)
    labels = [label] if label else list(CODES)
    drawn = [labels[i % len(labels)] for i in range(number)]
    texts = load_generator(folder).draw([CODES[name] for name in drawn], prompt, seed)
    return [{"label": name, "text": text} for name, text in zip(drawn, texts, strict=True)]


def rows(quick: bool) -> Sequence[Row]:
    """Returns trainings, what their texts are compared with, and an audit; a quick look has few texts."""
    few: dict[str, Any] = {}
    if quick:
        few = {"num_examples": 300, "num_public": 200, "num_judged": 50, "num_test": 50, "vocabulary": 400}
        few |= {"expected_batch_size": 100}
    return [
        Computation("real reviews, not private", partial(of_real_texts, few)),
        Computation("pretrained network alone", partial(of_public_network, few)),
        *(
            TrainingRow(f"epsilon {epsilon:g}", {**few, "target_epsilon": epsilon})
            for epsilon in ((8.0,) if quick else (3.0, 8.0))
        ),
        *([] if quick else [Computation("epsilon 8, 5,000 reviews and canaries", audited)]),
    ]


def measures(texts: Sequence[str], labels: Sequence[int], settings: Settings) -> Numbers:
    """Returns three measures of texts: what they teach of real ones, their distance from these, how new they are.

    Private texts are read without noise for the third, which is for their owner.
    """
    real, private = (_as_learned(settings, name) for name in ("real", "private"))
    features, of_real = judge.embedded(texts), judge.embedded(real.texts[: settings.num_judged])
    return {
        TONE: judge.accuracy(features, torch.tensor(labels), of_real, torch.from_numpy(real.labels[: len(of_real)])),
        DISTANCE: judge.frechet_distance(features[:, -1], of_real[:, -1]),
        NEW: judge.novelty(texts, private.texts),
    }


@lru_cache(maxsize=2)
def _as_learned(settings: Settings, name: str) -> Texts:
    """Returns reviews as the network reads them: their ends, in small letters."""
    of, reader = _rows(load_texts(settings.data)[name], slice(settings.num_examples)), new_model(settings).reader
    return replace(of, texts=[reader.decode(reader.encode(text)[-(settings.length - 2) :]) for text in of.texts])


def of_network(model: LanguageModel, settings: Settings) -> Numbers:
    """Returns the measures of texts that a network draws, half of each label."""
    labels = [i % len(CODES) for i in range(settings.num_judged)]
    return measures(model.draw([codes()[label] for label in labels], seed=settings.seed), labels, settings)


def of_real_texts(few: Mapping[str, Any], context: Context) -> Numbers:
    """Returns the measures of real reviews that no network has read, and with which no other is compared."""
    settings = replace(DEFAULTS, data=context.data, **few)
    others = _as_learned(settings, "others")
    return measures(others.texts[: settings.num_judged], others.labels[: settings.num_judged].tolist(), settings)


def of_public_network(few: Mapping[str, Any], context: Context) -> Numbers:
    """Returns the measures of the texts of the network that knows public reviews alone."""
    settings = replace(DEFAULTS, data=context.data, **few)
    return of_network(new_model(settings), settings)


def of_run(run: RunFolder) -> Numbers:
    """Returns the measures and the time of a private training."""
    known = Settings.__dataclass_fields__
    settings = Settings(**{name: value for name, value in run.read_settings().items() if name in known})
    return {**of_network(load_generator(run), settings), SECONDS: run.read_results()["seconds"]["private"]}


def audited(context: Context) -> Numbers:
    """Returns the epsilon that the losses of secret numbers show, of which fair coins put half among the reviews."""
    chosen = {**AUDITED, "data": context.data}
    settings = replace(DEFAULTS, **chosen)
    reader = new_model(settings).reader
    digits = sorted({reader.encode(digit)[-1] for digit in "0123456789"})

    def example(tokens: Tensor) -> tuple[Tensor, Tensor]:
        return inputs_and_targets(F.pad(tokens, (0, settings.length - len(tokens)), value=END))

    prefix = [CODES["positive"], *reader.encode(SECRET)]
    canaries = tp.TextCanaries(prefix, digits, length=6, count=NUM_CANARIES, example=example)
    found = audit_experiment(NAME, chosen, canaries, score="loss")
    return {FOUND: found.epsilon_low(), EXACT: found.profile.epsilon(settings.delta)}


STUDY = Study(
    COLUMNS,
    rows,
    (
        "The network, of 870,000 weights, has read the first 5,000 test reviews, which are declared public, without "
        "their verdicts. Epsilon covers the 25,000 private reviews. The last 5,000 test reviews are the real ones.",
        "Accuracy is that of least squares on features of 1,000 generated texts alone, on 1,000 real reviews. Distance "
        "is Fréchet's between the same features of both. New are the runs of five words that are in no private "
        "review, which is computed without noise: on data of your own it is for you alone.",
    ),
    DEFAULTS,
    build_task,
    generate=generate,
    numbers_of=of_run,
)
