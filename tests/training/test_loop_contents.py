# SPDX-License-Identifier: Apache-2.0
"""Tests that variables of a loop are compared by their contents, and get others for one run only."""

import functools
from collections import deque
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from torch_privacy.support.contents import same
from torch_privacy.training import loop_contents
from torch_privacy.training.loop_contents import Exchange, content_of, other_content
from torch_privacy.training.loop_rows import MOST_BYTES_OFTEN, OtherRows
from torch_privacy.training.loop_variables import ENTRY, ITEM, Variable


def result():
    return torch.ones(3, requires_grad=True) * 2


@functools.cache
def cached(x):
    return x


def table():
    return pd.DataFrame({"a": [1, 2]})


def written(value):
    value.iloc[0, 0] = 5


CHANGES = {
    "large tensor": (lambda: torch.zeros(30), lambda v: v.add_(1)),
    "large array": (lambda: np.zeros(30), lambda v: v.fill(1)),
    "result": (result, lambda v: v.data.add_(1)),
    "cached function": (lambda: functools.cache(cached.__wrapped__), lambda v: v(1)),
    "table": (table, written),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_put_back_is_compared(name, monkeypatch):
    monkeypatch.setattr(loop_contents, "MOST_NUMBERS", 20)
    make, change = CHANGES[name]
    value = make()
    content = content_of({"a": [value]})
    assert same({"a": [value]}, content)
    assert same({"a": [make()]}, content)
    assert not same({"a": [torch.zeros(2)]}, content)
    change(value)
    assert not same({"a": [value]}, content)


@pytest.mark.parametrize("container", [{}, [], deque()], ids=lambda container: type(container).__name__)
def test_what_another_thread_changes_meanwhile_is_read_at_one_moment(container):
    class Writing(torch.Tensor):
        """Stands for that thread: it writes whenever two contents are compared."""

        @classmethod
        def __torch_function__(cls, function, types, arguments=(), options=None):
            if function is torch.equal:
                container.update({len(container): 0.0}) if isinstance(container, dict) else container.append(0.0)
            return super().__torch_function__(function, types, arguments, options)

    parts = [torch.zeros(2).as_subclass(Writing), 1.0, torch.ones(2).as_subclass(Writing)]
    container.update(enumerate(parts)) if isinstance(container, dict) else container.extend(parts)
    content = content_of(container)
    assert same(container, content)
    size = len(container)
    assert size > len(content)
    container[1] = 2.0
    assert len(other_content(container, content)) == size < len(container)


@pytest.mark.parametrize("size", [3, 30])
def test_a_default_argument_has_other_numbers_for_one_run(size, monkeypatch):
    monkeypatch.setattr(loop_contents, "MOST_NUMBERS", 20)
    value = torch.arange(size)
    variable = Variable("", "f", "f", ITEM, (value,), 0)
    exchange = Exchange([(variable, content_of(torch.zeros(2)))], [])
    with exchange.exchanging():
        assert not torch.equal(value, torch.arange(size))
    assert torch.equal(value, torch.arange(size))


@pytest.mark.parametrize("make", [torch.tensor, np.array])
def test_places_where_parts_begin_keep_their_order_with_other_content(make):
    offsets = {5: make([0, 5, 10, 20])}  # new in a cache, so that there is no earlier content
    other = torch.as_tensor(other_content(offsets, {})[5])
    F.embedding_bag(torch.zeros(25, dtype=torch.int64), torch.ones(1, 2), other)  # checks it
    assert other.tolist() != [0, 5, 10, 20]


@pytest.mark.parametrize("often", [True, False])
def test_rows_that_are_too_many_to_be_exchanged_are_not_copied(often):
    rows, labels = torch.zeros(MOST_BYTES_OFTEN // 4 + 1), torch.zeros(4)
    variable = Variable("", "data", "data", ENTRY, {"data": (rows, labels)}, "data")
    others = OtherRows(SimpleNamespace(rows_of_others=list), often=often)
    exchange = Exchange([(variable, others)], [])
    exchange.enter()
    for part in (rows, labels):
        part += 1
    exchange.settle()
    assert (rows[0], labels[0]) == (1 if often else 0, 0)


def test_a_variable_has_its_earlier_content_for_one_run_in_another_object():
    holder = {"x": [torch.ones(2), 1.0]}
    value = holder["x"]
    exchange = Exchange([(Variable("", "x", "x", ENTRY, holder, "x"), content_of([torch.zeros(2), 0.5]))], [])
    with exchange.exchanging():
        assert holder["x"] is not value
        assert same(holder["x"], [torch.zeros(2), 0.5])
    assert holder["x"] is value
    value[0].add_(1)
    exchange.put_back()
    assert same(value, [torch.ones(2), 1.0])
