# SPDX-License-Identifier: Apache-2.0
"""Trains with banded noise of 1, 8 and 32 bands at equal epsilon, and prints how good the models are.

    python benchmarks/banded.py run --network cnn --log banded.jsonl   # goes on where it was stopped
    python benchmarks/banded.py table --log banded.jsonl

| network | data | parameters |
|---|---|---|
| linear | MNIST | 7,850 |
| cnn: two convolutions with tanh | MNIST | 26,010 |
| patches, scattering: linear on features that nothing private made | CIFAR-10 | 144,010; 155,530 |
| words: one transformer block of width 64 that predicts the next word of a review | IMDb | 168,040 |

Batches have 500 of 50,000 examples on average (q = 0.01); clip norm 1, delta 1e-5. 10,000 further training examples
choose the learning rate of each row with seed 0 (10,000 of the 50,000 on CIFAR-10), so that the test data decide
nothing. The other seeds train with that rate. The score of words is the mean log likelihood of a word, in nats.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy.data import imdb, load_cifar10, load_public_images, mnist
from torch_privacy_papers.best.cifar10 import CHANNELS, NUM_PATCHES, PATCHES, SCATTERED, SIDE
from torch_privacy_papers.best.common import linear

BANDS, EPSILONS = (1, 8, 32), (2.0, 8.0)
RATES = {"sgd": (0.5, 1.0, 2.0), "adam": (0.001, 0.003, 0.01)}
SHARE, DELTA, HELD_OUT, SEEDS = 0.01, 1e-5, 10_000, 5
WORDS, LENGTH, WIDTH = 1_000, 17, 64
Data = tuple[Tensor, Tensor, Tensor, Tensor]  # inputs and targets, for training and for the test


class Words(nn.Module):
    """Predicts each next word by one causal transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(0.1 * torch.randn(LENGTH - 1, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, WORDS)
        self.register_buffer("mask", torch.ones(LENGTH - 1, LENGTH - 1, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places
        y = self.norms[0](h)
        h = h + self.attention(y, y, y, attn_mask=self.mask, need_weights=False)[0]
        return self.last(h + self.perceptron(self.norms[1](h)))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip


def digits() -> Data:
    split = mnist.load_mnist()
    (x, y), (test_x, test_y) = split.train.tensors, split.test.tensors
    return x, y, test_x, test_y


def features(new_inputs: Callable[..., Tensor]) -> Data:
    split = load_cifar10(None)
    public = load_public_images(None).images
    (x, y), (test_x, test_y) = split.train.tensors, split.test.tensors
    return new_inputs(x, public), y, new_inputs(test_x, public), test_y


def reviews() -> Data:
    """Returns pieces of reviews as numbers of words, and the word after each; the words are counted without noise."""
    split = imdb.load_imdb(vocabulary=imdb.TrainingWords(WORDS), length=4 * LENGTH, keep="first", pad="after")
    parts: list[Tensor] = []
    for part in (split.train, split.test):
        pieces = part.tensors[0].view(-1, LENGTH)
        pieces = pieces[pieces.ne(0).all(1)]  # without padding
        chosen = pieces[torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))[:60_000]]
        parts += [chosen[:, :-1].contiguous(), chosen[:, 1:].contiguous()]
    return parts[0], parts[1], parts[2][:10_000], parts[3][:10_000]


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Data]]] = {
    "linear": (partial(linear, 784), digits),
    "cnn": (cnn, digits),
    "patches": (partial(linear, NUM_PATCHES), partial(features, PATCHES)),
    "scattering": (partial(linear, CHANNELS * SIDE**2), partial(features, SCATTERED)),
    "words": (Words, reviews),
}


def losses_of(scores: Tensor, y: Tensor) -> Tensor:
    """Returns (n,) the loss of each example: for words, the mean over its places."""
    losses = F.cross_entropy(scores.flatten(0, -2), y.flatten(), reduction="none")
    return losses.view(len(y), -1).mean(1)


def score(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Returns the accuracy in percent; for words the mean log likelihood."""
    with torch.no_grad():
        found = [
            -losses_of(model(inputs), labels) if y.ndim > 1 else 100.0 * model(inputs).argmax(1).eq(labels)
            for inputs, labels in zip(x.split(2000), y.split(2000), strict=True)
        ]
    return float(torch.cat(found).double().mean())


def trained(new_model: Callable[[], nn.Module], data: Data, settings: dict[str, float | str]) -> dict[str, float]:
    x, y, test_x, test_y = data
    torch.manual_seed(int(settings["seed"]))
    model, n, rate = new_model(), len(x) - HELD_OUT, float(settings["rate"])
    make = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[str(settings["optimizer"])]
    training = tp.PrivateTraining(
        model, make(model.parameters(), lr=rate), TensorDataset(x[:n], y[:n]), expected_batch_size=SHARE * n,
        num_steps=int(settings["steps"]), clipping=tp.Automatic(), target_epsilon=float(settings["epsilon"]),
        delta=DELTA, correlation=tp.Banded(int(settings["bands"])),
    )  # fmt: skip
    for inputs, labels in training:
        training.step(losses_of(model(inputs), labels))
    spent = training.spent().epsilon.high
    assert spent <= settings["epsilon"]
    noise = training.settings.noise_multiplier or math.nan
    scores = {"held_out": score(model, x[n:], y[n:]), "test": score(model, test_x, test_y)}
    return {"epsilon_high": spent, "noise": noise, **scores}


def run(log: Path, kind: str, optimizer: str, steps: int, rates: list[float]) -> None:
    known = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    new_model, load = NETWORKS[kind]
    data = load()
    for seed in range(SEEDS):
        for epsilon in EPSILONS:
            for bands in BANDS:
                row = {"network": kind, "optimizer": optimizer, "steps": steps, "epsilon": epsilon, "bands": bands}
                first = [one for one in known if row.items() <= one["setting"].items() and one["setting"]["seed"] == 0]
                best = max(first, key=lambda one: one["held_out"])["setting"]["rate"] if seed else None
                for rate in rates if best is None else [best]:
                    setting = {**row, "seed": seed, "rate": rate}
                    if setting in [one["setting"] for one in known]:
                        continue
                    known.append({"setting": setting, **trained(new_model, data, setting)})
                    with log.open("a") as file:
                        print(json.dumps(known[-1]), file=file)
                    print(known[-1], flush=True)


def table(log: Path) -> None:
    found: dict[tuple[str, str, int, float, int], dict[float, list[dict[str, float]]]]
    found = defaultdict(lambda: defaultdict(list))
    for row in map(json.loads, log.read_text().splitlines()):
        setting = row["setting"]
        group = tuple(setting[name] for name in ("network", "optimizer", "steps", "epsilon", "bands"))
        found[group][setting["rate"]].append(row)
    print("| network | optimizer | steps | epsilon | bands | noise multiplier | learning rate | score | seeds |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (kind, optimizer, steps, epsilon, bands), rates in sorted(found.items()):
        rate, rows = max(rates.items(), key=lambda each: (len(each[1]), each[1][0]["held_out"]))
        test = np.array([row["test"] for row in rows])
        error = test.std(ddof=1) / len(test) ** 0.5 if len(test) > 1 else float("nan")
        digits = 3 if kind == "words" else 2
        shown = f"{test.mean():.{digits}f} ± {error:.{digits}f} | {len(test)}"
        print(
            f"| {kind} | {optimizer} | {steps} | {epsilon:g} | {bands} | {rows[0]['noise']:.3f} | {rate:g} | {shown} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--log", type=Path, default=Path("banded.jsonl"))
    parser.add_argument("--network", choices=NETWORKS, default="cnn")
    parser.add_argument("--optimizer", choices=RATES, default="sgd")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rates", type=float, nargs="+", help="learning rates")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "run":
        run(given.log, given.network, given.optimizer, given.steps, given.rates or [*RATES[given.optimizer]])
    else:
        table(given.log)


if __name__ == "__main__":
    main()
