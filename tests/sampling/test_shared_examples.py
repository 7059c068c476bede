# SPDX-License-Identifier: Apache-2.0
"""Two data sets share an example if rows of equal content say so, wherever they lie in memory."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

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
