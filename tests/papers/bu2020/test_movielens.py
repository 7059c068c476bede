# SPDX-License-Identifier: Apache-2.0
"""The other methods of gdp-movielens, on ratings made up here of a user's and a film's numbers and one factor."""

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from torch_privacy.data.dataset import Data
from torch_privacy.runs.rows import SCORE, Computation, Context
from torch_privacy_papers.bu2020 import movielens


@pytest.fixture
def errors(monkeypatch):
    """Root mean squared errors by the name of the method."""
    pytest.importorskip("sklearn")
    random = np.random.default_rng(0)
    users, films = 80, 40
    taste = 3 + random.normal(0, 0.4, (users, 1)) + random.normal(0, 0.4, films)
    taste = taste + np.outer(random.choice([-1, 1], users), random.choice([-1, 1], films))
    pairs = np.stack(np.meshgrid(np.arange(users), np.arange(films), indexing="ij"), 2).reshape(-1, 2)
    stars = np.arange(0.5, 5.5, 0.5)
    labels = np.abs(taste.reshape(-1, 1) - stars).argmin(1)
    test = random.random(len(pairs)) < 0.2
    parts = [
        TensorDataset(torch.from_numpy(pairs[chosen]), torch.from_numpy(labels[chosen])) for chosen in (~test, test)
    ]
    data = Data("made up", *parts, tuple(stars), "none", {}, (users, films))
    monkeypatch.setattr(movielens, "load_movielens", lambda *args, **options: data)
    others = [row for row in movielens.rows(quick=False) if isinstance(row, Computation)]
    return {row.name: row.compute(Context(quick=False, seed=0, data=None))[SCORE] for row in others}


def test_a_batch_is_an_eightieth_of_the_ratings_that_are_there(monkeypatch):
    for num_ratings, expected in ((80_669, 1008), (800_167, 10_002)):  # latest-small, and MovieLens 1M
        data = Data("made up", range(num_ratings), [], (), "none", {})  # pyright: ignore[reportArgumentType]
        monkeypatch.setattr(movielens, "load_movielens", lambda *args, data=data, **options: data)
        assert movielens.settings_of_data(None) == {"expected_batch_size": expected}


def test_methods_that_know_more_err_less(errors):
    assert errors["user, film and factors"] < errors["user and film"] - 0.2
    assert errors["user and film"] < errors["global average"]
    assert errors["nearest users"] < errors["global average"]
    assert errors["nonnegative factors"] < errors["user and film"] - 0.2


def test_nonnegative_factors_do_not_take_missing_ratings_for_zeros():
    """A table of rank one with half of its ratings missing is completed; no factor explains zeros."""
    random = np.random.default_rng(0)
    stars = np.arange(1.0, 6.0)
    table = np.outer(random.choice([1, 2], 30), random.choice([1, 2], 20))  # 1, 2 and 4 stars
    pairs = np.argwhere(table)
    test = random.random(len(pairs)) < 0.5
    parts = [
        TensorDataset(torch.from_numpy(pairs[rows]), torch.from_numpy(table[tuple(pairs[rows].T)] - 1))
        for rows in (~test, test)
    ]
    data = Data("made up", *parts, tuple(stars), "none", {}, (30, 21))  # one film has no rating
    fitted = movielens._nonnegative(data, num_factors=1, epochs=300, regularization=0.0, seed=0)
    np.testing.assert_allclose(fitted, table[tuple(pairs[test].T)], atol=1e-6)


def test_stars_are_the_mean_under_the_softmax():
    stars, outputs = torch.tensor([0.5, 1.0, 5.0]), torch.tensor([[0.0, 0.0, 0.0], [100.0, 0.0, 0.0]])
    errors = movielens.squared_stars(stars, outputs, torch.tensor([1, 2]))
    assert errors.tolist() == pytest.approx([(6.5 / 3 - 1) ** 2, 4.5**2])
