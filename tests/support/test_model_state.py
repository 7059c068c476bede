# SPDX-License-Identifier: Apache-2.0
"""Tests what is remembered of a model between steps: it must notice every change."""

import pytest
import torch
from torch import nn

from torch_privacy.support.model_state import ModelState, ModelTree, MutationGuard, Versions
from torch_privacy.training.weights import WeightMarks


def model():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


CHANGES = {
    "parameter replaced": lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(3, 2))),
    "parameter replaced in its registry": lambda m: m[0]._parameters.update(bias=nn.Parameter(torch.zeros(3))),
    "registry replaced": lambda m: m[0].__dict__.update(_parameters=dict(m[0]._parameters)),
    "parameter removed": lambda m: delattr(m[0], "bias"),
    "buffer replaced": lambda m: setattr(m[1], "running_mean", torch.ones(3)),
    "module added": lambda m: m.append(nn.Linear(3, 1)),
    "module replaced": lambda m: m.__setitem__(0, nn.Linear(2, 3)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_read_anew(change):
    m = model()
    tree = ModelTree(m)
    assert tree.is_current()
    CHANGES[change](m)
    assert not tree.is_current()


@pytest.mark.parametrize("change", ["parameter replaced", "parameter removed", "buffer replaced"])
def test_guard_names_what_was_replaced(change):
    m = model()
    guard = MutationGuard(m, ModelTree(m))
    assert guard.changed() == ([], [])
    CHANGES[change](m)
    assert any(guard.changed())


def test_guard_and_versions_name_what_was_written_into():
    m = model()
    guard, versions = MutationGuard(m), Versions([*m.parameters()])
    assert versions.are_current()
    with torch.no_grad():
        m.get_parameter("0.bias").zero_()
    m.get_buffer("1.running_mean").zero_()
    assert guard.changed() == (["0.bias"], ["1.running_mean"])
    assert not versions.are_current()
    assert [id(p) for p in versions.unchanged()] == [id(p) for p in m.parameters() if p is not m[0].bias]


def test_state_removes_hooks_of_every_kind_that_were_registered_since():
    m = model()
    m[0].register_forward_hook(lambda *_: None)
    kept, state = list(m[0]._forward_hooks), ModelState(m)
    for module in m.modules():
        module.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
        module.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True)
        module.register_full_backward_pre_hook(lambda *_: None)
        module.register_full_backward_hook(lambda *_: None)
    state.restore()
    registries = [value for module in m.modules() for name, value in vars(module).items() if "_hooks" in name]
    assert [key for registry in registries for key in registry] == kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_marks_name_the_weights_that_moved(dtype):
    weights = {"a": torch.ones(4, dtype=dtype), "b": torch.ones(2, 3, dtype=dtype), "c": torch.ones(5)}
    marks = WeightMarks(weights)
    assert marks.untouched()
    assert marks.holds(weights)
    weights["b"].data[0, 0] = 2  # the version does not count this write
    assert marks.moved() == ["b"]
    marks.renew()
    assert marks.untouched()
    assert not marks.holds(weights | {"a": torch.ones(4, dtype=dtype)})


LARGE = {
    "contiguous": lambda: torch.randn(101, 103),
    "half": lambda: torch.randn(101, 103).bfloat16(),
    "complex": lambda: torch.randn(90, 90, dtype=torch.complex64),
    "transposed": lambda: torch.randn(200, 91).T,
    "channels last": lambda: torch.randn(70, 3, 5, 5).to(memory_format=torch.channels_last),
    "with an offset": lambda: torch.randn(10001)[1:],
    "with gaps": lambda: torch.randn(200, 90)[:, ::2],
}


@pytest.mark.parametrize("case", LARGE)
def test_marks_see_any_entry_that_moved(case):
    weight = LARGE[case]()
    marks = WeightMarks({"large": weight, "small": torch.ones(3)})
    for place in torch.randint(weight.numel(), (20,)).tolist():
        at = tuple(int(k) for k in torch.unravel_index(torch.tensor(place), weight.shape))
        before = weight[at].clone()
        weight.data[at] = 7
        assert marks.moved() == ["large"]
        weight.data[at] = before
        assert marks.moved() == []
