# SPDX-License-Identifier: Apache-2.0
"""pate-mnist on images made up here: disjoint teachers, priced votes. And the norms of the code for film reviews."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import TensorDataset

from torch_privacy.experiments import pate_mnist, sparse_norms
from torch_privacy.experiments.networks import AveragedWords
from torch_privacy.experiments.pate_mnist import Size, student_numbers, votes_of_teachers
from torch_privacy.experiments.rows import Context
from torch_privacy.privacy import compose
from torch_privacy.privacy.pate import votes_event

TINY = Size(teachers=6, teacher_steps=2, student_steps=3, queries={8: 5})


@pytest.fixture
def made_up(monkeypatch):
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    train, test = (TensorDataset(torch.rand(n, 1, 28, 28), torch.randint(10, (n,))) for n in (60, 30))
    data = SimpleNamespace(train=train, test=test)
    monkeypatch.setattr(pate_mnist, "load_mnist", lambda folder: data)
    monkeypatch.setattr(pate_mnist, "NUM_PUBLIC", 20)
    votes_of_teachers.cache_clear()
    return data


def test_every_example_belongs_to_one_teacher_who_votes_once(made_up, monkeypatch):
    seen = []

    def teach(images, digits, num_steps, seed):
        seen.append(images)
        return lambda x: torch.eye(10)[torch.full((len(x),), seed % 10)]

    monkeypatch.setattr(pate_mnist, "trained_teacher", teach)
    monkeypatch.setattr(pate_mnist, "predicted", lambda model, x: model(x).argmax(1))
    votes = votes_of_teachers(TINY, 0, None)
    assert votes.sum(1).tolist() == [6] * 5
    assert len(seen) == 6
    everything = torch.cat(seen).flatten(1)
    assert len(everything) == 60 == len(everything.unique(dim=0))


def test_noise_spends_the_epsilon_and_the_certified_one_covers_any_votes(made_up):
    numbers = student_numbers(TINY, 8, Context(quick=True, seed=0, data=None))
    certified = numbers["epsilon"]
    assert 7.9 < certified.high <= 8
    assert certified == compose([(votes_event(numbers["noise_stddev"]), 5)]).epsilon(1e-5)
    assert numbers["queries"] == 5
    assert 0 <= numbers["epsilon_data_dependent"]


def test_authors_norms_are_exact_only_where_no_word_stands_twice():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = AveragedWords(50).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    labels = torch.tensor([0])

    def norms(words):
        """Of what is added up, and of the exact gradient, at a clip norm far below."""
        total = torch.cat([part.flatten() for part in sparse_norms.clipped_sums(model, words, labels, 1e-3)])
        exact = torch.autograd.grad(torch.nn.functional.cross_entropy(model(words), labels), list(model.parameters()))
        direction = torch.cat([part.flatten() for part in exact])
        torch.testing.assert_close(total / total.norm(), direction / direction.norm())
        return float(total.norm())

    assert norms(torch.randperm(50)[None, :8]) == pytest.approx(1e-3)
    assert norms(torch.full((1, 8), 3)) > 1.1e-3
