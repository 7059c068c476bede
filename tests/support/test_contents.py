# SPDX-License-Identifier: Apache-2.0
"""Tests that contents are copied, compared and put back: in containers, within each other, and in themselves."""

from collections import OrderedDict, UserDict, deque, namedtuple

import numpy as np
import pytest
import torch

from torch_privacy.support.contents import MISSING, Saved, copied, fill, length_if_long, same
from torch_privacy.support.held_state import MAX_ENTRIES

Pair = namedtuple("Pair", ["a", "b"])
NAN = float("nan")
VALUES = {
    "number": lambda: 3,
    "NaN": lambda: float("nan"),
    "tensor": lambda: torch.tensor([1.0, NAN]),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "array": lambda: np.array([1.0, NAN]),
    "array of texts": lambda: np.array(["a", "b"]),
    "numpy's number": lambda: np.float32(0.5),
    "device": lambda: torch.device("cpu"),
    "list": lambda: [1, [2.0, "x"], torch.zeros(2)],
    "dict": lambda: {"a": {"b": [torch.zeros(2)]}, 1: None},
    "ordered dict": lambda: OrderedDict(a=1, b=[2]),
    "another mapping": lambda: UserDict(a=1, b=[2]),
    "tuple": lambda: (1, torch.zeros(2)),
    "named tuple": lambda: Pair(1, [2]),
    "deque": lambda: deque([1, 2], maxlen=2),
    "set": lambda: {1, 2},
    "frozen set": lambda: frozenset({1, 2}),
    "long list": lambda: [0] * (MAX_ENTRIES + 1),
}
OTHERS = {
    "number": lambda: 4,
    "NaN": lambda: 0.0,
    "tensor": lambda: torch.tensor([1.0, 0.0]),
    "bfloat16": lambda: torch.ones(3),
    "array": lambda: np.array([NAN, NAN]),
    "array of texts": lambda: np.array(["a", "c"]),
    "numpy's number": lambda: np.float64(0.5),
    "device": lambda: torch.device("meta"),
    "list": lambda: [1, [2.0, "y"], torch.zeros(2)],
    "dict": lambda: {"a": {"b": [torch.ones(2)]}, 1: None},
    "ordered dict": lambda: OrderedDict(a=1, c=[2]),
    "another mapping": lambda: UserDict(a=1, b=[3]),
    "tuple": lambda: [1, torch.zeros(2)],
    "named tuple": lambda: Pair(1, [3]),
    "deque": lambda: deque([2, 2], maxlen=2),
    "set": lambda: {1, 3},
    "frozen set": lambda: {1, 2},
    "long list": lambda: [0] * MAX_ENTRIES + [1],
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_has_the_content_of_an_equal_one_only(name):
    content = copied(VALUES[name]())
    assert same(VALUES[name](), content)
    assert same(copied(VALUES[name]()), content)
    assert not same(OTHERS[name](), content)
    assert not same(content, copied(OTHERS[name]()))
    assert not same(VALUES[name](), MISSING)


CHANGES = {
    "tensor": lambda v: v.add_(1),
    "array": lambda v: v.fill(0),
    "list": lambda v: (v[1].append(3), v[2].add_(1), v.insert(0, 7)),
    "dict": lambda v: (v["a"]["b"][0].add_(1), v["a"].clear(), v.update(c=3), v.pop(1)),
    "ordered dict": lambda v: v.move_to_end("a"),
    "tuple": lambda v: v[1].add_(1),
    "named tuple": lambda v: v.b.append(1),
    "deque": lambda v: v.append(5),
    "set": lambda v: v.add(5),
    "long list": lambda v: v.append(5),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_in_place_are_seen_and_undone(name):
    value = VALUES[name]()
    saved = Saved(value)
    CHANGES[name](value)
    assert name == "ordered dict" or not same(value, saved.content)
    saved.restore()
    assert same(value, saved.content)
    assert same([*value], [*VALUES[name]()])


def test_the_same_parts_are_put_back_and_others_are_not_written_into():
    first, later = torch.zeros(2), torch.ones(2)
    value = {"kept": [first]}
    parts, saved = value["kept"], Saved(value)
    value["kept"][0] = later
    saved.restore()
    assert value["kept"] is parts
    assert parts[0] is first
    assert torch.equal(later, torch.ones(2))


def in_itself(number):
    value = [1, torch.full((2,), number)]
    value.append({"self": value})
    return value


def test_a_container_in_itself_is_copied_compared_and_put_back():
    value = in_itself(0.0)
    saved = Saved(value)
    assert same(value, saved.content)
    assert same(in_itself(0.0), saved.content)
    assert not same(in_itself(1.0), saved.content)
    value[2]["self"] = None
    value[1].add_(1)
    saved.restore()
    assert value[2]["self"] is value
    assert torch.equal(value[1], torch.zeros(2))


def test_a_tensor_is_put_back_that_was_resized_or_got_a_graph():
    resized, graph = torch.zeros(2), torch.zeros(2)
    saved = Saved([resized, graph])
    resized.resize_(3).fill_(1)
    graph.add_(torch.ones(2, requires_grad=True))
    saved.restore()
    assert torch.equal(resized, torch.zeros(2))
    assert torch.equal(graph.detach(), torch.zeros(2))


def test_tensors_that_have_not_changed_are_not_written_into():
    value = torch.tensor([NAN, 1.0])
    saved = Saved(value)
    saved.restore()
    fill(value, value.clone())
    assert value._version == 0


def test_of_a_long_container_the_length_alone_is_compared():
    long = [0] * (MAX_ENTRIES + 1)
    saved = Saved({"long": long}, length_if_long)
    long[0] = 1
    assert same({"long": long}, saved.content)
    assert same(copied({"long": long}, length_if_long), saved.content)
    long.append(1)
    assert not same({"long": long}, saved.content)
    assert not same({"long": len(long)}, saved.content)
    assert not same(copied({"long": long}, length_if_long), saved.content)
    saved.restore()
    assert len(long) == MAX_ENTRIES + 2
