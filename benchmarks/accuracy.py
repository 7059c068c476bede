# SPDX-License-Identifier: Apache-2.0
"""Measures what each setting of a private training is worth, on three tasks at an epsilon where privacy hurts.

    python benchmarks/accuracy.py knobs --log accuracy.jsonl   # goes on where it was stopped
    python benchmarks/accuracy.py sizes --log accuracy.jsonl   # accuracy over the number of examples and epsilon
    python benchmarks/accuracy.py show --log accuracy.jsonl    # prints the tables
    python benchmarks/accuracy.py draw --log accuracy.jsonl    # draws docs/img/accuracy.svg

| task | data | network | examples | epsilon |
|---|---|---|---|---|
| census | Adult: 123 answers, income above 50,000 dollars | perceptron with 64 hidden units | 28,561 | 0.25 |
| digits | MNIST, in ten classes | two convolutions, 5,386 parameters | 5,000 | 2 |
| reviews | IMDb: which of 2,000 hashed words a text has | linear | 20,000 | 2 |

The base: 250 steps of SGD at delta 1e-5, ``Flat`` clipping to norm 1, the batch of ``tp.plan``. One setting is changed
at a time. The learning rate of each row is doubled and halved with seed 0 until that no longer helps on held-out
training data, so that test data decide nothing; the other seeds train with that rate.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy.data import HashedWords, load_adult, load_imdb, load_mnist
from torch_privacy.privacy import plan
from torch_privacy_papers.best.common import linear, whitened
from torch_privacy_papers.models.augmentation import cropped

DELTA, STEPS, SEEDS, DECAY = 1e-5, 250, 3, 0.98
EPSILON = {"census": 0.25, "digits": 2.0, "reviews": 2.0}
NUM_EXAMPLES = {"census": 28_561, "digits": 5_000, "reviews": 20_000}
HELD_OUT = {"census": 4_000, "digits": 5_000, "reviews": 5_000}
GUESS = {"census": 76.38, "digits": 11.35, "reviews": 50.0}  # the most frequent class of the test data
START = {"census": 2.0, "digits": 2.0, "reviews": 4.0}  # learning rates to begin with
FEATURES = {"census": "perceptron", "digits": "pixels", "reviews": 2000}
OTHER = {"census": ["linear"], "digits": ["scattering"], "reviews": [500]}
BASE: dict[str, Any] = {
    "n": 1.0, "steps": STEPS, "batch": 1.0, "clip": 1.0, "views": 1, "bands": 1,
}  # fmt: skip
KNOBS: dict[str, list[dict[str, Any]]] = {
    "base": [{}],
    "batch size": [{"batch": 1 / 16}, {"batch": 1 / 4}],
    "steps": [{"steps": 60}],
    "clip norm": [{"clip": 0.1}, {"clip": 10.0}, {"clip": "automatic"}],
    "correlated noise": [{"bands": 8}],
}
MORE = {  # where a run is quick enough
    "census": {"batch size": [{"batch": 4.0}], "steps": [{"steps": 500}], "augmentation": [{"views": 4}]},
    "digits": {"augmentation": [{"views": 4}]},
    "reviews": {},
}
SIZES = {0.5: (500, 2_000, 30_000), 2.0: (500, 2_000, 8_000, 30_000), 8.0: (500, 2_000, 30_000)}
PICTURE = Path(__file__).parent.parent / "docs/img/accuracy.svg"
Row = dict[str, Any]


class Words(nn.Module):
    """A linear model of which words a text has, each text as a row of length 1."""

    def __init__(self, words: int):
        super().__init__()
        self.dense = linear(words, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(F.normalize(x.float()))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, 2), nn.Tanh(), nn.Conv2d(8, 16, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(400, 10)
    )  # fmt: skip


def new_model(task: str, features: str | int) -> nn.Module:
    if task == "reviews":
        return Words(int(features))
    makers: dict[str | int, Callable[[], nn.Module]] = {
        "linear": partial(linear, 123, 2), "scattering": partial(linear, 81 * 49), "pixels": cnn,
        "perceptron": lambda: nn.Sequential(nn.Linear(123, 64), nn.ReLU(), nn.Linear(64, 2)),
    }  # fmt: skip
    return makers[features]()


@lru_cache(maxsize=2)
def load(task: str, features: str | int) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns inputs and targets of training, held-out and test examples; the training examples in random order."""
    n, held_out = NUM_EXAMPLES[task], HELD_OUT[task]
    if task == "reviews":
        split = load_imdb(vocabulary=HashedWords(int(features)))
    else:
        split = load_adult() if task == "census" else load_mnist()
    (x, y), (test_x, test_y) = split.train.tensors, split.test.tensors
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[: n + held_out]
    parts = {"train": order[:n], "held_out": order[n:]}
    found = {name: (x[rows], y[rows]) for name, rows in parts.items()} | {"test": (test_x[:10_000], test_y[:10_000])}
    if task == "reviews":
        found = {name: (bags(words, int(features)), labels) for name, (words, labels) in found.items()}
    if features == "scattering":
        found = {name: (whitened(images), labels) for name, (images, labels) in found.items()}
    return found


def bags(words: Tensor, size: int) -> Tensor:
    """Returns (n, size) bytes: 1 where the text has the word."""
    return torch.zeros(len(words), size, dtype=torch.uint8).scatter_(1, words, 1).index_fill_(1, torch.tensor([0]), 0)


def augmented(task: str, x: Tensor) -> Tensor:
    """Shifts images by up to a pixel; leaves out a tenth of the answers or words."""
    return cropped(x, 28, 1) if task == "digits" else x * (torch.rand(x.shape) > 0.1).to(x.dtype)


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Returns the accuracy in percent."""
    with torch.no_grad():
        return 100 * float(torch.cat([model(part).argmax(1) for part in x.split(2000)]).eq(y).double().mean())


def trained(row: Row) -> dict[str, float]:
    """Trains once; returns accuracies of the last weights and of their moving average."""
    task, parts = row["task"], load(row["task"], row["features"])
    n = round(row["n"] * NUM_EXAMPLES[task])
    x, y = (part[:n] for part in parts["train"])
    planned = plan(n, row["epsilon"], DELTA, num_steps=(row["steps"],)).chosen
    torch.manual_seed(row["seed"])
    model, clip = new_model(task, row["features"]), row["clip"]
    clipping = tp.Automatic() if clip == "automatic" else tp.Flat(clip)
    rate = row["rate"] / (1.0 if clip == "automatic" else clip)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    average = tp.MovingAverage(model, optimizer, decay=DECAY)
    training = tp.PrivateTraining(
        model, optimizer, tp.Examples(TensorDataset(x, y), views=row["views"]),
        expected_batch_size=min(n, max(1, round(row["batch"] * planned.expected_batch_size))),
        num_steps=row["steps"], clipping=clipping, target_epsilon=row["epsilon"], delta=DELTA,
        correlation=tp.Banded(row["bands"]),
    )  # fmt: skip
    for inputs, labels in training:
        inputs = augmented(task, inputs) if row["views"] > 1 else inputs
        losses = F.cross_entropy(model(inputs), labels, reduction="none")
        training.step(losses.view(-1, row["views"]) if row["views"] > 1 else losses)
    spent = training.spent().epsilon.high
    assert spent <= row["epsilon"]
    found = {"epsilon_high": spent, "noise": training.settings.noise_multiplier or math.nan}
    for prefix, network in (("", model), ("averaged_", average.model)):
        found |= {prefix + name: accuracy(network, *parts[name]) for name in ("held_out", "test")}
    return found


def without_privacy(row: Row) -> dict[str, float]:
    """Trains on all examples of a task by Adam, without clipping and noise; returns scores of the best epoch."""
    parts = load(row["task"], row["features"])
    x, y = parts["train"]
    torch.manual_seed(0)
    model, found = new_model(row["task"], row["features"]), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(30):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        found.append({name: accuracy(model, *parts[name]) for name in ("held_out", "test")})
    return max(found, key=lambda one: one["held_out"])


class Log:
    """The rows of a file, each trained once."""

    def __init__(self, path: Path):
        self.path = path
        self.rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def find(self, row: Row) -> Row | None:
        return next((one for one in self.rows if one["setting"] == row), None)

    def get(self, row: Row, make: Callable[[Row], dict[str, Any]] = trained) -> Row:
        found = self.find(row)
        if found is None:
            found = {"setting": row, **make(row)}
            with self.path.open("a") as file:
                print(json.dumps(found), file=file)
            self.rows.append(found)
            print(found, flush=True)
        return found


def best_rate(get: Callable[[float], float], start: float) -> float:
    """Returns the rate with the largest score among powers of two times ``start``, by climbing from it."""
    scores: dict[float, float] = {}

    def score(rate: float) -> float:
        if rate not in scores:
            scores[rate] = get(rate)
        return scores[rate]

    rate = start
    while True:
        best = max((rate, 2 * rate, rate / 2), key=score)
        if best == rate:
            return rate
        rate = best


def seeds_of(log: Log, row: Row, seeds: int, start: float, prefix: str = "", make: Any = trained) -> list[Row]:
    """Returns the row's trainings with its best rate, by seed."""
    rate = best_rate(lambda rate: log.get({**row, "rate": rate, "seed": 0}, make)[prefix + "held_out"], start)
    return [log.get({**row, "rate": rate, "seed": seed}, make) for seed in range(seeds)]


def rows_of(task: str) -> Iterator[tuple[str, Row, str]]:
    """Yields knob, setting and score of each row of a task."""
    base = {"task": task, "features": FEATURES[task], "epsilon": EPSILON[task], **BASE}
    for changes in (KNOBS, MORE[task], {"features": [{"features": other} for other in OTHER[task]]}):
        for knob, rows in changes.items():
            for change in rows:
                yield knob, {**base, **change}, ""
    yield "averaging", base, "averaged_"


def start_of(task: str, row: Row) -> float:
    return 0.25 if row["features"] == "scattering" else START[task]


def knobs(log: Log, tasks: list[str], seeds: int) -> None:
    for task in tasks:
        for _, row, prefix in rows_of(task):
            seeds_of(log, row, seeds, start_of(task, row), prefix)


def sizes_of(task: str) -> Iterator[Row]:
    cells = [(n, epsilon) for epsilon, sizes in SIZES.items() for n in sizes]
    for n, epsilon in sorted(cells, key=lambda cell: cell[0] * cell[1]):
        share = min(n, NUM_EXAMPLES[task]) / NUM_EXAMPLES[task]
        yield {"task": task, "features": FEATURES[task], "epsilon": epsilon, **BASE, "n": share}


def sizes(log: Log, tasks: list[str], seeds: int) -> None:
    for task in tasks:
        rate = START[task] / 4
        for row in sizes_of(task):
            rate = seeds_of(log, row, seeds, rate, "averaged_")[0]["setting"]["rate"]
        log.get({"task": task, "features": FEATURES[task], "epsilon": None}, without_privacy)


def seeds_in(log: Log, row: Row, prefix: str) -> tuple[float, np.ndarray]:
    """Returns the rate of a row in the file, and the test accuracies of its seeds; no accuracy if there is none."""
    found = [one for one in log.rows if row.items() <= one["setting"].items() and len(one["setting"]) == len(row) + 2]
    first = [one for one in found if one["setting"]["seed"] == 0]
    if not first:
        return math.nan, np.array([])
    # that with several seeds: the best of seed 0, which a tie leaves open
    rate = max(
        (one["setting"]["rate"] for one in first),
        key=lambda rate: (
            sum(one["setting"]["rate"] == rate for one in found),
            next(one[prefix + "held_out"] for one in first if one["setting"]["rate"] == rate),
        ),
    )
    return rate, np.array([one[prefix + "test"] for one in found if one["setting"]["rate"] == rate])


def words_of(task: str, row: Row) -> str:
    """Returns how a row differs from its task's base."""
    base = {"features": FEATURES[task], **BASE}
    changed = {name: row[name] for name in base if row[name] != base[name]}
    shown = {
        "batch": "batch times {}", "steps": "{} steps", "clip": "clip norm {}", "views": "{} augmented views",
        "bands": "noise of {} bands", "features": "features: {}",
    }  # fmt: skip
    exact = {"batch": Fraction, "features": "{} words".format if task == "reviews" else str}  # the others as they are
    words = (shown[name].format(exact.get(name, str)(value)) for name, value in changed.items())
    return ", ".join(words) or "base"


def table(log: Log, task: str) -> Iterator[tuple[str, str, float, np.ndarray, np.ndarray]]:
    """Yields knob, change, rate, and accuracies of each row that is there, and those of the base."""
    rows = list(rows_of(task))
    base = seeds_in(log, rows[0][1], "")[1]
    for knob, row, prefix in rows:
        rate, test = seeds_in(log, row, prefix)
        if len(test):
            yield knob, "averaged weights" if prefix else words_of(task, row), rate, test, base


def error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else math.nan


def show(log: Log, tasks: list[str], seeds: int) -> None:
    cells: dict[str, dict[str, str]] = {}
    for task in tasks:
        for _, words, rate, test, base in table(log, task):
            gain = f"{test.mean() - base.mean():+.2f} ± {math.hypot(error(test), error(base)):.2f}"
            shown = f"{test.mean():.2f} ± {error(test):.2f} %" if words == "base" else gain
            cells.setdefault(words, {})[task] = f"{shown} (rate {rate:g}, {len(test)} seeds)"
    print(f"| accuracy, and gain in points | {' | '.join(f'{task}, ε = {EPSILON[task]:g}' for task in tasks)} |")
    print("|---" * (len(tasks) + 1) + "|")
    for words, of_tasks in cells.items():
        print(f"| {words} | {' | '.join(of_tasks.get(task, '') for task in tasks)} |")
    for task in tasks:
        print(f"\n{task}, one seed: {', '.join(rates_of(log, task)) or 'no rate beside the best'}")
        best = log.find({"task": task, "features": FEATURES[task], "epsilon": None})
        points = sorted(points_of(log, task))
        smooth = np.maximum.accumulate([GUESS[task], *(accuracy for _, accuracy, _ in points)])
        without = smooth[-1] if best is None else max(best["test"], smooth[-1])
        print(f"\n{task}: a guess {GUESS[task]:.1f}, without privacy {without:.1f}")
        for (signal, accuracy, words), high in zip(points, smooth[1:], strict=True):
            print(f"({signal:.0f}, {high:.1f}),  # {words}: {accuracy:.2f}")


def rates_of(log: Log, task: str) -> Iterator[str]:
    """Yields what twice and half the base's rate gain with seed 0, with the last and with averaged weights."""
    row = {"task": task, "features": FEATURES[task], "epsilon": EPSILON[task], **BASE, "seed": 0}
    rate = next((rate for _, words, rate, *_ in table(log, task) if words == "base"), 0.0)
    best = log.find({**row, "rate": rate})
    for words, factor in (("twice the rate", 2.0), ("half the rate", 0.5)):
        found = log.find({**row, "rate": factor * rate})
        if best is not None and found is not None:
            last, averaged = (found[name] - best["test"] for name in ("test", "averaged_test"))
            yield f"{words} {last:+.1f} (averaged weights {averaged:+.1f})"


def points_of(log: Log, task: str) -> Iterator[tuple[float, float, str]]:
    """Yields total signal, accuracy of averaged weights, and examples with epsilon, of each size measured."""
    for row in sizes_of(task):
        test = seeds_in(log, row, "averaged_")[1]
        n = round(row["n"] * NUM_EXAMPLES[task])
        if len(test):
            limit = plan(n, row["epsilon"], DELTA, num_steps=(STEPS,)).limit
            yield n * limit, float(test.mean()), f"{n:,} examples, epsilon {row['epsilon']:g}"


def draw(log: Log, tasks: list[str], seeds: int) -> None:
    """Draws what each change is worth, a panel for each task."""
    import matplotlib
    from matplotlib.figure import Figure

    from torch_privacy.runs.report import figures, style

    rows = {task: {words: (test, base) for _, words, _, test, base in table(log, task)} for task in tasks}
    order = list(dict.fromkeys(words for task in tasks for words in rows[task] if words != "base"))[::-1]
    with matplotlib.rc_context(style.FILE_STYLE):
        figure = Figure(figsize=(9, 4.8), layout="constrained")
        panels = figure.subplots(1, len(tasks), squeeze=False, sharey=True)[0]
        for axes, task in zip(panels, tasks, strict=True):
            shown = {words: values for words, values in rows[task].items() if words != "base"}
            gains = [test.mean() - base.mean() for test, base in shown.values()]
            errors = [2 * math.hypot(error(test), error(base)) for test, base in shown.values()]
            axes.axvline(0, color="0.6", linewidth=0.8)
            axes.errorbar(
                gains, [order.index(words) for words in shown], xerr=errors, fmt="o", markersize=4, linewidth=1.2
            )
            axes.set_title(f"{task}, ε = {EPSILON[task]:g}: {rows[task]['base'][0].mean():.1f} %", fontsize=11)
            axes.set_yticks(range(len(order)), order)
        figure.supxlabel("gain in points, with two standard errors", fontsize=11)
        figures.save(figure, PICTURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["knobs", "sizes", "show", "draw"])
    parser.add_argument("--log", type=Path, default=Path("accuracy.jsonl"))
    parser.add_argument("--tasks", nargs="+", choices=NUM_EXAMPLES, default=list(NUM_EXAMPLES))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    actions: Mapping[str, Callable[[Log, list[str], int], None]] = {
        "knobs": knobs, "sizes": sizes, "show": show, "draw": draw,
    }  # fmt: skip
    actions[given.what](Log(given.log), given.tasks, given.seeds)


if __name__ == "__main__":
    main()
