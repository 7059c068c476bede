# SPDX-License-Identifier: Apache-2.0
"""A ``collate_fn`` that keeps something of a batch for later ones is refused; others train."""

from collections import defaultdict
from functools import partial

import pytest
import torch
from trainings import training_of

import torch_privacy as tp

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)).double()


class Largest:
    """Divides by the largest entry so far."""

    largest = 1e-3

    def __call__(self, rows):
        x = torch.stack(rows)
        self.largest = max(self.largest, float(x.abs().max()))
        return x / self.largest


class OfFirst:
    """Divides by the largest entry of the first batch."""

    largest = None

    def __call__(self, rows):
        x = torch.stack(rows)
        if self.largest is None:
            self.largest = float(x.abs().max())
        return x / self.largest


class Numbered:
    """Numbers words in the order in which they appear."""

    def __init__(self, bound):
        self.words = defaultdict(lambda: len(self.words))
        self.words.default_factory = self.words.__len__ if bound else self.words.default_factory

    def __call__(self, rows):
        return torch.stack(rows) * torch.tensor([self.words[int(10 * row[0])] for row in rows])[:, None]


def largest_of_function():
    def collate(rows):
        x = torch.stack(rows)
        collate.largest = max(getattr(collate, "largest", 0.0), float(x.abs().max()))
        return x / collate.largest

    return collate


def with_numbers():
    words = {}

    def collate(rows):
        numbers = [words.setdefault(int(10 * row[0]), len(words)) for row in rows]
        return torch.stack(rows) * torch.tensor(numbers)[:, None]

    return collate


def centered():
    def collate(rows, sums=torch.zeros(3).double()):  # noqa: B008
        sums += torch.stack(rows).sum(0)
        return torch.stack(rows) - sums.sign()

    return collate


def with_length(rows, longest=[0]):  # noqa: B006
    """Pads with zeros to the largest length so far."""
    longest[0] = max(longest[0], 4 + int(torch.stack(rows).max() > 2))
    return torch.nn.functional.pad(torch.stack(rows), (0, longest[0] - 3))


class Counting:
    """Counts its batches, and keeps items by their number."""

    def __init__(self):
        self.count, self.known = 0, {}

    def __call__(self, items):
        self.count += 1
        return torch.stack([self.known.setdefault(int(i), row) for i, row in items]) * (self.count < 1000)


def trained(dataset, collate_fn, **more):
    training = training_of(dataset=dataset, num_steps=3, examples={"collate_fn": collate_fn} | more)
    for x in training:
        training.step(training.model(x[:, :3]).square().sum(1))
    return training


MAKE = {
    "largest": Largest,
    "of first": OfFirst,
    "attribute of a function": largest_of_function,
    "numbers": with_numbers,
    "numbers by a factory": partial(Numbered, bound=False),
    "numbers by a bound factory": partial(Numbered, bound=True),
    "centered": centered,
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_what_collate_keeps_of_earlier_batches_is_refused(make, workers):
    with pytest.raises(tp.Refused, match="examples that it had before"):
        trained([*X], make(), num_workers=workers)


@pytest.mark.parametrize(
    ("dataset", "collate"), [([*X], with_length), ([*enumerate(X)], Counting())], ids=["length", "counting"]
)
def test_a_collate_that_makes_the_same_of_each_example_trains(dataset, collate):
    assert trained(dataset, collate).statement()["independence"]["not_compared"] == []


def test_sparse_batches_train_as_dense_ones_do():
    products = {
        "sparse": (lambda rows: torch.stack(rows).to_sparse(), lambda x, w: torch.sparse.mm(x, w.T)),
        "dense": (torch.stack, lambda x, w: x @ w.T),
    }
    found = {}
    for name, (collate, product) in products.items():
        torch.manual_seed(0)
        training = training_of(torch.nn.Linear(3, 1), [*X], num_steps=3, examples={"collate_fn": collate})
        for x in training:
            training.step(product(x, training.model.weight).squeeze(1) + training.model.bias)
        found[name] = training.model.weight.detach().clone()
    torch.testing.assert_close(found["sparse"], found["dense"])


class Dropping(torch.utils.data.Dataset):
    """Leaves some of the items out that are fetched in one call."""

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i]

    def __getitems__(self, indices):
        return [X[i] for i in indices if X[i, 0] > 0]


def nested(rows):
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize(
    ("dataset", "collate", "named"),
    [(Dropping(), None, "items for .* indices"), ([*X], nested, "nested tensor")],
    ids=["items", "nested"],
)
def test_batches_that_cannot_be_compared_are_refused_in_words(dataset, collate, named):
    training = training_of(torch.nn.Linear(3, 1), dataset, num_steps=3, examples={"collate_fn": collate})
    with pytest.raises(tp.Refused, match=named):
        _ = [training.step(training.model(torch.stack(x.unbind())).squeeze(1)) for x in training]
