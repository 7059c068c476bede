# SPDX-License-Identifier: Apache-2.0
"""Examples with several owners: which stay, that one owner moves one row, what is stated, and what is refused."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset
from trainings import network, parameters_of, train, training_of

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.sampling.co_owners import kept_of_each
from torch_privacy.sampling.datasets import source_of

LISTS = st.lists(st.sets(st.integers(0, 8), min_size=1, max_size=4), min_size=1, max_size=30)
MAILS = [[0, 1], [1, 2], [3], [4, 5, 6], [6], [3, 7], [8, 9], [2, 10], [0, 0]]
STAY = [1, 2, 4, 6, 8]  # by hand: single owners 3, 6 and 0 first, then (1, 2), then (8, 9)
CLIP_NORM, BATCH = 0.5, 2.5


@given(LISTS, st.integers(1, 3))
def test_no_owner_keeps_more_than_the_bound_and_no_example_could_be_added(owners, most):
    kept = kept_of_each(owners, most).tolist()
    assert kept == sorted(set(kept))
    counts = Counter(owner for i in kept for owner in owners[i])
    assert max(counts.values()) <= most
    for i in set(range(len(owners))) - set(kept):
        assert max(counts[owner] for owner in owners[i]) == most


def inputs_of_mails():
    return torch.randn(len(MAILS), 3, generator=torch.Generator().manual_seed(0))


def training_on(x, **settings):
    examples = {"owners": MAILS, "per_owner": 1, "owner_name": "person", "public_owners": True}
    torch.manual_seed(1)
    data = TensorDataset(x, torch.arange(len(MAILS)) % 2)
    return training_of(network(), data, expected_batch_size=BATCH, examples=examples, **settings)


def test_examples_that_share_an_owner_are_never_both_in_a_training():
    x = inputs_of_mails()
    training = training_on(x, num_steps=40)
    assert {value for batch in train(training) for value in batch} == {float(x[i, 0]) for i in STAY}
    assert training.settings.sampling_probability == BATCH / 5
    statement = training.statement()
    assert (statement["num_owners"], statement["examples_left_out"], statement["owner"]) == (5, 4, "person")
    assert "the owners of each example" in statement["treated_as_public"]
    event = privacy.SubsampledGaussian(1.0, 0.5, privacy.NeighboringRelation.REPLACE_SPECIAL, unit="person")
    assert training.spent(1e-2).epsilon == privacy.compose([(event, 40)]).epsilon(1e-2)
    assert "person" in str(training.spent(1e-2))


@pytest.mark.parametrize("owner", range(11))
def test_replacing_all_that_one_owner_has_moves_a_sum_by_at_most_twice_the_clip_norm(owner):
    """In the same step, with the same noise."""
    x = inputs_of_mails()
    other = x.clone()
    other[[i for i, owners in enumerate(MAILS) if owner in owners]] = 1e3
    sums = []
    for inputs in (x, other):
        training = training_on(inputs, num_steps=1, clipping=tp.Flat(CLIP_NORM))
        train(training)
        sums.append(BATCH * parameters_of(training))  # the rate is 1
    assert (sums[0] - sums[1]).norm() <= 2 * CLIP_NORM * (1 + 1e-5)


def test_a_cap_for_several_owners_chooses_by_the_owners_alone():
    assert (
        tp.at_most(range(9), MAILS, 2, public_owners=True).indices
        == kept_of_each([{*one} for one in MAILS], 2).tolist()
    )
    assert tp.at_most(range(9), MAILS, 1, public_owners=True).indices == STAY
    rows = np.array([[0, 1], [1, 2], [2, 2]])
    assert tp.at_most(range(3), rows, 1, public_owners=True).indices == [0, 2]


def test_training_on_a_cap_by_public_owners_says_that_they_are_public():
    data = TensorDataset(inputs_of_mails(), torch.arange(len(MAILS)) % 2)
    capped = tp.at_most(data, MAILS, 2, public_owners=True)
    for dataset, is_public in ((capped, True), (Subset(capped, [0, 1, 2]), True), (Subset(data, [0, 1, 2]), False)):
        training = training_of(network(), dataset, expected_batch_size=2, delta=1e-2)
        assert ("the owners of each example" in training.statement()["treated_as_public"]) == is_public
        assert ("the owners of each example" in training.spent().treated_as_public) == is_public
    assert source_of(capped)[0] is data


def test_owners_that_may_be_private_are_refused():
    with pytest.raises(tp.Refused, match=r"at_most: example 0 has its owners in a list.*public_owners=True"):
        tp.at_most(range(9), MAILS, 1)
    with pytest.raises(tp.Refused, match="8 ids, and the data set 9 examples"):
        tp.at_most(range(9), MAILS[:-1], 1, public_owners=True)
