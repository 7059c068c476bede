# SPDX-License-Identifier: Apache-2.0
"""A ``collate_fn`` that keeps something of a batch for later ones is refused; others train."""

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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [Largest, with_numbers, centered], ids=["largest", "numbers", "centered"])
def test_what_collate_keeps_of_earlier_batches_is_refused(make, workers):
    with pytest.raises(tp.Refused, match="examples that it had before"):
        trained([*X], make(), num_workers=workers)


@pytest.mark.parametrize(
    ("dataset", "collate"), [([*X], with_length), ([*enumerate(X)], Counting())], ids=["length", "counting"]
)
def test_a_collate_that_makes_the_same_of_each_example_trains(dataset, collate):
    assert trained(dataset, collate).statement()["independence"]["not_compared"] == []
