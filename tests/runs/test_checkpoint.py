# SPDX-License-Identifier: Apache-2.0
"""A state comes back from its file as it was, bit for bit; a file with another bit is refused, and so is other data."""

import copy
import math
import os
import stat
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from torch_privacy.runs import checkpoint
from torch_privacy.support.validate import Refused


def same(a, b):
    """True if two states are equal in values, bits and types."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()) and a.contiguous().reshape(-1).view(
            torch.uint8
        ).tolist() == b.contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(a, dict):
        attributes = getattr(a, "_metadata", None), getattr(b, "_metadata", None)
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and same(*attributes) and all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (a != a and b != b)


def model_and(optimizer, scheduler=None):
    """A model after a step, with its optimizer and scheduler."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))
    if optimizer is not torch.optim.LBFGS:  # which needs contiguous gradients
        model = model.to(memory_format=torch.channels_last)
    made = optimizer(model.parameters())
    parts = [model, made] + ([] if scheduler is None else [scheduler(made)])

    def closure():
        made.zero_grad()
        loss = model(torch.ones(2, 2, 4, 4)).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        made.step(closure)
        for part in parts[2:]:
            part.step()
    return {type(part).__name__: part.state_dict() for part in parts}


rates = torch.optim.lr_scheduler
STATES = {
    "plain values": lambda: {
        "none": None, "flag": True, "small": -0.0, "not finite": [math.nan, math.inf, -math.inf], "text": "§\udc80$é",
        "large": [2**63 - 1, 2**63, 2**64 + 1, -(2**200)], "tuple": (1, (2.0, "3"), []), "$tensor": "0", "": {},
        "keys": {0: "a", (1, "b"): "c", None: 1, True: 2, 2.5: 3}, "next": 1.0000000000000002, "least": 5e-324,
        "kinds": [OrderedDict(b=1, a=2), Counter({3: 2})], "$text": {"$int": "7"},
    },
    "types of tensors": lambda: {
        str(dtype): [torch.tensor(3.7).to(dtype), torch.arange(6).to(dtype).view(2, 3), torch.zeros(0, 4, dtype=dtype)]
        for dtype in (
            torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64,
            torch.int8, torch.uint8, torch.bool, torch.uint16, torch.float8_e4m3fn,
        )
    },
    "bits of floats": lambda: {"x": torch.tensor([0x7FC00001, -(2**31), 1], dtype=torch.int32).view(torch.float32)},
    "orders of memory": lambda: {
        "transposed": torch.arange(6.0).view(2, 3).T, "permuted": torch.rand(2, 3, 4, 5).permute(0, 3, 1, 2),
        "complex": torch.view_as_complex(torch.rand(3, 4, 2)).T,
    },
    "Adam with amsgrad": lambda: model_and(lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), amsgrad=True)),
    "LBFGS": lambda: model_and(torch.optim.LBFGS),
    "one cycle": lambda: model_and(torch.optim.AdamW, lambda o: rates.OneCycleLR(o, 0.1, total_steps=9)),
    "milestones": lambda: model_and(torch.optim.RMSprop, lambda o: rates.MultiStepLR(o, [1, 1, 5])),
    "lambdas": lambda: model_and(torch.optim.SGD, lambda o: rates.LambdaLR(o, lambda step: 0.5**step)),
    "sequence": lambda: model_and(
        torch.optim.SGD, lambda o: rates.SequentialLR(o, [rates.ConstantLR(o), rates.ExponentialLR(o, 0.9)], [2])
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_a_state_comes_back_as_it_was(name, tmp_path):
    state = STATES[name]()
    checkpoint.save(tmp_path / "c", state)
    assert stat.S_IMODE(os.stat(tmp_path / "c").st_mode) == 0o600
    assert same(checkpoint.load(tmp_path / "c"), state)
    assert not same(state, {**state, "more": 1})


def test_views_and_one_tensor_in_two_places_come_back():
    whole = torch.arange(12.0).view(3, 4)
    one = whole.T[1:]
    found = checkpoint.unpacked(checkpoint.packed({"whole": whole, "column": whole[:, 1], "a": one, "b": [one]}))
    assert torch.equal(found["whole"], whole)
    assert torch.equal(found["column"], whole[:, 1])
    assert found["a"] is found["b"][0]
    assert torch.equal(found["a"], one)


def test_lazy_conjugates_and_negatives_come_back_with_their_values():
    z = torch.tensor([1 + 2j, 3 - 4j])
    found = checkpoint.unpacked(checkpoint.packed({"z": z, "conjugate": z.conj(), "negative": z.conj().imag}))
    assert z.conj().is_conj()
    assert z.conj().imag.is_neg()
    assert found["z"].tolist() == [1 + 2j, 3 - 4j]
    assert found["conjugate"].tolist() == [1 - 2j, 3 + 4j]
    assert found["negative"].tolist() == [-2.0, 4.0]


class Odd(dict):
    pass


OTHERS = {
    "function": ({"optimizer": {"hooks": [len]}}, r"optimizer\.hooks\[0\] is of type builtin_function_or_method"),
    "key": ({"a": {len: 1}}, "a key of a is of type"),
    "set": ({"a": {1, 2}}, "a is of type set"),
    "float32 of numpy": ({"a": np.float32(1)}, "a is of type float32"),
    "other dictionary": ({"a": Odd()}, "a is of type Odd"),
    "sparse": ({"a": torch.eye(2).to_sparse()}, "only dense tensors"),
    "meta": ({"a": torch.empty(2, device="meta")}, "only dense tensors"),
    "half a character": ({"a": "\ud800"}, "half a character"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_values_are_refused_by_their_place(name, tmp_path):
    state, message = OTHERS[name]
    with pytest.raises(Refused, match=message):
        checkpoint.save(tmp_path / "c", state)
    assert not (tmp_path / "c").exists()


def test_deep_states_are_refused_when_they_are_saved():
    deep = {}
    for _ in range(checkpoint.DEEPEST - 1):
        deep = {0: deep}
    assert checkpoint.unpacked(checkpoint.packed({"a": deep})) == {"a": deep}
    with pytest.raises(Refused, match="levels of nesting"):
        checkpoint.packed({"a": [[[deep]]]})


def test_every_flipped_bit_and_every_cut_is_refused(tmp_path):
    path = tmp_path / "c"
    checkpoint.save(path, {"model": OrderedDict(w=torch.arange(5.0)), "step": 17, "key": "ab" * 8})
    content = path.read_bytes()
    for place in range(len(content)):
        for damaged in (
            content[:place],
            content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :],
        ):
            with pytest.raises(ValueError, match="damaged"):
                checkpoint.unpacked(damaged)
    path.write_bytes(content + b"\0")
    with pytest.raises(Refused, match=r"^[^\n]*c: cannot be read [^\n]*damaged"):
        checkpoint.load(path)


class Runs:
    def __reduce__(self):
        return os.mkdir, ("/tmp/torch_privacy_was_here",)


def test_files_of_earlier_versions_are_refused_and_run_nothing(tmp_path):
    torch.save({"training": Runs()}, tmp_path / "zip")
    torch.save({"training": Runs()}, tmp_path / "pickle", _use_new_zipfile_serialization=False)
    (tmp_path / "json").write_text('{"format": 1, "step_count": 3}')
    for name in ("zip", "pickle", "json"):
        with pytest.raises(Refused, match=rf"{name}: is of an earlier version.* finish the run with the version"):
            checkpoint.load(tmp_path / name)
    assert not os.path.exists("/tmp/torch_privacy_was_here")


def test_the_state_is_left_alone():
    state = STATES["Adam with amsgrad"]()
    before = copy.deepcopy(state)
    checkpoint.packed(state)
    assert same(state, before)
