# SPDX-License-Identifier: Apache-2.0
"""Tests couplings at the edges of a rehearsal: in the data set, in the loop's variables, by draws, late in a training.

    OMP_NUM_THREADS=1 python benchmarks/edges.py --jobs 2           # everything, about five minutes
    python benchmarks/edges.py --only 'items|late' --seeds 3        # scenarios by name or category

The scenarios are those of ``benchmarks/independence.py`` in kind: small trainings, coupled or honest, with one outlier.
In those of the category "items" the outlier is in no batch, and two trainings differ in its content alone: then nothing
may move. ``change`` is the largest movement of the clipped sum over the rule's sensitivity. The verdict "named" stands
for a coupling that no rehearsal can refuse, because it may be harmless: the statement names it, and a warning is given.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import independence
import numpy as np
import torch
from independence import (
    BATCH,
    CLASSES,
    EXAMPLES,
    INPUTS,
    OUTLIER,
    STEPS,
    WIDTH,
    Net,
    Scenario,
    Setup,
    add,
    classify,
    padded,
    padded_with_lengths,
    sequences,
    texts,
    vectors,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim import SGD
from torch.utils.data import ConcatDataset, Dataset, Subset

import torch_privacy as tp

EPOCH = EXAMPLES // BATCH
independence.SCENARIOS.clear()


# Items that read other items. A data set is made of vectors (n, INPUTS) and labels (n,).

CONTENT = 1.0  # of the outlier, which is in no batch; the second training has another


def rows() -> tuple[Tensor, Tensor]:
    """Returns vectors and labels; the outlier has the content of this training."""
    x, y = vectors().tensors
    x, y = x.clamp(-3, 3), y.clone()
    if CONTENT != 1.0:
        x[OUTLIER], y[OUTLIER] = CONTENT * (x[OUTLIER] + 1), (y[OUTLIER] + 1) % CLASSES
    return x, y


class Rows(Dataset):
    """Returns x and y of an item; ``read`` makes them from the data set and the index."""

    def __init__(self, read: Callable[["Rows", int], tuple[Tensor, Tensor]], length: int = EXAMPLES, **more: Any):
        self.x, self.y = rows()
        self.read, self.length = read, length
        vars(self).update(more)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.read(self, i)


def items(reads: dict[str, Callable], **more: Any) -> dict[str, Callable[[], Setup]]:
    return {name: partial(lambda read: Setup(Net(), data=Rows(read), **more), read) for name, read in reads.items()}


def another(i: int) -> int:
    return (i + 1 + int(torch.randint(EXAMPLES - 1, ()))) % EXAMPLES


def mixup(data: Rows, i: int) -> tuple[Tensor, Tensor]:
    return data.x[i] + 0.5 * data.x[another(i)], data.y[i]


def cutmix(data: Rows, i: int) -> tuple[Tensor, Tensor]:
    x = data.x[i].clone()
    x[:3] = data.x[another(i)][:3]
    return x, data.y[i]


def mosaic(data: Rows, i: int) -> tuple[Tensor, Tensor]:
    return torch.stack([data.x[i], *(data.x[random.randrange(EXAMPLES)] for _ in range(3))]).sum(0), data.y[i]


def triplet(data: Rows, i: int) -> tuple[Tensor, Tensor]:
    alike = [j for j in range(EXAMPLES) if data.y[j] == data.y[i]]
    return data.x[i] - data.x[alike[np.random.randint(len(alike))]], data.y[i]


def neighbor(data: Rows, i: int) -> tuple[Tensor, Tensor]:
    distance = (data.x - data.x[i]).norm(dim=1)
    return data.x[distance.argsort()[1]] + data.x[i], data.y[i]


def usable(data: Rows, i: int) -> tuple[Tensor, Tensor]:
    while data.x[i, 0] < 0:  # "corrupt": take the next one
        i = (i + 1) % EXAMPLES
    return data.x[i], data.y[i]


class ClassMeans(Rows):
    """Subtracts the mean of the item's class, which is computed when it is needed first."""

    means: Tensor | None = None

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if self.means is None:
            self.means = torch.stack([self.x[self.y == k].mean(0) for k in range(CLASSES)])
        return self.x[i] - self.means[self.y[i]], self.y[i]


class CachedMean(Rows):
    @lru_cache  # noqa: B019
    def mean(self) -> Tensor:
        return self.x.mean(0)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] - self.mean(), self.y[i]


class Windows(Dataset):
    """Cuts windows of three steps out of one series."""

    def __init__(self) -> None:
        x, self.y = rows()
        self.series = torch.cat([x[:, 0], x[:2, 1]])

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.series[i : i + 3].repeat(2), self.y[i]


class Records(Dataset):
    """Holds one dictionary for each example."""

    def __init__(self, read: Callable[[list, int], Tensor]):
        x, y = rows()
        self.records = [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]
        self.read = read

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.read(self.records, i), self.records[i]["y"]


class Wrapped(Dataset):
    """Wraps another data set."""

    def __init__(self, inner: Any, read: Callable[[Any, int], tuple[Tensor, Tensor]]):
        self.inner, self.read = inner, read

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.read(self.inner, i)


def hugging_face(read: Callable[[Any, list[int]], list] | None = None) -> Any:
    import datasets

    x, y = rows()
    found = datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist(), "number": list(range(EXAMPLES))})
    whole = found.with_format("torch")

    def transform(batch: dict) -> dict:
        read_x = torch.tensor(batch["x"]) if read is None else read(whole, batch["number"])
        return {"x": list(read_x), "y": [torch.tensor(v) for v in batch["y"]]}

    return found.with_transform(transform)


def of_dicts(items: list) -> tuple[Tensor, Tensor]:
    return torch.stack([one["x"] for one in items]), torch.stack([one["y"] for one in items])


def frame(read: Callable[[Any, int], Any]) -> Dataset:
    import pandas

    class Frame(Dataset):
        def __init__(self) -> None:
            x, self.y = rows()
            self.table = pandas.DataFrame(x.numpy())

        def __len__(self) -> int:
            return len(self.table)

        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            return torch.tensor(np.asarray(read(self.table, i)), dtype=torch.float32), self.y[i]

    return Frame()


add(
    "items",
    items(
        {
            "mixup": mixup,
            "cutmix": cutmix,
            "mosaic": mosaic,
            "triplets": triplet,
            "random negative": lambda d, i: (d.x[i] - d.x[random.randrange(EXAMPLES)], d.y[i]),
            "skip the corrupt one": usable,
            "nearest neighbor": neighbor,
            "previous item": lambda d, i: (d.x[i] - d.x[i - 1], d.y[i]),
            "mean of the data": lambda d, i: (d.x[i] - d.x.mean(0), d.y[i]),
            "share of the class": lambda d, i: (d.x[i] * (d.y == d.y[i]).float().mean() * 3, d.y[i]),
            "rank in the data": lambda d, i: (d.x[i] + (d.x[:, 0] < d.x[i, 0]).sum(), d.y[i]),
        }
    )
    | {
        "sliding windows": lambda: Setup(Net(), data=Windows()),
        "cached class means": lambda: Setup(Net(), data=ClassMeans(None)),
        "lru_cache of the mean": lambda: Setup(Net(), data=CachedMean(None)),
        "list of records": lambda: Setup(Net(), data=Records(lambda r, i: r[i]["x"] + r[i - 3]["x"])),
        "a wrapper that mixes": lambda: Setup(
            Net(), data=Wrapped(Rows(lambda d, i: (d.x[i], d.y[i])), lambda d, i: (d[i][0] + d[another(i)][0], d[i][1]))
        ),
        "a wrapper around a subset": lambda: Setup(
            Net(),
            data=Wrapped(
                Subset(Rows(lambda d, i: (d.x[i], d.y[i])), list(range(EXAMPLES))[::-1]),
                lambda d, i: (d[i][0] + d[(i + 5) % EXAMPLES][0], d[i][1]),
            ),
        ),
        "parts put together": lambda: Setup(
            Net(),
            data=Wrapped(
                ConcatDataset([Subset(Rows(lambda d, i: (d.x[i], d.y[i])), range(a, a + 12)) for a in (0, 12)]),
                lambda d, i: (d[i][0] + d[i - 1][0], d[i][1]),
            ),
        ),
        "Hugging Face, a transform that mixes": lambda: Setup(
            Net(),
            data=hugging_face(lambda w, k: torch.stack([w[(i + 1) % EXAMPLES]["x"] for i in k])),
            collate=of_dicts,
        ),
        "table, rolling mean": lambda: Setup(Net(), data=frame(lambda t, i: t.rolling(3, 1).mean().iloc[i])),
    },
)


class OwnCache(Rows):
    """Keeps each item that it has read."""

    def __init__(self) -> None:
        super().__init__(None)
        self.cache: dict[int, Any] = {}

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if i not in self.cache:
            self.cache[i] = (2 * self.x[i], self.y[i])
        return self.cache[i]


class Tokens(Dataset):
    """Cuts one stream of tokens into blocks, and looks each token up in a vocabulary."""

    def __init__(self) -> None:
        x, self.y = rows()
        self.stream = [f"w{int(v)}" for v in (x.abs() * 3).flatten()]
        self.vocabulary = {f"w{i}": i for i in range(100)}

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        block = self.stream[i * INPUTS : (i + 1) * INPUTS]
        return torch.tensor([float(self.vocabulary[w]) for w in block]) / 9, self.y[i]


class Files(Dataset):
    """Reads one file for each example."""

    def __init__(self) -> None:
        import tempfile

        x, y = rows()
        self.folder = tempfile.TemporaryDirectory()
        self.names = []
        for i in range(EXAMPLES):
            name = f"{self.folder.name}/{i}.pt"
            torch.save((x[i], y[i]), name)
            self.names.append(name)

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.load(self.names[i])


class NamedTransforms(Rows):
    """Augments by tables that have as many rows as there are examples, or more."""

    def __init__(self, count: int) -> None:
        super().__init__(None)
        self.table = torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(3))

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] + 0.1 * self.table[int(torch.randint(len(self.table), ()))], self.y[i]


class Together(Rows):
    def __getitems__(self, indices: list[int]) -> list:
        return [(self.x[i] + 0.01 * torch.randn(INPUTS), self.y[i]) for i in indices]


def random_crop(data: Rows, i: int) -> tuple[Tensor, Tensor]:
    return torch.roll(data.x[i], int(torch.randint(3, ()))) + 0.1 * random.random() + 0.1 * np.random.rand(), data.y[i]


add(
    "honest items",
    items({"own row": lambda d, i: (d.x[i], d.y[i])})
    | items({"own random numbers": random_crop}, random=True)
    | {
        "a cache of its own items": lambda: Setup(Net(), data=OwnCache()),
        "blocks of a stream of tokens": lambda: Setup(Net(), data=Tokens()),
        "files": lambda: Setup(Net(), data=Files()),
        "a table of augmentations, shorter": lambda: Setup(Net(), data=NamedTransforms(7), random=True),
        "a table of augmentations, longer": lambda: Setup(Net(), data=NamedTransforms(31), random=True),
        "fetched together": lambda: Setup(Net(), data=Together(None), random=True),
        "subset of a subset": lambda: Setup(
            Net(),
            data=Subset(Subset(Rows(lambda d, i: (d.x[i], d.y[i])), [*range(EXAMPLES)]), [*range(EXAMPLES)][::-1]),
        ),
        "parts": lambda: Setup(
            Net(), data=ConcatDataset([Subset(Rows(lambda d, i: (d.x[i], d.y[i])), range(a, a + 12)) for a in (0, 12)])
        ),
        "records": lambda: Setup(Net(), data=Records(lambda r, i: 2 * r[i]["x"])),
        "Hugging Face with a transform": lambda: Setup(Net(), data=hugging_face(), collate=of_dicts),
        "table": lambda: Setup(Net(), data=frame(lambda t, i: t.iloc[i])),
        "a list of pairs": lambda: Setup(Net(), data=[*zip(*rows(), strict=True)]),
        "views": lambda: Setup(
            Net(),
            data=Rows(random_crop),
            views=2,
            losses=lambda m, t, b: classify(m, t, b).view(-1, 2),
            random=True,
        ),
    },
    coupled=False,
)


def own_row(data: Rows, i: int) -> tuple[Tensor, Tensor]:
    return data.x[i], data.y[i]


# Variables of the loop that took in data, and are read later.


def losses_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def last_median(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Any) -> None:
    median, seen = 1.0, []
    for batch in training:
        found = losses_of(model, batch)
        if training.step(found / median):
            seen += found.tolist()
            if training.step_count % EPOCH == 0:
                median, seen = sorted(seen)[len(seen) // 2] if seen else 1.0, []


def clusters(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Any) -> None:
    x = vectors().tensors[0]
    weight = torch.ones(CLASSES)
    for batch in training:
        found = losses_of(model, batch) * weight[batch[1]]
        if training.step(found) and training.step_count % EPOCH == 0:
            with torch.no_grad():
                weight = 1 / (1 + torch.bincount(model(x).argmax(1), minlength=CLASSES))


LAST: dict[str, Any] = {}


def global_activations(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Any) -> None:
    LAST.clear()
    for batch in training:
        out = model(batch[0])
        target = LAST.get("mean", torch.zeros(CLASSES))
        found = F.cross_entropy(out - target, batch[1], reduction="none")
        if training.step(found) and training.step_count % EPOCH == 0:
            LAST["mean"] = out.detach().mean(0)


def two_tasks(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Any) -> None:
    last = [1.0, 1.0]
    for batch in training:
        out = model(batch[0])
        one, two = F.cross_entropy(out, batch[1], reduction="none"), out.square().sum(1)
        if training.step(one / last[0] + two / last[1]):
            last = [float(one.detach().mean()), float(two.detach().mean())]


def running_mean(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Any) -> None:
    mean = torch.zeros(INPUTS)
    for batch in training:
        found = losses_of(model, (batch[0] - mean, batch[1]))
        if not training.rehearsing:
            mean = 0.5 * mean + 0.5 * batch[0].mean(0)
        training.step(found)


def centered(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Any) -> None:
    teacher = nn.Module()
    teacher.register_buffer("center", torch.zeros(CLASSES))
    for batch in training:
        out = model(batch[0])
        if training.step(F.cross_entropy(out - teacher.center, batch[1], reduction="none")):
            teacher.center.lerp_(out.detach().mean(0), 0.5)


def partial_fit(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Any) -> None:
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().partial_fit(np.random.default_rng(0).normal(size=(5, INPUTS)))
    for x, y in training:
        scaled = torch.from_numpy(scaler.transform(x.numpy())).float()
        if training.step(losses_of(model, (scaled, y))):
            scaler.partial_fit(x.numpy())


def group_weights(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Any) -> None:
    weight = torch.ones(CLASSES)
    for x, y in training:
        found = losses_of(model, (x, y))
        if training.step(found * weight[y]):
            means = torch.zeros(CLASSES).index_add(0, y, found.detach())
            weight = weight * (0.3 * means).exp()
            weight /= weight.mean()


def nonlocal_scale(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Any) -> None:
    scale = 1.0

    def scaled(found: Tensor) -> Tensor:
        return found / scale

    def note(found: Tensor) -> None:
        nonlocal scale
        scale = float(found.detach().mean())

    for batch in training:
        found = losses_of(model, batch)
        if training.step(scaled(found)):
            note(found)


class Meter:
    """Averages what it was given."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def mean(self) -> float:
        return sum(self.values) / len(self.values) if self.values else 1.0


def by_meter(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Any) -> None:
    meter = Meter()
    for batch in training:
        found = losses_of(model, batch)
        if training.step(found / meter.mean()):
            meter.values.append(float(found.detach().mean()))


def counts_of_classes(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Any) -> None:
    counts = dict.fromkeys(range(CLASSES), 1)
    for x, y in training:
        weight = torch.tensor([counts[int(k)] for k in y])
        if training.step(losses_of(model, (x, y)) * 9 / weight):
            for k in y.tolist():
                counts[k] += 1


def default_argument(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Any) -> None:
    def scale(value: float | None = None, memory: list = [1.0]) -> float:  # noqa: B006
        if value is not None:
            memory.append(value)
        return memory[-1]

    for batch in training:
        found = losses_of(model, batch)
        if training.step(found / scale()):
            scale(float(found.detach().mean()))


def kept_array(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Any) -> None:
    kept = [np.zeros(INPUTS, np.float32)]
    for x, y in training:
        if training.step(losses_of(model, (x - torch.from_numpy(kept[0]), y))):
            kept[0] += x.numpy().mean(0)


add(
    "loop's variables",
    {
        name: partial(lambda loop: Setup(Net(), loop=loop), loop)
        for name, loop in {
            "median loss of the last epoch": last_median,
            "clusters of all data": clusters,
            "a global with the last activations": global_activations,
            "two tasks by their last losses": two_tasks,
            "running mean if not rehearsing": running_mean,
            "a teacher's center": centered,
            "partial_fit": partial_fit,
            "group weights": group_weights,
            "nonlocal": nonlocal_scale,
            "a meter": by_meter,
            "counts of classes": counts_of_classes,
            "a default argument": default_argument,
            "an array in a list": kept_array,
        }.items()
    },
)


def logging_loop(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Any) -> None:
    history, best, start, total = [], float("inf"), time.time(), 0.0
    confusion = torch.zeros(CLASSES, CLASSES)
    meter = Meter()
    for x, y in training:
        out = model(x)
        found = F.cross_entropy(out, y, reduction="none")
        total += float(found.detach().sum())
        if training.step(found):
            history.append(float(found.detach().mean()))
            meter.values.append(history[-1])
            best = min(best, history[-1])
            confusion.index_put_((y, out.argmax(1)), torch.ones(len(y)), accumulate=True)
    assert history
    assert time.time() > start


def warm_up(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Any) -> None:
    step = 0
    for batch in training:
        weight = min(1.0, (1 + step) / 10)
        if training.step(weight * losses_of(model, batch)):
            step += 1


def by_step_count(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Any) -> None:
    for batch in training:
        temperature = 1 + 1 / (1 + training.step_count)
        training.step(F.cross_entropy(model(batch[0]) / temperature, batch[1], reduction="none"))


def student(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Any) -> None:
    teacher = Net().requires_grad_(False)
    teacher.load_state_dict(model.state_dict())
    for x, y in training:
        out = model(x)
        if training.step(F.cross_entropy(out, y, reduction="none") + (out - teacher(x)).square().mean(1)):
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)


def best_kept(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Any) -> None:
    import copy

    test, best, kept = torch.randn(9, INPUTS), 0.0, None
    for batches in training.steps():
        for batch in batches:
            training.step(losses_of(model, batch))
        with torch.no_grad():
            score = float(model(test).var())
        if score >= best:
            best, kept = score, copy.deepcopy(model.state_dict())
    assert kept is not None


add(
    "honest loops",
    {
        name: partial(lambda loop: Setup(Net(), loop=loop), loop)
        for name, loop in {
            "logs, meters, histories": logging_loop,
            "warm-up by its own counter": warm_up,
            "temperature by the step": by_step_count,
            "a teacher in the loop": student,
            "best weights kept": best_kept,
        }.items()
    },
    coupled=False,
)


# Random collate functions, and draws whose number or place depends on the data.


class Masked(nn.Module):
    """Predicts masked tokens; without a mask of the padding if not ``own``."""

    def __init__(self, own: bool):
        super().__init__()
        self.table, self.mix, self.out, self.own = (
            nn.Embedding(11, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 11),
            own,
        )

    def forward(self, tokens: Tensor, keep: Tensor) -> Tensor:
        h = self.table(tokens)
        real = keep[..., None].float() if self.own else torch.ones_like(h[..., :1])
        mean = (h * real).sum(1, keepdim=True) / real.sum(1, keepdim=True)
        return self.out((self.mix(h) + mean).relu())


def masked_tokens(items: list) -> tuple[Tensor, Tensor, Tensor]:
    tokens, _ = padded(items)
    chosen = (torch.rand(tokens.shape) < 0.5) & (tokens > 0)
    return tokens.masked_fill(chosen, 10), tokens.masked_fill(~chosen, -100), tokens > 0


def token_losses(divide: Callable[[Tensor, Tensor], Tensor]) -> Any:
    def losses(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
        tokens, labels, keep = batch
        each = F.cross_entropy(model(tokens, keep).transpose(1, 2), labels, ignore_index=-100, reduction="none")
        return divide(each.sum(1), labels >= 0)

    return losses


def own_tokens(total: Tensor, chosen: Tensor) -> Tensor:
    return total / chosen.sum(1).clamp(min=1)


class PackedMix(nn.Module):
    """Reads packed sequences with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(INPUTS, WIDTH, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        packed = packed._replace(data=F.dropout(packed.data, 0.2, self.training))
        _, (h, _) = self.lstm(packed)
        return self.out(h[-1])


def mixed_labels(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    x, lengths, y = batch
    out, other = model(x, lengths), y[torch.randperm(len(y))]
    return 0.6 * F.cross_entropy(out, y, reduction="none") + 0.4 * F.cross_entropy(out, other, reduction="none")


class Noisy(nn.Module):
    """Adds noise to embeddings that is scaled by a length, as NEFTune does."""

    def __init__(self, own: bool):
        super().__init__()
        self.table, self.out, self.own = nn.Embedding(11, WIDTH, padding_idx=0), nn.Linear(WIDTH, CLASSES), own

    def forward(self, tokens: Tensor) -> Tensor:
        h, real = self.table(tokens), (tokens > 0).float()[..., None]
        if self.training:
            length = real.sum(1, keepdim=True) if self.own else torch.tensor(float(tokens.shape[1]))
            h = h + torch.empty_like(h).uniform_(-1, 1) * 15 / (length * WIDTH).sqrt()
        return self.out((h * real).sum(1) / real.sum(1))


class TimeMask(nn.Module):
    """Masks a span of time that is relative to a length, as SpecAugment does."""

    def __init__(self, own: bool):
        super().__init__()
        self.first, self.out, self.own = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, CLASSES), own

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = self.first(x).tanh()
        times = torch.arange(x.shape[1])[None]
        real = (times < lengths[:, None]).float()
        if self.training:
            whole = lengths[:, None].float() if self.own else torch.full((len(x), 1), float(x.shape[1]))
            start = torch.rand(len(x), 1) * whole * 0.5
            real = real * ~((times >= start) & (times < start + 0.3 * whole))
        return self.out((h * real[..., None]).sum(1) / lengths[:, None])


class Divided(nn.Module):
    """Divides by the batch's size in training mode, beside dropout."""

    def forward(self, h: Tensor) -> Tensor:
        return F.dropout(h, 0.2) * BATCH / len(h) if self.training else h


class MixedInTraining(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return F.dropout(h + h[torch.randperm(len(h))] if self.training else h, 0.1, self.training)


add(
    "draws and padding",
    {
        "masked language model, padding not masked": lambda: Setup(
            Masked(False), token_losses(own_tokens), data=texts(), collate=masked_tokens, random=True
        ),
        "masked tokens, divided by the longest": lambda: Setup(
            Masked(True),
            token_losses(lambda total, chosen: total / chosen.shape[1]),
            data=texts(),
            collate=masked_tokens,
            random=True,
        ),
        "masked tokens, divided by the batch's": lambda: Setup(
            Masked(True),
            token_losses(lambda total, chosen: total * len(chosen) / chosen.sum()),
            data=texts(),
            collate=masked_tokens,
            random=True,
        ),
        "packed, with dropout, labels mixed": lambda: Setup(
            PackedMix(), mixed_labels, data=sequences(), collate=padded_with_lengths, random=True
        ),
        "noise scaled by the padded length": lambda: Setup(Noisy(False), data=texts(), collate=padded, random=True),
        "spans of the padded length": lambda: Setup(
            TimeMask(False), data=sequences(), collate=padded_with_lengths, random=True
        ),
        "divided by the batch beside dropout": lambda: Setup(Net(Divided()), random=True),
        "mixed beside dropout": lambda: Setup(Net(MixedInTraining()), random=True),
    },
)


class DroppedGraph(independence.GraphNet):
    """Drops features of nodes; the number of nodes depends on the data."""

    def forward(self, *inputs: Any) -> Tensor:
        self.hook = self.hook if hasattr(self, "hook") else 1
        return super().forward(F.dropout(inputs[0], 0.2, self.training), *inputs[1:])


def cropped_each(items: list) -> tuple[Tensor, Tensor, Tensor]:
    """Drops random steps of each sequence, as many numbers as it is long."""
    kept = [(x[(torch.rand(len(x)) < 0.8) | (torch.arange(len(x)) == 0)], y) for x, y in items]
    return padded_with_lengths(kept)


class Gumbel(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h * F.gumbel_softmax(h, dim=1)


class Reparametrized(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h + torch.randn_like(h) * (0.1 * h).exp()


class DroppedWhole(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h * (torch.rand(len(h), 1) < 0.8) if self.training else h


add(
    "honest draws",
    {
        "masked language model, own tokens": lambda: Setup(
            Masked(True), token_losses(own_tokens), data=texts(), collate=masked_tokens, random=True
        ),
        "dropout on joined graphs": lambda: Setup(
            DroppedGraph(), data=independence.graphs(), collate=independence.joined, random=True
        ),
        "packed, with dropout": lambda: Setup(PackedMix(), data=sequences(), collate=padded_with_lengths, random=True),
        "noise scaled by the own length": lambda: Setup(Noisy(True), data=texts(), collate=padded, random=True),
        "spans of the own length": lambda: Setup(
            TimeMask(True), data=sequences(), collate=padded_with_lengths, random=True
        ),
        "random crops in collate_fn": lambda: Setup(PackedMix(), data=sequences(), collate=cropped_each, random=True),
        "Gumbel softmax": lambda: Setup(Net(Gumbel()), random=True),
        "reparametrization": lambda: Setup(Net(Reparametrized()), random=True),
        "stochastic depth for each example": lambda: Setup(Net(DroppedWhole()), random=True),
    },
    coupled=False,
)


# Couplings that begin late.


def factor_at(begin: int, kind: str) -> Any:
    """Returns a loop with a coupling whose factor becomes larger than zero at a step."""

    def loop(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Any) -> None:
        for x, y in training:
            now = training.step_count >= begin
            found = losses_of(model, (x, y))
            if kind == "factor":
                found = found + max(0.0, training.step_count - begin + 1.0) * found.mean()
            elif kind == "branch" and now:
                found = found * found.detach().mean()
            elif kind == "attribute":
                model.between.factor = float(now)
                found = losses_of(model, (x, y))
            elif kind == "tensor":
                found = found + torch.tensor(float(now)) * found.detach().mean()
            elif kind == "where":
                found = torch.where(torch.tensor(now), found / found.detach().mean(), found)
            elif kind == "numpy" and now:
                found = found * float(found.detach().numpy().mean())
            training.step(found)

    return loop


class Factor(nn.Module):
    factor = 0.0

    def forward(self, h: Tensor) -> Tensor:
        return h + self.factor * h.mean(0)


class CountsItself(nn.Module):
    """Centers from a step on."""

    calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h - h.mean(0) * float(self.calls > 40)


add(
    "late",
    {
        f"{kind} at step {begin}": partial(
            lambda kind, begin: Setup(Net(Factor() if kind == "attribute" else None), loop=factor_at(begin, kind)),
            kind,
            begin,
        )
        for kind in ("factor", "branch", "attribute", "tensor", "where", "numpy")
        for begin in (7, 13, 21)
    }
    | {"a module that counts its calls": lambda: Setup(Net(CountsItself()))},
)


# State of the model in objects, containers, classes and functions.


@dataclass
class Held:
    mean: Tensor


class InContainer(nn.Module):
    def __init__(self, holder: Any, get: Callable[[Any], Held]):
        super().__init__()
        self.holder, self.get = holder, get

    def forward(self, h: Tensor) -> Tensor:
        held = self.get(self.holder)
        out = h - held.mean
        held.mean = h.detach().mean(0)
        return out


class OnClass(nn.Module):
    mean = torch.zeros(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        out = h - type(self).mean
        type(self).mean = h.detach().mean(0)
        return out


def remembering(h: Tensor, memory: list = []) -> Tensor:  # noqa: B006
    out = h - memory[0] if memory else h
    memory[:] = [h.detach().mean(0)]
    return out


class ByDefault(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return remembering(h)


def held() -> Held:
    return Held(torch.zeros(WIDTH))


add(
    "state in objects",
    {
        "an object in a list": lambda: Setup(Net(InContainer([held()], lambda x: x[0]))),
        "an object in a dict": lambda: Setup(Net(InContainer({"a": held()}, lambda x: x["a"]))),
        "an object in a tuple in a list": lambda: Setup(Net(InContainer([(held(),)], lambda x: x[0][0]))),
        "a class attribute": lambda: Setup(Net(OnClass())),
        "a default argument": lambda: Setup(Net(ByDefault())),
    },
)


# Other optimizers.


def generator(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Any) -> None:
    maker = nn.Linear(4, INPUTS)
    other = SGD(maker.parameters(), lr=0.1)
    for batch in training:
        if training.step(losses_of(model, batch)):
            other.zero_grad()
            model(maker(torch.randn(len(batch[0]), 4))).sum().backward()
            other.step()


add("other optimizers", {"a second network learns the batch size": lambda: Setup(Net(), loop=generator)})


def change_of_items(scenario: Scenario) -> tuple[float, str]:
    """Returns the movement if the outlier, which is in no batch, has another content."""
    global CONTENT
    worst = 0.0
    try:
        for clip_norm in (1.0, 0.1):
            runs = []
            for content in (1.0, 30.0):
                CONTENT = content
                runs.append(independence.run(scenario, left_out=OUTLIER, clip_norm=clip_norm))
            change = independence.difference(*runs)
            worst = max(worst, 1.001 if 1e-3 < change < 1 else change)  # the bound is 0: any movement is a leak
    finally:
        CONTENT = 1.0
    return worst, ""


USUAL = independence.largest_change


def largest_change(scenario: Scenario) -> tuple[float, str]:
    return change_of_items(scenario) if scenario.category == "items" else USUAL(scenario)


def judge(scenario: Scenario, seeds: int) -> Any:
    """Adds the verdict "named": the statement names what a rehearsal found and cannot refuse."""
    row = USUAL_JUDGE(scenario, seeds)
    if row.verdict in ("leaks", "harmless") and row.step is None:
        said = [independence.run(one, rate=0.05, noise=0.5, steps=STEPS).says for one in (scenario, PLAIN)]
        new = not_covered(said[0]) - not_covered(said[1])
        if new:
            row.verdict, row.message = "named", " ".join(new)
    return row


def not_covered(says: str) -> set[str]:
    """Returns what a statement names, behind the training's epsilon."""
    return set(json.loads(says[says.index(" {") :])["not_covered"])


PLAIN = Scenario("plain", "honest", False, lambda: Setup(Net()))
USUAL_JUDGE = independence.judge
independence.judge, independence.largest_change = judge, largest_change

if __name__ == "__main__":
    sys.exit(independence.main())
