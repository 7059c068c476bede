# SPDX-License-Identifier: Apache-2.0
"""Two data sets share an example if rows of equal content say so, wherever they lie; no data set has a row twice."""

import functools

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import torch_privacy as tp
from torch_privacy.sampling import shared_examples
from torch_privacy.sampling.shared_examples import share_examples

N = 80
X, Y = torch.randn(N, 12, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 3
PRIVATE = TensorDataset(X, Y)
OTHERS = torch.randn(20, 12, generator=torch.Generator().manual_seed(1))


class Items(Dataset):
    """Makes items in code, with a little noise if asked."""

    def __init__(self, x, noise=0.0):
        self.x, self.noise = x, noise

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i] + self.noise * torch.randn(12), "label": int(Y[i])}


def records(rows):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict(
        {"idx": [*range(len(rows))], "tokens": [row.tolist() for row in rows], "label": Y[: len(rows)].tolist()}
    )


def few_categories(seed, n):
    return TensorDataset(torch.from_numpy(np.random.default_rng(seed).integers(4, size=(n, 3))))


SHARED = {
    "a clone": lambda: (TensorDataset(X[:9].clone()), PRIVATE),
    "by numpy": lambda: (TensorDataset(torch.from_numpy(X.numpy().copy()), 0 * Y), PRIVATE),
    "another shape and precision": lambda: (TensorDataset(X.double().view(N, 1, 3, 4)), PRIVATE),
    "one of many": lambda: (TensorDataset(torch.cat([OTHERS, X[7:8]])), PRIVATE),
    "in a subset": lambda: (Subset(TensorDataset(X.clone()), [3]), Subset(TensorDataset(X.clone()), [2, 3])),
    "a list": lambda: ([(x.clone(), 1) for x in X[:5]], PRIVATE),
    "arrays": lambda: ([(x, 1) for x in X.numpy()[:5].copy()], PRIVATE),
    "items": lambda: (Items(X.clone()), Items(X[:20].clone())),
    "augmented items": lambda: (Items(X[:20].clone(), 0.1), Items(X.clone(), 0.1)),
    "selected records": lambda: (records(X).select(range(5, 30)), records(X)),
    "shuffled records": lambda: (records(X).shuffle(seed=0).select(range(9)), records(X)),
    "records in another format": lambda: (records(X).select([4]).with_format("torch"), records(X)),
}
APART = {
    "other rows with equal labels": lambda: (TensorDataset(OTHERS, Y[:20].clone()), PRIVATE),
    "other rows of one tensor": lambda: (TensorDataset(X[:40]), TensorDataset(X[40:])),
    "items": lambda: (Items(OTHERS), Items(X)),
    "records with equal numbers": lambda: (records(OTHERS), records(X)),
    "none": lambda: ([], PRIVATE),
    "items that fail": lambda: ([object()], Items(X)),
    "few categories": lambda: (few_categories(0, 40), few_categories(1, 400)),
}


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("case", SHARED)
def test_equal_rows_are_found(case, coarse, monkeypatch):
    if coarse:
        monkeypatch.setattr(shared_examples, "MOST_BYTES", 0)
        monkeypatch.setattr(shared_examples, "FEW_ENTRIES", 5)
    a, b = SHARED[case]()
    assert share_examples(a, b)
    assert share_examples(b, a) or case == "one of many"


@pytest.mark.parametrize("case", APART)
def test_other_rows_are_not_mistaken(case):
    a, b = APART[case]()
    assert not share_examples(a, b)
    assert not share_examples(b, a)


@functools.cache
def kept_records():
    return records(X)


def joined(*parts):
    return pytest.importorskip("datasets").concatenate_datasets(parts)


def lists_in_one_buffer(rows):
    values = pa.array(np.arange(8.0))
    return [kept_records().__class__(pa.table({"x": rows(values, begin)})) for begin in (0, 4)]


ITEMS = Items(X)
TWICE = {
    "a subset": lambda: Subset(PRIVATE, [0, 3, 3]),
    "an index from the end": lambda: Subset(PRIVATE, [0, N - 1, -1]),
    "a subset of a subset": lambda: Subset(Subset(PRIVATE, range(9, 3, -1)), [0, 5, 0]),
    "parts": lambda: ConcatDataset([PRIVATE, TensorDataset(OTHERS), PRIVATE]),
    "parts that overlap": lambda: ConcatDataset([Subset(PRIVATE, range(5)), Subset(TensorDataset(X), [8, 4])]),
    "slices that overlap": lambda: ConcatDataset([TensorDataset(X[:9], Y[:9]), TensorDataset(X[8:20], Y[8:20])]),
    "parts in code": lambda: ConcatDataset([Items(X), Subset(ITEMS, [1]), Subset(ITEMS, [1])]),
    "entries of a list": lambda: [*zip(X, Y, strict=True)][:3] * 2,
    "records": lambda: records(X).select([4, 7, 4]),
    "joined records": lambda: joined(kept_records().select(range(9)), kept_records().select([20, 3])),
    "slices of records": lambda: joined(kept_records().select(range(8, 14)), kept_records().select(range(10, 11))),
}
ONCE = {
    "a subset": lambda: Subset(Subset(PRIVATE, range(9, 3, -1)), [0, 5, -3]),
    "parts": lambda: ConcatDataset([Subset(PRIVATE, range(5)), TensorDataset(X.clone()), Subset(ITEMS, [1]), Items(X)]),
    "slices": lambda: ConcatDataset([TensorDataset(X[:8:2]), TensorDataset(X[1:8:2]), TensorDataset(X[8:, 6:])]),
    "one number for all": lambda: TensorDataset(torch.zeros(1, 1).expand(N, 1), X),
    "equal texts and numbers": lambda: ["a", "a", ("a", 1), ("a", 1)] + [1] * 9,
    "records": lambda: records(X).shuffle(seed=0).select(range(3, 9)),
    "joined records": lambda: joined(kept_records().select(range(9)), kept_records().select([20, 30]), records(X)),
    "lists in one buffer": lambda: joined(
        *lists_in_one_buffer(
            lambda values, k: pa.ListArray.from_arrays(pa.array([k, k + 2, k + 4], pa.int32()), values)
        )
    ),
    "pairs in one buffer": lambda: joined(
        *lists_in_one_buffer(lambda values, k: pa.FixedSizeListArray.from_arrays(values[k : k + 4], 2))
    ),
    "records without a value": lambda: joined(*(kept_records().from_dict({"none": [None] * 3}) for _ in "ab")),
}


@pytest.mark.parametrize("case", TWICE)
def test_an_example_that_is_taken_twice_is_refused(case):
    with pytest.raises(tp.Refused, match="more than once"):
        tp.Examples(TWICE[case]())
    owners = [0] * len(TWICE[case]())
    assert tp.Examples(TWICE[case](), owners=owners, per_owner=1).num_units == 1


@pytest.mark.parametrize("case", ONCE)
def test_examples_that_are_taken_once_are_not_refused(case):
    assert tp.Examples(ONCE[case]()).num_units == len(ONCE[case]())
