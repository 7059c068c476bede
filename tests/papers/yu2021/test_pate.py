# SPDX-License-Identifier: Apache-2.0
"""pate-mnist on images made up here: disjoint teachers, priced votes. And the norms of the code for film reviews."""

from dataclasses import replace

import pytest
import torch
from torch.utils.data import TensorDataset

from torch_privacy.data import Data
from torch_privacy.privacy import compose
from torch_privacy.runs.rows import Context
from torch_privacy_papers.yu2021 import pate
from torch_privacy_papers.yu2021.pate import PateSize, student_numbers, votes_of_teachers

TINY = PateSize("MNIST", teachers=6, threshold=4.0, answers={8: 5})
IMAGES = {"MNIST": ("load_mnist", (1, 28, 28)), "CIFAR-10": ("load_cifar10", (3, 32, 32))}


@pytest.fixture
def made_up(monkeypatch, request):
    load, shape = IMAGES[getattr(request, "param", "MNIST")]
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    train, test = (TensorDataset(torch.rand(n, *shape), torch.randint(10, (n,))) for n in (60, 40))
    monkeypatch.setattr(pate, load, lambda folder: Data("made up", train, test, tuple(range(10)), "", {}))
    monkeypatch.setattr(pate, "NUM_SCORED", 10)
    pate.images_seen.cache_clear()
    votes_of_teachers.cache_clear()
    yield train.tensors[0]
    pate.images_seen.cache_clear()
    votes_of_teachers.cache_clear()


def test_every_example_belongs_to_one_teacher_who_votes_once(made_up, monkeypatch):
    seen = []

    class Teacher:
        @classmethod
        def fitted(cls, points, labels, width):
            seen.append(points)
            return cls()

        def predicted(self, points):
            return torch.full((len(points),), len(seen) % 10)

    monkeypatch.setattr(pate, "Ridge", Teacher)
    votes = votes_of_teachers(TINY, 0, None)
    assert votes.sum(1).tolist() == [6] * 10
    assert len(seen) == 6
    everything = torch.cat(seen)
    assert len(everything) == 60 == len(everything.unique(dim=0))


@pytest.mark.parametrize("left_out", [0, 31, 59])
def test_one_example_less_changes_one_vote_on_every_question(made_up, monkeypatch, left_out):
    """What the events' sensitivities, √2 of the votes and 1 of the largest count, are said of."""
    votes = votes_of_teachers(TINY, 0, None)
    whole = pate.images_seen(TINY, None)
    kept = [number for number in range(60) if number != left_out]
    less = replace(whole, private=whole.private[kept], digits=whole.digits[kept])
    data = pate.load_mnist(None)
    neighbor = replace(data, train=TensorDataset(*(tensor[kept] for tensor in data.train.tensors)))
    votes_of_teachers.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(pate, "images_seen", lambda *_: less)
        patch.setattr(pate, "load_mnist", lambda folder: neighbor)
        others = votes_of_teachers(TINY, 0, None)
    assert (votes - others).norm(dim=1).max() <= 2**0.5 + 1e-6
    assert (votes.amax(1) - others.amax(1)).abs().max() <= 1


def test_a_teacher_without_examples_has_no_vote(made_up):
    many = PateSize("MNIST", teachers=400, threshold=4.0, answers={8: 5})
    owners = pate.teachers_of(made_up, 400, seed=0)
    assert votes_of_teachers(many, 0, None).sum(1).tolist() == [len(owners.unique())] * 10


def test_principal_components_see_public_images_only(made_up):
    before = pate.images_seen(TINY, None)
    made_up.zero_()
    pate.images_seen.cache_clear()
    pate.with_inputs.cache_clear()
    after = pate.images_seen(TINY, None)
    assert not torch.equal(before.private, after.private)
    assert torch.equal(before.public, after.public)
    assert torch.equal(before.scored, after.scored)
    assert before.width == after.width


@pytest.mark.parametrize("confident", [False, True])
def test_noise_spends_the_epsilon_and_the_certified_one_covers_any_votes(made_up, confident):
    numbers = student_numbers(TINY, 8, confident, Context(quick=True, seed=0, data=None))
    certified = numbers["epsilon"]
    assert 7.9 < certified.high <= 8
    assert certified == compose(TINY.mechanism(8, confident).events()).epsilon(1e-5)
    assert (numbers["tests"] is not None) == confident
    assert numbers["queries"] <= 5
    assert 0 <= numbers["epsilon_data_dependent"] <= 1.1 * certified.high  # Renyi orders see a little more


@pytest.mark.parametrize("made_up", ["CIFAR-10"], indirect=True)
def test_photographs_have_teachers_of_their_own_and_the_same_price(made_up):
    size = replace(TINY, source="CIFAR-10")
    numbers = student_numbers(size, 8, False, Context(quick=True, seed=0, data=None))
    assert len(pate.images_seen(size, None).private) == len(made_up)  # the photographs made up here, not digits
    assert votes_of_teachers(size, 0, None).sum(1).tolist() == [6] * 10
    assert numbers["epsilon"] == compose(TINY.mechanism(8, False).events()).epsilon(1e-5)
    assert numbers["queries"] == 5
