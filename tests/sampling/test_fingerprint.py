# SPDX-License-Identifier: Apache-2.0
"""A keyed fingerprint tells the same data from others, and nothing to those without the key."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

import torch_privacy as tp
from torch_privacy.sampling import fingerprint as module
from torch_privacy.sampling.fingerprint import fingerprint, matches_fingerprint, read_key

KEY, OTHER = bytes(range(32)), bytes(32)


def tensors(n=30):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)


@dataclasses.dataclass
class Record:
    text: str
    label: int


class Holder:
    def __init__(self, content):
        self.content = content


class Items(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        found = self.items[i]
        return found() if callable(found) else found


def changed(item):
    if isinstance(item, torch.Tensor):
        return item + 1
    if isinstance(item, dict):
        return {**item, "label": item["label"] + 1}
    return {"a": "b"} if item == {"a": "c"} else (*item[:-1], item[-1] + 1)


ITEMS = {
    "pairs": [(torch.zeros(2), k) for k in range(5)],
    "tensors": [torch.full((2, 2), float(k)) for k in range(5)],
    "bfloat16": [torch.full((2,), float(k), dtype=torch.bfloat16) for k in range(5)],
    "mappings": [{"input_ids": [1, 2, k], "text": f"text {k}", "label": k} for k in range(5)],
    "arrays": [(np.arange(3.0), b"x", None, np.int64(k)) for k in range(5)],
    "records": [(Record("a", 3), Holder([1, 2]), {1, 2}, k) for k in range(5)],
}


@pytest.mark.parametrize("name", ITEMS)
def test_each_item_counts(name):
    items = ITEMS[name]
    statement = {"data": fingerprint(Items(items), KEY)}
    assert statement["data"]["num_items"] == 5
    assert statement == json.loads(json.dumps(statement))
    assert matches_fingerprint(statement, Items(list(items)), KEY)
    for k in range(5):
        others = [changed(item) if k == j else item for j, item in enumerate(items)]
        assert not matches_fingerprint(statement, Items(others), KEY)
    assert not matches_fingerprint(statement, Items(items[::-1]), KEY)
    assert not matches_fingerprint(statement, Items(items[:-1]), KEY)


def test_rows_of_tensors_count_with_their_order_and_type():
    x, y = tensors()
    statement = {"data": fingerprint(TensorDataset(x, y), KEY)}
    assert statement["data"]["num_items"] == 30
    assert matches_fingerprint(statement, Subset(TensorDataset(torch.cat([x, x]), torch.cat([y, y])), range(30)), KEY)
    order = torch.randperm(30)
    one = x.clone()
    one[29, 3] += 1e-6
    for other in ((x[order], y[order]), (one, y), (x.double().float() + 0.0, y.int()), (x.view(30, 2, 2), y), (x,)):
        assert not matches_fingerprint(statement, TensorDataset(*other), KEY)


def test_without_its_key_a_fingerprint_tells_nothing():
    data = TensorDataset(*tensors())
    found, other = fingerprint(data, KEY), fingerprint(data, OTHER)
    assert found["fingerprint"] != other["fingerprint"]
    assert KEY.hex() not in json.dumps(found)
    with pytest.raises(ValueError, match="the key is that of another run"):
        matches_fingerprint({"data": found}, data, OTHER)


@pytest.mark.parametrize("kind", ["tensors", "items"])
def test_of_large_data_a_sample_is_read_that_the_key_determines(monkeypatch, kind):
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    monkeypatch.setattr(module, "MOST_ITEMS", 10)
    x, y = tensors()
    make = TensorDataset if kind == "tensors" else lambda x, y: Items(list(zip(x, y, strict=True)))
    statement = {"data": fingerprint(make(x, y), KEY)}
    assert (statement["data"]["num_items"], statement["data"]["num_examples"]) == (10, 30)
    read = set()
    for k in range(30):
        one = x.clone()
        one[k] += 1
        if not matches_fingerprint(statement, make(one, y), KEY):
            read.add(k)
    assert len(read) == 10
    assert read == set(module._sample(30, KEY, 10))
    assert read != set(module._sample(30, OTHER, 10))
    assert [*module._sample(30, KEY, 4)] == [*module._sample(30, KEY, 10)][:4]


def test_slow_items_end_the_sample(monkeypatch):
    monkeypatch.setattr(module, "MOST_SECONDS", 0.0)
    statement = {"data": fingerprint(Items([(k, 0) for k in range(40)]), KEY)}
    assert statement["data"]["num_items"] == module.FEWEST_ITEMS
    assert matches_fingerprint(statement, Items([(k, 0) for k in range(40)]), KEY)


def test_random_augmentation_repeats_and_the_random_state_stays():
    items = [lambda k=k: (torch.randn(2) + k, np.random.rand()) for k in range(5)]
    torch.manual_seed(3)
    statement = {"data": fingerprint(Items(items), KEY)}
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))
    assert matches_fingerprint(statement, Items(items), KEY)


def test_items_of_which_a_generator_of_their_own_changes_some_have_no_fingerprint():
    """Else the state of a training could not be loaded again, as that of other data."""
    draw = np.random.default_rng(1)
    items = [lambda k=k: -k if draw.random() < 0.1 else k for k in range(1, 65)]
    assert all(fingerprint(Items(items), bytes([k]) * 32)["fingerprint"] is None for k in range(20))


def failing():
    raise OSError("the name of a person")


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        ([object()], "an item holds an object of type object"),
        ([(lambda: 0,)], "an item holds an object of type"),
        ([lambda counter=[0]: counter.append(0) or len(counter)], "items differ from one time"),
        ([failing], r"an item could not be read \(OSError\)$"),
        ([torch.zeros(2, 2).to_sparse()], "a tensor of layout"),
    ],
)
def test_what_cannot_be_hashed_is_said(items, reason):
    statement = {"data": fingerprint(Items(items), KEY)}
    assert statement["data"]["fingerprint"] is None
    with pytest.raises(ValueError, match="no fingerprint was made, because"):
        matches_fingerprint(statement, Items(items), KEY)
    assert "person" not in json.dumps(statement)
    assert re.search(reason, statement["data"]["not_made_because"])


def test_an_item_within_itself_has_no_fingerprint():
    item = []
    item.append(item)
    assert "levels" in fingerprint(Items([item]), KEY)["not_made_because"]


def test_damaged_keys_and_statements_are_refused(tmp_path):
    data = TensorDataset(*tensors())
    statement = {"data": fingerprint(data, KEY)}
    (tmp_path / "statement.json").write_text(json.dumps(statement))
    (tmp_path / "key").write_text(KEY.hex() + "\n")
    assert read_key(tmp_path / "key") == KEY
    assert matches_fingerprint(tmp_path / "statement.json", data, tmp_path / "key")
    for text in ("", "zz", KEY.hex()[:-2], "0" * 4000):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(ValueError, match="bad: cannot be read"):
            matches_fingerprint(statement, data, tmp_path / "bad")
    with pytest.raises(ValueError, match="a key of 3 bytes"):
        matches_fingerprint(statement, data, b"key")
    with pytest.raises(ValueError, match="none: cannot be read"):
        matches_fingerprint(tmp_path / "none", data, KEY)
    with pytest.raises(ValueError, match="the statement has no fingerprint"):
        matches_fingerprint({}, data, KEY)
    with pytest.raises(ValueError, match="the method 'other' is unknown"):
        matches_fingerprint({"data": statement["data"] | {"method": "other"}}, data, KEY)
    with pytest.raises(tp.Refused, match="cannot be sampled"):
        matches_fingerprint(statement, iter([]), KEY)
