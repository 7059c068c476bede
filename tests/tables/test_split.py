# SPDX-License-Identifier: Apache-2.0
"""Splits: of positions or owners alone, the same when rows are added."""

import numpy as np
import pytest

from torch_privacy.tables import split


def test_parts_are_all_rows_once():
    train, test = split(1000, seed=3, share=0.25)
    assert sorted([*train, *test]) == list(range(1000))
    assert 200 < len(test) < 300
    assert not np.array_equal(test, split(1000, seed=4, share=0.25)[1])


def test_rows_that_are_added_move_no_other_row():
    before, after = split(500, seed=1)[1], split(900, seed=1)[1]
    np.testing.assert_array_equal(after[after < 500], before)


def test_an_owner_has_rows_on_one_side_and_does_not_depend_on_others():
    owners = np.random.default_rng(0).integers(0, 40, 500).astype(str)
    train, test = split(500, owners=owners)
    assert not set(owners[train]) & set(owners[test])
    without = owners != owners[test[0]]
    again = split(int(without.sum()), owners=owners[without])[1]
    assert set(owners[without][again]) == set(owners[test]) - {owners[test[0]]}


def test_owners_may_be_numbers_or_have_spaces():
    expected = split(4, share=0.5, owners=["1", "1", "2", "7"])
    for owners in ([1, 1, 2, 7], np.array([1, 1, 2, 7]), [" 1", "1 ", "2", "7"]):
        np.testing.assert_array_equal(split(4, share=0.5, owners=owners)[1], expected[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "n=0 must be an integer of at least 1"),
        ({"n": 10, "share": 1.0}, r"share=1.0 must lie in \(0, 1\)"),
        ({"n": 10, "seed": -1}, "seed=-1"),
        ({"n": 1}, "leaves none for"),
        ({"n": 2, "owners": ["a", None]}, "some rows have no owner"),
        ({"n": 2, "owners": ["a", " "]}, "some rows have no owner"),
        ({"n": 3, "owners": ["a", "b"]}, "got 2 owners for 3 rows"),
        ({"n": 2, "owners": ["a", "a"]}, "of the owners leaves none"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        split(**arguments)
