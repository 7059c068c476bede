# SPDX-License-Identifier: Apache-2.0
"""An item that reads other items is refused, whatever it reads them from; other data sets train."""

import functools
import os
import random
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset
from trainings import training_of

import torch_privacy as tp
from torch_privacy.sampling.exchanged_items import ExchangedItems
from torch_privacy.sampling.item_check import item_check
from torch_privacy.sampling.shadow import DatasetShadow

N = 60
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 3
ROWS = [*zip(X, Y, strict=True)]
SERIES = torch.randn(3 * N + 8, generator=torch.Generator().manual_seed(1))
OWNERS = np.arange(N) // 4


class Stored(Dataset):
    """Holds rows, and makes each item by a function of itself and the index."""

    def __init__(self, item, **more):
        self.x, self.y, self.item = X.clone(), Y.clone(), item
        vars(self).update(more)

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.item(self, i)


class Cached(Stored):
    """Computes means at the first fetch, in three ways."""

    means = None

    @functools.cached_property
    def mean(self):
        return self.x.mean(0)

    @functools.lru_cache  # noqa: B019
    def mean_of(self, label):
        return self.x[self.y == label].mean(0)

    def lazy(self):
        if self.means is None:
            self.means = self.x.mean(0)
        return self.means


class Together(Stored):
    """Fetches many items in one call."""

    def __getitems__(self, indices):
        return [self.x[i] - self.x.mean(0) for i in indices]


def first_sound(self, i):
    while self.x[i].isnan().any():
        i = (i + 1) % N
    return self.x[i]


def cutmix(self, i):
    image, other = self.x[i].clone(), self.x[random.randrange(N)]
    image[:2] = other[:2]
    return image


def blended(self, i):
    return self.x[i] + self.x[int(torch.randint(N, ()))]


def by_global(self, i):
    return ROWS[i][0] - torch.stack([x for x, _ in ROWS]).mean(0)


def with_default(self, i, rows=X):
    return rows[i] - rows.mean(0)


def by_closure():
    rows = X.clone()
    return Stored(lambda self, i: self.x[i] - rows.mean(0))


def by_table():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": X[:, 0].numpy()})
    return Stored(lambda self, i: float(self.frame["x"].rolling(3, min_periods=1).mean().iloc[i]), frame=frame)


def by_transform():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": X.tolist()})
    return rows.with_transform(lambda batch: {"x": [[*x, *rows[random.randrange(N)]["x"]] for x in batch["x"]]})


def with_broken():
    data = Stored(first_sound)
    data.x[::9] = float("nan")
    return data


def skewed(start, length=5):
    return Stored(lambda self, i: self.series[start(self, i) : start(self, i) + length], series=SERIES)


class MinusFirst:
    """Subtracts the first row that it gets; has no attribute until then."""

    first = None

    def __call__(self, x):
        self.first = x.clone() if self.first is None else self.first
        return x - self.first


READ_OTHERS = {
    "mixup": lambda: Stored(blended),
    "cutmix": lambda: Stored(cutmix),
    "mosaic": lambda: Stored(lambda self, i: [self.x[j] for j in (i, random.randrange(N))], x=[*X]),
    "triplets": lambda: Stored(
        lambda self, i: self.x[[i, random.choice(self.of_class[int(self.y[i])])]],
        of_class={label: [*range(label, N, 3)] for label in range(3)},
    ),
    "negatives by a generator of its own": lambda: Stored(
        lambda self, i: (self.x[i], self.x[self.generator.integers(N)]), generator=np.random.default_rng(0)
    ),
    "sliding windows": lambda: skewed(lambda self, i: i),
    "sliding windows with a stride": lambda: skewed(lambda self, i: 3 * i),
    "sliding windows by a list of starts": lambda: Stored(
        lambda self, i: self.series[self.starts[i] : self.starts[i] + 5], series=SERIES, starts=[*range(0, 3 * N, 3)]
    ),
    "windows of a text": lambda: Stored(lambda self, i: self.x[i : i + 9], x="".join(map(chr, range(97, 97 + N + 9)))),
    "broken examples": with_broken,
    "lazy means": lambda: Cached(lambda self, i: self.x[i] - self.lazy()),
    "a cached property": lambda: Cached(lambda self, i: self.x[i] - self.mean),
    "a cached method": lambda: Cached(lambda self, i: self.x[i] - self.mean_of(int(self.y[i]))),
    "labels": lambda: Stored(lambda self, i: (self.x[i], self.y[i] - self.y.float().mean())),
    "nearest rows": lambda: Stored(lambda self, i: self.x[(self.x - self.x[i]).norm(dim=1).argsort()[:3]]),
    "the previous row": lambda: Stored(lambda self, i: (self.x[i], self.x[i - 1])),
    "a fixed partner": lambda: Stored(
        lambda self, i: self.x[i] + self.x[self.partner[i]], partner=np.random.default_rng(0).permutation(N)
    ),
    "a partner in a copy": lambda: Stored(lambda self, i: self.x[i] + self.z[(7 * i + 3) % N], z=X.clone()),
    "a global": lambda: Stored(by_global),
    "a closure": by_closure,
    "a default argument": lambda: Stored(with_default),
    "a table": by_table,
    "a transform": by_transform,
    "a dictionary": lambda: Stored(
        lambda self, i: self.by_name[self.names[i]] + self.by_name[random.choice(self.names)],
        names=[f"n{i}" for i in range(N)],
        by_name={f"n{i}": x for i, x in enumerate(X)},
    ),
    "fetched together": lambda: Together(None),
    "a state": lambda: Stored(
        lambda self, i: vars(self).update(m=self.m + self.x[(i + 1) % N]) or self.x[i] - self.m, m=0.0
    ),
    "a mean of the items so far": lambda: Stored(
        lambda self, i: vars(self).update(m=0.9 * self.m + self.x[i]) or self.x[i] - self.m, m=0.0
    ),
    "the first item": lambda: Stored(lambda self, i: self.change(self.x[i]), change=MinusFirst()),
    "other blocks": lambda: Stored(
        lambda self, i: [self.flat[3 * j : 3 * j + 3] for j in (i, random.randrange(N))], flat=X.flatten().clone()
    ),
    "a child": lambda: ConcatDataset([Stored(lambda self, i: self.x[i]), Stored(blended)]),
    "rows outside of a subset": lambda: Subset(Stored(blended), range(0, N, 2)),
    "a subset of a subset": lambda: Subset(Subset(Stored(blended), range(N - 1, 9, -1)), range(5, 45)),
}


def of_records():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": X.tolist()}).shuffle(seed=0)
    return Stored(lambda self, i: torch.tensor(rows[i]["x"]) + torch.randn(3))


def by_name():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": X[:, 0].numpy()}, index=[f"p{i}" for i in range(N)]).sample(frac=1.0, random_state=0)
    return Stored(lambda self, i: float(self.frame.loc[self.names[i]]["x"]), frame=frame, names=sorted(frame.index))


def kept(self, i):
    if i not in self.cache:
        self.cache[i] = self.x[i] * 2
    return self.cache[i] + torch.randn(3)


class Open(Stored):
    """Holds a lock and a file, and closes the file at its end."""

    def __init__(self, item):
        super().__init__(item, lock=threading.Lock(), file=open(os.devnull))

    def __del__(self):
        self.file.close()


ENDS = np.cumsum(np.random.default_rng(0).integers(1, 4, size=N))
READ_THEMSELVES = {
    "rows": lambda: Stored(lambda self, i: (self.x[i] + torch.randn(3), self.y[i])),
    "texts": lambda: Stored(
        lambda self, i: [self.words[w] for w in self.texts[i].split()],
        texts=[f"w{i} w{7 * i % 90}" for i in range(N)],
        words={f"w{k}": k for k in range(100)},
    ),
    "embedded classes": lambda: Stored(
        lambda self, i: self.x[i] + self.of_class[self.y[i]], of_class=torch.randn(3, 3)
    ),
    "records": of_records,
    "a table by name": by_name,
    "a cache by index": lambda: Stored(kept, cache={}),
    "generators of its own": lambda: Stored(
        lambda self, i: self.x[i] + self.a.normal() + torch.randn(3, generator=self.b),
        a=np.random.default_rng(0),
        b=torch.Generator(),
    ),
    "generators of its own, by content": lambda: Stored(
        lambda self, i: [self.generator.normal() for _ in range(1 + int(self.y[i]))], generator=np.random.default_rng(0)
    ),
    "words": lambda: Stored(
        lambda self, i: self.table[self.words[i]].mean(0),
        table=torch.randn(5 * N, 3),
        words=np.random.default_rng(0).integers(5 * N, size=(N, 40)),
    ),
    "draws by content": lambda: Stored(lambda self, i: [random.random() for _ in range(1 + int(self.y[i]))]),
    "locks and files": lambda: Open(lambda self, i: self.x[i] if self.lock and not self.file.closed else None),
    "blocks": lambda: skewed(lambda self, i: 3 * i, 3),
    "blocks by a list of starts": lambda: Stored(
        lambda self, i: SERIES[self.starts[i] : self.starts[i] + 3], starts=np.random.default_rng(0).permutation(N) * 3
    ),
    "texts of several lengths in one": lambda: Stored(
        lambda self, i: self.series[self.ends[i] : self.ends[i + 1]], series=SERIES, ends=np.append(0, ENDS)
    ),
    "two halves": lambda: Stored(lambda self, i: (self.x[i], self.x[i + N]), x=torch.randn(2 * N, 3)),
    "an order": lambda: Stored(lambda self, i: (self.x[self.order[i]], self.y[self.order[i]]), order=[*range(1, N), 0]),
    "a computed order": lambda: Stored(lambda self, i: (self.x[N - 1 - i], self.y[N - 1 - i])),
    "a dictionary by a part of the name": lambda: Stored(
        lambda self, i: self.found[self.files[i][:-4]],
        files=[f"{7 * i % N}.png" for i in range(N)],
        found={str(i): x for i, x in enumerate(X)},
    ),
    "parts": lambda: ConcatDataset([Stored(lambda self, i: self.x[i]), Subset(Stored(kept, cache={}), range(5, 40))]),
    "subsets": lambda: Subset(Subset(Stored(lambda self, i: self.x[i]), range(N - 1, 9, -1)), range(5, 45)),
}


class Numbers(Dataset):
    """Stores nothing."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return float(i)


def compare(dataset, owners=None, rounds=3):
    """Compares the items of half of the data set as the first rehearsals do; returns what could not be compared."""
    check, generator = item_check(dataset, owners), np.random.default_rng(0)
    for _ in range(rounds):
        check(generator.permutation(len(dataset))[: len(dataset) // 2], generator, thorough=True)
    return check.notes


@pytest.mark.thorough(but=10)
@pytest.mark.parametrize("case", READ_OTHERS)
def test_an_item_that_reads_others_is_refused(case):
    with pytest.raises(tp.Refused, match="reads other examples"):
        compare(READ_OTHERS[case]())


@pytest.mark.parametrize("case", READ_THEMSELVES)
def test_an_item_of_its_own_rows_passes(case):
    dataset = READ_THEMSELVES[case]()
    compare(dataset)
    dataset[3]  # nothing of the original was closed or changed
    assert torch.equal(X, torch.stack([x for x, _ in ROWS]))


def test_examples_of_one_owner_may_read_each_other():
    compare(Stored(lambda self, i: self.x[4 * (i // 4) + random.randrange(4)] + self.x[i]), OWNERS)
    with pytest.raises(tp.Refused, match="`x`"):
        compare(Stored(blended), OWNERS)


def test_the_original_is_not_written_to():
    dataset = Cached(lambda self, i: vars(self).setdefault("seen", []).append(i) or self.x[i])
    before = {**vars(dataset)}
    compare(dataset)
    assert {**vars(dataset)} == before
    assert Cached.means is None


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (Numbers(), "Nothing was found"),
        (Stored(lambda self, i: (torch.randn(2, generator=SEEDED[i]), self.y[i])), "comes from elsewhere"),
        (Stored(lambda self, i: os.urandom(4)), "differs from one time"),
        (Subset(Stored(lambda self, i: self.x[i]), range(9)), "fewer than 16"),
        (Stored(lambda self, i: self.x[random.randrange(200)], x=torch.randn(200)), "do not follow from their number"),
    ],
    ids=["nothing stored", "elsewhere", "not repeatable", "few", "a table of noise"],
)
def test_what_cannot_be_compared_is_noted(dataset, why):
    assert any(why in note for note in compare(dataset))


class _Seeded:
    """Stands for a data base: an object without rows that can be seen."""

    __slots__ = ()

    def __getitem__(self, i):
        return torch.Generator().manual_seed(i)


SEEDED = _Seeded()


@pytest.mark.parametrize("settings", [{}, {"examples": {"num_workers": 2}}, {"examples": {"views": 2}}], ids=str)
def test_training_refuses_items_that_read_others(settings):
    def losses(model, x):
        found = model(x).square().sum(1)
        return found.view(-1, 2) if settings.get("examples", {}).get("views") else found

    for item, passes in ((lambda self, i: self.x[i], True), (blended, False)):
        training = training_of(dataset=Stored(item, x=X.double()), num_steps=2, **settings)
        if passes:
            for x in training:
                training.step(losses(training.model, x))
            assert training.statement()["independence"]["not_compared"] == []
        else:
            with pytest.raises(tp.Refused, match="reads other examples"):
                next(iter(training))


class Numbers(Dataset):
    """Has more items than there is memory for a number of each, and stores none."""

    def __len__(self):
        return 10**15

    def __getitem__(self, i):
        return i % 7


def test_items_are_fetched_after_others_without_a_list_of_all_items():
    """Sorting a list of all took most of the time of a rehearsal where there are a million."""
    run = ExchangedItems(DatasetShadow.of(Numbers()), np.random.default_rng(0), None, len(Numbers()))
    items = np.array([3, 10**14])
    assert run.after_others(items) == run.items(items)
